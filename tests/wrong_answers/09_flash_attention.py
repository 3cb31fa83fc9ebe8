# Wrong answers to the exercises of lesson 9. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
more_mib = 2 * 32 * 2048 * 64 * 2 / MIB

# %% 2:
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

# %% 3:
def lazy(m, total, out, s, v):
    largest = s.amax(-1, keepdim=True)
    new = torch.where(largest > m + 8, largest, m)
    w = (s - new).exp()
    return new, total + w.sum(-1, keepdim=True), out + w @ v
