# Wrong answers to the exercises of lesson 6. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bits_in_blocks_of_32 = 4 + 8 / 64 + 32 / (64 * 256)

# %% 2:
def quantile_levels(bits):
    return torch.linspace(-1, 1, 2**bits)

# %% 3:
better_levels = torch.linspace(-1, 1, 16)
