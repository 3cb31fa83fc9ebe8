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

# %% 2: each group keeps its own scale
def pack_above_zero(x, levels):
    scales = x.amax().expand(len(x), 1)
    middles = (levels[:-1] + levels[1:]) / 2
    codes = torch.bucketize(x / scales, middles).clamp(min=1) * (x > 0)
    return codes.to(torch.uint8), scales

# %% 2: codes are bytes
def pack_above_zero(x, levels):
    codes, scales = pack(x, levels)
    return codes.int().clamp(min=1) * (x > 0), scales

# %% 3: which pages does the last step leave
def order(steps, places):
    return places[::-1]

# %% 3: which pages does the last step leave
def order(steps, places):
    return places

# %% 3: which pages does the last step leave
def order(steps, places):  # another beginning in each step
    start = steps % len(places)
    return places[start:] + places[:start]

# %% 3: which pages does the last step leave
def order(steps, places):
    import random

    return random.Random(steps).sample(places, len(places))

# %% 3: exactly once in each step
def order(steps, places):  # every other place
    return places[steps % 2 :: 2]

# %% 3: exactly once in each step
def order(steps, places):  # there and back in one step
    return places + places[::-1]

# %% 3: not a list
def order(steps, places):
    return reversed(places) if steps % 2 else iter(places)

# %% 3: which pages does the last step leave
def order(steps, places):  # the weights in turn, their pieces as before
    return sorted(places, key=lambda place: place[0] if steps % 2 else -place[0])
