# Wrong answers to the exercises of lessons/nf4.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: which two parts are shared by fewer
bits_in_groups_of_32 = 4 + 8 / 64 + 32 / (64 * 256)

# %% 1: which two parts
bits_in_groups_of_32 = 4 + 8 / 32 + 32 / (64 * 256)  # one of the two

# %% 1: which two parts
bits_in_groups_of_32 = 4 + 8 / 32  # the scales' scales forgotten

# %% 1: the codes stay
bits_in_groups_of_32 = 4 + 32 / 32  # fp32 scales

# %% 2: zero is among the levels 0 times
def quantile_levels(bits):
    return torch.linspace(-1, 1, 2**bits)

# %% 2: 3 bits make 8 levels
def quantile_levels(bits):  # 4, whatever is asked
    return quantile_levels_4()

# %% 2: 4 bits make 16 levels, not \(17,\)
def quantile_levels(bits):  # as many below zero as above
    many = 2 ** (bits - 1)
    up = torch.special.ndtri(torch.linspace(0.5, 1 - (1 / (4 * many) + 1 / (4 * many - 2)) / 2, many + 1).double()[1:])
    levels = torch.cat([-up.flip(0), torch.zeros(1), up])
    return (levels / levels.max()).float()

# %% 2: 3 bits: .* how many slices
def quantile_levels(bits):  # the slices of 4 bits
    many = 2 ** (bits - 1)
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    up = torch.linspace(0.5, outermost, many + 1, dtype=torch.float64)[1:]
    down = 1 - torch.linspace(outermost, 0.5, many, dtype=torch.float64)
    levels = torch.special.ndtri(torch.cat([down, up]))
    return (levels / levels.max()).float()

# %% 2: 4 bits: 7 levels above zero and 8 below
def quantile_levels(bits):  # one more below
    many = 2 ** (bits - 1)
    outermost = 1 - (1 / (4 * many) + 1 / (4 * many - 2)) / 2
    up = torch.linspace(0.5, outermost, many + 1, dtype=torch.float64)[1:]
    down = 1 - torch.linspace(outermost, 0.5, many, dtype=torch.float64)
    levels = torch.special.ndtri(torch.cat([down, up]))
    return -(levels / levels.max()).float().flip(0)

# %% 2: the ends are
def quantile_levels(bits):  # not divided by the largest
    many = 2 ** (bits - 1)
    outermost = 1 - (1 / (4 * many) + 1 / (4 * many - 2)) / 2
    up = torch.linspace(0.5, outermost, many + 1, dtype=torch.float64)[1:]
    down = 1 - torch.linspace(outermost, 0.5, many, dtype=torch.float64)
    return torch.special.ndtri(torch.cat([down, up])).float()

# %% 3: which place is best for a level
better_levels = torch.linspace(-1, 1, 16)

# %% 3: 1.000 times NF4's error
better_levels = nf4_levels

# %% 3: given the weights that fell to it
better_levels = shares.quantile((torch.arange(16) + 0.5) / 16)  # each level is used equally often

# %% 3: need not be at -1 and 1
better_levels = torch.cat([nf4_levels[:1], (nf4_levels[:-2] + nf4_levels[2:]) / 2, nf4_levels[-1:]])  # each in the middle of its neighbours

# %% 3: sort them
better_levels = nf4_levels.flip(0)

# %% 3: 16 levels, not
better_levels = nf4_levels[:15]
