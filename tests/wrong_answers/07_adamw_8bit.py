# Wrong answers to the exercises of lesson 7. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_at_rank_1 = int(704_512 * (2 + 8 / 256))

# %% 2:
def pack_above_zero(x, levels):
    codes, scales = pack(x, levels)
    return codes.clamp(min=1), scales

# %% 3:
def pack_by_dice(x, levels):
    codes, scales = pack(x, levels)
    up = torch.randint(0, 2, codes.shape)
    return (codes.int() + up).clamp(max=255).to(torch.uint8), scales
