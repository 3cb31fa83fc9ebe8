# Wrong answers to the exercises of lessons/chunked_loss.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: bytes of a logit
times_fewer = 4096 / 256

# %% 1: 4,096 tokens
times_fewer = 12 * 2048 / (8 * 256)

# %% 1: more bytes a logit
times_fewer = 8 * 4096 / (12 * 256)

# %% 1: larger by the smaller
times_fewer = 8 * 256 / (12 * 4096)

# %% 1: same words
times_fewer = 12 * 4096 * 151_936 / (8 * 256 * 128_256)

# %% 1: which factor cancels
times_fewer = 12 * 4096 * 151_936 / (8 * 256)

# %% 2: its slope is missing
def capped(hidden, head, labels, c):
    logits = c * (hidden @ head.T / c).tanh()
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, labels[:, None])).sum()
    grad = (logits - total).exp() - F.one_hot(labels, len(head))
    return loss, grad @ head

# %% 2: without a cap
def capped(hidden, head, labels, c):
    logits = hidden @ head.T
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, labels[:, None])).sum()
    grad = (logits - total).exp() - F.one_hot(labels, len(head))
    return loss, grad @ head

# %% 2: label's own logit is capped
def capped(hidden, head, labels, c):
    z = hidden @ head.T
    squashed = (z / c).tanh()
    total = (c * squashed).logsumexp(1, keepdim=True)
    loss = (total - z.gather(1, labels[:, None])).sum()
    grad = (c * squashed - total).exp() - F.one_hot(labels, len(head))
    return loss, grad * (1 - squashed**2) @ head

# %% 2: that is the mean
def capped(hidden, head, labels, c):
    squashed = (hidden @ head.T / c).tanh()
    loss = F.cross_entropy(c * squashed, labels)
    grad = (c * squashed).softmax(1) - F.one_hot(labels, len(head))
    return loss, grad * (1 - squashed**2) @ head / len(labels)

# %% 2: inside the tanh is divided
def capped(hidden, head, labels, c):
    squashed = (hidden @ head.T).tanh()
    loss = F.cross_entropy(c * squashed, labels, reduction="sum")
    grad = (c * squashed).softmax(1) - F.one_hot(labels, len(head))
    return loss, grad * (1 - squashed**2) * c @ head

# %% 2: not of the capped logits
def capped(hidden, head, labels, c):
    logits = c * (hidden @ head.T / c).tanh()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    grad = logits.softmax(1) - F.one_hot(labels, len(head))
    return loss, grad * (1 - logits**2) @ head

# %% 2: what is left of it
def capped(hidden, head, labels, c):
    squashed = (hidden @ head.T / c).tanh()
    loss = F.cross_entropy(c * squashed, labels, reduction="sum")
    grad = (c * squashed).softmax(1) - F.one_hot(labels, len(head))
    return loss, grad * (1 - squashed**2) / c @ head

# %% 2: softmax minus one-hot
def capped(hidden, head, labels, c):  # the one-hot is forgotten
    squashed = (hidden @ head.T / c).tanh()
    loss = F.cross_entropy(c * squashed, labels, reduction="sum")
    return loss, (c * squashed).softmax(1) * (1 - squashed**2) @ head

# %% 2: sum it over the tokens
def capped(hidden, head, labels, c):
    squashed = (hidden @ head.T / c).tanh()
    loss = F.cross_entropy(c * squashed, labels, reduction="none")
    grad = (c * squashed).softmax(1) - F.one_hot(labels, len(head))
    return loss, grad * (1 - squashed**2) @ head

# %% 2: and hidden
def capped(hidden, head, labels, c):  # of the logits, not of the hidden states
    squashed = (hidden @ head.T / c).tanh()
    loss = F.cross_entropy(c * squashed, labels, reduction="sum")
    grad = (c * squashed).softmax(1) - F.one_hot(labels, len(head))
    return loss, grad * (1 - squashed**2)

# %% 2: without autograd
def capped(hidden, head, labels, c):
    hidden = hidden.clone().requires_grad_()
    loss = F.cross_entropy(c * (hidden @ head.T / c).tanh(), labels, reduction="sum")
    loss.backward()
    return loss, hidden.grad

# %% 3: inside the slice
def logsumexp_in_slices(hidden, head, width):
    total = torch.zeros(len(hidden))
    for part in head.split(width):
        total += (hidden @ part.T).exp().sum(1)
    return total.log()

# %% 3: starts from 0
def logsumexp_in_slices(hidden, head, width):
    total = torch.zeros(len(hidden))
    for part in head.split(width):
        total = torch.logaddexp(total, (hidden @ part.T).logsumexp(1))
    return total

# %% 3: is every word counted once
def logsumexp_in_slices(hidden, head, width):  # adds logarithms
    return sum((hidden @ part.T).logsumexp(1) for part in head.split(width))

# %% 3: in the last slice, too
def logsumexp_in_slices(hidden, head, width):  # the rest of the words is dropped
    total = torch.full((len(hidden),), -torch.inf)
    for at in range(0, len(head) - width + 1, width):
        total = torch.logaddexp(total, (hidden @ head[at : at + width].T).logsumexp(1))
    return total

# %% 3: is every word counted once
def logsumexp_in_slices(hidden, head, width):  # the first slice counts twice
    total = (hidden @ head[:width].T).logsumexp(1)
    for part in head.split(width):
        total = torch.logaddexp(total, (hidden @ part.T).logsumexp(1))
    return total

# %% 3: is every word counted once
def logsumexp_in_slices(hidden, head, width):  # the largest slice alone
    return torch.stack([(hidden @ part.T).logsumexp(1) for part in head.split(width)]).amax(0)

# %% 3: too many words live at once
def logsumexp_in_slices(hidden, head, width):
    return (hidden @ head.T).logsumexp(1)

# %% 3: too many words live at once
def logsumexp_in_slices(hidden, head, width):  # all slices are kept
    slices = [hidden @ part.T for part in head.split(width)]
    return torch.stack([logits.logsumexp(1) for logits in slices]).logsumexp(0)

# %% 3: the shape is
def logsumexp_in_slices(hidden, head, width):
    total = torch.full((len(hidden), 1), -torch.inf)
    for part in head.split(width):
        total = torch.logaddexp(total, (hidden @ part.T).logsumexp(1, keepdim=True))
    return total
