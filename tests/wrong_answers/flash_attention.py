# Wrong answers to the exercises of lessons/flash_attention.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: kept with either kernel
more_mib = 2 * 32 * 2048 * 64 * 2 / MIB

# %% 1: both repeated
more_mib = (32 - 8) * 2048 * 64 * 2 / MIB

# %% 1: 2 bytes
more_mib = 2 * (32 - 8) * 2048 * 64 * 4 / MIB

# %% 1: all 16 blocks
more_mib = 16 * 2 * (32 - 8) * 2048 * 64 * 2 / MIB

# %% 1: number of bytes
more_mib = 2 * (32 - 8) * 2048 * 64 * 2

# %% 1: heads that the copies add
more_mib = 2 * 8 * 2048 * 64 * 2 / MIB

# %% 2: can the first tile of a row be all -inf
def windowed(q, k, v, window):
    out = torch.empty_like(q)
    at = torch.arange(T)
    for n, rows in enumerate(TILES):
        state = start(q[..., rows, :])
        for keys in TILES[: n + 1]:
            behind = at[rows, None] - at[keys]
            s = scores(q, k, rows, keys).masked_fill(behind >= window, -INF)
            state = update(*state, s, v[..., keys, :])
        out[..., rows, :] = state[2] / state[1]
    return out

# %% 2: another kernel
def windowed(q, k, v, window):  # right numbers, and every tile is made
    behind = torch.arange(T)[:, None] - torch.arange(T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < window))

# %% 2: tiles are made, but only in
def windowed(q, k, v, window):  # the whole matrix
    behind = torch.arange(T)[:, None] - torch.arange(T)
    s = (q @ k.mT / D**0.5).masked_fill((behind < 0) | (behind >= window), -INF)
    return s.softmax(-1) @ v

# %% 2: tiles are made, but only in
def windowed(q, k, v, window):  # all tiles up to the diagonal
    out = torch.empty_like(q)
    for n, rows in enumerate(TILES):
        state = start(q[..., rows, :])
        for keys in TILES[: n + 1]:
            behind = torch.arange(T)[rows, None] - torch.arange(T)[keys]
            s = scores(q, k, rows, keys).masked_fill(behind >= window, -INF)
            state = careful(*state, s, v[..., keys, :])
        out[..., rows, :] = state[2] / state[1]
    return out

# %% 2: tiles are made, but only in
def windowed(q, k, v, window):  # off by one: keys.stop is the first key of the next tile
    out = torch.empty_like(q)
    for n, rows in enumerate(TILES):
        state = start(q[..., rows, :])
        for keys in TILES[: n + 1]:
            if rows.start - keys.stop >= window:
                continue
            behind = torch.arange(T)[rows, None] - torch.arange(T)[keys]
            s = scores(q, k, rows, keys).masked_fill(behind >= window, -INF)
            state = careful(*state, s, v[..., keys, :])
        out[..., rows, :] = state[2] / state[1]
    return out

# %% 2: not a softmax over the query itself
def windowed(q, k, v, window):  # one token too many
    out = torch.empty_like(q)
    for n, rows in enumerate(TILES):
        state = start(q[..., rows, :])
        for keys in TILES[: n + 1]:
            behind = torch.arange(T)[rows, None] - torch.arange(T)[keys]
            if behind.min() > window:
                continue
            s = scores(q, k, rows, keys).masked_fill(behind > window, -INF)
            state = careful(*state, s, v[..., keys, :])
        out[..., rows, :] = state[2] / state[1]
    return out

# %% 2: not a softmax over the query itself
def windowed(q, k, v, window):  # skips tiles in which the last query sees nothing, and the first does
    out = torch.empty_like(q)
    for n, rows in enumerate(TILES):
        state = start(q[..., rows, :])
        for keys in TILES[: n + 1]:
            if rows.stop - 1 - (keys.stop - 1) >= window:
                continue
            behind = torch.arange(T)[rows, None] - torch.arange(T)[keys]
            s = scores(q, k, rows, keys).masked_fill(behind >= window, -INF)
            state = careful(*state, s, v[..., keys, :])
        out[..., rows, :] = state[2] / state[1]
    return out

# %% 2: not a softmax over the query itself
def windowed(q, k, v, window):  # the sum is forgotten
    out = torch.empty_like(q)
    for n, rows in enumerate(TILES):
        state = start(q[..., rows, :])
        for keys in TILES[: n + 1]:
            if rows.start - (keys.stop - 1) >= window:
                continue
            behind = torch.arange(T)[rows, None] - torch.arange(T)[keys]
            s = scores(q, k, rows, keys).masked_fill(behind >= window, -INF)
            state = careful(*state, s, v[..., keys, :])
        out[..., rows, :] = state[2]
    return out

# %% 3: were both corrected
def lazy(m, total, out, s, v):
    largest = s.amax(-1, keepdim=True)
    new = torch.where(largest > m + 8, largest, m)
    w = (s - new).exp()
    return new, total + w.sum(-1, keepdim=True), out + w @ v

# %% 3: were both corrected
def lazy(m, total, out, s, v):  # corrects the sum, and not the output
    largest = s.amax(-1, keepdim=True)
    new = torch.where(largest > m + 8, largest, m)
    shrink, w = (m - new).exp(), (s - new).exp()
    return new, total * shrink + w.sum(-1, keepdim=True), out + w @ v

# %% 3: moved in a row
def lazy(m, total, out, s, v):  # all rows of a tile move if any is far above
    largest = s.amax(-1, keepdim=True)
    new = torch.maximum(m, largest) if (largest > m + 8).any() else m
    shrink, w = (m - new).exp(), (s - new).exp()
    return new, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v

# %% 3: stayed in a row
def lazy(m, total, out, s, v):  # all rows stay unless all are far above
    largest = s.amax(-1, keepdim=True)
    new = largest if (largest > m + 8).all() else m
    shrink, w = (m - new).exp(), (s - new).exp()
    return new, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v

# %% 3: moved in a row
def lazy(m, total, out, s, v):
    return update(m, total, out, s, v)

# %% 3: stayed in a row
def lazy(m, total, out, s, v):  # keeps the first tile's for ever
    largest = s.amax(-1, keepdim=True)
    new = torch.where(m == -INF, largest, m)
    shrink, w = (m - new).exp(), (s - new).exp()
    return new, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v

# %% 3: moved in a row
def lazy(m, total, out, s, v):  # 8 or more
    largest = s.amax(-1, keepdim=True)
    new = torch.where(largest >= m + 8, largest, m)
    shrink, w = (m - new).exp(), (s - new).exp()
    return new, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v

# %% 3: moves to the tile's largest
def lazy(m, total, out, s, v):  # 8 steps up
    largest = s.amax(-1, keepdim=True)
    new = torch.where(m == -INF, largest, torch.where(largest > m + 8, m + 8, m))
    shrink, w = (m - new).exp(), (s - new).exp()
    return new, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v
