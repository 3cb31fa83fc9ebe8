# Wrong answers to the exercises of lessons/mixed_precision.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: beyond 65,504
first_scale = 65_536

# %% 1: beyond 65,504
first_scale = 32_768

# %% 1: only ever halves
first_scale = 65_504 / 3  # no scale is ever that

# %% 1: already worked
first_scale = 8_192

# %% 2: lora_A.* is torch.float16, and lean keeps it in torch.float32
def undo(model, dtype):
    for p in model.parameters():
        if p.dtype == torch.float32:
            p.data = p.data.to(dtype)
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False

# %% 2: find the flag
def undo(model, dtype):
    for p in model.parameters():
        if not p.requires_grad and p.dtype == torch.float32:
            p.data = p.data.to(dtype)

# %% 2: is torch.float16, and lean keeps it in torch.uint8
def undo(model, dtype):  # unpacked, too
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)

# %% 2: just names another tensor
def undo(model, dtype):
    for p in model.parameters():
        if not p.requires_grad and p.dtype == torch.float32:
            p = p.to(dtype)

# %% 2: is torch.float32, and lean keeps it in torch.float16
def undo(model, dtype):  # the table alone
    table = model.get_input_embeddings().weight
    table.data = table.data.to(dtype)
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False

# %% 2: is torch.float16, and lean keeps it in torch.bfloat16
def undo(model, dtype):
    for p in model.parameters():
        if not p.requires_grad and p.dtype == torch.float32:
            p.data = p.data.half()
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False

# %% 2: requires_grad has changed
def undo(model, dtype):
    for p in model.parameters():
        if not p.requires_grad and p.dtype == torch.float32:
            p.data = p.data.to(dtype)
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    for p in model.parameters():
        p.requires_grad = False

# %% 2: changes the model in place
def undo(model, dtype):
    return adapted(packed(dtype))

# %% 3: the mean is off
def to_bf16_at_random(x):
    return x.bfloat16()

# %% 3: the mean is off
def to_bf16_at_random(x):  # cuts
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()

# %% 3: the mean is off
def to_bf16_at_random(x):  # heads or tails
    down = x.view(torch.int32) & -65536
    up = down + 65536 * torch.randint_like(down, 2) * (down != x.view(torch.int32))
    return up.view(torch.float32).bfloat16()

# %% 3: one of its two neighbours
def to_bf16_at_random(x):  # rounds to nearest after the random number
    bits = x.view(torch.int32)
    return (bits + torch.randint_like(bits, 2**16)).view(torch.float32).bfloat16()

# %% 3: the mean is off
def to_bf16_at_random(x):  # half of the lower half
    bits = x.view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**15)) & -65536).view(torch.float32).bfloat16()

# %% 3: the mean is off
def to_bf16_at_random(x):  # one random number for all
    return ((x.view(torch.int32) + int(torch.randint(2**16, ()))) & -65536).view(torch.float32).bfloat16()

# %% 3: a random number of its own
def to_bf16_at_random(x):  # one random number for each row
    lower = torch.randint(2**16, (len(x), 1), dtype=torch.int32)
    return ((x.view(torch.int32) + lower) & -65536).view(torch.float32).bfloat16()

# %% 3: not bf16
def to_bf16_at_random(x):
    bits = x.view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**16)) & -65536).view(torch.float32)

# %% 3: must stay what it is
def to_bf16_at_random(x):  # noise of a step, which is half as wide below a power of two
    step = 2.0 ** (x.abs().log2().floor() - 7)
    return (x + (torch.rand(x.shape) - 0.5) * step).bfloat16()
