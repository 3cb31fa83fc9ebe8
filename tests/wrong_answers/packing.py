# Wrong answers to the exercises of lessons/packing.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: all four into one sequence
bytes_of_the_mask = 4 * 2048**2

# %% 1: one byte
bytes_of_the_mask = 2 * (4 * 2048) ** 2

# %% 1: not a bit
bytes_of_the_mask = (4 * 2048) ** 2 // 8

# %% 1: above the diagonal is stored
bytes_of_the_mask = 8192 * 8193 // 2

# %% 1: number of MiB
bytes_of_the_mask = 64

# %% 1: how many pairs
bytes_of_the_mask = 2 * 2048

# %% 2: which document must you change
def leaks(call, batch):  # the last document, which nobody sees
    number = (batch["position_ids"] == 0).cumsum(dim=-1)[0]
    last = number == number[-1]
    other = {**batch, "input_ids": torch.where(last, 9, batch["input_ids"])}
    return not torch.equal(call(batch)[~last], call(other)[~last])

# %% 2: own logits move
def leaks(call, batch):  # compares all tokens
    first = (batch["position_ids"] == 0).cumsum(dim=-1)[0] == 1
    other = {**batch, "input_ids": torch.where(first, 9, batch["input_ids"])}
    return not torch.equal(call(batch), call(other))

# %% 2: own logits move
def leaks(call, batch):
    return True

# %% 2: which document must you change
def leaks(call, batch):  # looks at the batch
    return "attention_mask" in batch

# %% 2: change each document in turn
def leaks(call, batch):  # only what the first one gives away
    first = (batch["position_ids"] == 0).cumsum(dim=-1)[0] == 1
    other = {**batch, "input_ids": torch.where(first, 9, batch["input_ids"])}
    return not torch.equal(call(batch)[~first], call(other)[~first])

# %% 2: compare documents before it
def leaks(call, batch):  # only what is behind the changed one
    number, before = (batch["position_ids"] == 0).cumsum(dim=-1)[0], call(batch)
    for j in number.unique():
        after = call({**batch, "input_ids": torch.where(number == j, 9, batch["input_ids"])})
        if not torch.equal(before[number > j], after[number > j]):
            return True
    return False

# %% 2: did both calls get the same
def leaks(call, batch):  # both calls get the changed words
    first = (batch["position_ids"] == 0).cumsum(dim=-1)[0] == 1
    other = batch
    other["input_ids"][0, first] = 9
    return not torch.equal(call(batch)[~first], call(other)[~first])

# %% 3: steps; without packing there are
def in_steps(lengths, documents, capacity):  # rows first, then steps
    rows = first_fit(lengths, capacity)
    return [rows[start : start + 6] for start in range(0, len(rows), 6)]

# %% 3: does not hold the documents
def in_steps(lengths, documents, capacity):  # indices within the step
    return [first_fit(lengths[start : start + documents], capacity) for start in range(0, len(lengths), documents)]

# %% 3: first_fit makes fewer
def in_steps(lengths, documents, capacity):  # nothing is packed
    return [[[i] for i in some] for some in split(list(range(len(lengths))), documents)]

# %% 3: more than
def in_steps(lengths, documents, capacity):  # all into one row
    return [[some] for some in split(list(range(len(lengths))), documents)]

# %% 3: steps; without packing there are
def in_steps(lengths, documents, capacity):  # the last, partial step is dropped
    steps = []
    for start in range(0, len(lengths) - documents + 1, documents):
        some = first_fit(lengths[start : start + documents], capacity)
        steps.append([[start + i for i in row] for row in some])
    return steps

# %% 3: does not hold the documents
def in_steps(lengths, documents, capacity):  # not in the given order
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [
        [[some[i] for i in row] for row in first_fit([lengths[i] for i in some], capacity)]
        for some in split(order, documents)
    ]

# %% 3: list of lists of lists
def in_steps(lengths, documents, capacity):  # the documents of a step, without rows
    return split(list(range(len(lengths))), documents)

# %% 3: steps; without packing
def in_steps(lengths, documents, capacity):  # of this course's rows only
    steps = []
    for start in range(0, len(lengths), 8):
        some = first_fit(lengths[start : start + 8], 2048)
        steps.append([[start + i for i in row] for row in some])
    return steps
