# Wrong answers to the exercises of lessons/mixed_precision.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: beyond 65,504
first_scale = 65_536

# %% 1: beyond 65,504
first_scale = 32_768

# %% 1: only ever halves
first_scale = 65_504 / 3  # no scale is ever that

# %% 1: already worked
first_scale = 8_192

# %% 2: nearer to its upper neighbour
def to_bf16(x):  # cut off
    return (x.view(torch.int32) & -65536).view(torch.float32)

# %% 2: whose last bit is 0
def to_bf16(x):  # a tie always goes away from zero
    return (x.view(torch.int32) + 0x8000 & -65536).view(torch.float32)

# %% 2: whose last bit is 0
def to_bf16(x):  # a tie always goes towards zero
    return (x.view(torch.int32) + 0x7FFF & -65536).view(torch.float32)

# %% 2: shift, add and mask the bits
def to_bf16(x):  # torch does it
    return x.bfloat16().float()

# %% 2: view the bits as torch.float32
def to_bf16(x):  # the right bits, still as integers
    bits = x.view(torch.int32)
    return bits + 0x7FFF + (bits >> 16 & 1) & -65536

# %% 2: view the bits as torch.float32
def to_bf16(x):  # converts the bits' number
    bits = x.view(torch.int32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & -65536).double()

# %% 2: the shape is
def to_bf16(x):
    bits = x.flatten().view(torch.int32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & -65536).view(torch.float32)

# %% 2: changed x itself
def to_bf16(x):
    bits = x.view(torch.int32)
    bits += 0x7FFF + (bits >> 16 & 1)
    return bits.bitwise_and_(-65536).view(torch.float32)

# %% 3: saves more for each token
break_even = 2048  # three tensors of T F

# %% 3: a copy of each weight
break_even = 1024  # two copies

# %% 3: casts of an input that was shared
break_even = 3 * 2048 * 8192 / (4 * 8192 + 2048)  # one cast, shared

# %% 3: saves more for each token
break_even = 3 * 2048  # four tensors of T D, where F is 4 D
