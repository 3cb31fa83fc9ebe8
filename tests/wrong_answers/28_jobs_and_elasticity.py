# Wrong answers to the exercises of lesson 28. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
most_usd = 0.80 * 50 / 60

# %% 2:
def grow(left, now, then, restart):
    return left * (1 - then / now) - restart

# %% 3:
hours_lost = 100 * 3 / 509
