# ---
# jupyter:
#   question: Which numbers can take 16 bits without harming training, and which fp32 copies does peft make although
#     nobody needs them?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # 16 bits: multiply in 16, learn in 32
# > **Promise.** You cut the memory of this run nearly in half, and on a T4 its step should become 2 to 9 times as fast
# > (predicted). You will know why fp16 needs a loss scale, what `Attempting to unscale FP16 gradients.` means, why a
# > loss becomes `nan`, and which line of many QLoRA scripts costs 1,155 MiB once the weights have 4 bits.
# >
# > **Card.** saves two bytes of each frozen weight and of most activations, and time on tensor cores / costs rounding,
# > and in fp16 a loss scale with a few skipped steps / approximate: inputs and results of matrix multiplications are
# > rounded to 11 (fp16) or 8 (bf16) significant bits / about 25 minutes / after [LoRA](lora.py)
#
# Our job fine-tunes Llama-3.2-1B on a T4 with 14.74 GiB. After [the lesson on the chunked loss](chunked_loss.py) a step
# needs 5,614 MiB, and nearly every number in it takes 4 bytes (fp32). *Mixed precision* stores frozen weights in 16
# bits (2 bytes) and multiplies in 16 bits. *Lean preparation* removes fp32 copies that peft still makes.
#
# ## 1. The bill
# *Frozen weights* (the first two lines of the bill below, 4,714 MiB) only get multiplied, because with LoRA no update
# changes them. *Trained weights and optimizer states* (the next two) collect very small updates.
# *[Activations](../docs/glossary.md#activation)* are results of the forward pass that are kept for the backward pass.
# Which of them may take 2 bytes? Guess what both switches make of the peak.

# %% Imports and settings, and the bill so far tags=["hide-input"]
from tempfile import TemporaryDirectory

import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from cria_tricks import BadInput, course
from cria_tricks.course import (
    CARDS,
    T4,
    Theme,
    Traffic,
    diff,
    find_shape,
    flops,
    forbid_cpu_repacking,
    function_at,
    losses,
    quiet_libraries,
    resolve,
    results,
    tables,
    toggles,
    with_settings,
)
from cria_tricks.course import memory_bill as estimate
from cria_tricks.techniques import lean_preparation, mixed_precision

quiet_libraries()
KIB, MIB = 2**10, 2**20
before = course.so_far("chunked_loss")  # all switches of the lessons up to this one
for line in course.bill(before).lines:
    print(f"{line.name:24}{line.bytes / MIB:8,.1f} MiB")
print(f"{'peak':24}{course.bill(before).peak_bytes / MIB:8,.1f} MiB")

# %% Your guess: MiB of the peak in 16 bits tags=["predict"]
guess = 0  # @param {type:"number"}

# %% [markdown]
# ## 2. From scratch, in five steps
# **Step 1: choose a format.** A floating-point number is $\pm 1.\text{fraction} \times 2^{\text{exponent}}$. The bits
# of the exponent decide how large a number can be, and those of the fraction how close the next number is.
#
# The size of the steps decides whether a weight can learn, because AdamW changes it only by about the learning rate. So
# subtract 1e-5 from 0.02 a hundred times: 0.019 is right.

# %%
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, mse_loss

from cria_tricks.course import SavedBytes

FORMATS = {  # bits of the exponent and of the fraction; its leading 1 is not stored
    "fp32": (8, 23, torch.float32),
    "fp16": (5, 10, torch.float16),
    "bf16": (8, 7, torch.bfloat16),
}
for name, (exponent, fraction, dtype) in FORMATS.items():
    bias = 2 ** (exponent - 1) - 1  # half of the exponents are negative
    largest = (2 - 2.0**-fraction) * 2.0**bias
    smallest = 2.0 ** (1 - bias - fraction)  # only the last bit of the fraction is left
    step = 2.0 ** (-6 - fraction)  # near 0.02, which lies between 2^-6 and 2^-5
    weight = torch.tensor(0.02, dtype=dtype)
    expected = weight.item() - 100 * round(1e-5 / step) * step
    for _ in range(100):
        weight -= 1e-5
    print(
        f"{name}: {smallest:.2g} to {largest:.5g}; "
        f"near 0.02 steps of {step:.1e}; after 100 updates {weight.item():.5f}"
    )
    assert largest == torch.finfo(dtype).max
    assert abs(weight.item() - expected) < 1e-9


# %% Draw figure 1 tags=["hide-input"]
def layouts(theme: Theme):
    """The bits of three formats."""
    sketch = course.Sketch(theme, 41, 10.6)
    holds = {
        "fp32": "up to 3.4e38; after 1 a step of 1.2e-7",
        "fp16": "up to 65,504; after 1 a step of 0.001",
        "bf16": "up to 3.4e38; after 1 a step of 0.008",
    }
    for place, (name, (e, f, _)) in enumerate(FORMATS.items()):
        top = 0.5 + 3.4 * place
        sketch.text(0, top + 0.9, name, align="left")
        sketch.tensor(4, top, 1, 1.8, "", color=2)
        sketch.tensor(5, top, e, 1.8, f"exp. {e}", color=1)
        sketch.tensor(5 + e, top, f, 1.8, f"fraction {f}", color=0)
        sketch.text(4, top + 2.4, holds[name], quiet=True, align="left")
    return sketch.figure


course.show(
    layouts,
    "Figure 1. The bits of fp32, fp16 and bf16: sign (green), exponent, fraction. fp16 "
    "has more precision than bf16, and bf16 has the range of fp32.",
)

# %% [markdown]
# In fp16 each update was rounded up, so the weight moved 50 % too far. In bf16 it never moved, and no error said so.
# Therefore weights that train are kept in fp32, as *master weights*.
#
# **Step 2: multiply in 16 bits.** Our toy is a linear layer with a frozen fp16 matrix and a LoRA adapter, A and B, in
# fp32. `by_hand` casts A and B to fp16 where they are multiplied, and their gradients come back through the cast, so
# they are fp32. torch's [autocast](../docs/glossary.md#autocast) does the same for every matrix multiplication. On CUDA
# it runs operations that add up many numbers, such as softmax and losses, in fp32. It converts no stored weight.

# %%
T, D, R = 64, 128, 8  # tokens, width, rank of the adapter


class Adapted(nn.Module):
    """A frozen matrix in 16 bits, with a LoRA adapter in fp32 (without alpha / r)."""

    def __init__(self):
        super().__init__()
        frozen = torch.randn(D, D) * D**-0.5
        self.frozen = nn.Parameter(frozen.half(), requires_grad=False)
        self.A = nn.Parameter(torch.randn(R, D) * D**-0.5)
        self.B = nn.Parameter(torch.randn(D, R) * 0.1)

    def forward(self, x):
        return linear(x, self.frozen) + linear(linear(x, self.A), self.B)


def by_hand(layer, x):
    x = x.half()
    narrow = linear(x, layer.A.half())
    return linear(x, layer.frozen) + linear(narrow, layer.B.half())


def by_torch(layer, x):
    with torch.autocast("cpu", torch.float16):
        return layer(x)


torch.manual_seed(0)
layer, x = Adapted(), torch.randn(T, D)
target = x.roll(1, 0)  # what it learns: the token before
gradients = []
for way in (by_hand, by_torch):
    loss = mse_loss(way(layer, x).float(), target)
    gradients.append(torch.autograd.grad(loss, [layer.A, layer.B]))
assert torch.equal(by_hand(layer, x), by_torch(layer, x))  # the same bits
assert all(map(torch.equal, *gradients))
assert all(gradient.dtype == torch.float32 for gradient in gradients[0])

# %% Compare with the package's own function tags=["hide-input"]
_w = torch.randn(D, D)
_found = mixed_precision.half_linear(x, _w, torch.float16)
assert torch.equal(_found, linear(x.half(), _w.half()))

# %% [markdown]
# **Step 3: scale the loss.** Some gradients are too small for fp16, which turns numbers of at most $2^{-25}$ into zero.
# The loss is a mean over 2,047 tokens, and each token has 128,256 [logits](../docs/glossary.md#logits). The gradient
# raises the right word's logit, and lowers each other logit by that word's probability, divided by 2,047. How many
# become zero? We try random logits, and peaked logits, where few words have nearly all probability.

# %%
V = 128_256  # words
drawn = torch.randn(1, V)
logits = {"random": (2 * drawn).half(), "peaked": (5 * drawn).half()}


def gradient_of(z, scale=1.0):
    """The gradient of one token's logits z, times the scale."""
    z = z.clone().requires_grad_()
    loss = cross_entropy(z.float(), torch.tensor([7])) / 2047
    return torch.autograd.grad(loss * scale, z)[0]


lost = {}
print("becomes zero               of words   of the downward gradient")
for name, z in logits.items():
    exact = gradient_of(z.float())
    downward = exact[exact > 0].sum()  # a positive gradient lowers a logit
    for scale in (1.0, 65536.0):
        zero = gradient_of(z, scale) == 0
        assert zero.sum() == (exact.abs() * scale <= 2.0**-25).sum()  # as predicted
        lost[name, scale] = (exact[zero].sum() / downward).item()
        print(
            f"{name} logits, scale {scale:6,.0f}{zero.float().mean():10.1%}"
            f"{lost[name, scale]:11.1%}"
        )


# %% Draw figure 2 tags=["hide-input"]
def window(theme: Theme):
    """Where the gradients of one token's logits lie, and what fp16 holds."""
    figure, axes = course.figure(height=2.9)
    wide = gradient_of(logits["random"].float())
    for color, scale in enumerate((1.0, 65536.0)):
        sizes = (wide.abs() * scale).log2().flatten().numpy()
        axes.hist(
            sizes,
            bins=60,
            color=theme.series[color],
            alpha=0.7,
            label=f"times {scale:,.0f}",
        )
    for border in (-25, -14, 16):
        axes.axvline(border, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    words = ((-36.5, "zero"), (-19.5, "few bits"), (1, "all 11 bits"), (19, "inf"))
    for place, word in words:
        axes.text(
            place,
            1.04,
            word,
            transform=axes.get_xaxis_transform(),
            ha="center",
            color=theme.quiet,
        )
    axes.set(
        xlabel="size of a word's gradient, as a power of 2",
        ylabel="words",
        xlim=(-48, 22),
    )
    axes.legend(loc="upper left")
    return figure


assert 0.51 < lost["random", 1] < 0.53
assert 0.02 < lost["peaked", 1] < 0.04
assert lost["random", 65536] < 0.001
course.show(
    window,
    "Figure 2. With random logits most gradients are too small for fp16, and become "
    "zero. Times 65,536 they lie in its range.",
)

# %% [markdown]
# With random logits fp16 loses half of the gradient that lowers wrong words. With peaked logits it loses more words, of
# little probability. The cure is to multiply the loss by a *scale* $S$, and to divide the fp32 gradients by $S$ before
# the update. A power of two changes only exponents, so it rounds nothing. bf16 has the range of fp32 and needs no
# scale. (The [chunked loss](chunked_loss.py) makes the logits' gradients before $S$ arrives, so it has its own factor,
# 1,024; there $S$ protects the blocks' gradients.)
#
# **Step 4: let the scale find itself.** $S$ times the largest gradient must stay below fp16's largest number, 65,504.
# So a step whose gradients overflow is skipped, and $S$ is halved. After many good steps $S$ is doubled.


# %%
class Scale:
    def __init__(self, scale=65536.0, growth_interval=2000):
        self.scale, self.growth_interval = scale, growth_interval
        self.good_steps = self.skipped = 0

    def step(self, optimizer, weights):
        for weight in weights:
            weight.grad /= self.scale
        if not all(weight.grad.isfinite().all() for weight in weights):
            self.scale /= 2
            self.good_steps = 0
            self.skipped += 1
            return  # weights and AdamW's states stay as they are
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


# %% [markdown]
# **Step 5: cast the small tensor, not the large one.** A is in fp32 and its input $x$ in fp16, so one of them must be
# cast. peft casts the large $x$ up to fp32. Autocast then casts it down again, into a new fp16 tensor that is kept for
# the backward pass (the fp32 one is freed). Without peft's cast, autocast casts only A, and the layer keeps the $x$
# that is in memory anyway.


# %%
def cast_the_input(x, A, B):  # as peft does
    return linear(linear(x.float(), A), B)


def cast_the_weights(x, A, B):  # lean: autocast casts A and B
    return linear(linear(x, A), B)


def measure(way):
    """The bytes that one adapter keeps, its output, and all gradients."""
    given = [x.half().requires_grad_(), layer.A, layer.B]
    with SavedBytes(besides=given) as saved, torch.autocast("cpu", torch.float16):
        y = way(*given)
    return saved.peak, (y, *torch.autograd.grad(y.float().square().sum(), given))


usual_bytes, usual_result = measure(cast_the_input)
lean_bytes, lean_result = measure(cast_the_weights)
print(
    f"kept: {usual_bytes:,} bytes by peft, {lean_bytes:,} lean; 2 T D = {2 * T * D:,}"
)
assert usual_bytes - lean_bytes == 2 * T * D
assert all(map(torch.equal, usual_result, lean_result))  # the same bits

# %% [markdown]
# The lean layer keeps $2TD$ bytes less, and no bit changes, because going up to fp32 and down again changes no number.
#
# ## 3. Prove it
# The claim is *approximate*: each input and result of a matrix multiplication moves by at most half a step of its
# format. But our loop must match torch's bit by bit, so we train the toy twice from one start: with `autocast` and
# `GradScaler`, and by hand. Both begin with far too high a scale, $2^{24}$, and double it after eight good steps.


# %%
def train(way, scale_now, step):
    """Forty steps: the loss and the scale of each, and the trained weights."""
    torch.manual_seed(6)
    layer, history = Adapted(), []
    weights = [layer.A, layer.B]
    optimizer = torch.optim.AdamW(weights, lr=0.003)
    for _ in range(40):
        optimizer.zero_grad()
        loss = mse_loss(way(layer, x).float(), target)
        history.append((loss.item(), scale_now()))
        (loss * scale_now()).backward()
        step(optimizer, weights)
    return history, weights


def torch_step(optimizer, weights):
    scaler.step(optimizer)  # divides the gradients; skips the step if one is infinite
    scaler.update()


scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=8)
scaler.scale(torch.zeros(()))  # it creates its scale at the first use
history, weights = train(by_torch, scaler.get_scale, torch_step)
scale = Scale(2.0**24, growth_interval=8)
our_history, our_weights = train(by_hand, lambda: scale.scale, scale.step)
assert our_history == history  # losses and scales
assert all(map(torch.equal, our_weights, weights))
powers = [int(used).bit_length() - 1 for _, used in history]
print("log2 of the scale:", *powers[:20])
print("and of steps 21-40:", *powers[20:])

# %% Predict the first good step; compare with the package's LossScale tags=["hide-input"]
torch.manual_seed(6)
_start = Adapted().float()
_largest = max(
    gradient.abs().max()
    for gradient in torch.autograd.grad(
        mse_loss(_start(x), target), [_start.A, _start.B]
    )
)
print(
    f"the largest gradient at the start is {_largest:.4f}; "
    f"65,504 is 2^{(65504 / _largest).log2():.1f} times as much"
)
_first = [used for _, used in history].index(2.0 ** (65504 / _largest).log2().floor())
assert _first == 3  # that step was the first to be taken
_theirs = mixed_precision.LossScale(2.0**24, 8)
_found = train(by_hand, lambda: _theirs.scale, _theirs.step)
assert _found[0] == history
assert all(map(torch.equal, _found[1], weights))
assert _theirs.skipped == scale.skipped

# %% [markdown] tags=["deep"]
# ### Deeper: the bound of a 16-bit matrix multiplication
# Rounding moves a number by at most half a step: by $u = 2^{-11}$ of itself in fp16 (above its lower end), by
# $u = 2^{-8}$ in bf16. In $y = \sum_i x_i w_i$ both factors are rounded, and so is the result; the sum is computed in
# fp32. So $y$ moves by $3u \sum_i |x_i w_i|$ and a little more, and we allow $4u$.

# %% tags=["deep"]
w = torch.randn(D, D)
exact = linear(x.double(), w.double())
sizes = linear(x.double().abs(), w.double().abs())
for name in ("fp16", "bf16"):
    _, fraction, dtype = FORMATS[name]
    moved = linear(x.to(dtype), w.to(dtype)).double() - exact
    error, bound = (moved.abs() / sizes).max(), 4 * 2.0 ** -(fraction + 1)
    print(f"{name}: moved by {error:.1e} of the sum of sizes, bound {bound:.1e}")
    assert error <= bound

# %% [markdown]
# ## 4. What it costs
# **A few steps.** The run above skipped three steps before the scale was low enough.
#
# **Time** falls, if the card's tensor cores know the format. A T4's know only fp16. At the peak rate of a T4, the
# multiplications of a row of 2,048 tokens would take 1.87 s in fp32 and 0.23 in fp16. But public runs in 16 bits reach
# 0.28 of that rate, and memory traffic comes on top. So we *predict* 8.27 s in fp32 (4.9 to 13.8, because no such run
# is public) and 1.83 with both switches (1.5 to 2.2).
#
# Of a CPU, only the table's bytes count (46 % less), because it emulates fp16.

# %%
# 2 for each weight and token: forward, once more for checkpointing, and backward.
operations = 3 * 2 * 2048 * course.bill(before).step.shape.weights
for card in ("t4", "l4"):  # an L4 is a newer card, with bf16 units
    for name in FORMATS:
        print(f"{card.upper()} {name}: {operations / CARDS[card].flops(name):.2f} s")
step_of = "peft=lora attention=best gradient_checkpointing=true chunked_loss=true"
course.on_a_gpu("mixed_precision", off=step_of, on=f"{step_of} precision=fp16")

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code, mixed precision is the model's `dtype` and the trainer's `fp16` or `bf16`. Lean
# preparation leaves out a call of peft, and turns off the casts of step 5. **For our job on a T4**, take script 2 with
# `dtype="float16"` and `fp16=True` (not bf16), without `max_steps=1`. Pass `gradient_checkpointing=True`
# (`activation_checkpointing` since transformers 5.23), too: on 4-bit weights the call also switches checkpointing on.

# %%
print("Script 1: all weights train, so they are stored in fp32")
print(mixed_precision.PLAIN)
print("Script 2: LoRA, with frozen weights in 16 bits, and lean")
print(lean_preparation.PLAIN)

# %% [markdown]
# The command (a T4's recipe has both switches on already):
#
# ```bash
# cria train kwanzaa --set tricks.precision=fp16 --set tricks.lean_preparation=true
# ```
#
# From [compute capability](../docs/glossary.md#compute-capability) 8.0 on, take bf16, which needs no loss scale. A T4
# (7.5) needs fp16. Its `torch.cuda.is_bf16_supported()` says True, because it accepts a slow emulation, so we refuse
# bf16.

# %%
after = course.so_far("mixed_precision")
try:
    resolve(with_settings(after, ["tricks.precision=bf16"]), T4)
except BadInput as refused:
    print(refused)
course.show_bill(before, after)
course.reveal(guess, course.bill(after).peak_bytes / MIB, "MiB")
course.show_worth("precision", "lean_preparation")
print("Lean preparation alone:")
course.show_worth("lean_preparation")

# %% Draw figure 3 tags=["hide-input"]
course.show(
    course.ladder("mixed_precision"),
    "Figure 3. The bill after each switch: fp16 saves 2.6 GiB, "
    "and lean preparation only a little so far.",
)

# %% Hold the numbers of the text tags=["hide-input"]
_alone = with_settings(after, ["tricks.lean_preparation=false"])
_moments = [
    {moment.name: moment.bytes for moment in course.bill(recipe).moments}
    for recipe in (_alone, after)
]
assert round((_moments[0]["last block"] - _moments[1]["last block"]) / MIB) == 95
_whole, _target = course.CAPSTONE, toggles.Target(find_shape(after.model), T4)
_peaks = [
    round(course.bill(with_settings(_whole, settings)).peak_bytes / MIB)
    for settings in (
        ["tricks.lean_preparation=false"],
        ["tricks.precision=fp32"],
        [],
    )
]
assert _peaks == [2671, 2364, 1516]
assert [round(course.bill(r).peak_bytes / MIB) for r in (before, _alone, after)] == [
    5614,
    2993,
    2927,
]
for _recipe, _range in ((before, (4.94, 8.27, 13.84)), (after, (1.49, 1.83, 2.24))):
    _middle = 2048 * _target.bill(_recipe).seconds
    _half = CARDS["t4"].spread(_recipe.tricks.precision) ** 0.5
    _found = (_middle / _half, _middle, _middle * _half)
    assert all(abs(a / b - 1) < 0.01 for a, b in zip(_found, _range, strict=True))

# %% [markdown]
# Frozen weights and saved activations take half. The peak is at the loss now, so lines of that moment appear (the
# deeper part explains them). *16-bit copies of weights* are the adapters, cast by autocast. Lean preparation saves only
# 66 MiB here. Yet in the whole job, which has [4-bit weights](nf4.py), it is worth 1,155 MiB, because many QLoRA
# scripts call peft's `prepare_model_for_kbit_training`. It raises every weight that is still in 16 bits to fp32:
#
# - The embedding takes twice its bytes: +501 MiB.
# - In Llama-3.2-1B the embedding is also the head, so autocast makes a 16-bit copy of it for the loss: +501 MiB.
# - The sum that passes from block to block (the residual stream) becomes fp32, so the inputs of $L$ blocks take $2LTD$
#   bytes more (128 MiB), and what the loss reads 24.5: +152.5 MiB.
#
# Without lean preparation the whole job takes 2,671 MiB, *more* than in fp32 (2,364). So on a T4 use both switches: in
# fp16, lean preparation cost 0.0001 of loss (one seed of a small model). In bf16 it cost 0.017 to 0.019 (three seeds,
# 20 steps at one rate), but our recipes use it there, too.

# %% [markdown] tags=["deep"]
# ### Deeper: where peft's preparation spends 1,155 MiB, byte by byte
# Read it, in peft 0.21: it freezes all weights, then raises every parameter in fp16 or bf16 to fp32, unless it is
# packed in 4 bits. In a quantized Llama two kinds of weights are left in 16 bits: the embedding, $V$ words of width
# $D$, and $2L + 1$ norms of $D$ numbers, for $L$ blocks. We hold that formula against the real function, on a Llama
# small enough to train here. For Llama-3.1-8B, whose head is a table of its own, the two tables would add 2,004 MiB.
# (bitsandbytes may print `Failed to load CPU gemm_4bit_forward`. That is no error: it uses a slower function instead.)

# %% Set up a small quantized Llama tags=["deep", "hide-input"]
fp16, bf16 = torch.float16, torch.bfloat16
WORDS, WIDTH, BLOCKS, ROWS, TOKENS = 512, 128, 4, 2, 64
widths = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
config = LlamaConfig(
    vocab_size=WORDS,
    num_hidden_layers=BLOCKS,
    tie_word_embeddings=True,
    use_cache=False,
    **widths,
)
folder = TemporaryDirectory()
torch.manual_seed(0)
LlamaForCausalLM(config).half().save_pretrained(folder.name)


def packed(dtype=fp16):
    """The small Llama, fresh: its matrices in 4 bits, all else in 16."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    # On the CPU, even where there is a GPU.
    where = {"device_map": {"": "cpu"}, "dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(
        folder.name, quantization_config=four_bits, **where
    )
    forbid_cpu_repacking(model)  # a trap of bitsandbytes on CPUs: load.py tells
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def learnt(model):
    """Give the adapters weights, as if they had learnt something already."""
    draw = torch.Generator().manual_seed(1)
    for p in trained(model):
        p.data = 0.02 * torch.randn(p.shape, generator=draw)
    return model


def adapted(model, cast=False):
    """With adapters; peft makes them fp32, and freezes all else."""
    settings = LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16
    )
    model = get_peft_model(model, settings)
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = cast
    return learnt(model)


ids = torch.randint(WORDS, (ROWS, TOKENS))
batch = {"input_ids": ids, "labels": ids}


# %% tags=["deep"]
def raised_bytes(V, D, L):
    return 2 * (V * D + (2 * L + 1) * D)  # two bytes more for each number


def stored(model):
    return sum(p.nbytes for p in model.parameters())


model = packed()
at_first = stored(model)
prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
print(
    f"small Llama: predicted {raised_bytes(WORDS, WIDTH, BLOCKS):,} bytes more, "
    f"counted {stored(model) - at_first:,}"
)
print(f"Llama-3.2-1B: {raised_bytes(128_256, 2048, 16) / MIB:,.1f} MiB more")
assert stored(model) - at_first == raised_bytes(WORDS, WIDTH, BLOCKS)
assert round(2 * 2 * 128_256 * 4096 / MIB) == 2004  # the two tables of the 8B model

# %% [markdown] tags=["deep"]
# That is 501 of 1,155 MiB. The other 654 are not in the weights. To find them, follow the dtypes. An fp32 table gives
# fp32 vectors. fp32 plus fp16 is fp32. A 4-bit matrix multiplies in 16 bits, and answers in the dtype of its input. So
# the residual stream, which passes from block to block, takes the dtype of the embedding.


# %% tags=["deep"]
def usual(model):
    """All that the preparation does to weights."""
    for p in model.parameters():
        p.requires_grad = False
        if p.dtype in (fp16, bf16):  # packed ones are uint8
            p.data = p.data.float()
    return model


def left_alone(model):
    """Lean: do nothing before the adapters come."""
    return model


def dtypes(model):
    first, seen = model.model.layers[0], {}
    places = {"embedding": model.model.embed_tokens, "norm": first.input_layernorm}
    places |= {"4-bit matrix": first.self_attn.q_proj, "residual stream": first}
    for name, place in places.items():
        place.register_forward_hook(
            lambda module, given, out, name=name: seen.update({name: out.dtype})
        )
    with torch.autocast("cpu", fp16):
        model(ids)
    return seen


right = [p.dtype for p in model.parameters()]
assert [p.dtype for p in usual(packed()).parameters()] == right
print(f"{'':16}{'usual':10}left alone")
seen = [dtypes(prepared(packed())) for prepared in (usual, left_alone)]
for place in seen[0]:
    print(f"{place:16}" + "".join(f"{str(found[place])[6:]:10}" for found in seen))
for found, dtype in zip(seen, (torch.float32, fp16), strict=True):
    assert set(found.values()) == {dtype}


# %% Draw the dtypes on the way through the model tags=["deep", "hide-input"]
def stream(theme: Theme):
    """Bytes of an element on the way through the model."""
    sketch = course.Sketch(theme, 41, 12.6)
    names = ("table", "stream", "norm", "matrix", "stream", "head")
    for n, name in enumerate(names):
        sketch.text(9.5 + 5.6 * n, 0.7, name, quiet=True)
    for place, (name, sizes) in enumerate(
        (("usual", (4, 4, 4, 4, 4, 2)), ("lean", (2, 2, 2, 2, 2, 0)))
    ):
        bottom = 5.8 + 6 * place
        sketch.text(0, bottom - 1, name, align="left")
        for n, size in enumerate(sizes):
            left = 7.5 + 5.6 * n
            sketch.tensor(
                left,
                bottom - (size or 2),
                4,
                size or 2,
                str(size) if size else "table",
                color=2 if n == 5 and size else 1 if size == 4 else 0,
                kept=bool(size),
            )
            if n < 5:
                sketch.arrow((left + 4.2, bottom - 1), (left + 5.4, bottom - 1))
    return sketch.figure


course.show(
    stream,
    "Bytes of an element on its way through the model. With an fp32 table everything "
    "after it is fp32, and the head, the same table, is copied back to 16 bits. Lean, "
    "the head is the table itself.",
)

# %% [markdown] tags=["deep"]
# So checkpointing keeps $4BTD$ bytes a block in place of $2BTD$, for $B$ rows of $T$ tokens. And what does fp32 buy?
#
# - *The table* was stored in 16 bits, and raising it appends zeros. *The head* is cast straight back by autocast.
# - *The norms*: 256 squared is more than fp16 holds, so a norm computed in fp16 would overflow. But Llama's norm
#   computes in fp32, whatever dtype it is given.
# - *The adapters' inputs*: peft casts them up over a 16-bit matrix, always. Over a 4-bit matrix it does so only outside
#   of autocast, and it asks for CUDA's autocast (`lora/bnb.py`). So by its source our run on a T4 never casts there.
#   This notebook's autocast is a CPU's, so here peft does cast.

# %% tags=["deep"]
table, norm = packed().model.embed_tokens.weight, packed().model.norm
assert torch.equal(table.float().half(), table)
large = torch.full((1, WIDTH), 300.0).half()
print(f"300 squared in fp16: {large.square()[0, 0]}; Llama's norm: {norm(large)[0, 0]}")
assert norm(large).dtype == fp16
torch.testing.assert_close(norm(large), norm(large.float()).half())
with torch.autocast("cpu", fp16):
    assert not torch.is_autocast_enabled()  # it asks for "cuda"

# %% [markdown] tags=["deep"]
# Now the proof on whole models. With the usual preparation or with the lean one, the cast of the adapters' inputs
# changes no bit of the loss or of a gradient. The package's own edits give the same bits as ours. And with
# checkpointing, lean keeps $2LBTD$ bytes less.


# %% tags=["deep"]
def step(model, dtype=fp16):
    """The loss and all gradients."""
    with torch.autocast("cpu", dtype):
        loss = losses.full_loss_sum(model, batch) / ids.numel()
    # 1,024 is a loss scale
    return loss.detach(), *torch.autograd.grad(1024 * loss, trained(model))


def kept_by_checkpointing(model):
    base = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    apart = [*model.parameters(), *model.buffers()]
    with SavedBytes(besides=apart) as saved, torch.autocast("cpu", fp16):
        # A name keeps the result alive while we count.
        _hidden = model.train().get_base_model().model(ids)
        return saved.now


for prepared in (usual, left_alone):
    with_it = step(adapted(prepared(packed()), cast=True))
    without = step(adapted(prepared(packed()), cast=False))
    assert all(map(torch.equal, with_it, without))

plan = resolve(with_settings(after, ["lora.r=8", "lora.alpha=16"]), T4)
production = packed()
for edit in plan.after_load:  # what the package does with a model that is loaded
    production = function_at(edit)(production, plan)
assert all(map(torch.equal, step(adapted(packed())), step(learnt(production))))

kept = [kept_by_checkpointing(adapted(p(packed()))) for p in (usual, left_alone)]
print(
    f"usual keeps {kept[0]:,} bytes, lean {kept[1]:,}; "
    f"predicted {2 * BLOCKS * ROWS * TOKENS * WIDTH:,} fewer"
)
assert kept[0] - kept[1] == 2 * BLOCKS * ROWS * TOKENS * WIDTH

# %% [markdown] tags=["deep"]
# At last the bill of the whole job without and with lean preparation: every line that changes is predicted. With it,
# the *final norm* saves its input in fp32 and its output in 16 bits, 24 MiB. Without it, both are in fp32, 32 MiB. The
# *hidden states for the loss* are those of trained tokens, and their gradients: 16 MiB with it, and 32 without.

# %% tags=["deep"]
whole = course.CAPSTONE
usually = with_settings(whole, ["tricks.lean_preparation=false"])
shape, n = find_shape(whole.model), 2048
predicted = {
    "weights: all others": -raised_bytes(shape.vocabulary, shape.width, shape.layers),
    # the table is in 16 bits: nothing to cast
    "16-bit copy of the head": -2 * shape.vocabulary * shape.width,
    "saved activations": -2 * shape.layers * n * shape.width,
    "final norm": -2 * n * shape.width,  # its result is part of the residual stream
    # as they were picked, before they were cast
    "hidden states for the loss": -4 * (n - 1) * shape.width,
    # cosines and sines take the dtype of the residual stream
    "batch": -2 * 2 * n * shape.head_width,
}
old, new = (
    {line.name: line.bytes for line in course.bill(recipe).lines}
    for recipe in (usually, whole)
)
assert predicted == {name: new.get(name, 0) - old[name] for name in predicted}
saved = course.bill(usually).peak_bytes - course.bill(whole).peak_bytes
table_share = -sum(list(predicted.values())[:2]) / saved
print(f"{saved / MIB:,.1f} MiB, of which {table_share:.0%} are one table")
assert saved == -sum(predicted.values())
print(diff(resolve(usually, T4), resolve(whole, T4)))
for name, recipe in (("usual", usually), ("lean", whole)):
    longest = toggles.longest(toggles.Target(shape, T4), recipe)
    print(f"{name}: rows of up to {longest:,} tokens fit a T4")

# %% [markdown] tags=["deep"]
# The second edit, the cast of inputs, saves nothing there: at this moment no block is being recomputed, and on a T4
# peft would not cast over a 4-bit matrix anyway.

# %% [markdown] tags=["deep"]
# ### Deeper: what a 16-bit residual stream rounds, and what that does to learning
# Inside a block, what lies between two matrix multiplications is now rounded once more. The multiplications took 16
# bits before, too. But the residual stream is carried through all blocks, so there errors can add up. It is a sum: the
# embedding, and what each of $2L$ parts of blocks adds. In 16 bits each sum is off by at most $u$ of its result. So in
# the end it is off from the exact sum of the same parts by $u \sum_i |x_i|$ at most, over the residual stream $x_i$
# after each sum. What all roundings together do to gradients we measure; we predict only that bf16 is $2^3$ times
# worse.


# %% Helper: the residual stream after each sum tags=["deep", "hide-input"]
def watch(model, dtype):
    """The residual stream after each sum, and what was added: from a forward pass of a
    lean model."""
    passed, added, base = [], [], model.get_base_model().model

    def enter(module, given, named):
        passed.append(given[0] if given else named["hidden_states"])

    def leave(module, given, out):
        added.append(out[0] if isinstance(out, tuple) else out)

    for block in base.layers:
        for before_it, part in (
            (block.input_layernorm, block.self_attn),
            (block.post_attention_layernorm, block.mlp),
        ):
            before_it.register_forward_pre_hook(enter, with_kwargs=True)
            part.register_forward_hook(leave)
    base.norm.register_forward_pre_hook(enter, with_kwargs=True)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        base(ids)
    return [x.double() for x in passed], [x.double() for x in added]


# %% tags=["deep"]
gap = {}
for name, dtype, u in (("fp16", fp16, 2.0**-11), ("bf16", bf16, 2.0**-8)):
    xs, parts = watch(adapted(packed(dtype)), dtype)
    assert len(parts) == len(xs) - 1 == 2 * BLOCKS
    off = (xs[-1] - (xs[0] + sum(parts))).abs()
    bound = u * sum(x_i.abs() for x_i in xs[1:])
    assert (off <= bound).all()
    grads = []
    for prepared in (usual, left_alone):
        _, *found = step(adapted(prepared(packed(dtype))), dtype)
        grads.append(torch.cat([g.flatten() for g in found]))
    gap[name] = ((grads[1] - grads[0]).norm() / grads[0].norm()).item()
    print(
        f"{name}: the stream uses {(off / bound).max():.0%} of its bound; "
        f"gradients {gap[name]:.2%} apart"
    )
assert 4 < gap["bf16"] / gap["fp16"] < 16

# %% [markdown] tags=["deep"]
# **Time** should fall, because all operations between the matrix multiplications read and write fewer bytes. We count
# the traffic. If the table below is from a CPU, its benchmark ran in fp32. Then there is nothing to save, and both
# lines are equal.

# %% tags=["deep"]
moved = []
for prepared in (usual, left_alone):
    with Traffic() as traffic:
        step(adapted(prepared(packed())))
    moved.append(traffic)
others = [traffic.others / MIB for traffic in moved]
print(f"without multiplications: {others[0]:.0f} MiB usual, {others[1]:.0f} lean")
assert moved[0].products == moved[1].products
assert others[1] < 0.6 * others[0]
step_of = (
    "peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true quantization=nf4"
)
course.on_a_gpu("lean_preparation", off=step_of, on=f"{step_of} lean_preparation=true")

# %% [markdown] tags=["deep"]
# **Quality**: SmolLM2-135M, 20 steps on real rows, loss on held-out rows, three seeds in bf16 and one in fp16.

# %% Show the committed runs tags=["deep", "hide-input"]
runs = [
    run
    for run in (results.study("quality") or {}).get("runs", ())
    if run["case"] == "fp32" or "16 + nf4" in run["case"]
]
course.show_table(
    tables.quality(runs) if runs else "no committed results next to this package"
)
for when in ("before", "after"):
    found = {(run["case"], run["seed"]): run[f"eval_loss_{when}"] for run in runs}
    for case, seed in found:
        if (lean_case := (f"{case} + lean", seed)) in found:
            print(
                f"lean, {when} training, over {case}, seed {seed}: "
                f"{found[lean_case] - found[case, seed]:+.4f}"
            )

# %% [markdown] tags=["deep"]
# In bf16 lean is as good before the first step, and 0.017 to 0.019 behind after 20. So bf16 does not harm the answers
# but the learning. That is half of what another seed changes, but it has the same sign each time. (Our gradients were
# 0.7 % apart with four blocks; SmolLM2 has thirty.) In fp16, in which a T4 computes, the rounding is an eighth as
# large, and lean is 0.0001 behind. A CPU has measured that, with fp16 results computed in fp32 and rounded; a T4 has
# not. In bf16 lean preparation lowered the peak of these runs from 1.7 GiB to 1.2.

# %% [markdown] tags=["deep"]
# ### Deeper: full fine-tuning, where 16 bits can cost memory
# Our weights are frozen, so storing them in 16 bits saves half. In full fine-tuning the fp32 master weights stay, and
# two things come on top of them:
#
# - The backward pass of a matrix multiplication needs the weight, so the 16-bit *copy* of each trained weight is kept.
# - [Eager attention](../docs/glossary.md#eager-attention) computes its softmax in fp32 and multiplies it in 16 bits. So
#   the largest tensor of a block, $T \times T$ for each head, is kept twice, in $4 + 2$ bytes.
#
# Below is a block of Llama, small enough to count: a thirty-second of every width, with all 32 heads. So a MiB of the
# real block is a KiB of ours. It has one row of $T$ tokens, $D$ width, $K$ width of the keys and of the values, $F$
# inner width of the MLP, $H$ heads. `keeps` adds up the bytes that it keeps for the backward pass.

# %% A block of Llama to count tags=["deep", "hide-input"]
SMALL = {"T": 64, "D": 64, "K": 16, "F": 256, "H": 32}
LLAMA = {"T": 2048, "D": 2048, "K": 512, "F": 8192, "H": 32}


def normed(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Block(nn.Module):
    """From (T, D) to (T, D), with eager attention."""

    def __init__(self, T, D, K, F, H):
        super().__init__()
        sizes = {
            "q": (D, D),
            "k": (K, D),
            "v": (K, D),
            "o": (D, D),
            "gate": (F, D),
            "up": (F, D),
            "down": (D, F),
        }
        self.sizes = T, D, K, H
        self.w = nn.ParameterDict(
            {name: torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()}
        )
        self.of_norms = nn.Parameter(torch.ones(2, D))
        # No token looks at later ones.
        self.future = torch.full((T, T), -torch.inf).triu(1)

    def forward(self, x):
        T, D, K, H = self.sizes
        y = normed(x) * self.of_norms[0]
        q, k, v = (
            linear(y, self.w[name]).view(T, -1, D // H).transpose(0, 1)
            for name in "qkv"
        )
        # Fewer heads of keys and values serve all H.
        k, v = (z[:, None].expand(-1, D // K, -1, -1).reshape(H, T, -1) for z in (k, v))
        scores = q @ k.transpose(1, 2) * (D // H) ** -0.5
        # A CPU's autocast leaves softmax alone, so ask for fp32, as transformers does.
        probabilities = (scores + self.future).softmax(-1, dtype=torch.float32)
        attended = (probabilities.to(v.dtype) @ v).transpose(0, 1).reshape(T, D)
        x = x + linear(attended, self.w["o"])
        y = normed(x) * self.of_norms[1]
        gate, up = (linear(y, self.w[name]) for name in ("gate", "up"))
        return x + linear(F.silu(gate) * up, self.w["down"])


# %% tags=["deep"]
def keeps(T, D, K, F, H, half):
    """Bytes that one block keeps, by kind."""
    a = 2 if half else 4  # bytes of what is multiplied
    return {
        "norms": 16 * T * D + 8 * T,
        # gate and up each keep a cast of the input that they shared; so do q, k and v
        "activations": a * ((9 if half else 6) * T * D + 4 * T * F),
        "attention matrix": (4 + 2 * half) * H * T * T,
        "copies of weights": 2 * half * (2 * D * D + 2 * D * K + 3 * D * F),
    }


block = Block(**SMALL)
rows_in = torch.randn(SMALL["T"], SMALL["D"], requires_grad=True)
counted = []
for half in (False, True):
    in_16_bits = torch.autocast("cpu", fp16, enabled=half)
    with SavedBytes(besides=block.parameters()) as saved_by_block, in_16_bits:
        block(rows_in)
    counted.append(saved_by_block.peak)
    print(f"half={half}: counted {counted[-1] / KIB:,.1f} KiB")
    assert counted[-1] == sum(keeps(**SMALL, half=half).values())

plain = course.so_far("the_bill")
plain16 = with_settings(plain, ["tricks.precision=fp16"])
fp32_block, fp16_block = (keeps(**LLAMA, half=half) for half in (False, True))
change = {kind: 16 * (fp16_block[kind] - fp32_block[kind]) for kind in fp32_block}
change["copies of weights"] += 2 * 128_256 * LLAMA["D"]  # the head's
change["activations"] -= 2 * LLAMA["T"] * LLAMA["D"]  # what the head takes
for kind, size in change.items():
    print(f"{kind:18}{size / MIB:+7,.0f} MiB")
peaks = [course.bill(recipe).peak_bytes for recipe in (plain, plain16)]
assert sum(change.values()) == peaks[1] - peaks[0]


# %% Draw what one block keeps tags=["deep", "hide-input"]
def ledger(theme: Theme):
    """What one block keeps, by kind."""
    drawn, axes = course.figure(height=2.3)
    columns, left = [keeps(**SMALL, half=half) for half in (False, True)], [0.0, 0.0]
    for color, kind in enumerate(columns[1]):
        sizes = [column[kind] / KIB for column in columns]
        axes.barh(
            [0, 1],
            sizes,
            left=left,
            color=theme.series[color],
            alpha=0.55,
            height=0.6,
            label=kind,
        )
        for place, size in enumerate(sizes):
            if size:
                axes.text(
                    left[place] + size / 2,
                    place,
                    f"{size:.0f}",
                    ha="center",
                    va="center",
                    color=theme.ink,
                )
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks([0, 1], ["fp32", "autocast"])
    axes.set(xlabel="kept by one block, KiB (MiB in Llama-3.2-1B's)", ylim=(1.5, -0.5))
    axes.legend(
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.45, 1.0),
        columnspacing=1,
        handlelength=1.2,
    )
    return drawn


course.show(
    ledger,
    "What one block keeps in full fine-tuning with eager attention: autocast shrinks "
    "the activations, and adds more than that elsewhere.",
)

# %% [markdown] tags=["deep"]
# So plain training takes 3.9 GiB *more* in fp16: activations save 2.4 GiB, copies of weights cost 2.3, and the second
# attention matrix costs 4. (In the MLP alone, autocast saves $8TF$ bytes of activations and keeps $6DF$ bytes of
# copies, so the two are equal at $T = \frac{3}{4} D = 1{,}536$ tokens.) How much it costs depends on the kernel that
# torch chooses by card and format:

# %% tags=["deep"]
changes = []
for name, attention, card in (
    ("eager on a T4", "eager", "t4"),
    ("sdpa on a T4", "sdpa", "t4"),
    ("sdpa on a T4, keys repeated", "sdpa tricks.expand_kv=true", "t4"),
    ("sdpa on an L4", "sdpa", "l4"),
):
    bills = []
    for recipe in (plain, plain16):
        recipe = with_settings(recipe, f"tricks.attention={attention}".split())
        bills.append(estimate(recipe, shape, CARDS[card].device))
    changes.append(round((bills[1].peak_bytes - bills[0].peak_bytes) / MIB))
    kernels = " -> ".join(bill.step.kernel for bill in bills)
    print(f"{name:27} {kernels:36} {changes[-1]:+6,} MiB")
assert changes == [4013, 301, -83, -8463]

# %% [markdown] tags=["deep"]
# On a T4 sdpa runs the *math* kernel in both formats, and this kernel keeps the matrix once, in fp32. On an L4 torch
# runs it in fp32 only; in 16 bits it runs the *flash* kernel, which never has the matrix: 8 GiB less. With repeated
# keys neither format keeps the matrix, and the switch saves 83 MiB. Our package also switches autocast's cache of cast
# weights off in full fine-tuning, because it would hold all copies until the forward pass ends.
#
# In operations the two formats are equal: 6 for each weight and token, and a tenth more for attention.

# %% tags=["deep"]
counts = []
for half in (False, True):
    with torch.autocast("cpu", fp16, enabled=half):
        counts.append(flops(lambda: block(rows_in).sum().backward()))
matrices = sum(matrix.numel() for matrix in block.w.values())
tokens, width = SMALL["T"], SMALL["D"]
assert counts[0] == counts[1] == 6 * tokens * matrices + 12 * tokens * tokens * width

# %% [markdown]
# ## 6. Where it breaks
# **`'loss': 0.0, 'grad_norm': nan`** (transformers 5 prints `'0'` and `'nan'`). A number of the *forward* pass exceeded
# 65,504, so the loss is NaN, and the trainer logs NaN as 0 (`logging_nan_inf_filter`). A loss scale cannot cure this;
# it silently skips step after step. Find the first module whose output is not finite, with `register_forward_hook`. If
# it is the residual stream, use peft's preparation; else divide before multiplying, or take bf16 on a newer card.
#
# **`Attempting to unscale FP16 gradients.`** The weights that train are in fp16, because the whole model was loaded in
# fp16 and nothing is frozen, or because peft got `autocast_adapter_dtype=False`. Dividing fp16 gradients by the scale
# would lose what the scale has saved, so torch refuses. The cure is to keep what trains in fp32.

# %%
adapter = nn.Parameter(torch.ones(D).half())
adapter.grad = torch.ones_like(adapter)
try:
    scaler.unscale_(torch.optim.SGD([adapter]))
except ValueError as error:
    print(error)
    assert str(error) == "Attempting to unscale FP16 gradients."
adapter = nn.Parameter(adapter.detach().float())  # the cure
adapter.grad = torch.ones_like(adapter)
scaler.unscale_(torch.optim.SGD([adapter]))
assert adapter.grad[0] == 1 / scaler.get_scale()

# %% [markdown] tags=["deep"]
# ### Deeper: a forward pass that overflows, step by step
# Here each attention score is a sum of 128 terms of about $40 \cdot 40$, which is 204,800. Queries are divided by
# $\sqrt{128}$ after they met the keys, or before.

# %% tags=["deep"]
large = 40 + torch.randn(T, D)
for divide_first in (False, True):
    weight, scale = nn.Parameter(torch.eye(D)), Scale()
    before_it, after_it = (D**-0.5, 1) if divide_first else (1, D**-0.5)
    for _ in range(10):
        with torch.autocast("cpu", torch.float16):
            q = linear(large, weight)
            scores = (q * before_it) @ large.T * after_it
        loss = scores.softmax(-1, dtype=torch.float32).square().mean()
        weight.grad = torch.autograd.grad(loss * scale.scale, weight)[0]
        scale.step(torch.optim.SGD([weight], lr=1e-6), [weight])
    print(
        f"divide first: {divide_first}; loss {loss:.4f}, skipped {scale.skipped} of 10"
    )
    assert divide_first == loss.isfinite() == (scale.skipped < 10)

# %% [markdown] tags=["deep"]
# ### Deeper: `nan` from the residual stream in lean fp16
# peft's usual preparation does buy one thing: an fp32 residual stream cannot overflow. How near does a model come to
# 65,504? We ran SmolLM2 in fp32 over all real rows, 107 to train and 27 to evaluate.

# %% Show what was measured on the real model tags=["deep", "hide-input"]
study = results.study("activations")
if study:
    largest_seen, end, blocks = (
        max(study["blocks"]),
        torch.finfo(fp16).max,
        len(study["blocks"]),
    )
    print(
        f"{largest_seen:,.0f}, after block "
        f"{study['blocks'].index(largest_seen) + 1} of {blocks}"
    )
    print(f"fp16 ends at {end:,.0f}: {end / largest_seen:.2f} times as much")
    assert {(round(row["largest"]), row["module"]) for row in study["rows"]} == {
        (24_929, "model.layers.11")
    }
    assert 2.62 < end / largest_seen < 2.64

# %% [markdown] tags=["deep"]
# The largest activation is the same in each row. It belongs to the first token, which is always the same and sees no
# other token. Other models, and training, change it. Therefore a run in lean fp16 first checks its first batch. If the
# largest activation is above a quarter of 65,504, as here, the trainer prints a warning with the number. If it
# overflows, the trainer refuses to start.
#
# Some models that were trained in bf16 exceed 65,504. Then the fp16 residual stream becomes `inf`, and its norm `nan`.
# The cure is bf16 on a card that computes it, or the usual preparation.

# %% tags=["deep"]
for dtype in (fp16, torch.float32):
    summed = torch.full((1, WIDTH), 60_000.0, dtype=dtype)
    summed = summed + torch.full((1, WIDTH), 8_000.0).half()
    print(f"{dtype}: {summed[0, 0]}, its norm {norm(summed)[0, 0]}")
    assert norm(summed).isfinite().all() == (dtype == torch.float32)

# %% [markdown] tags=["deep"]
# ### Deeper: how many updates vanish in 16-bit master weights
# bf16 needs no scale, so nothing refuses 16-bit master weights there. TRL's `SFTTrainer` (1.16) converts the adapters
# of a 4- or 8-bit model to bf16, so this part is about them. (On a T4, with `fp16=True`, they end in [an
# error](../docs/symptoms.md#numbers).) Between $2^e$ and $2^{e+1}$ numbers of $p$ significant bits ($p = 11$ in fp16, 8
# in bf16) are $2^{e+1-p}$ apart. An update $\eta$ below half of that, $2^{e-p}$, is rounded back to where it came from.
# peft starts $A$ evenly between $\pm 1/\sqrt{D}$. Which share of its weights does not move?


# %% tags=["deep"]
def unmoved(dtype, p, eta):
    """The share of weights that an update leaves where they are: by the rule, and by
    rounding."""
    w, ways = start.to(dtype).float(), torch.randint_like(start, 2) * 2 - 1
    by_rule = 2.0 ** (w.abs().log2().floor() - p) > eta
    by_rounding = (w + eta * ways).to(dtype) == w
    return by_rule.float().mean().item(), by_rounding.float().mean().item()


start = (2 * torch.rand(100_000) - 1) / 2048**0.5
for name, dtype, p in (("fp16", fp16, 11), ("bf16", bf16, 8)):
    # the job's highest rate, a tenth of it, about its 38th of 42
    for eta in (5e-4, 5e-5, 1.2e-5):
        rule, found = unmoved(dtype, p, eta)
        print(
            f"{name}, update of {eta:.1e}: predicted {rule:.0%} do not move, "
            f"counted {found:.0%}"
        )
        assert abs(found - rule) < 0.01


# %% Draw the weights that do not move tags=["deep", "hide-input"]
def standing(theme: Theme):
    """The share that does not move, against the update."""
    drawn, axes = course.figure(height=2.9)
    # powers of two themselves are ties
    sizes = [2.0 ** (-e / 3) for e in range(34, 70) if e % 3]
    for (name, dtype, p), color in zip(
        (("fp16", fp16, 11), ("bf16", bf16, 8)), theme.series, strict=False
    ):
        found = [unmoved(dtype, p, eta) for eta in sizes]
        axes.plot(
            sizes,
            [100 * rule for rule, _ in found],
            color=color,
            linewidth=1.2,
            label=f"{name}, predicted",
        )
        axes.plot(
            sizes,
            [100 * got for _, got in found],
            color=color,
            marker="o",
            markersize=4,
            linestyle="",
            label="counted",
        )
    for eta, says in ((5e-4, " highest rate"), (1.2e-5, " 38th of 42 steps")):
        axes.axvline(eta, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(eta, 104, says, color=theme.quiet)
    axes.set(
        xscale="log",
        xlabel="size of the update",
        ylabel="weights that do not move, %",
        ylim=(-3, 112),
    )
    axes.invert_xaxis()
    axes.grid(axis="y")
    axes.legend(loc="center right")
    return drawn


course.show(
    standing,
    "The smaller the update, the more weights of A it leaves where they are, if they "
    "are kept in 16 bits. AdamW's updates are about as large as the learning rate, or "
    "smaller.",
)

# %% [markdown] tags=["deep"]
# The cure is fp32 for master weights. For our 11,272,192 trained weights that is 21.5 MiB more than 16 bits. Below an
# adapter alone trains at our learning rate, and at a tenth of it, both falling to zero. After each step its weights are
# rounded to a format. bf16 is left behind. fp16 does well at our rate, and not at a tenth of it.


# %% tags=["deep"]
def train_kept_in(dtype, D=64, r=8, steps=400, rate=5e-4):
    torch.manual_seed(2)
    x = torch.randn(256, D)
    # what the base leaves to be learnt
    target = x @ (torch.randn(D, 4) @ torch.randn(4, D)).T / 64
    A = nn.Parameter(((2 * torch.rand(r, D) - 1) / D**0.5).to(dtype).float())
    B = nn.Parameter(torch.zeros(D, r))
    optimizer = torch.optim.AdamW([A, B], weight_decay=0)
    for n in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - n / steps)
        optimizer.zero_grad()
        loss = mse_loss(2 * (x @ A.T) @ B.T, target)
        loss.backward()
        optimizer.step()
        for weight in (A, B):
            weight.data = weight.data.to(dtype).float()
    return loss.item()


for rate, steps in ((5e-4, 400), (5e-5, 4000)):
    in_fp32, in_fp16, in_bf16 = (
        train_kept_in(dtype, rate=rate, steps=steps)
        for dtype in (torch.float32, fp16, bf16)
    )
    print(
        f"rate {rate:.0e}: fp32 reaches {in_fp32:.4f}, fp16 {in_fp16:.4f}, "
        f"bf16 {in_bf16:.4f}"
    )
    assert in_bf16 > 1.2 * in_fp32
    assert (in_fp16 > 1.2 * in_fp32) == (rate < 1e-4)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A run begins at the usual scale, 65,536. Its largest gradient, unscaled, is 3.0 and stays so. At which
#    scale does it take its first step?
# 2. **Build.** A script has called `prepare_model_for_kbit_training` on a quantized model, and then added adapters.
#    Fill in `undo(model, dtype)`. It changes the model in place: frozen fp32 weights become `dtype`, packed 4-bit
#    weights (dtype uint8) and whatever requires gradients (the adapters) stay, and every flag
#    `cast_input_dtype_enabled` of a module becomes False.
# 3. **Reach.** Weights in bf16 can learn if rounding is random: each number goes to its lower or its upper neighbour,
#    so that the *mean* is right. Fill in `to_bf16_at_random(x)`, from an fp32 tensor to a bf16 tensor. A bf16 number is
#    the upper 16 bits of an fp32 number, and `x.view(torch.int32)` gives all 32. What if you add random lower 16 bits,
#    and then set these to zero with the mask `-65536`? (Ignore inf and nan.)

# %% tags=["exercise"]
first_scale = None


def undo(model, dtype):
    """FILL ME IN: change the model in place."""


def to_bf16_at_random(x):
    """FILL ME IN: return a bf16 tensor shaped like x."""


# %% Check the exercises tags=["hide-input"]
def of_scale(answer):
    scale = float(answer)
    assert 3 * scale <= 65_504, (
        f"3 x {scale:,.0f} is beyond 65,504, so this step is skipped, too"
    )
    assert scale in 2.0 ** torch.arange(17), (
        f"not {scale:,.0f}; the scale begins at 65,536 and only ever halves"
    )
    course.equal(
        16_384, "a larger scale was tried before this one, and it already worked"
    )(answer)


def flags(model):
    return {
        part.cast_input_dtype_enabled
        for part in model.modules()
        if hasattr(part, "cast_input_dtype_enabled")
    }


def of_undo(answer):
    for dtype in (fp16, bf16):
        model, wanted = adapted(usual(packed(dtype)), cast=True), adapted(packed(dtype))
        at_first = [p.dtype for p in model.parameters()], flags(model)
        found = answer(model, dtype)
        if found is not None and found is not model:
            raise TypeError(f"it returned a {type(found).__name__}")
        if at_first == ([p.dtype for p in model.parameters()], flags(model)):
            # it touches nothing
            if not getattr(answer, "__code__", None) or not answer.__code__.co_names:
                raise NotImplementedError
            raise AssertionError(
                "nothing in the model has changed; "
                "`p = p.to(dtype)` just names another tensor"
            )
        for (name, p), (_, right) in zip(
            model.named_parameters(), wanted.named_parameters(), strict=True
        ):
            assert p.dtype == right.dtype, (
                f"{name} is {p.dtype}, and lean keeps it in {right.dtype}"
            )
            assert p.requires_grad == right.requires_grad, (
                f"{name}: requires_grad has changed"
            )
        assert flags(model) == {False}, (
            "adapters over 16-bit matrices still cast inputs to fp32; find the flag"
        )
        assert all(map(torch.equal, step(model, dtype), step(wanted, dtype))), (
            "the loss or a gradient is not lean's"
        )


def of_random_rounding(answer):
    torch.manual_seed(3)
    x = torch.tensor([1 + 1 / 1024, -3.001, 0.02, 1e-4]).repeat(20_000, 1)
    if (found := answer(x.clone())) is None:
        raise NotImplementedError
    assert found.dtype == bf16, f"the result is {found.dtype}, not bf16"
    assert found.shape == x.shape, (
        f"the shape is {tuple(found.shape)}, and x has {tuple(x.shape)}"
    )
    step = 2.0 ** (x.abs().log2().floor() - 7)
    assert ((found.float() - x).abs() < step).all(), (
        "a number may only go to one of its two neighbours"
    )
    held = (
        torch.tensor([0.0, 1.0, -2.0, 0.5, 1.0078125, -3.0, 1e-4, -0.02])
        .bfloat16()
        .repeat(1000, 1)
    )
    assert torch.equal(answer(held.float()), held), (
        "a number that bf16 can hold, such as 1.0, must stay what it is"
    )
    off = ((found.double().mean(0) - x[0]).abs() / step[0]).max()
    assert off < 0.02, (
        f"the mean is off by {off:.2f} of a step: "
        "the nearer neighbour must be likelier, in proportion"
    )
    alike = answer(torch.full((64, 64), 1 + 1 / 256)).float()
    for way in (0, 1):
        assert (alike.std(way) > 0).all(), (
            "each number needs a random number of its own"
        )


course.check(1, first_scale, of_scale, "a loss scale, one number")
course.check(
    2,
    undo,
    of_undo,
    "a function (model, dtype) that changes the model in place and returns nothing",
)
course.check(
    3,
    to_bf16_at_random,
    of_random_rounding,
    "a function x -> a bf16 tensor shaped like x",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# first_scale = 16_384  # 3 x 32,768 is beyond 65,504
#
#
# def undo(model, dtype):
#     for p in model.parameters():
#         if not p.requires_grad and p.dtype == torch.float32:  # frozen, and not packed
#             p.data = p.data.to(dtype)
#     for module in model.modules():
#         if hasattr(module, "cast_input_dtype_enabled"):
#             module.cast_input_dtype_enabled = False
#
#
# def to_bf16_at_random(x):
#     bits = x.view(torch.int32)
#     bits = bits + torch.randint_like(bits, 2**16)
#     return (bits & -65536).view(torch.float32).bfloat16()
# ```
#
# </details>
#
# ## In one breath
# - **Saves** 2,687 of 5,614 MiB here, and time on tensor cores. Lean preparation is 66 MiB of that, and 1,155 MiB once
#   the weights are quantized.
# - **Costs** rounding, and in fp16 a loss scale and a few skipped steps. In bf16, lean preparation cost 0.017 to 0.019
#   of loss after 20 steps of a small model.
# - **Approximate**: a number moves by at most $2^{-11}$ of itself in fp16, and $2^{-8}$ in bf16. The loss scale rounds
#   nothing, and leaving out peft's casts of inputs changes no bit.
# - **When**: on every card with 16-bit units: fp16 on a T4, bf16 from compute capability 8.0 on. Keep what trains in
#   fp32.
# - **When not**: activations beyond 65,504 on a card without bf16, or full fine-tuning with eager attention.
# - **Not in this lesson**: TF32, which from compute capability 8.0 on multiplies fp32 numbers of 11 significant bits
#   (our fp32 seconds of an L4 are without it), and [FP8](../docs/left_out.md#fp8).
#
# ## Sources
# - Micikevicius et al. 2018, *Mixed Precision Training*, arXiv 1710.03740, sections 3.1 (master weights), 3.2 (loss
#   scaling), 3.3 (sums in fp32). Gupta et al. 2015, *Deep Learning with Limited Numerical Precision*, arXiv 1502.02551
#   (random rounding).
# - torch 2.13: `torch/amp/grad_scaler.py`, `torch/amp/autocast_mode.py`, `is_bf16_supported` in `torch/cuda`.
# - peft 0.21: `utils/other.py` (`prepare_model_for_kbit_training`), `tuners/lora/layer.py` and `tuners/lora/bnb.py`
#   (the casts), `helpers.py` (`disable_input_dtype_casting`). bitsandbytes 0.50: `nn/modules.py`
#   (`Linear4bit.forward`).
# - Issues on the preparation: peft 3265 (about 1 GB), bitsandbytes 1569 (63.1 to 81.1 GB), TRL pull request 4335 (19.1
#   to 14.2 GB, Qwen3-14B), AgileRL 623 (inputs uncast: 20 to 24 % less, gradients bitwise equal). Overflow in fp16:
#   gemma_pytorch issue 24.
# - Ours, measured on a CPU on 2026-11-22: fp32 logits of SmolLM2-135M-Instruct over five training rows of 1,024 tokens,
#   the gradient of a mean over 2,047; 99.4 to 99.5 % of the words and 3.9 to 4.5 % of the downward gradient lie below
#   $2^{-25}$.
# - transformers 5.23: `eager_attention_forward` and `LlamaRMSNorm` in `modeling_llama.py`, `logging_nan_inf_filter` in
#   `trainer.py`. NVIDIA's data sheets of T4 and L4, for the rates.
# - Ours: `cria_tricks/techniques/mixed_precision.py`, `cria_tricks/techniques/lean_preparation.py`, and their tests in
#   `tests/techniques`.
