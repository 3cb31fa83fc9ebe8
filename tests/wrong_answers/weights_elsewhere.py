# Wrong answers to the exercises of lessons/weights_elsewhere.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: in the slots already
blocks_fetched = 8 * 2 * 40

# %% 1: the backward pass fetches blocks, too
blocks_fetched = 8 * (40 - 2)

# %% 1: and two are in the slots
blocks_fetched = 8 * 40

# %% 1: one micro-batch
blocks_fetched = 2 * (40 - 2)

# %% 1: L - 2 blocks forward
blocks_fetched = 8 * 2 * (40 - 1)

# %% 2: below the limit
def careful(optimizer, limit):  # every gradient becomes as long as the limit
    def hook(weight):
        norm = weight.grad.norm()
        if norm.isfinite():
            weight.grad.mul_(limit / norm)
            optimizer.step()
        weight.grad = None

    return hook

# %% 2: in the same direction
def careful(optimizer, limit):  # number by number
    def hook(weight):
        if weight.grad.isfinite().all():
            weight.grad.clamp_(-limit, limit)
            optimizer.step()
        weight.grad = None

    return hook

# %% 2: of norm 10 must become
def careful(optimizer, limit):  # clips nothing
    def hook(weight):
        if weight.grad.isfinite().all():
            optimizer.step()
        weight.grad = None

    return hook

# %% 2: not finite reached the weight
def careful(optimizer, limit):  # does not look
    def hook(weight):
        norm = weight.grad.norm()
        weight.grad.mul_((limit / norm).clamp(max=1))
        optimizer.step()
        weight.grad = None

    return hook

# %% 2: free it
def careful(optimizer, limit):  # the gradient stays
    def hook(weight):
        norm = weight.grad.norm()
        if norm.isfinite():
            weight.grad.mul_((limit / norm).clamp(max=1))
            optimizer.step()

    return hook

# %% 2: free it
def careful(optimizer, limit):  # the gradient stays where there was no step
    def hook(weight):
        norm = weight.grad.norm()
        if norm.isfinite():
            weight.grad.mul_((limit / norm).clamp(max=1))
            optimizer.step()
            weight.grad = None

    return hook

# %% 2: took no step
def careful(optimizer, limit):
    def hook(weight):
        weight.grad = None

    return hook

# %% 3: a whole step
def tokens_to_hide(flops, link, size):  # three passes, two copies
    return size * flops / (3 * link)

# %% 3: the forward pass alone
def tokens_to_hide(flops, link, size):
    return size * flops / (6 * link)

# %% 3: multiply and add
def tokens_to_hide(flops, link, size):
    return size * flops / link

# %% 3: size bytes
def tokens_to_hide(flops, link, size):  # always 16 bits
    return 2 * flops / (2 * link)

# %% 3: seconds of a copy
def tokens_to_hide(flops, link, size):  # upside down
    return 2 * link / (size * flops)
