# Wrong answers to the exercises of lesson 13. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
mib_for_8b = 2 * 128_256 * 4096 / 2**20

# %% 2:
def undo(model, dtype):
    for p in model.parameters():
        if p.dtype == torch.float32:
            p.data = p.data.to(dtype)
    for module in model.modules():
        if hasattr(module, 'cast_input_dtype_enabled'):
            module.cast_input_dtype_enabled = False

# %% 3:
def to_bf16_by_lot(x):
    return x.bfloat16()
