# Wrong answers to the exercises of lesson 21. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
cards_of_80_gb = 14

# %% 2:
def stage_1(weight, gradients, moments, rate):
    N = len(moments)
    pieces = []
    for w, g, m in zip(weight.chunk(N), (sum(gradients) / N).chunk(N), moments):
        m.mul_(0.9).add_(g)
        pieces.append(w - rate * m)
    return torch.cat(pieces)

# %% 3:
def forward_seconds(computes, gathers):
    return sum(computes) + sum(gathers)
