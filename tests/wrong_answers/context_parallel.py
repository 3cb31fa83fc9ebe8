# Wrong answers to the exercises of lessons/context_parallel.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: 7 turns
mib_sent = 8 * 32 * 2 * 8192 * 8 * 128 * 2 / 2**20

# %% 1: its own tokens
mib_sent = 7 * 32 * 2 * 65_536 * 8 * 128 * 2 / 2**20

# %% 1: keys and values
mib_sent = 7 * 32 * 8192 * 8 * 128 * 2 / 2**20

# %% 1: 32 blocks
mib_sent = 7 * 2 * 8192 * 8 * 128 * 2 / 2**20

# %% 2: weight each part
def over_parts(q, parts):
    return sum(attend(q, k, v, False)[0] for k, v in parts) / len(parts)

# %% 2: wrong with 3 parts
def over_parts(q, parts):
    if len(parts) == 1:
        return attend(q, *parts[0], False)[0]
    return merge(*attend(q, *parts[0], False), *attend(q, *parts[1], False))[0]

# %% 2: exp of large scores overflows
def over_parts(q, parts):
    sums = [(scores(q, k, False).exp() @ v, scores(q, k, False).exp().sum(-1, keepdim=True)) for k, v in parts]
    return sum(one for one, _ in sums) / sum(total for _, total in sums)

# %% 2: shape
def over_parts(q, parts):
    return torch.cat([attend(q, k, v, False)[0] for k, v in parts], dim=1) if len(parts) > 1 else q[0]

# %% 3: set both times equal
tokens_to_hide = 3 * 4 * 32 / 10e9 * 100e12 / (2 * 32)

# %% 3: cancel
tokens_to_hide = 4 * 4 * 8 / 10e9 * 100e12 / (2 * 32)

# %% 3: one T
tokens_to_hide = (3 * 4 * 8 / 10e9 * 100e12 / (2 * 32)) ** 0.5
