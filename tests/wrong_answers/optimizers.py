# Wrong answers to the exercises of lessons/optimizers.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: fewer than 4,096 elements keep 32 bits
bytes_at_rank_1 = int(704_512 * (2 + 8 / 256))

# %% 1: scale of 4 bytes for every 256
bytes_at_rank_1 = 8 * 311_296 + 2 * 393_216

# %% 1: two moments
bytes_at_rank_1 = 4 * 311_296 + 393_216 * (2 + 8 / 256)

# %% 1: some tensors do have 4,096
bytes_at_rank_1 = 8 * 704_512

# %% 1: there are 16
bytes_at_rank_1 = 3_289_088 // 16

# %% 1: which of the 14 tensors
large = 16 * 2 * 8192  # the A of down is forgotten
bytes_at_rank_1 = 8 * (704_512 - large) + int(large * (2 + 8 / 256))

# %% 2: zero itself
def pack_above_zero(x, levels):
    codes, scales = pack(x, levels)
    return codes.clamp(min=1), scales

# %% 2: still has zero's code
def pack_above_zero(x, levels):
    return pack(x, levels)

# %% 2: still has zero's code
def pack_above_zero(x, levels):
    return pack(torch.where(x > 0, x + 1e-8, x), levels)[0], pack(x, levels)[1]

# %% 2: all other numbers go to the nearest level
def pack_above_zero(x, levels):  # rounds everything up
    _, scales = pack(x, levels)
    shares = x.reshape(-1, 256) / scales.clamp(min=1e-38)
    return torch.bucketize(shares, levels).clamp(max=255).to(torch.uint8), scales

# %% 2: nearest level
def pack_above_zero(x, levels):  # of the dynamic map, whatever levels it is given
    codes, scales = pack(x, MAPS[1])
    return torch.where(x.reshape(-1, 256) > 0, codes.clamp(min=1), 0), scales

# %% 2: each block keeps its own scale
def pack_above_zero(x, levels):
    scales = x.amax().expand(len(x), 1)
    middles = (levels[:-1] + levels[1:]) / 2
    codes = torch.bucketize(x / scales, middles).clamp(min=1) * (x > 0)
    return codes.to(torch.uint8), scales

# %% 2: codes are bytes
def pack_above_zero(x, levels):
    codes, scales = pack(x, levels)
    return codes.int().clamp(min=1) * (x > 0), scales

# %% 3: one of the two levels beside it
def pack_by_dice(x, levels):
    codes, scales = pack(x, levels)
    up = torch.randint(0, 2, codes.shape)
    return (codes.int() + up).clamp(max=255).to(torch.uint8), scales

# %% 3: the mean of many draws
def pack_by_dice(x, levels):
    return pack(x, levels)

# %% 3: the mean of many draws
def pack_by_dice(x, levels):  # heads or tails, however near
    _, scales = pack(x, levels)
    shares = x.reshape(-1, 256) / scales.clamp(min=1e-38)
    below = (torch.bucketize(shares, levels, right=True) - 1).clamp(max=254)
    up = (torch.rand(shares.shape) < 0.5) & (shares > levels[below])
    return (below + up).to(torch.uint8), scales

# %% 3: the mean of many draws
def pack_by_dice(x, levels):  # the other way round
    _, scales = pack(x, levels)
    shares = x.reshape(-1, 256) / scales.clamp(min=1e-38)
    below = (torch.bucketize(shares, levels, right=True) - 1).clamp(max=254)
    up = torch.rand(shares.shape) < (levels[below + 1] - shares) / levels.diff()[below]
    return (below + (up & (shares > levels[below]))).to(torch.uint8), scales

# %% 3: a draw of its own
def pack_by_dice(x, levels):
    _, scales = pack(x, levels)
    shares = x.reshape(-1, 256) / scales.clamp(min=1e-38)
    below = (torch.bucketize(shares, levels, right=True) - 1).clamp(max=254)
    up = torch.rand(()) < (shares - levels[below]) / levels.diff()[below]
    return (below + up).to(torch.uint8), scales

# %% 3: one of the two levels beside it
def pack_by_dice(x, levels):  # noise of one size for all
    codes, scales = pack(x, levels)
    noisy = x + (torch.rand(x.shape) - 0.5) / 256 * scales * (x > 0)
    return pack(noisy.clamp(min=0), levels)[0], scales
