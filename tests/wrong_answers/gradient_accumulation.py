# Wrong answers to the exercises of lessons/gradient_accumulation.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: in fp32
bytes_kept = 2 * 45_088_768

# %% 1: one sum of gradients, .* whatever k is
bytes_kept = 7 * 4 * 45_088_768  # one gradient for each row before the last

# %% 1: sum of gradients
bytes_kept = 12 * 45_088_768  # with AdamW's states

# %% 1: for each weight that trains
bytes_kept = 4 * 1_235_814_400  # of all weights

# %% 2: some tokens count for more
def from_a_stream(batches):
    tokens, rows = 0, 0
    for batch in batches:
        (loss_sum(batch) / trained(batch)).backward()
        tokens, rows = tokens + trained(batch), rows + 1
    for weight in model.parameters():
        weight.grad /= rows
    return tokens

# %% 2: times as long as it should be
def from_a_stream(batches):  # a sum
    tokens = 0
    for batch in batches:
        loss_sum(batch).backward()
        tokens += trained(batch)
    return tokens

# %% 2: times as long as it should be
def from_a_stream(batches):  # padding and prompts are counted
    tokens, everything = 0, 0
    for batch in batches:
        loss_sum(batch).backward()
        tokens += trained(batch)
        everything += batch["labels"].numel()
    for weight in model.parameters():
        weight.grad /= everything
    return tokens

# %% 2: batches are alive at once
def from_a_stream(batches):  # counts ahead
    batches = list(batches)
    accumulate(batches)
    return trained(*batches)

# %% 2: batches are alive at once
def from_a_stream(batches):  # one backward pass at the end
    loss, tokens = 0.0, 0
    for batch in batches:
        loss = loss + loss_sum(batch)
        tokens += trained(batch)
    (loss / tokens).backward()
    return tokens

# %% 2: some tokens count for more
def from_a_stream(batches):  # divides by the tokens so far
    tokens = 0
    for batch in batches:
        tokens += trained(batch)
        (loss_sum(batch) / tokens).backward()
    return tokens

# %% 2: is not the number of trained tokens
def from_a_stream(batches):
    tokens = 0
    for batch in batches:
        loss_sum(batch).backward()
        tokens += trained(batch)
    for weight in model.parameters():
        weight.grad /= tokens
    return loss_sum(batch).item() / tokens

# %% 3: add 1 in a loop
largest_sum = 255

# %% 3: add 1 in a loop
largest_sum = 128  # 7 bits of the fraction

# %% 3: add 1 in a loop
largest_sum = 2048  # fp16's

# %% 3: try it
largest_sum = float("inf")
