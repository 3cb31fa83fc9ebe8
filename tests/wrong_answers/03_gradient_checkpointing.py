# Wrong answers to the exercises of lesson 3. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_at_twice_the_length = 173056

# %% 2:
def in_pairs(blocks, x):
    for block in blocks:
        x = ours(block, x)
    return x

# %% 3:
best_k = 8
