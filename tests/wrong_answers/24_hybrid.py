# Wrong answers to the exercises of lesson 24. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
data_line_of_27 = [24, 25, 26, 27]

# %% 2:
def two_levels(tensor, inside, across):
    dist.all_reduce(tensor, group=inside)
    dist.all_reduce(tensor, group=across)
    return tensor

# %% 3:
best_grid = (8, 1, 1)
