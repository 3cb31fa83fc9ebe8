# Wrong answers to the exercises of lesson 22. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
mib_of_a_row = 2 * 32 * 2 * 4096 * 4096 / 2**20

# %% 2:
def loss_of_parts(hidden, my_head, labels, first):
    z = hidden @ my_head.T
    place = labels - first
    here = (place >= 0) & (place < len(my_head))
    its_own = z.gather(1, place.clamp(0, len(my_head) - 1)[:, None])[:, 0] * here
    both = torch.stack([z.exp().sum(1), its_own])
    dist.all_reduce(both)
    return (both[0].log() - both[1]).mean()

# %% 3:
break_even_rate = sum(call.sent for call in calls) / compute_seconds(whole, shape, A100, "tensor", 1)
