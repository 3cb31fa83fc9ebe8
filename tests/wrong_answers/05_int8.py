# Wrong answers to the exercises of lesson 5. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
smallest_ruinous_outlier = 127

# %% 2:
def in_blocks(rows, size):
    codes, absmax = to_codes(rows)
    return codes.reshape(len(rows), -1, size), absmax[:, None].expand(-1, rows.shape[1] // size)

# %% 3:
tokens_that_eat_it = (2 * weights - in_8_bits) / (L * 12 * WIDTH + L * 4 * INNER)
