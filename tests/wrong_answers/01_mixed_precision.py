# Wrong answers to the exercises of lesson 1. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
first_scale = 32_768

# %% 2:
def to_bf16(x):
    return (x.view(torch.int32) & -65536).view(torch.float32)

# %% 3:
break_even = 2048
