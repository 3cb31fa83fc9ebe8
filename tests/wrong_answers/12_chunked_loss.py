# Wrong answers to the exercises of lesson 12. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
times_fewer = 4096 / 256

# %% 2:
def capped(hidden, head, labels, c):
    logits = c * (hidden @ head.T / c).tanh()
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, labels[:, None])).sum()
    grad = (logits - total).exp() - F.one_hot(labels, len(head))
    return loss, grad @ head

# %% 3:
def logsumexp_in_slices(hidden, head, width):
    total = torch.zeros(len(hidden))
    for part in head.split(width):
        total += (hidden @ part.T).exp().sum(1)
    return total.log()
