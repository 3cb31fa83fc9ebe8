# Wrong answers to the exercises of lesson 11. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_of_the_mask = 4 * 2048**2

# %% 2:
def leaks(call, batch):
    number = (batch['position_ids'] == 0).cumsum(dim=-1)[0]
    last = number == number[-1]
    other = {**batch, 'input_ids': torch.where(last, 9, batch['input_ids'])}
    return not torch.equal(call(batch)[~last], call(other)[~last])

# %% 3:
def in_steps(lengths, documents, capacity):
    rows = first_fit(lengths, capacity)
    return [rows[start : start + 6] for start in range(0, len(rows), 6)]
