# Wrong answers to the exercises of lessons/lean_preparation.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: a table of its own
mib_for_8b = 2 * 128_256 * 4096 / 2**20

# %% 1: so it takes 2 more
mib_for_8b = 2 * 4 * 128_256 * 4096 / 2**20

# %% 1: 4,096 wide
mib_for_8b = 2 * 128_256 * 2048 / 2**20

# %% 1: packed matrices stay packed
mib_for_8b = 2 * 8_030_261_248 / 2**20

# %% 1: number of bytes
mib_for_8b = 2 * 2 * 128_256 * 4096

# %% 1: which tables are not packed
mib_for_8b = 2 * (128_256 * 4096 + 4096 * 4096) / 2**20

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
def to_bf16_by_lot(x):
    return x.bfloat16()

# %% 3: the mean is off
def to_bf16_by_lot(x):  # cuts
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()

# %% 3: the mean is off
def to_bf16_by_lot(x):  # heads or tails
    down = x.view(torch.int32) & -65536
    up = down + 65536 * torch.randint_like(down, 2) * (down != x.view(torch.int32))
    return up.view(torch.float32).bfloat16()

# %% 3: one of its two neighbours
def to_bf16_by_lot(x):  # rounds to nearest behind the lottery
    bits = x.view(torch.int32)
    return (bits + torch.randint_like(bits, 2**16)).view(torch.float32).bfloat16()

# %% 3: the mean is off
def to_bf16_by_lot(x):  # half of the lower half
    bits = x.view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**15)) & -65536).view(torch.float32).bfloat16()

# %% 3: the mean is off
def to_bf16_by_lot(x):  # one draw for all
    return ((x.view(torch.int32) + int(torch.randint(2**16, ()))) & -65536).view(torch.float32).bfloat16()

# %% 3: a draw of its own
def to_bf16_by_lot(x):  # one draw for a row
    lower = torch.randint(2**16, (len(x), 1), dtype=torch.int32)
    return ((x.view(torch.int32) + lower) & -65536).view(torch.float32).bfloat16()

# %% 3: not bf16
def to_bf16_by_lot(x):
    bits = x.view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**16)) & -65536).view(torch.float32)

# %% 3: must stay what it is
def to_bf16_by_lot(x):  # noise of a step, which is half as wide below a power of two
    step = 2.0 ** (x.abs().log2().floor() - 7)
    return (x + (torch.rand(x.shape) - 0.5) * step).bfloat16()
