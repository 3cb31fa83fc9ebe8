# Wrong answers to the exercises of lesson 18. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
smallest_difference = 2**-8

# %% 2:
def teaches_to_stop(row, end):
    return end in row["input_ids"]

# %% 3:
train_loss_of_the_dead = 1.6 * 3 / 42
