# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Mixed precision: multiply in 16 bits, learn in 32
# > **Promise.** By a T4's data sheet, products become eight times as fast. Gradients too small for 16 bits come back.
# > And you see why full fine-tuning with eager attention takes 3.9 GiB *more* in 16 bits.
#
# > **Card.** saves time now, bytes once the weights are frozen / costs rounding, a loss scale, a skipped step now and
# > then, and with eager attention 3.9 GiB / approximate: products are rounded to 11 (fp16) or 8 (bf16) significant bits
# > / 25 minutes / after [the bill](the_bill.py)
#
# Our job is QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4. [The lesson on the bill](the_bill.py)
# ended with the bill of plain training: a peak of 31.3 GiB, where a T4 has 14.74. Nearly every number on it takes 4
# bytes. So let us take 2, and halve it. Will it halve? Write your guess down.

# %% Your guess: GiB of the peak in 16 bits tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, mse_loss, silu
from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks import course
from cria_tricks.bench.style import Theme
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.counting import SavedBytes, flops
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.folds import estimate
from cria_tricks.tricks.mixed_precision import LossScale, half_linear

torch.manual_seed(0)
KIB, MIB = 2**10, 2**20

# %% [markdown]
# ## 1. The bill
# A floating-point number is a sign, an exponent and a fraction: $\pm 1.\text{fraction} \times 2^{\text{exponent}}$.
# Bits of the exponent buy *range*: how large, how small. Bits of the fraction buy *fineness*: how close the next number
# is. With 16 bits you must choose.

# %%
FORMATS = {
    "fp32": (8, 23, torch.float32),
    "fp16": (5, 10, torch.float16),
    "bf16": (8, 7, torch.bfloat16),
}
for name, (e, f, dtype) in FORMATS.items():
    bias = 2 ** (e - 1) - 1  # so that half of the exponents are negative
    largest, smallest, step = (2 - 2.0**-f) * 2.0**bias, 2.0 ** (1 - bias - f), 2.0**-f
    print(
        f"{name}: largest {largest:9.5g}, smallest {smallest:7.2g}, "
        f"from 1 to the next {step:.2g}"
    )
    assert (largest, step) == (torch.finfo(dtype).max, torch.finfo(dtype).eps)


# %% Draw figure 1 tags=["hide-input"]
def layouts(theme: Theme):
    """The bits of three formats."""
    sketch = course.Sketch(theme, 41, 10.6)
    holds = {
        "fp32": "up to 3.4e38, down to 1.4e-45; steps of 1.2e-7",
        "fp16": "up to 65,504, down to 6e-8; steps of 0.001: finer, narrow",
        "bf16": "up to 3.4e38, down to 9e-41; steps of 0.008: wide, coarser",
    }
    for row, (name, (e, f, _)) in enumerate(FORMATS.items()):
        top = 0.5 + 3.4 * row
        sketch.text(0, top + 0.9, name, align="left")
        sketch.tensor(4, top, 1, 1.8, "±", color=2)
        sketch.tensor(5, top, e, 1.8, f"exponent {e}", color=1)
        sketch.tensor(5 + e, top, f, 1.8, f"fraction {f}", color=0)
        sketch.text(4, top + 2.4, holds[name], quiet=True, align="left")
    return sketch.figure


course.show(
    layouts,
    "Figure 1. Two ways to spend 16 bits: fp16 is finer, bf16 has the range of fp32.",
)

# %% [markdown]
# Now a block of Llama, small enough to count: a thirty-second of every width, with all 32 heads. So a MiB of the real
# block is a KiB of ours. One row of $T$ tokens, $D$ width, $K$ width of the keys and of the values, $F$ inner width of
# the MLP, $H$ heads. `half` marks what products multiply; for now it does nothing. Attention is *eager*, as in our job
# until [the lesson on FlashAttention](flash_attention.py): it makes the $T \times T$ matrix of each head in full.


# %%
T, D, K, F, H = 64, 64, 16, 256, 32


def normed(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Block(nn.Module):
    """From (T, D) to (T, D)."""

    def __init__(self):
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
        self.w = nn.ParameterDict(
            {name: torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()}
        )
        self.of_norms = nn.Parameter(torch.ones(2, D))

    def forward(self, x, half=lambda tensor: tensor):
        y = normed(x) * self.of_norms[0]
        q, k, v = (
            linear(half(y), half(self.w[name])).view(T, -1, D // H).transpose(0, 1)
            for name in "qkv"
        )
        # 8 heads serve 32
        k, v = (z[:, None].expand(-1, D // K, -1, -1).reshape(H, T, -1) for z in (k, v))
        scores = half(q) @ half(k).transpose(1, 2) * (D // H) ** -0.5
        looks = (scores + future).softmax(-1, dtype=torch.float32)
        attended = (half(looks) @ half(v)).transpose(0, 1).reshape(T, D)
        x = x + linear(half(attended), half(self.w["o"]))
        y = normed(x) * self.of_norms[1]
        gate, up = (linear(half(y), half(self.w[name])) for name in ("gate", "up"))
        return x + linear(half(silu(gate) * up), half(self.w["down"]))


future = torch.full((T, T), -torch.inf).triu(1)  # no token looks at later ones
block, x = Block(), torch.randn(T, D, requires_grad=True)
target = x.detach().roll(1, 0)  # what it learns: the token before
plain = Block.__call__


def kept_by(way):
    """Bytes that autograd keeps for the backward pass, weights apart."""
    with SavedBytes(besides=block.parameters()) as kept:
        way(block, x)
    return kept.peak


# %% [markdown]
# What does it keep for the backward pass? The norms: their input, their result, a root. Products: what they multiply,
# which is two norm outputs, $q$, $k$, $v$, what was attended, the MLP's last input. The MLP's nonlinear part: three
# more of $TF$. The softmax: the $T \times T$ matrix of each head. `keeps` adds it up; look at `half=False` only.


# %%
def keeps(T, D, K, F, H, half):
    """Bytes that one block keeps, by kind."""
    a = 2 if half else 4  # bytes of what is multiplied
    return {
        "norms": 16 * T * D + 8 * T,
        "what products take and give": a * ((9 if half else 6) * T * D + 4 * T * F),
        "the attention's matrix": (4 + 2 * half) * H * T * T,
        "copies of weights": 2 * half * (2 * D * D + 2 * D * K + 3 * D * F),
    }


# V words, L blocks
LLAMA, V, L = {"T": 2048, "D": 2048, "K": 512, "F": 8192, "H": 32}, 128_256, 16
predicted, counted = sum(keeps(T, D, K, F, H, half=False).values()), kept_by(plain)
print(f"predicted {predicted / KIB:,.1f} KiB, counted {counted / KIB:,.1f} KiB")
assert counted == predicted
before, after = course.so_far("the_bill"), course.so_far("mixed_precision")
waiting = {line.name: line.bytes for line in course.bill(before).lines}[
    "saved activations"
]
# the same formula is the bill's row
assert waiting == L * sum(keeps(**LLAMA, half=False).values())

# %% [markdown]
# ## 2. From scratch, in three steps
# **Multiply in 16 bits.** The weight stays in fp32. It is cast where it is used, and its gradient comes back through
# the cast, into fp32. That, and remembering casts of weights during a forward pass, is all that `autocast` does to a
# product; it converts no model. Products go to 16 bits, what sums many numbers (softmax, norms, losses) to fp32, the
# rest takes what comes. (A CPU's list is shorter, so our block asks for its softmax in fp32, as transformers does.)


# %%
def ours(block, x):
    return block(x, half=lambda tensor: tensor.half())


def of_torch(block, x):
    with torch.autocast("cpu", torch.float16):
        return block(x)


def gradients(way, scale=4096.0):
    found = torch.autograd.grad(
        mse_loss(way(block, x), target) * scale, [x, *block.parameters()]
    )
    assert all(grad.dtype == torch.float32 for grad in found)
    return torch.cat([grad.flatten() for grad in found]) / scale


assert torch.equal(ours(block, x), of_torch(block, x))
assert torch.equal(gradients(ours), gradients(of_torch))
w = block.w["up"]
# the package's reference
assert torch.equal(half_linear(x, w, torch.float16), linear(x.half(), w.half()))

# %% [markdown]
# **Learn in 32 bits.** Why keep fp32 weights? AdamW moves a weight by about the learning rate. Take a weight of 0.02
# and a rate of 1e-5, a hundred times, down to 0.019. A 16-bit weight can only stand on multiples of its step.


# %%
for name, (_, f, dtype) in FORMATS.items():
    # 0.02 lies between 2^-6 and 2^-5
    w, step = torch.tensor(0.02, dtype=dtype), 2.0 ** (-6 - f)
    predicted = w.item() - 100 * round(1e-5 / step) * step
    for _ in range(100):
        w -= 1e-5
    print(f"{name}: a step of {step:.1e}; after 100 updates {w.item():.5f}")
    assert abs(w.item() - predicted) < 1e-9

# %% [markdown]
# In fp16 every update became half as large again. In bf16, often called the safe one, nothing was learnt, and no error
# said so.
#
# **Scale the loss.** Gradients are small. The loss is a mean over 2,047 tokens, and each token pushes the right word up
# and all 128,255 others down, by $p / 2047$, $p$ being a word's probability. Up to $2^{-25}$, half of its smallest
# number, fp16 rounds to zero. How many of these pushes are lost? Take one token with random logits, and with peaked
# logits, where a few words have nearly all probability.

# %%
drawn = torch.randn(1, V)
# in fp16, as the head gives them under autocast
logits = {"random": (2 * drawn).half(), "peaked": (5 * drawn).half()}


def pushes(z, scale=1.0):
    """The gradient of one token's logits z."""
    z.requires_grad_()
    loss = cross_entropy(z.float(), torch.tensor([7])) / 2047
    return torch.autograd.grad(loss * scale, z)[0]


wide, lost = {name: pushes(z.float()) for name, z in logits.items()}, {}
for name, exact in wide.items():
    for scale in (1.0, 65536.0):
        predicted, gone = (
            (exact.abs() * scale <= 2.0**-25).sum(),
            pushes(logits[name].clone(), scale) == 0,
        )
        lost[name, scale] = (exact[gone].sum() / exact[exact > 0].sum()).item()
        share = f"{lost[name, scale]:.1%} of the push down"
        print(
            f"{name}, scale {scale:6.0f}: predicted {predicted:7,} zeros, "
            f"counted {gone.sum():7,}: {share}"
        )
        assert gone.sum() == predicted
assert lost["random", 1] > 0.4 > 0.05 > lost["peaked", 1] > 0.01 > lost["random", 65536]


# %% Draw figure 2 tags=["hide-input"]
def window(theme: Theme):
    """Where the gradients of one token's logits lie, and what fp16 holds."""
    drawn, axes = course.figure(height=2.9)
    for color, scale in enumerate((1.0, 65536.0)):
        sizes = (wide["random"].abs() * scale).log2().flatten().numpy()
        axes.hist(
            sizes,
            bins=60,
            color=theme.series[color],
            alpha=0.7,
            label=f"times {scale:,.0f}",
        )
    for border in (-25, -14, 16):
        axes.axvline(border, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    words = (
        (-36.5, "becomes zero"),
        (-19.5, "fewer bits"),
        (1, "all 11 bits"),
        (19, "infinity"),
    )
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
    return drawn


course.show(
    window,
    "Figure 2. With random logits most pushes are too small for fp16; "
    "a scale moves them into its range.",
)

# %% [markdown]
# With random logits fp16 loses 98 % of the words and half of the push down: the model hears "more of this" and only
# half of "less of that". With peaked logits it loses even more words, but these had little probability: 2 % of the
# push. SmolLM2-135M lost 4 % on five of our rows. The chain rule is linear, so the cure is one line: multiply the loss
# by a scale $S$, and divide the fp32 gradients by it. A power of two moves exponents and rounds nothing.
#
# How large may $S$ be? Until $S$ times the largest gradient passes 65,504. Nobody knows that beforehand, so the scale
# finds itself: after an overflow the step is skipped and $S$ halved; after a quiet while it is doubled.


# %%
class Scale:
    def __init__(self, scale=65536.0, wait=2000):
        self.scale, self.wait, self.good = scale, wait, 0

    def step(self, optimizer, weights):
        for weight in weights:
            weight.grad /= self.scale
        if not all(weight.grad.isfinite().all() for weight in weights):
            self.scale, self.good = self.scale / 2, 0
            return  # skipped: weights and AdamW's states stay as they are
        optimizer.step()
        self.good += 1
        if self.good == self.wait:
            self.scale, self.good = self.scale * 2, 0


# %% [markdown]
# ## 3. Prove it
# **The claim is *approximate*, so here is its bound.** Rounding moves a number by at most half a step: $u = 2^{-11}$ of
# itself in fp16 (above the lower end), $2^{-8}$ in bf16. In $y = \sum_i x_i w_i$ both factors move, and the result; the
# sum is kept in fp32. So $y$ moves by $3u \sum_i |x_i w_i|$ and a little; we ask for $4u$.

# %%
x0, w = x.detach(), block.w["up"].detach()
for name in ("fp16", "bf16"):
    _, f, dtype = FORMATS[name]
    moved = linear(x0.to(dtype), w.to(dtype)).double() - linear(x0.double(), w.double())
    error, bound = (
        (moved.abs() / linear(x0.double().abs(), w.double().abs())).max(),
        4 * 2.0 ** -(f + 1),
    )
    print(
        f"{name}: moved by {error:.1e} of the sum of sizes at most; "
        f"the bound is {bound:.1e}"
    )
    assert error <= bound

# %% [markdown]
# **The scale is torch's, step for step.** We train the block three times from one start: with `autocast` and
# `GradScaler`, by hand, with the package's `LossScale`. They begin far too high, at $2^{24}$, and double after eight
# good steps. Same losses, same scales, same bits.


# %%
def train(way, scale_now, step):
    """Forty steps of a fresh block: each one's loss and scale, and the weights at the
    end."""
    torch.manual_seed(1)
    block, history = Block(), []
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.003)
    for _ in range(40):
        optimizer.zero_grad()
        loss = mse_loss(way(block, x), target)
        history.append((loss.item(), scale_now()))
        (loss * scale_now()).backward()
        step(optimizer, list(block.parameters()))
    return history, list(block.parameters())


scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=8)
scaler.scale(torch.zeros(()))  # it makes its scale at the first use
history, weights = train(
    of_torch,
    scaler.get_scale,
    lambda optimizer, _: (scaler.step(optimizer), scaler.update()),
)
for scale in (Scale(2.0**24, 8), LossScale(2.0**24, 8)):
    by_hand = train(ours, lambda scale=scale: scale.scale, scale.step)
    assert by_hand[0] == history
    assert all(map(torch.equal, by_hand[1], weights))
print("log2 of the scale:", *(int(used).bit_length() - 1 for _, used in history))

torch.manual_seed(1)
start = Block()
largest = max(
    grad.abs().max()
    for grad in torch.autograd.grad(mse_loss(start(x), target), list(start.w.values()))
)
print(
    f"65,504 / {largest:.3f}, the largest gradient at the start, "
    f"is 2^{(65504 / largest).log2():.1f}"
)
# the first step that was taken
assert history[scale.skipped][1] == 2.0 ** (65504 / largest).log2().floor()

# %% [markdown]
# Four steps are skipped, as predicted; then the scale climbs, as the gradients shrink.
#
# **The bytes: the surprise.** Now `half=True`. What products take and give is in 2 bytes (though `gate` and `up` each
# keep a cast of the input that they shared, as do $q$, $k$, $v$). Two things come *on top*:
#
# - A product's backward pass needs the weight it multiplied by, so the 16-bit *copy* waits, beside the fp32 weight.
# - Eager attention's softmax keeps its result in fp32, and the product behind it keeps a copy in 16 bits. So the
#   block's largest tensor waits twice, in $4 + 2$ bytes.

# %%
in_16_bits = keeps(T, D, K, F, H, half=True)
predicted, counted = sum(in_16_bits.values()), kept_by(of_torch)
print(
    f"predicted {predicted / KIB:,.1f} KiB, counted {counted / KIB:,.1f} KiB; "
    f"fp32 kept {kept_by(plain) / KIB:,.1f}"
)
assert counted == kept_by(ours) == predicted


# %% Draw figure 3 tags=["hide-input"]
def ledger(theme: Theme):
    """What one block keeps, by kind."""
    drawn, axes = course.figure(height=2.3)
    in_32_bits, left = keeps(T, D, K, F, H, half=False), [0.0, 0.0]
    for color, kind in enumerate(in_16_bits):
        sizes = [column[kind] / KIB for column in (in_32_bits, in_16_bits)]
        axes.barh(
            [0, 1],
            sizes,
            left=left,
            color=theme.series[color],
            alpha=0.55,
            height=0.6,
            label=kind,
        )
        for row, size in enumerate(sizes):
            if size:
                axes.text(
                    left[row] + size / 2,
                    row,
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
    "Figure 3. Autocast shrinks what products take and give, "
    "and adds more than that elsewhere.",
)

# %% [markdown]
# ## 4. What it costs
# **Error.** You saw it: bf16 has three bits fewer than fp16, so its products are about $2^3 = 8$ times as far off.
#
# **Time.** No product is saved. Each runs faster on tensor cores, if they know the format; a T4's know fp16, not bf16.
# On paper a step multiplies and adds for each weight and token, once forward and twice backward: 6 operations, and a
# tenth more for attention. In seconds, at the data sheets' best, which nobody reaches:

# %%
counts = [
    flops(lambda way=way: way(block, x).sum().backward()) for way in (plain, of_torch)
]
assert (
    counts[0]
    == counts[1]
    == 6 * T * sum(w.numel() for w in block.w.values()) + 12 * T * T * D
)
step = 6 * 2048 * course.bill(before).facts.shape.weights
for card in ("t4", "l4"):
    print(
        card.upper(),
        *(f"{name} {step / CARDS[card].flops(name):.2f} s" for name in FORMATS),
    )

# %% [markdown]
# Norms, softmax and the optimizer gain nothing, so expect less than 8. Measure. (The benchmark's base is frozen, so
# there bytes are saved, too.)

# %%
step_of = "peft=lora attention=best gradient_checkpointing=true chunked_loss=true"
course.on_a_gpu("mixed_precision", off=step_of, on=f"{step_of} precision=fp16")

# %% [markdown]
# ## 5. The production switch
# One line. It becomes one argument of transformers' trainer: `autocast` around the forward pass, and a `GradScaler`.

# %%
print("--set tricks.precision=fp16")
print(diff(resolve(before, T4), resolve(after, T4)))
try:
    resolve(with_settings(before, ["tricks.precision=bf16"]), T4)
except BadInput as refused:
    print(refused)

# %% [markdown]
# `torch.cuda.is_bf16_supported()` says True on a T4, because it counts emulation. From compute capability 8.0 on, bf16
# is real, needs no loss scale, and is the usual choice.

# %%
course.show_bill(before, after)
fp32, fp16 = keeps(**LLAMA, half=False), keeps(**LLAMA, half=True)
change = {kind: L * (fp16[kind] - fp32[kind]) for kind in fp32}
change["copies of weights"] += 2 * V * LLAMA["D"]  # the head's
# what the head takes
change["what products take and give"] -= 2 * LLAMA["T"] * LLAMA["D"]
print({kind: f"{size / MIB:+,.0f} MiB" for kind, size in change.items() if size})
assert (
    sum(change.values())
    == course.bill(after).peak_bytes - course.bill(before).peak_bytes
)
course.reveal(guess, course.bill(after).peak_bytes / 2**30, "GiB")

# %% [markdown]
# Weights and optimizer states stay in fp32, because they learn. Two lines of the bill grew, *saved activations* and
# *16-bit copy of the head*. The last line splits them: smaller activations save 2.4 GiB, and the copies of weights cost
# 2.3. Then eager attention's matrix waits a second time: 4 GiB. The peak is still at the loss.
#
# So 16 bits cost memory because of eager attention. transformers' own default is `sdpa`, where torch chooses a kernel
# by card and format. Predict the change on a T4 and on an L4:

# %%
changes = []
for name, attention, card in (
    ("eager on a T4", "eager", "t4"),
    ("sdpa on a T4", "sdpa", "t4"),
    ("sdpa on a T4, keys repeated", "sdpa tricks.expand_kv=true", "t4"),
    ("sdpa on an L4", "sdpa", "l4"),
):
    recipes = [
        with_settings(one, f"tricks.attention={attention}".split())
        for one in (before, after)
    ]
    fp32, fp16 = (
        estimate(one, course.bill(before).facts.shape, CARDS[card].device)
        for one in recipes
    )
    changes.append(round((fp16.peak_bytes - fp32.peak_bytes) / MIB))
    print(
        f"{name:27} fp32 {fp32.facts.kernel:16} -> fp16 {fp16.facts.kernel:16} "
        f"{changes[-1]:+6,} MiB"
    )
assert changes == [4013, 301, -83, -8463]

# %% [markdown]
# On a T4 sdpa runs the *math* kernel in both formats. This kernel keeps the matrix once, in fp32. On an L4 torch runs
# it in fp32 only; in 16 bits it runs the *flash* kernel, which never has the matrix: 8 GiB less. Where neither format
# keeps the matrix, the switch saves 83 MiB.
#
# Why use 16 bits on a T4? For the tensor cores. Later lessons remove what costs bytes: checkpointing (3) drops saved
# activations, and a frozen base (4) needs no copies.

# %%
lora = course.so_far("lora")
bills = [
    course.bill(with_settings(lora, [f"tricks.precision={name}"]))
    for name in ("fp32", "fp16")
]
print(
    "in the lesson on LoRA, without it and with it:",
    *(f"{bill.peak_bytes / 2**30:.2f} GiB" for bill in bills),
)

# %%
course.show(
    course.staircase("mixed_precision"),
    "Figure 4. The bill so far: the first step goes up.",
)

# %% [markdown]
# ## 6. Where it breaks
# **`Attempting to unscale FP16 gradients.`** The model was loaded in fp16 and its weights train: dividing their fp16
# gradients would lose what the scale saved, so torch refuses. Cure: what trains is fp32. Our switch keeps adapters so,
# over a 16-bit base.

# %%
weight = nn.Parameter(torch.ones(D).half())
weight.grad = torch.ones_like(weight)
try:
    scaler.unscale_(torch.optim.SGD([weight]))
except ValueError as error:
    print(error)
    assert str(error) == "Attempting to unscale FP16 gradients."
cured = nn.Parameter(weight.detach().float())
cured.grad = torch.ones_like(cured)
scaler.unscale_(torch.optim.SGD([cured]))
assert cured.grad[0] == 1 / scaler.get_scale()

# %% [markdown]
# **`'loss': 0.0, 'grad_norm': nan`** (transformers 5 prints `'0'` and `'nan'`). The loss is NaN; the trainer's filter
# logs that as 0. A number of the *forward* pass went beyond 65,504. No loss scale heals that; it skips step after step,
# silently. Here $q \cdot k$ is 64 products of about $40 \cdot 40$: 102,400. Cure: divide by
# $\sqrt{64}$ *before* multiplying, or take bf16's range, on a card that has it.

# %%
big = 40 + torch.randn(T, D)
# the queries are divided after they met the keys, or before
for early in (False, True):
    weight, scale = nn.Parameter(torch.eye(D)), LossScale()
    for _ in range(10):
        with torch.autocast("cpu", torch.float16):
            q = linear(big, weight)
            scores = q * D**-0.5 @ big.T if early else q @ big.T * D**-0.5
        loss = scores.softmax(-1, dtype=torch.float32).square().mean()
        weight.grad = torch.autograd.grad(loss * scale.scale, weight)[0]
        scale.step(torch.optim.SGD([weight], lr=1e-6), [weight])
    print(
        f"divided early: {early}; loss {loss:.4f}, skipped {scale.skipped} of 10, "
        f"scale {scale.scale:,.0f}"
    )
    assert early == loss.isfinite() == (scale.skipped < 10)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A run begins at the usual scale, 65,536. Its largest 16-bit gradient, unscaled, is 3.0 and stays so.
#    At which scale does it take its first step? The answer is that scale.
# 2. **Build.** bf16 is the upper half of an fp32. Fill in `to_bf16(x)`: round an fp32 tensor to bf16 with integer
#    operations alone, to the nearest, ties to even. `x.view(torch.int32)` gives the bits. Return fp32, in the shape of
#    `x`, and leave `x` as it is.
# 3. **Reach.** Take the MLP alone: what `gate`, `up`, `down` multiply and what lies between, casts and copies
#    included, with Llama's $D$ and $F$. At how many tokens $T$ does it keep as many bytes with autocast as without?

# %% tags=["exercise"]
first_scale = None


def to_bf16(x):
    """FILL ME IN."""


break_even = None


# %% Check the exercises tags=["hide-input"]
# any 32 bits
anything = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32).view(
    torch.float32
)


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


def of_break_even(answer):
    tokens = float(answer)
    assert tokens <= 1536, (
        f"not {tokens:,.0f}; autocast saves more for each token: "
        "list what lies between y and down"
    )
    course.equal(
        1536,
        "autocast adds more: a copy of each weight, "
        "and the casts of an input that was shared",
    )(answer)


class OnlyIntegers(TorchDispatchMode):
    """Refuse operations that make 16-bit numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        wide = not isinstance(out, torch.Tensor) or out.dtype not in (
            torch.bfloat16,
            torch.float16,
        )
        assert wide, (
            f"{func} makes 16-bit numbers; shift, add and mask the bits as integers"
        )
        return out


def of_bf16(answer):
    ties = 1 + torch.arange(256) / 256  # every second one is halfway
    for numbers, hint in (
        (
            anything[~anything.isnan()],
            "a number nearer to its upper neighbour must go there",
        ),
        (
            torch.cat([ties, -ties]),
            "halfway between two numbers, take the neighbour whose last bit is 0",
        ),
        (
            torch.tensor([torch.inf, -torch.inf, 0.0, -0.0]),
            "infinity and zero stay what they are",
        ),
        (torch.randn(3, 5), "keep the shape of x"),
    ):
        given = numbers.clone()
        with OnlyIntegers():
            found = answer(given)
        if found is None:
            raise NotImplementedError
        assert found.dtype == torch.float32, (
            "give fp32 back: view the bits as torch.float32"
        )
        assert found.shape == numbers.shape, (
            f"the shape is {tuple(found.shape)}, and x has {tuple(numbers.shape)}"
        )
        assert torch.equal(
            found.view(torch.int32), numbers.bfloat16().float().view(torch.int32)
        ), hint
        assert torch.equal(given, numbers), (
            "your function changed x itself; leave x as it is"
        )


course.check(1, first_scale, of_scale, "a loss scale, one number")
course.check(
    2,
    to_bf16,
    of_bf16,
    "a function (x) -> fp32 numbers in the shape of x, an fp32 tensor",
)
course.check(3, break_even, of_break_even, "a number of tokens")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # 3 x 65,536 and 3 x 32,768 are beyond 65,504, 3 x 16,384 is not
# first_scale = 65_536 / 2 / 2
#
#
# def to_bf16(x):
#     bits = x.view(torch.int32)
#     odd = bits >> 16 & 1  # a tie goes up when the last bit that stays is 1
#     return (bits + 0x7FFF + odd & -65536).view(torch.float32)
#
#
# # the input draws, 4 T D = 2 x 2 T D; 4 x 2 T F saved = 3 x 2 D F copied
# break_even = 3 * 2048 // 4
# ```
#
# </details>
#
# ## In one breath
# - **Saves** time, on tensor cores; memory, where frozen weights take 2 bytes instead of 4, and where 16 bits let torch
#   use the flash kernel (from compute capability 8.0 on).
# - **Costs** rounding; in fp16 a loss scale and a few skipped steps; in full fine-tuning a 16-bit copy of each weight,
#   and with eager attention a copy of its matrix.
# - **Approximate**: a number moves by at most $2^{-11}$ of itself in fp16, $2^{-8}$ in bf16. The scale rounds nothing.
# - **When**: on every card with 16-bit units; fp16 on a T4, bf16 from compute capability 8.0 on.
# - **When not**: to save bytes in full fine-tuning on a T4 (on an L4 with sdpa it saves 8,463 MiB); with activations
#   beyond 65,504 and no bf16.
#
# ## Sources
# - Micikevicius et al. 2018, *Mixed Precision Training*, arXiv 1710.03740, sections 3.1 (master weights), 3.2 (loss
#   scaling), 3.3 (sums in fp32).
# - torch 2.13: `torch/amp/grad_scaler.py`, `torch/amp/autocast_mode.py`, `is_bf16_supported` in `torch/cuda`.
# - Ours, measured on a CPU on 2026-11-22: fp32 logits of SmolLM2-135M-Instruct over five training rows of 1,024 tokens,
#   the gradient of a mean over 2,047; 99.4 to 99.5 % of the words and 3.9 to 4.5 % of the push lie below $2^{-25}$.
# - transformers 5.23: `eager_attention_forward` in `modeling_llama.py`, `logging_nan_inf_filter` in `trainer.py`.
# - NVIDIA's data sheets of T4 and L4, for the rates.
# - Ours: `cria_tricks/tricks/mixed_precision.py`, `tests/tricks/test_mixed_precision.py`.
