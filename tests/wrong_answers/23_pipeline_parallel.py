# Wrong answers to the exercises of lesson 23. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
mib_across = 2048

# %% 2:
def cut(seconds, S):
    return [len(seconds) * (s + 1) // S - len(seconds) * s // S for s in range(S)]

# %% 3:
pieces_and_borders = (4, 4)
