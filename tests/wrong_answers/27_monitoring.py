# Wrong answers to the exercises of lesson 27. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
share_of_the_peak = 1.0

# %% 2:
def stalls(events):
    steps = [e for e in events if e['name'].startswith('step')]
    return sum(b['ts'] - a['ts'] - a['dur'] for a, b in zip(steps, steps[1:])) / 1e6

# %% 3:
last_step = free // (3 * MIB)
