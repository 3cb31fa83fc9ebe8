# Wrong answers to the exercises of lesson 17. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_at_rank_32 = 6_000_000

# %% 2:
def checkpoint_bytes(numbers, bits):
    return 4 * numbers

# %% 3:
rows_in_12_hours = 107
