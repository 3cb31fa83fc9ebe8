# Wrong answers to the exercises of lessons/long_rows.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: rounds each pinned block
pinned_gib = 16 * 70_000 * 2048 * 2 / 2**30

# %% 1: the model has 16
pinned_gib = 0.5

# %% 1: a number has 2 bytes
pinned_gib = 16 * 2**30 / 2**30  # fp32

# %% 1: give GiB
pinned_gib = 16 * 2**29

# %% 1: round it up to a power of two
pinned_gib = 4  # rounded down

# %% 2: are they added
def by_width(x, gate, up, down, pieces):  # joined, as tiles of tokens are
    return torch.cat(
        [
            (F.silu(x @ g.T) * (x @ u.T)) @ dn.T
            for g, u, dn in zip(gate.chunk(pieces), up.chunk(pieces), down.chunk(pieces, dim=1))
        ],
        dim=1,
    )

# %% 2: f numbers a token are alive
def by_width(x, gate, up, down, pieces):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

# %% 2: f numbers a token are alive
def by_width(x, gate, up, down, pieces):  # all pieces are kept, then joined
    inner = [F.silu(x @ g.T) * (x @ u.T) for g, u in zip(gate.chunk(pieces), up.chunk(pieces))]
    return torch.cat(inner, dim=1) @ down.T

# %% 2: add up
def by_width(x, gate, up, down, pieces):  # only the last piece
    for g, u, dn in zip(gate.chunk(pieces), up.chunk(pieces), down.chunk(pieces, dim=1)):
        y = (F.silu(x @ g.T) * (x @ u.T)) @ dn.T
    return y

# %% 2: with 5 pieces the result is wrong
def by_width(x, gate, up, down, pieces):  # what does not divide is left out
    size, y = len(gate) // pieces, torch.zeros_like(x)
    for n in range(pieces):
        its = slice(n * size, n * size + size)
        y += (F.silu(x @ gate[its].T) * (x @ up[its].T)) @ down[:, its].T
    return y

# %% 2: the result, shaped like x
def by_width(x, gate, up, down, pieces):  # rows of down instead of columns
    y = torch.zeros_like(x)
    for g, u, dn in zip(gate.chunk(pieces), up.chunk(pieces), down.chunk(pieces)):
        y += (F.silu(x @ g.T) * (x @ u.T)) @ dn.T
    return y

# %% 3: a number of the input has 2 bytes
width = 800e12 / (13 * 50e9)

# %% 3: a weight costs 2 operations
width = 200e12 / (13 * 50e9)

# %% 3: not D\^2
width = 400e12 / 50e9

# %% 3: set 2 D / link equal
width = 50e9 * 13 / 400e12
