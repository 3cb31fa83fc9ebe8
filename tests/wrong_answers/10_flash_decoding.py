# Wrong answers to the exercises of lesson 10. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
past_as_large_as_the_weights = 2 * shape.weights / (cached / 2)

# %% 2:
def splits_for(work, sms):
    return max(1, sms // work)

# %% 3:
def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    rows = q.transpose(0, 1).flatten(1, 2)
    out, _ = attend(rows, prompt_k, prompt_v)
    return (out.unflatten(1, (len(q), -1)).transpose(0, 1) + attend(q, own_k, own_v)[0]) / 2
