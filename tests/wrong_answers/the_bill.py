# Wrong answers to the exercises of lessons/the_bill.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: A number takes 4 bytes
bytes_more = 2 * 65_536

# %% 1: a gradient of zeros takes as many bytes
bytes_more = 0

# %% 1: in KiB; give it in bytes
bytes_more = 256

# %% 1: which gradients are in memory now
bytes_more = 16 * 65_536

# %% 2: a gradient is left
def update_on_the_way(model):
    optimizers = [torch.optim.AdamW([p]) for p in model.parameters()]
    for p, o in zip(model.parameters(), optimizers):
        p.register_post_accumulate_grad_hook(lambda p, o=o: o.step())
    return optimizers

# %% 2: gradients are in memory together
def update_on_the_way(model):  # all of them, when the last one has come
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def update(p):
        if all(p.grad is not None for p in model.parameters()):
            for p, optimizer in optimizers.items():
                optimizer.step()
                p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return optimizers

# %% 2: of its own weight
def update_on_the_way(model):  # every hook has the last optimizer
    optimizers = []
    for p in model.parameters():
        optimizer = torch.optim.AdamW([p])

        def update(p):
            optimizer.step()
            p.grad = None

        p.register_post_accumulate_grad_hook(update)
        optimizers.append(optimizer)
    return optimizers

# %% 2: they hold the states
def update_on_the_way(model):  # a new optimizer for each step
    def update(p):
        torch.optim.AdamW([p]).step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return [update] * 17

# %% 2: the same settings
def update_on_the_way(model):  # Adam decays no weights
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return optimizers

# %% 2: a gradient is left
def update_on_the_way(model):  # zeros, not dropped
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none=False)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return optimizers

# %% 2: the answer is a function
def update_on_the_way(model):  # one optimizer for all
    optimizer = torch.optim.AdamW(model.parameters())

    def update(p):
        optimizer.step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return optimizer

# %% 3: too little; look at all lines
least_gib = 16 * 1_235_814_400 / 2**30

# %% 3: fused AdamW makes no temporary tensor
least_gib = 20 * 1_235_814_400 / 2**30  # with the square roots of foreach

# %% 3: too little; look at all lines
least_gib = 12 * 1_235_814_400 / 2**30  # "gradients cost nothing"

# %% 3: in GB of 10\^9 bytes
least_gib = (16 * 1_235_814_400 + 2 * 4 * 128_256 * 2048) / 1e9

# %% 3: too little; look at all lines
least_gib = (16 * 1_235_814_400 + 4 * 128_256 * 2048) / 2**30

# %% 3: compute it from P, V and D
least_gib = 20.4  # the rounded number of the deeper part
