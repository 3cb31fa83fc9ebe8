# Wrong answers to the exercises of lessons/int8.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: still has the code 1
smallest_ruinous_outlier = 127

# %% 1: with a smaller outlier
smallest_ruinous_outlier = 440  # an error of 100 % in the mean

# %% 1: still has the code 1
smallest_ruinous_outlier = 253

# %% 1: still has the code 21
smallest_ruinous_outlier = 6  # the threshold

# %% 2: spoils blocks that it is not in
def in_blocks(rows, size):
    codes, absmax = to_codes(rows)
    return codes.reshape(len(rows), -1, size), absmax[:, None].expand(-1, rows.shape[1] // size)

# %% 2: shapes must be
def in_blocks(rows, size):  # the rows are gone
    return to_codes(rows.reshape(-1, size))

# %% 2: shapes must be
def in_blocks(rows, size):  # whatever the size
    codes, scales = to_codes(rows.reshape(-1, 64))
    return codes.reshape(len(rows), -1, 64), scales.reshape(len(rows), -1)

# %% 2: largest absolute value of its block
def in_blocks(rows, size):  # the step, not the largest size
    codes, scales = to_codes(rows.reshape(-1, size))
    return codes.reshape(len(rows), -1, size), scales.reshape(len(rows), -1) / 127

# %% 2: codes are int8
def in_blocks(rows, size):  # never rounded
    scales = rows.reshape(len(rows), -1, size).abs().amax(dim=2)
    return rows.reshape(len(rows), -1, size) / scales[:, :, None] * 127, scales

# %% 2: more than half a step away
def in_blocks(rows, size):  # cut off
    scales = rows.reshape(len(rows), -1, size).abs().amax(dim=2)
    return (rows.reshape(len(rows), -1, size) / scales[:, :, None] * 127).to(torch.int8), scales

# %% 3: which inputs are kept, and how many bytes
tokens_that_use_it_up = (2 * weights - in_8_bits) / (L * 4 * (3 * WIDTH + INNER))  # all in fp32

# %% 3: which inputs
tokens_that_use_it_up = (2 * weights - in_8_bits) / (L * 2 * (6 * WIDTH + INNER))  # q, k and v one each, gate and up too

# %% 3: are kept and 927 saved
tokens_that_use_it_up = (2 * weights - in_8_bits) / (2 * (3 * WIDTH + INNER))  # one block

# %% 3: which inputs
tokens_that_use_it_up = (2 * weights - in_8_bits) / (L * 2 * 4 * WIDTH)  # down's input as narrow as the others
