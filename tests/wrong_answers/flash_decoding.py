# Wrong answers to the exercises of lessons/flash_decoding.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: keys and values, and every number
past_as_large_as_the_weights = 2 * shape.weights / (cached / 2)

# %% 1: every weight has 2 bytes
past_as_large_as_the_weights = shape.weights / cached

# %% 1: 8 heads of keys and values
past_as_large_as_the_weights = 2 * shape.weights / (2 * shape.layers * H * D * 2)

# %% 1: one block
past_as_large_as_the_weights = 2 * shape.weights / (cached / shape.layers)

# %% 1: how often does that go into
past_as_large_as_the_weights = longest

# %% 2: only 78% of the card
def splits_for(work, sms):
    return max(1, sms // work)

# %% 2: not split at all
def splits_for(work, sms):
    return -(-sms // work)

# %% 2: fewer are good enough
def splits_for(work, sms):  # the best share
    if work >= 0.8 * sms:
        return 1
    shares = [work * n / sms / math.ceil(work * n / sms) for n in range(1, sms + 1)]
    return shares.index(max(shares)) + 1

# %% 2: not split at all
def splits_for(work, sms):  # the first rule is forgotten
    shares = [work * n / sms / math.ceil(work * n / sms) for n in range(1, sms + 1)]
    return next(n for n, share in enumerate(shares, 1) if share >= 0.85 * max(shares))

# %% 2: not split at all
def splits_for(work, sms):  # more than 0.8
    if work > 0.8 * sms:
        return 1
    shares = [work * n / sms / math.ceil(work * n / sms) for n in range(1, sms + 1)]
    return next(n for n, share in enumerate(shares, 1) if share >= 0.85 * max(shares))

# %% 2: only 80% of the card
def splits_for(work, sms):  # counts from 0
    if work >= 0.8 * sms:
        return 1
    shares = [work * n / sms / math.ceil(work * n / sms) for n in range(1, sms + 1)]
    return next(n for n, share in enumerate(shares) if share >= 0.85 * max(shares))

# %% 2: of the card are in use
def splits_for(work, sms):  # rounds down
    if work >= 0.8 * sms:
        return 1
    shares = [work * n / sms / max(1, work * n // sms) for n in range(1, sms + 1)]
    return next(n for n, share in enumerate(shares, 1) if share >= 0.85)

# %% 2: not a whole number
def splits_for(work, sms):
    return max(1.0, 0.85 * sms / work)

# %% 3: which weight does each part get
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    rows = q.transpose(0, 1).flatten(1, 2)
    out, _ = attend(rows, prompt_k, prompt_v)
    return (out.unflatten(1, (len(q), -1)).transpose(0, 1) + attend(q, own_k, own_v)[0]) / 2

# %% 3: which weight does each part get
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):  # by the number of keys
    rows = q.transpose(0, 1).flatten(1, 2)
    shared = attend(rows, prompt_k, prompt_v)[0].unflatten(1, (len(q), -1)).transpose(0, 1)
    own, P, S = attend(q, own_k, own_v)[0], prompt_k.shape[1], own_k.shape[2]
    return (P * shared + S * own) / (P + S)

# %% 3: copied for every question
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    keys = torch.cat([prompt_k.expand(len(q), -1, -1, -1), own_k], 2)
    values = torch.cat([prompt_v.expand(len(q), -1, -1, -1), own_v], 2)
    return attend(q, keys, values)[0]

# %% 3: copied for every question
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    return merge(attend(q, prompt_k, prompt_v), attend(q, own_k, own_v))[0]

# %% 3: the prompt was read 6 times
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    outs = [merge(attend(q[b], prompt_k, prompt_v), attend(q[b], own_k[b], own_v[b]))[0] for b in range(len(q))]
    return torch.stack(outs)

# %% 3: the queries' is
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):  # the heads first
    rows = q.transpose(0, 1).flatten(1, 2)
    shared = [x.unflatten(1, (len(q), -1)) for x in attend(rows, prompt_k, prompt_v)]
    own = [x.transpose(0, 1) for x in attend(q, own_k, own_v)]
    return merge(shared, own)[0]

# %% 3: which queries share a head
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):  # the queries of one head next to another's
    rows = q.reshape(q.shape[1], -1, q.shape[3])
    shared = [x.reshape(*q.shape[:3], -1) for x in attend(rows, prompt_k, prompt_v)]
    return merge(shared, attend(q, own_k, own_v))[0]
