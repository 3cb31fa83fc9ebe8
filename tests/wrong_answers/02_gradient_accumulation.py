# Wrong answers to the exercises of lesson 2. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_that_wait = 2 * 11_272_192

# %% 2:
def from_a_stream(batches):
    tokens, rows = 0, 0
    for batch in batches:
        (loss_sum(batch) / trained(batch)).backward()
        tokens, rows = tokens + trained(batch), rows + 1
    for weight in model.parameters():
        weight.grad /= rows
    return tokens

# %% 3:
largest_sum = 255
