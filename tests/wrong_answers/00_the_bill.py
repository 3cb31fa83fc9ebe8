# Wrong answers to the exercises of lesson 0. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_more = 2 * 65_536

# %% 2:
def update_on_the_way(model):
    optimizers = [torch.optim.AdamW([p]) for p in model.parameters()]
    for p, o in zip(model.parameters(), optimizers):
        p.register_post_accumulate_grad_hook(lambda p, o=o: o.step())
    return optimizers

# %% 3:
least_gib = 16 * 1_235_814_400 / 2**30
