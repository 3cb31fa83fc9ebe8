# Wrong answers to the exercises of lessons/sharding.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: nobody sells a part
cards_of_80_gb = 14

# %% 1: nobody sells a part
cards_of_80_gb = 16 * 70_553_706_496 / 80e9

# %% 1: all three kinds of bytes count
cards_of_80_gb = math.ceil(2 * 70_553_706_496 / 80e9)

# %% 1: all three kinds of bytes count
cards_of_80_gb = math.ceil(14 * 70_553_706_496 / 80e9)

# %% 1: a card has 80 \* 10\*\*9
cards_of_80_gb = math.ceil(16 * 70_553_706_496 / (80 * 2**30))

# %% 2: the mean of the gradients, and not their sum
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    pieces = []
    for w, g, m in zip(weight.chunk(N), (sum(gradients) / N).chunk(N), moments):
        m.mul_(0.9).add_(g)
        pieces.append(w - rate * m)
    return torch.cat(pieces)

# %% 2: moments must hold 0.9 m \+ g
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    pieces = []
    for w, g, m in zip(weight.chunk(N), sum(gradients).chunk(N), moments):
        m = 0.9 * m + g
        pieces.append(w - rate * m)
    return torch.cat(pieces)

# %% 2: put all pieces together
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    for w, g, m in zip(weight.chunk(N), sum(gradients).chunk(N), moments):
        m.mul_(0.9).add_(g)
        piece = w - rate * m
    return piece

# %% 2: each of its own piece
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    pieces = []
    for rank, m in enumerate(moments):  # each process's own gradient, not summed
        w, g = weight.chunk(N)[rank], gradients[rank].chunk(N)[rank]
        m.mul_(0.9).add_(g)
        pieces.append(w - rate * m)
    return torch.cat(pieces)

# %% 2: moments must hold 0.9 m \+ g
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    pieces = []
    for w, g, m in zip(weight.chunk(N), sum(gradients).chunk(N), moments):
        m.mul_(0.9).add_(0.1 * g)
        pieces.append(w - rate * m)
    return torch.cat(pieces)

# %% 2: by the rate times its new moment
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    pieces = []
    for w, g, m in zip(weight.chunk(N), sum(gradients).chunk(N), moments):
        pieces.append(w - rate * g)
        m.mul_(0.9).add_(g)
    return torch.cat(pieces)

# %% 2: 2 processes have 2 pieces
def stage_1(weight, gradients, moments, rate):
    pieces = []
    for w, g, m in zip(weight.chunk(4), sum(gradients).chunk(4), moments):  # made for four processes
        m.mul_(0.9).add_(g)
        pieces.append(w - rate * m)
    return torch.cat(pieces)

# %% 3: too slow: weights travel while a block runs
def forward_seconds(computes, gathers):
    return sum(computes) + sum(gathers)

# %% 3: too fast: weights set off when the block before starts
def forward_seconds(computes, gathers):
    return max(sum(computes), sum(gathers))

# %% 3: too fast: weights set off when the block before starts
def forward_seconds(computes, gathers):
    come = done = 0.0
    for takes, gather in zip(computes, gathers):
        come += gather  # all gathers back to back
        done = max(come, done) + takes
    return done

# %% 3: it should be
def forward_seconds(computes, gathers):
    return sum(max(pair) for pair in zip(computes, gathers))
