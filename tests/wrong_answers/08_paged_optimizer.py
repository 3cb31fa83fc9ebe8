# Wrong answers to the exercises of lesson 8. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
lowest_rank = 48

# %% 2:
def order(steps, places):
    return places[::-1]

# %% 3:
micro_batches = 6
