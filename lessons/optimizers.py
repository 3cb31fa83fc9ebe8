# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # 8-bit AdamW: two bytes where there were eight
# > **Promise.** You keep both of AdamW's moments in a byte each, with the levels, blocks and steps of bitsandbytes; and
# > you find out why that takes 64 MiB off our run and 5.4 GiB off full fine-tuning.
#
# > **Card.** saves three quarters of the optimizer's states / costs a rounding of both moments in every step /
# > approximate: each moment moves to the nearest of 256 levels of its block / 35 minutes / after [NF4](nf4.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. [The lesson on
# NF4](nf4.py) left its bill at 5,449 MiB. AdamW remembers two numbers of 32 bits for each trained weight. Must they be
# so exact?

# %% Imports and settings tags=["hide-input"]
import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks import course
from cria_tricks.bench import results, tables
from cria_tricks.bench.style import Theme
from cria_tricks.data.sources import find
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks import adamw_8bit as reference

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# AdamW keeps two running means for each trained weight, its *moments*: $m$ of its gradient $g$, and $v$ of $g^2$. In
# fp32 they are 8 bytes. A byte each, and one fp32 scale for every 256 numbers of each, are $2 + 2 \cdot 4 / 256 = 2.03$
# bytes. Predict the row *optimizer states* of two runs: ours, and [the lesson on
# checkpointing](gradient_checkpointing.py)'s, which trained all weights.

# %% Your guess: MiB of 8-bit states of all weights tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before, after = course.so_far("nf4"), course.so_far("optimizers")
full = course.so_far("gradient_checkpointing")
full_8bit = with_settings(full, ["tricks.optimizer=adamw_8bit"])


def states(recipe):
    return next(
        line.bytes
        for line in course.bill(recipe).lines
        if line.name == "optimizer states"
    )


missing = {}
for name, plain, eight in (("LoRA", before, after), ("all weights", full, full_8bit)):
    N = course.bill(plain).facts.trained_weights
    predicted = N * (2 + 8 / 256)
    missing[name] = states(eight) - predicted
    print(f"{name}: {N:,} learn, {8 * N / MIB:,.1f} MiB in 32 bits")
    print(
        f"    in 8 bits: predicted {predicted / MIB:,.1f} MiB, "
        f"on the bill {states(eight) / MIB:,.1f}"
    )
    assert states(plain) == 8 * N
assert missing["LoRA"] == 0
course.reveal(guess, states(full_8bit) / MIB, "MiB")

# %% [markdown]
# Right to the byte for LoRA, and 1,495 MiB short for all weights. Somebody kept 32 bits. Section 5 finds out who.
#
# ## 2. From scratch, in four steps
# **Look at what must be stored.** A small model guesses the next byte of our own rows from the eight bytes before. It
# is soon trained, and its moments are real ones.

# %%
text = b"\n".join(
    part["content"].encode()
    for row in find("nguzo_saba", "train").rows
    for part in row.messages
)
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(make, steps=200):
    """Losses, weights and optimizer of a run: the same start and the same batches for
    every optimizer."""
    torch.manual_seed(1)
    inner, outer = nn.Linear(8 * 32, 128, bias=False), nn.Linear(128, 256)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), inner, nn.GELU(), outer)
    optimizer, losses = make(list(model.parameters())), []
    for _ in range(steps):
        batch = data[torch.randint(len(data) - 8, (256, 1)) + torch.arange(9)]
        loss = F.cross_entropy(model(batch[:, :8]), batch[:, 8])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), list(model.parameters()), optimizer


SETTINGS = {"lr": 3e-3, "weight_decay": 0.01}
exact_losses, weights, adamw = train(lambda w: torch.optim.AdamW(w, **SETTINGS))
v = adamw.state[weights[2]]["exp_avg_sq"].view(-1, 256)  # of the last matrix
shares = v / v.amax(dim=1, keepdim=True)
print(
    "smallest second moment of a block over its largest: "
    f"{shares.amin(dim=1).median():.0e} in the median"
)
print(
    "256 even levels from 0 to 1 would make "
    f"{(shares < 1 / 510).float().mean():.1%} of them zero"
)
assert (shares < 1 / 510).float().mean() > 0.03

# %% [markdown]
# **Levels that follow the size.** Second moments are squares, so they spread over twice as many powers of ten as
# gradients do. The *dynamic map* spends as much of a byte on the power of ten as the number needs: some zero bits, one
# for each factor of ten, then a one, then a fraction in what is left (after a sign, for $m$). Large numbers get a fine
# fraction, small ones a coarse one.


# %%
def dynamic_map(signed):
    levels = [0.0, 1.0]
    for zeros in range(7):
        cuts = torch.linspace(0.1, 1, 2 ** (6 - zeros + (not signed)) + 1)
        sizes = 10.0**-zeros * (cuts[:-1] + cuts[1:]) / 2
        levels += sizes.tolist() + ((-sizes).tolist() if signed else [])
    return torch.tensor(sorted(levels))


MAPS = dynamic_map(signed=True), dynamic_map(signed=False)
print(
    f"levels of v: {MAPS[1][1]:.3g}, {MAPS[1][2]:.3g}, {MAPS[1][3]:.3g} ... "
    f"{MAPS[1][-2]:.4f}, {MAPS[1][-1]:.0f}"
)

# %% Draw figure 1 tags=["hide-input"]
even = torch.linspace(0, 1, 256)


def spread_of_moments(theme: Theme):
    """Second moments of a trained matrix over their block's largest, above the levels
    of two maps."""
    drawn, axes = course.figure(height=2.9)
    found = shares[shares > 0].log10().flatten()
    axes.hist(found.numpy(), bins=96, range=(-8, 0), density=True, color=theme.grid)
    for row, levels in enumerate((MAPS[1], even)):
        places = levels[levels > 0].log10()
        axes.scatter(
            places,
            [-0.09 - 0.12 * row] * len(places),
            marker="|",
            s=60,
            color=theme.series[row],
            linewidth=1,
        )
    axes.set_yticks(
        [-0.21, -0.09, 0, 0.2, 0.4, 0.6], ["even", "dynamic", "0", "0.2", "0.4", "0.6"]
    )
    axes.set_xticks(range(-8, 1), [f"$10^{{{n}}}$" for n in range(-8, 1)])
    axes.set(
        xlabel="second moment, over the largest of its block",
        ylabel="share (density)",
        xlim=(-8, 0.1),
    )
    return drawn


course.show(
    spread_of_moments,
    "Figure 1. Real second moments, and the levels of two maps of a byte. "
    "Left of a map's lowest level numbers become "
    "zero.",
)

# %% [markdown]
# In a decade with $2^b$ levels they lie $0.9 / 2^b$ of its top apart. In the top decade of $v$, $b$ is 7, so a number
# moves by at most $\frac{0.45}{128} / 0.1 = 3.5\,\%$ of itself. Each decade below doubles that.
#
# **Blocks of 256** keep one large number from ruining all, as in [the lesson on NF4](nf4.py).


# %%
def pack(x, levels):
    """Codes, and the scale of each block: its largest."""
    blocks = x.reshape(-1, 256)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    middles = (levels[:-1] + levels[1:]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-38), middles)
    # a negative number keeps its sign, as on a card (section 3)
    codes -= ((blocks < 0) & (levels[codes] == 0)).long()
    return codes.to(torch.uint8), scales


def unpack(codes, scales, levels):
    return levels[codes.int()] * scales


# %% [markdown]
# **A step in fp32.** Unpack both moments of one matrix, take AdamW's step, pack them again. With learning rate $\eta$,
# step number $t$, decays $\beta_1, \beta_2$ and a small $\epsilon$ it moves a weight by $\eta \cdot
# \frac{m}{1 - \beta_1^t} / \big(\sqrt{v / (1 - \beta_2^t)} + \epsilon\big)$, after weight decay has shrunk it.


# %%
class AdamW8:
    def __init__(
        self, weights, lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, maps=MAPS
    ):
        self.weights, self.lr, self.decay, self.betas, self.eps = (
            weights,
            lr,
            weight_decay,
            betas,
            eps,
        )
        self.maps, self.steps = maps, 0
        self.moments = [
            [pack(torch.zeros_like(weight), levels) for levels in maps]
            for weight in weights
        ]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        beta1, beta2 = self.betas
        for weight, packed in zip(self.weights, self.moments, strict=True):
            grad = weight.grad.view(-1, 256)
            m, v = (
                unpack(*moment, levels)
                for moment, levels in zip(packed, self.maps, strict=True)
            )
            m.mul_(beta1).add_(grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (v.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.eps)
            weight.mul_(1 - self.lr * self.decay)
            weight.view(-1, 256).addcdiv_(
                m, root, value=-self.lr / (1 - beta1**self.steps)
            )
            packed[:] = [
                pack(moment, levels)
                for moment, levels in zip((m, v), self.maps, strict=True)
            ]


# %% Draw figure 2 tags=["hide-input"]
def one_step(theme: Theme):
    """What is in memory before, in and after a step, for one block of 256 weights."""
    sketch = course.Sketch(theme, 44, 11)
    for left, when in (
        (0, "between two steps"),
        (17, "in the step, a matrix at a time"),
        (34, "and again"),
    ):
        sketch.text(left, 0.8, when, align="left", quiet=True)
    for row, name in enumerate(("m", "v")):
        top = 2 + 4.6 * row
        for left in (0, 34):
            sketch.tensor(left, top, 6.4, 2.2, f"256 codes {name}", color=row)
            sketch.tensor(left + 6.8, top, 0.4, 2.2, "", color=2)
        sketch.tensor(
            17, top, 9.5, 2.2, f"{name} in fp32, 1,024 bytes", color=row, kept=False
        )
        sketch.arrow((7.9, top + 1.1), (16.6, top + 1.1))
        sketch.text(12.2, top + 0.3, "look up", quiet=True)
        sketch.arrow((27, top + 1.1), (33.6, top + 1.1))
        sketch.text(30.2, top + 0.3, "nearest", quiet=True)
    sketch.text(0, 9.8, "256 bytes and a scale of 4, each", align="left", quiet=True)
    sketch.text(21.7, 5.4, "with the gradient: a step", quiet=True)
    return sketch.figure


course.show(
    one_step,
    "Figure 2. The moments of one block: filled stays, "
    "dashed lives for one matrix's update.",
)

# %% [markdown]
# ## 3. Prove it
# The claim is *approximate*. So: our maps are the right maps, each rounding stays within its bound, our steps are the
# package's bit for bit and bitsandbytes' nearly, and the bytes are counted.

# %%
eight_losses, ours, optimizer = train(lambda w: AdamW8(w, **SETTINGS))
_, packages, _ = train(lambda w: reference.AdamW8bit(w, **SETTINGS), steps=20)
_, twenty, _ = train(lambda w: AdamW8(w, **SETTINGS), steps=20)
for levels, signed in zip(MAPS, (True, False), strict=True):
    assert torch.equal(levels, reference.dynamic_levels(signed))
    assert torch.equal(levels, bnb.functional.create_dynamic_map(signed))
assert all(map(torch.equal, twenty, packages))

kept = sum(
    part.nbytes for packed in optimizer.moments for moment in packed for part in moment
)
assert kept == sum(weight.numel() for weight in ours) * (2 + 8 / 256)

codes, scales = pack(v, MAPS[1])
moved = (unpack(codes, scales, MAPS[1]) - v).abs() / v
for decade, bound in ((1, 4.5 / 128), (2, 4.5 / 64), (3, 4.5 / 32)):
    worst = (
        moved[(shares > 10.0**-decade) & (shares <= 10.0 ** (1 - decade))].max().item()
    )
    print(
        f"decade {decade} below the block's largest: "
        f"moved by {worst:.2%} of itself at most, bound {bound:.2%}"
    )
    assert worst < bound

# %% [markdown]
# bitsandbytes has no kernel for this on a CPU: it unpacks, updates and packs in torch, and finds codes in a table of
# 65,536 places. So an entry's width, $2^{-15}$ of the scale, may lie between its rounding and ours.


# %%
def of_bnb(weights, **settings):
    # section 6 says why
    return bnb.optim.AdamW8bit(weights, min_8bit_size=256, **settings)


theirs_losses, _, _ = train(lambda w: of_bnb(w, **SETTINGS))
_, first, one = train(lambda w: AdamW8(w, **SETTINGS), steps=1)
_, their_first, their_one = train(lambda w: of_bnb(w, **SETTINGS), steps=1)
for weight, mine, packed in zip(their_first, first, one.moments, strict=True):
    assert torch.allclose(weight, mine, rtol=0, atol=1e-6)
    for number, ((codes, scales), levels) in enumerate(
        zip(packed, MAPS, strict=True), start=1
    ):
        state = their_one.state[weight]
        assert torch.equal(scales.flatten(), state[f"absmax{number}"])
        their_codes = state[f"state{number}"].view(-1, 256)
        apart = (
            unpack(codes, scales, levels) - unpack(their_codes, scales, levels)
        ).abs()
        neighbours = (codes.int() - their_codes.int()).abs() <= 1
        assert (neighbours | (apart <= 2**-15 * scales)).all()


def final(losses):
    return losses[-20:].mean().item()


print(
    f"loss: {final(exact_losses):.4f} in 32 bits, {final(eight_losses):.4f} ours, "
    f"{final(theirs_losses):.4f} theirs"
)
assert abs(final(eight_losses) - final(exact_losses)) < 0.03
assert abs(final(theirs_losses) - final(exact_losses)) < 0.03

# %% [markdown]
# **Which device does what.** On a CUDA card one kernel does it all. We have read its source, but we have not run it. It
# differs from the CPU in three places:
#
# - *Rounding.* The kernel takes the nearest level. But a negative $m$ that would become zero goes to the level below,
#   so it keeps its sign. Our `pack` does the same. A CPU's table has no entry for zero, so even zero becomes a small
#   number.
# - *Weight decay.* The kernel shrinks the weight after the step. A CPU does so before it, like torch and ours.
# - *A gradient that is not finite.* The kernel sets both moments of that one weight to zero and leaves the weight as it
#   is. On a CPU the scale of its block becomes infinite, and after the next step all 256 weights of it are `nan`.

# %%
x = torch.zeros(1, 256)
x[0, :3] = torch.tensor([1, -1e-7, 1e-7])  # the first is the block's largest
on_a_card = unpack(*pack(x, MAPS[0]), MAPS[0])[0]
codes, scales = torch.ops.bitsandbytes.quantize_blockwise(x, MAPS[0], 256)
at_cpu = unpack(codes, scales[:, None], MAPS[0])[0]
for name, found in (("as on a card", on_a_card), ("on a CPU", at_cpu)):
    print(
        f"{name:13} -1e-07 becomes {found[1]:.1e}, 1e-07 {found[2]:.1e}, "
        f"and 0 {found[3]:.1e}"
    )
assert on_a_card[1:4].tolist() == [MAPS[0][MAPS[0] < 0].max(), 0, 0]
assert at_cpu.abs().min() > 1e-5

# %% [markdown]
# ## 4. What it costs
# **Time.** More work for each number, and fewer bytes to read: on a card these nearly cancel. torchtune measured 4.7 %
# fewer tokens a second, and 19.6 % less memory (all weights of Llama-3.2-3B, A100). On a CPU, without a kernel, it
# costs more. Our benchmark trains a copy of whole blocks, as an adapter is too small to show anything:

# %%
step_of = "peft=side_network attention=best precision=best gradient_checkpointing=true"
course.on_a_gpu("adamw_8bit", off=step_of, on=f"{step_of} optimizer=adamw_8bit")

# %% [markdown]
# **Quality.** SmolLM2-135M by LoRA, 20 steps on real rows, three seeds, loss on held-out rows:

# %%
runs = [
    run
    for run in (results.study("quality") or {}).get("runs", ())
    if run["case"] in ("fp32", "adamw_8bit")
]
print(tables.quality(runs) if runs else "no committed results beside this package")

# %% [markdown]
# A ten-thousandth of loss, where the seeds lie 0.03 apart; nothing else in this course that rounds is so cheap. (4 % of
# the weights, thin matrices of keys and values, kept 32 bits.) But 20 steps cannot show everything. $v$ moves slowly.
# If gradients shrink to a tenth, it falls by 0.1 % a step, and after 3,000 steps is at $0.01 + 0.99 \cdot 0.999^{3000}
# = 0.06$ of what it was. Predict it in 8 bits, if half of a block shrinks. (Levels near the top lie 0.7 % apart.)

# %%
falls, levels = torch.arange(256) % 2 == 0, MAPS[1]


def after_3000(pack, noise):
    """The mean second moment of what fell, in 32 bits and in 8: at first it was 1."""
    exact, packed = torch.ones(1, 256), pack(torch.ones(1, 256), levels)
    for _ in range(3000):
        squares = (
            torch.where(falls, 0.1, 1.0)
            * (torch.randn(256) if noise else torch.ones(256))
        ) ** 2
        exact = 0.999 * exact + 0.001 * squares
        packed = pack(0.999 * unpack(*packed, levels) + 0.001 * squares, levels)
    return exact[0, falls].mean().item(), unpack(*packed, levels)[
        0, falls
    ].mean().item()


stuck, noisy = after_3000(pack, noise=False), after_3000(pack, noise=True)
for kind, (exact, eight_bits) in (("steady", stuck), ("noisy", noisy)):
    print(f"{kind:6} gradients: {exact:.3f} in 32 bits, {eight_bits:.3f} in 8")
assert abs(stuck[0] - 0.059) < 0.001
assert stuck[1] == 1
assert noisy[1] > 4 * noisy[0]

# %% [markdown]
# It does not fall at all: 0.1 % is less than half a level, so every step rounds back to where it was. Noise helps a
# little. Such weights take steps that are too short, and no message says so. (If the whole block shrinks, its scale
# falls, and all is well.) Papers on fewer bits call it swamping, or staleness; exercise 3 is a cure. Our run has 42
# steps, three times 14, too few for it to matter.
#
# ## 5. The production switch

# %%
print("--set tricks.optimizer=adamw_8bit")
print(diff(resolve(before, T4), resolve(after, T4)))

# %%
course.show_bill(before, after)
first, second = course.bill(before), course.bill(after)
assert {line.name for line in first.lines if line not in second.lines} == {
    "optimizer states"
}

# %% [markdown]
# One row changed: 64 MiB of 86, 1.2 % of the peak. LoRA had taken the rest three lessons ago, as 11 million numbers
# learn in place of 1,236. Now the same switch where all weights learn, at three moments of a step:

# %%
MOMENTS = "log-softmax", "embedding", "optimizer step"
plain, eight = (
    {moment.name: moment.bytes for moment in course.bill(recipe).moments}
    for recipe in (full, full_8bit)
)
for name in MOMENTS:
    change = (eight[name] - plain[name]) / MIB
    print(
        f"{name:16}{plain[name] / MIB:10,.1f}{eight[name] / MIB:10,.1f}"
        f"{change:+11,.1f} MiB"
    )
embedding = find_shape(full.model).embedding_weights
print(
    f"missing {missing['all weights'] / MIB:,.1f} MiB, "
    f"the embedding {embedding * (6 - 8 / 256) / MIB:,.1f}"
)
assert abs(missing["all weights"] / (embedding * (6 - 8 / 256)) - 1) < 0.001
assert {plain[name] - eight[name] for name in MOMENTS} == {
    states(full) - states(full_8bit)
}

# %% [markdown]
# The states fall by 5,539 MiB at every moment, and nothing else changes: transformers' default, the fused AdamW, makes
# nothing large in its step either. (`torch.optim.AdamW` without `fused=True` does: on a card it uses *foreach*, which
# makes the square roots of all $v$ at once, 4 bytes a weight, here another 4,714 MiB.) The peak is at the loss, and its
# 18.0 GiB are too many.
#
# And here is who kept 32 bits. transformers asks bitsandbytes to leave every *embedding* alone: rare words make its
# gradients uneven, and the paper found that unstable. And bitsandbytes leaves alone what has fewer than 4,096 elements,
# here the norms. (Our bill takes the two norms of a block for one tensor, and so forgets 0.4 MiB of it.)

# %%
course.show(
    course.staircase("optimizers"),
    "Figure 3. The bill so far: with LoRA this step is hardly one.",
)

# %% [markdown]
# ## 6. Where it breaks
# **`nan`, some thirty steps into the run.** Somebody took even levels for $v$, as int8 does for weights. In section 2
# they made zeros of 6 % of the second moments. Predict: what does AdamW do with $\sqrt{0}$?

# %%
straight = torch.linspace(-1, 1, 255), torch.linspace(0, 1, 256)
losses, _, _ = train(lambda w: AdamW8(w, **SETTINGS, maps=straight), steps=40)
print("even levels for both:", " ".join(f"{loss:.3g}" for loss in losses[::5].tolist()))
halfway, _, _ = train(lambda w: AdamW8(w, **SETTINGS, maps=(straight[0], MAPS[1])))
print(
    f"even levels for m alone: {final(halfway):.4f}; the dynamic map for both: "
    f"{final(eight_losses):.4f}"
)
assert not losses[-1] < 100
assert final(halfway) < final(exact_losses) + 0.05

# %% [markdown]
# Cause: in its next step such a $v$ is $(1 - \beta_2)\, g^2$ and nothing more. With a steady gradient the weight soon
# moves $\frac{1}{\sqrt{1 - \beta_2}} = 32$ times too far; and where the next $g$ happens to be zero, by $m / \epsilon$,
# which can be any number. (Here $m$ itself does not mind even levels.) The cure is the dynamic map. But it ends, too:
# below $1.6 \cdot 10^{-7}$ of the block's largest $v$, so for gradients some 2,500 times smaller. See both cliffs:

# %%
sizes = torch.logspace(-5, 0, 256)


def last_step(make, steps=100):
    """How far each of 256 weights went in the last step, in learning rates. Its
    gradient is always the same."""
    optimizer = make([weight := torch.zeros(256, requires_grad=True)])
    for _ in range(steps):
        start, weight.grad = weight.detach().clone(), sizes.clone()
        optimizer.step()
    return start - weight.detach()


dynamic = last_step(lambda w: AdamW8(w, lr=1.0))
linear = last_step(lambda w: AdamW8(w, lr=1.0, maps=(MAPS[0], straight[1])))
on_cpu = last_step(lambda w: of_bnb(w, lr=1.0, weight_decay=0.0))
too_far = ((1 - 0.999**100) / (1 - 0.999)) ** 0.5
for steps, floor in ((dynamic, MAPS[1][1] / 2), (linear, straight[1][1] / 2)):
    assert steps[sizes < 0.99 * floor**0.5].median() > 0.9 * too_far
    assert steps[sizes > 1.01 * floor**0.5].max() < 1.5


# %% Draw figure 4 tags=["hide-input"]
def cliffs(theme: Theme):
    """A weight's step against its gradient's share of the block's largest."""
    drawn, axes = course.figure(height=3.0)
    named = (
        ("dynamic map", dynamic),
        ("even levels", linear),
        ("bitsandbytes on a CPU", on_cpu),
    )
    for (name, steps), color in zip(named, theme.series, strict=False):
        axes.plot(sizes, steps, color=color, label=name)
    axes.axhline(1, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1.2e-5, 1.15, "32 bits", color=theme.quiet)
    axes.set(
        xlabel="gradient, over the largest of its block",
        ylabel="step, in learning rates",
    )
    axes.set(xscale="log", yscale="log")
    axes.grid(axis="y")
    axes.legend(loc="lower right")
    return drawn


course.show(
    cliffs,
    "Figure 4. After 100 equal gradients 32-bit AdamW moves every weight by one "
    "learning rate. Left of its cliff a map "
    "moves them ten times as far, on the way to 32; "
    "a CPU's table hardly moves them at all.",
)

# %% [markdown]
# On a CPU bitsandbytes errs the other way: its table rounds small $v$ *up*. So a test on a CPU says nothing about the
# cliff on a card. Cures: a larger $\epsilon$, 32 bits for that tensor, or levels without a zero (exercise 2).
#
# **No message, and states as large as before.** `adamw_8bit` was asked for, but the tensors are small. Ask the states
# for their dtype. Cure: `min_8bit_size`; transformers does not pass it on, so make the optimizer yourself.

# %%
for least in (4096, 256):  # the first is the default
    # LoRA's A at rank 1
    thin = [nn.Parameter(torch.zeros(1, 2048)), nn.Parameter(torch.zeros(1, 8192))]
    asked = bnb.optim.AdamW8bit(thin, min_8bit_size=least)
    for weight in thin:
        weight.grad = torch.ones_like(weight)
    asked.step()
    print(
        f"from {least:5,} elements:",
        {weight.numel(): asked.state[weight]["state1"].dtype for weight in thin},
    )
    assert asked.state[thin[0]]["state1"].dtype == (
        torch.float32 if least == 4096 else torch.uint8
    )

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** With $r = 1$ our adapters are 16 times smaller, and many of their tensors have fewer than 4,096
#    elements. How many bytes do the optimizer states take under `adamw_8bit`? Your answer is a number of bytes. (In
#    each of 16 blocks, widths 2,048, 512 and 8,192: q and o go from 2,048 to 2,048, k and v from 2,048 to 512, gate and
#    up from 2,048 to 8,192, down back.)
# 2. **Build.** Fill in `pack_above_zero(x, levels)`. It does what `pack` does, but a number above zero never gets
#    zero's code. It is for $v$ alone, so no number is negative, and `levels[0]` is zero. Return what `pack` returns:
#    codes (uint8) and scales (fp32), of shapes (blocks, 256) and (blocks, 1).
# 3. **Reach.** Fill in `pack_by_dice(x, levels)`, with the same inputs and outputs. For each number draw at random to
#    which of the two levels beside it it goes, such that the mean over many draws is the number itself. Then $v$ falls
#    as it should; what does the randomness cost?

# %% tags=["exercise"]
bytes_at_rank_1 = None


def pack_above_zero(x, levels):
    """FILL ME IN: return codes and scales, as `pack` does."""


def pack_by_dice(x, levels):
    """FILL ME IN: return codes and scales, as `pack` does."""


# %% Check the exercises tags=["hide-input"]
PAIR = (
    "a function (x, levels) -> codes, uint8 of shape (blocks, 256), and scales, "
    "fp32 of shape (blocks, 1)"
)


def answered(answer, x, levels):
    """Return a reader's codes and scales, after a check of their dtypes and shapes."""
    if (found := answer(x.clone(), levels)) is None:
        raise NotImplementedError
    codes, scales = found
    right_codes, right_scales = pack(x, levels)
    assert codes.dtype == torch.uint8, (
        f"codes are bytes (torch.uint8), and yours are {codes.dtype}"
    )
    for name, mine, right in (
        ("codes", codes, right_codes),
        ("scales", scales, right_scales),
    ):
        assert mine.shape == right.shape, (
            f"your {name} have shape {tuple(mine.shape)}, pack's {tuple(right.shape)}"
        )
    assert torch.equal(scales, right_scales), (
        "each block keeps its own scale, its largest number, as in pack"
    )
    return codes, scales


def of_above_zero(answer):
    # of three blocks; the last is all zeros
    ends = torch.tensor([1.0, 1e-4, 0.0])[:, None]
    x = torch.cat([torch.zeros(56), torch.logspace(-12, 0, 200)]) * ends
    for levels in (MAPS[1], torch.linspace(0, 1, 256)):
        codes, _ = answered(answer, x, levels)
        plain, _ = pack(x, levels)
        assert not codes[x == 0].any(), "zero itself must keep zero's code"
        assert codes[x > 0].all(), "some number above zero still has zero's code"
        assert torch.equal(codes[plain > 0], plain[plain > 0]), (
            "all other numbers go to the nearest level, as in pack"
        )
        assert (codes[(x > 0) & (plain == 0)] == 1).all(), (
            "the smallest numbers take the lowest level above zero"
        )


def of_dice(answer):
    torch.manual_seed(3)
    levels = MAPS[1]
    x = torch.stack(
        [
            torch.logspace(-5, 0, 256),
            1e-4 * torch.logspace(-5, 0, 256).flip(0),
            torch.zeros(256),
        ]
    )
    tried = torch.stack(
        [unpack(*answered(answer, x, levels), levels) for _ in range(1000)]
    )
    scales = pack(x, levels)[1]
    gaps = (
        levels.diff()[
            (torch.bucketize(x / scales.clamp(min=1e-38), levels) - 1).clamp(0, 254)
        ]
        * scales
    )
    assert not tried[:, 2].any(), "a block of zeros stays zero"
    assert ((tried - x).abs() <= 1.001 * gaps).all(), (
        "a number may only go to one of the two levels beside it"
    )
    assert ((tried.mean(0) - x).abs() <= 0.1 * gaps).all(), (
        "the mean of many draws is not the number; the nearer a level is, "
        "the more often it must be drawn"
    )
    alike = torch.full((1, 256), (levels[200] + levels[201]) / 2)
    alike[0, 0] = 1
    found = answered(answer, alike, levels)[0][0, 1:]
    assert found.unique().numel() == 2, (
        "equal numbers of a block all went the same way: each needs a draw of its own"
    )


course.check(
    1,
    bytes_at_rank_1,
    course.about(
        3_289_088,
        "which of the 14 tensors of a block have 4,096 elements or more? Only those "
        "have 8-bit states",
        within=1e-9,
        mistakes={
            704_512 * (2 + 8 / 256): "not all states are 8-bit: "
            "tensors with fewer than 4,096 elements keep 32 bits",
            704_512 * 8: "some tensors do have 4,096 elements or more, "
            "and their states are 8-bit",
            8 * 311_296
            + 2 * 393_216: "8-bit states also need a scale of 4 bytes for every 256 "
            "numbers of a moment",
            4 * 311_296
            + (2 + 8 / 256)
            * 393_216: "AdamW keeps two moments, also where they have 32 bits",
            3_289_088 / 16: "that is for one block, and there are 16",
        },
    ),
    "a number of bytes, of all states of all 16 blocks",
)
course.check(2, pack_above_zero, of_above_zero, PAIR)
course.check(3, pack_by_dice, of_dice, PAIR)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# large, all_of_them = 16 * 3 * 8192, 704_512  # B of gate and up, A of down
# bytes_at_rank_1 = 8 * (all_of_them - large) + int(large * (2 + 8 / 256))
#
#
# def pack_above_zero(x, levels):
#     codes, scales = pack(x, levels)
#     return torch.where(x.reshape(-1, 256) > 0, codes.clamp(min=1), 0), scales
#
#
# def pack_by_dice(x, levels):
#     _, scales = pack(x, levels)
#     shares = x.reshape(-1, 256) / scales.clamp(min=1e-38)
#     below = (torch.bucketize(shares, levels, right=True) - 1).clamp(max=254)
#     up = torch.rand(shares.shape) < (shares - levels[below]) / levels.diff()[below]
#     return (below + up).to(torch.uint8), scales
#
#
# # 8 bits fall as 32 do; but a single v is now noisier than before
# print(after_3000(pack_by_dice, noise=False))
# ```
#
# </details>
#
# ## In one breath
# - **Saves** three quarters of AdamW's states, 8 bytes a trained weight $\to$ 2.03; not of embeddings, not of tensors
#   below 4,096 elements.
# - **Costs** a rounding of both moments in every step: 0.0001 of loss after 20 steps of LoRA.
# - **Approximate**: a $v$ in its block's top decade moves by at most 3.5 % of itself, in each decade below by twice as
#   much.
# - **When**: most weights train. Then states are the largest row that is not the weights' own.
# - **When not**: an adapter of some millions of numbers (it costs next to nothing, and saves as little); long runs with
#   $\beta_2$ near 1, unless you compare.
#
# ## Sources
# - Dettmers et al. 2021, *8-bit Optimizers via Block-wise Quantization*, arXiv 2110.02861, section 2, appendix F.1.
#   Dettmers 2015, arXiv 1511.04561, section 2.3 (the dynamic map). Loshchilov and Hutter 2019, arXiv 1711.05101.
# - Xu et al. 2025, arXiv 2505.00347 (swamping); Topollai and Choromanska 2026, arXiv 2603.16731 (staleness). Li et al.
#   2023, *Memory Efficient Optimizers with 4-bit States*, arXiv 2309.01507 (levels without a zero).
# - torchtune's README, "Optimization flags". bitsandbytes 0.50: `optim/optimizer.py` (`min_8bit_size`),
#   `backends/cpu/ops.py`; its repository's `csrc/cpu_ops.cpp` (the table) and `csrc/kernels.cu` (the kernel:
#   `kOptimizerStatic8bit2StateBlockwise`, read at version 0.50.1). transformers 5.23: `trainer.py`
#   (`create_optimizer`, embeddings), `trainer_optimizer.py`.
# - Ours: `cria_tricks/tricks/adamw_8bit.py`, `tests/tricks/test_adamw_8bit.py`.
