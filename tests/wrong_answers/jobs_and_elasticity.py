# Wrong answers to the exercises of lessons/jobs_and_elasticity.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: timeout
most_usd = 0.80 * 50 / 60  # the training alone

# %% 1: two things were added
most_usd = 0.80 * 2 * 50 / 60  # no half hour

# %% 1: two things were added
most_usd = 0.80 * (50 + 30) / 60  # not twice

# %% 1: in hours
most_usd = 0.80 * (2 * 50 + 30)

# %% 2: zero
def grow(left, now, then, restart):
    return left * (1 - then / now) - restart

# %% 2: left / now steps
def grow(left, now, then, restart):
    return max(0, left * (now - then) - restart)  # as if left were steps

# %% 2: how long do these take
def grow(left, now, then, restart):
    return max(0, left * (now / then - 1) - restart)

# %% 2: the restart takes its seconds
def grow(left, now, then, restart):
    return max(0, left * (1 - then / now))

# %% 2: the restart takes its seconds
def grow(left, now, then, restart):
    saved = left * (1 - then / now)
    return saved if saved > restart else 0

# %% 2: zero
def grow(left, now, then, restart):
    return abs(left * (1 - then / now) - restart)

# %% 3: both parts
hours_lost = 100 * 3 / 509  # the writing alone

# %% 3: at the best interval
hours_lost = 100 * (3 / 360 + 360 / (2 * 43200))  # the root of C M, without the 2

# %% 3: for 12 hours
hours_lost = 100 * (2 * 3 / 7200) ** 0.5  # the lesson's two hours

# %% 3: in seconds
hours_lost = 100 * (2 * 3 / 12) ** 0.5
