# ---
# jupyter:
#   question: Can a T4 train all weights of Llama-3.2-1B, and can a card of 4 GiB train adapters of an 8B model?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # All weights, and weights that are elsewhere
# > **Promise.** LoRA is not enough for you, and full fine-tuning of Llama-3.2-1B ends in `CUDA out of memory`: it takes
# > 20.4 GiB, and a T4 has 14.7. You will free each gradient as soon as its weight has taken a step, which with 8-bit
# > AdamW gets it to 11.3. Then you keep the frozen blocks of an 8B model in host memory, so that a card of 4 GiB trains
# > its adapters on short rows.
# >
# > **Card.** saves the gradients of all weights but the largest; the frozen weights of all blocks but two / costs PCIe
# > traffic and host memory, and rules out gradient accumulation and clipping by the norm of all gradients /
# > exact, bit for bit, except fp16 steps that overflow / about 25 minutes / after [a full card](a_full_card.py)
#
# So far the job trained 11 million adapter weights, and the 1.24 billion others were frozen. Now all weights
# train first, and then the frozen weights leave the card. All bytes and seconds are predicted, because no T4 has run
# these jobs yet.

# %% Imports and settings tags=["hide-input"]
import copy

from cria_tricks import BadInput, course, recipes
from cria_tricks.course import (
    CARDS,
    COLAB,
    T4,
    Target,
    Theme,
    capacity,
    diff,
    find_shape,
    folds,
    host_bill,
    one_by_one,
    peak_bytes,
    resolve,
    with_settings,
)
from cria_tricks.techniques import optimizer_in_backward, stream_layers

KIB, MIB, GIB = 2**10, 2**20, 2**30


def refusal(recipe, setting):
    """Return the line that refuses a setting."""
    try:
        resolve(with_settings(recipe, [setting]), T4)
    except BadInput as error:
        return str(error)
    raise AssertionError(f"{setting} is not refused")


# %% [markdown]
# ## 1. The bill
# We train all 1.24 billion weights of Llama-3.2-1B on one row of 1,024 tokens. (With 2,048 it would be tight on a T4.)
# [Mixed precision](mixed_precision.py) in fp16, [sdpa](flash_attention.py) and
# [checkpointing](gradient_checkpointing.py) are on. Here weights that train are stored in fp32, 4 bytes each, and so
# are their gradients and the two [optimizer states](../docs/glossary.md#adamw) of AdamW. How many GiB are weights,
# gradients and states together?

# %% Your guess: GiB of weights, gradients and states tags=["predict"]
guess = 0  # @param {type:"number"}

# %% The job, and four ways to train it tags=["hide-input"]
settings = [
    "tricks.gradient_accumulation=1",
    "data.max_length=1024",
    "tricks.attention=sdpa",
    "tricks.expand_kv=true",
    "tricks.gradient_checkpointing=true",
    "tricks.precision=fp16",
]
full = with_settings(course.so_far("the_bill"), settings)
smaller_states = ["tricks.optimizer=adamw_8bit"]
no_gradients = ["tricks.optimizer_in_backward=true", "train.max_grad_norm=0"]
ways = {
    "plain": full,
    "8-bit AdamW": with_settings(full, smaller_states),
    "steps in the backward pass": with_settings(full, no_gradients),
    "both": with_settings(full, smaller_states + no_gradients),
}
llama = find_shape(full.model)

# %%
course.reveal(guess, 16 * llama.weights / GIB, "GiB")
for line in course.bill(full).lines:
    print(f"{line.name:28}{line.bytes / MIB:8,.0f} MiB")
print()
for name, recipe in ways.items():
    found = course.bill(recipe)
    print(f"{name:28}{found.peak_bytes / GIB:5.1f} GiB at the peak, needs", end=" ")
    # with CUDA's own memory, and then with what the allocator may reserve as well
    low, high = found.least_bytes / GIB, found.needed_bytes / GIB
    print(f"{low:.1f} to {high:.1f}: {found.verdict}")

# %% [markdown]
# The peak of the plain step is at the end of the backward pass, when all gradients exist and no activations are left.
# [8-bit AdamW](optimizers.py) shrinks the optimizer states from 9,429 to 3,889 MiB (those of the embedding stay in
# fp32). A gradient is needed only until its weight has taken a step. So `optimizer_in_backward` lets each weight take
# its step when its gradient arrives, and frees the gradient. It needs `train.max_grad_norm=0`, which means no clipping;
# section 6 shows why.
#
# Added to the plain step, steps in the backward pass save 3.6 GiB (20.4 to 16.8), and not 4.6, because the embedding's
# gradients stay (deeper part). Without them, "both" would take 15.0 GiB instead of 11.3. So without
# [paging](optimizers.py) only both together fit a T4, with 13.9 of 14.7 GiB.


# %% Check the numbers of the text tags=["hide-input"]
peaks = [course.bill(recipe).peak_bytes / GIB for recipe in ways.values()]
assert [f"{peak:.1f}" for peak in peaks] == ["20.4", "15.0", "16.8", "11.3"]
states = (
    line.bytes for line in course.bill(ways["both"]).lines if "states" in line.name
)
assert round(sum(states) / MIB) == 3889
longer = course.bill(with_settings(ways["both"], ["data.max_length=2048"]))
assert longer.verdict == "tight"
fits = [course.bill(recipe).fits for recipe in ways.values()]
assert fits == [False, False, False, True]


# %% Draw figure 1 tags=["hide-input"]
def four_bills(theme: Theme):
    """The peak of each way, by kind of line."""
    # what is left, a batch of 1 MiB, cannot be seen, so it has no name in the legend
    kinds = {
        "weights": (("weights",), theme.series[0]),
        "optimizer states": (("optimizer",), theme.series[3]),
        "gradients": (("gradients", "embedding"), theme.quiet),
    }
    drawn, axes = course.figure(height=2.6)
    for place, recipe in enumerate(ways.values()):
        left, rest = 0.0, list(course.bill(recipe).lines)
        for starts, color in kinds.values():
            taken = [line for line in rest if line.name.startswith(starts)]
            rest = [line for line in rest if line not in taken]
            size = sum(line.bytes for line in taken) / GIB
            axes.barh(place, size, left=left, color=color, height=0.66)
            left += size
        left += sum(line.bytes for line in rest) / GIB
        assert sum(line.bytes for line in rest) < 2 * MIB
        axes.text(left, place, f" {left:.1f} GiB", va="center", color=theme.ink)
    for name, (_, color) in kinds.items():
        axes.barh(0, 0, color=color, label=name)
    axes.set_yticks(range(len(ways)), ["plain", "8-bit AdamW", "early steps", "both"])
    axes.set(xlabel="peak of a step, GiB", xlim=(0, 24), ylim=(len(ways) - 0.4, -1.2))
    capacity(axes, theme)
    axes.grid(axis="x")
    drawn.legend(loc="outside lower center", ncols=3, fontsize=8)
    return drawn


course.show(
    four_bills,
    "Figure 1. Predicted peaks: either change alone leaves the step too large for a "
    "T4, and both together fit. (Early steps are those in the backward pass. The "
    "batch, 1 MiB, cannot be seen.)",
)

# %% [markdown] tags=["deep"]
# ### Deeper: why only 3.6 of 4.6 GiB are saved
# The gradients of all weights take 4.6 GiB, but freeing them lowers the peak by only 3.6. In this model one matrix of
# 1,002 MiB is both embedding and head. Each of its two uses gives a gradient, and their sum is a third tensor of that
# size. All three exist for a moment, with the switch as well. (Two of them are in the line of 2,012 MiB, with 8 MiB for
# the gradient of the embedding's output.) So you save the gradients of all *other* weights.

# %% tags=["deep"]
gain = course.bill(full).peak_bytes
gain -= course.bill(ways["steps in the backward pass"]).peak_bytes
print(f"all gradients {4 * llama.weights / GIB:.1f} GiB, saved {gain / GIB:.1f}")
assert gain == 4 * (llama.weights - llama.vocabulary * llama.width)

# %% [markdown]
# ## 2. From scratch, in two parts
# **A step for each gradient.** A [hook](../docs/glossary.md#hook) is a function that torch calls at a certain moment.
# This hook is called when the gradient of a *weight* is complete, which is here one parameter of torch, such as a
# matrix. At that moment no other weight has a gradient, so `optimizer.step()` updates this weight alone.

# %%
import torch
import torch.nn.functional as F
from torch import nn


def tiny():
    """A model whose embedding is also its head."""
    torch.manual_seed(0)
    layers = [nn.Embedding(512, 32), nn.Linear(32, 128), nn.Tanh()]
    layers += [nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 32)]
    model = nn.Sequential(*layers, nn.Linear(32, 512, bias=False))
    model[-1].weight = model[0].weight
    return model


def step_in_backward(model, optimizer):
    def step(weight):
        optimizer.step()  # looks at all weights, and skips those without a gradient
        weight.grad = None  # frees the gradient

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)


model, ids = tiny(), torch.arange(9)
step_in_backward(model, torch.optim.AdamW(model.parameters(), fused=True))
F.cross_entropy(model(ids[:-1]), ids[1:]).backward()  # and no optimizer.step()
assert all(weight.grad is None for weight in model.parameters())

# %% [markdown]
# **Two slots.** The [host](../docs/glossary.md#host) is the computer around the card, with memory of its own. A frozen
# weight never changes, so it can stay on the host and be copied to the card when it is needed.
#
# We keep all blocks on the host, and make room for two of them on the card, the *slots*. Block $i$ always comes into
# slot $i \bmod 2$. Before a block runs, a hook fetches the block that runs next, over the one that has just finished.
# In the forward pass this is the next higher number. With checkpointing each block runs again just before its own
# backward pass, from the last block to the first, so there it is the next lower number.
#
# No card is needed: here the slots are in ordinary memory, but copies and order are the same. On a card a copy must
# also wait for its slot, and a block for its copy. The package does both, and [an
# H200](../docs/benchmarks.md#a-first-sitting-on-an-h200) computed the same bits, in blocks of 16 MiB.

# %%
L, D = 6, 64  # blocks, width


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, 4 * D, bias=False).requires_grad_(False)
        self.down = nn.Linear(4 * D, D, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(D, D, bias=False)  # it trains, so it stays on the card

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x))) + self.adapter(x)

    def frozen(self):
        return self.up.weight, self.down.weight


class TwoSlots:
    """Fetches the frozen weights of each block from the host, one block ahead."""

    def __init__(self, blocks):
        self.host = []
        for block in blocks:
            self.host.append(torch.cat([weight.flatten() for weight in block.frozen()]))
        self.slots = [torch.empty_like(self.host[0]) for _ in range(2)]
        self.here = [None, None]  # the number of the block in each slot
        self.running, self.fetched = -1, 0
        for number, block in enumerate(blocks):
            sizes = [weight.numel() for weight in block.frozen()]
            places = self.slots[number % 2].split(sizes)
            for weight, place in zip(block.frozen(), places, strict=True):
                weight.data = place.view_as(weight)  # no memory of its own
            block.register_forward_pre_hook(
                lambda *_, number=number: self.enter(number)
            )

    def enter(self, number):
        if number == self.running:
            return  # a backward pass, or the next forward pass, begins with this block
        # the numbers rise in a forward pass, and fall in a backward pass
        ahead = number + 1 if number > self.running else number - 1
        self.running = number
        self.fetch(number)  # it is here already, unless it is the very first block
        # Into the slot of the block that has just run. On a card a second stream copies
        # it while this block runs.
        self.fetch(ahead)

    def fetch(self, number):
        slot = number % 2
        if 0 <= number < len(self.host) and self.here[slot] != number:
            self.slots[slot].copy_(self.host[number])
            self.here[slot] = number
            self.fetched += 1


# %% [markdown]
# ## 3. Prove it
# **Steps in the backward pass.** We train the small model for three steps, plainly and with hooks. The weights must be
# equal bit for bit. Then we count the bytes that are alive at the peak, in addition to weights and optimizer states.
# The plain step holds the gradients of all $P$ weights, and two more tensors as large as the embedding. With hooks only
# three tensors of this size should be left: the two gradients of the shared matrix, and their sum.


# %%
def made(hooked):
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if hooked:
        step_in_backward(model, optimizer)
    return model, optimizer


def train(hooked):
    """The weights after three steps, and the peak of the last step in bytes."""
    model, optimizer = made(hooked)

    def one_step():
        F.cross_entropy(model(ids[:-1]), ids[1:]).backward()
        optimizer.step()  # with hooks there is nothing left to update
        optimizer.zero_grad()

    one_step()
    one_step()  # the states exist now
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    peak = peak_bytes(one_step, alive=[ids, *model.parameters(), *states])
    return [weight.detach() for weight in model.parameters()], peak


plain, plain_peak = train(hooked=False)
ours, our_peak = train(hooked=True)
assert all(map(torch.equal, plain, ours))
P, tied = sum(weight.numel() for weight in plain), plain[0].numel()
print(f"plain: predicted {4 * (P + 2 * tied):,} bytes, counted {plain_peak:,}")
print(f"ours:  predicted {4 * 3 * tied:,} bytes, counted {our_peak:,}")
assert plain_peak == 4 * (P + 2 * tied) + 8  # and the loss with its gradient
assert our_peak == 4 * 3 * tied + 8

# %% [markdown]
# **Two slots.** We run the same blocks twice, once with all weights resident on the card and once streamed. Losses and
# gradients must be equal bit for bit. How many blocks does the second pass fetch? When it begins, the first two blocks
# are still in the slots, and when its backward pass begins, the last two are. So it fetches $L - 2$ blocks forward and
# $L - 2$ backward. (The first pass begins with empty slots, so it fetches two more.)

# %% Helper: one pass through all blocks tags=["hide-input"]
from torch.utils.checkpoint import checkpoint


def one_pass(blocks, run):
    """Return the loss and the adapters' gradients."""
    torch.manual_seed(2)
    x = torch.randn(8, D)
    for block in blocks:
        x = run(block, x)
    loss = x.square().mean()
    return loss.detach(), *torch.autograd.grad(
        loss, [block.adapter.weight for block in blocks]
    )


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


# %%
torch.manual_seed(1)
resident = nn.ModuleList(Block() for _ in range(L))
streamed = copy.deepcopy(resident)
slots = TwoSlots(streamed)
for _ in range(2):
    before = slots.fetched
    expected = one_pass(resident, checkpointed)
    found = one_pass(streamed, checkpointed)
    assert all(map(torch.equal, expected, found))
    print(f"bits equal; {slots.fetched - before} blocks fetched")
assert slots.fetched - before == 2 * (L - 2)

before = sum(weight.nbytes for block in resident for weight in block.frozen())
after = sum(slot.nbytes for slot in slots.slots)
print(f"frozen weights on the card: {before / KIB:,.0f} KiB resident,", end=" ")
print(f"{after / KIB:,.0f} in two slots")
assert after == before * 2 / L

# %% [markdown]
# ## 4. What it costs
# Steps in the backward pass are the same steps, only earlier. They cost a launch and a check for each weight, which our
# estimate does not count. Streaming copies blocks over PCIe, the *link* between host and card (12.2 GB a second on a
# T4). A copy runs while the card computes, so it costs time only where it takes longer than the computation. The next
# cell predicts both for one row of Llama-3.1-8B with LoRA on a T4: the seconds of all copies in a step, and those of
# everything else. (Middles of ranges, whose high ends are 1.5 times their low ends.)
#
# In 16 bits the card must wait for the copies of short rows, because short rows need little computation. The forward
# pass decides: it has half of the copies, but only about a third of the work (deeper part). With
# [NF4](nf4.py) it does not wait even with 16 tokens. A block has only about a quarter of the bytes,
# and the card must unpack it in each of three passes (forward, again, backward).

# %% Helper: predict copies and computation tags=["hide-input"]
t4, eight = CARDS["t4"], find_shape("llama-3.1-8b")
on = [
    "model=llama-3.1-8b",
    "tricks.gradient_accumulation=1",
    "tricks.stream_layers=true",
]
bits = {
    "16-bit": with_settings(
        course.CAPSTONE,
        [*on, "tricks.quantization=none", "tricks.double_quantization=false"],
    ),
    "NF4": with_settings(course.CAPSTONE, on),
}


def copies_and_work(recipe, tokens):
    """Estimate the seconds of all copies, and of all else."""
    parts = {part.name: part for part in folds.time_of(recipe, eight, t4, tokens).parts}
    copies = parts.pop("fetched blocks").link_bytes / (t4.link_rate * t4.reached.link)
    return copies, sum(part.seconds for part in parts.values())


def forward_pass(recipe, tokens):
    """Estimate the seconds of the copies and of the blocks' work in it."""
    parts = {part.name: part for part in folds.time_of(recipe, eight, t4, tokens).parts}
    spent = {name: part.seconds for name, part in parts.items()}
    copies, _ = copies_and_work(recipe, tokens)
    once, back = one_by_one(folds.step_of(recipe, eight, T4))
    work = spent["blocks forward"] + spent.get("unpacking", 0) / 3
    work += spent["adapter"] / 4 + spent["attention"] * 2 / 9
    work += spent["between products"] * once / (2 * once + back)
    return copies / 2, work


# %%
for name, recipe in bits.items():
    for tokens in (16, 256, 1024):
        copies, work = copies_and_work(recipe, tokens)
        print(f"{name:7}{tokens:5,} tokens: copies {copies:.2f} s,", end=" ")
        print(f"everything else {work:.2f} s")
        assert (copies > work) == (name == "16-bit" and tokens < 1024)


# %% Draw figure 2 tags=["hide-input"]
def timeline(theme: Theme):
    """Five blocks of a forward pass: mean times of a copy and of the work for it."""
    drawn, axes = course.figure(height=3.2)

    def bar(row, left, wide, color, block):
        axes.barh(
            row,
            wide,
            left=left,
            height=0.8,
            color=theme.series[color],
            alpha=0.4,
            edgecolor=theme.ink,
        )
        axes.text(
            left + wide / 2, row, str(block), ha="center", va="center", color=theme.ink
        )

    rows = []
    for case, name in enumerate(bits):
        copies, work = forward_pass(bits[name], 256)
        copies, work = 1000 * copies / (eight.layers - 2), 1000 * work / eight.layers
        # when each block has arrived, and when each has been computed
        here, done = [0.0], [0.0]
        for block in range(5):
            # The next block comes into the slot of the one before, when that one is
            # done and the link is free.
            sends = max(done[-1], here[-1])
            bar(3 * case, sends, copies, 0, block + 1)
            begins = max(done[-1], here[block])
            bar(3 * case + 1, begins, work, 1, block)
            here.append(sends + copies)
            done.append(begins + work)
        rows += [(3 * case, f"{name}: link"), (3 * case + 1, f"{name}: card")]
    axes.set_yticks(*zip(*rows, strict=True))
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds, by estimate")
    axes.grid(axis="x")
    return drawn


course.show(
    timeline,
    "Figure 2. Llama-3.1-8B at 256 tokens on a T4, the first five blocks, predicted: "
    "in 16 bits the card must wait for each block; in NF4 each block arrives in time.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: from how many tokens on the copies are hidden
# The forward pass decides, because it has half of the copies, but only about a third of the work. We take the parts of
# the estimate that are in it. In 16 bits its work hides its copies from about 900 tokens on. (In the totals of a whole
# step they are equal at 524 tokens already, and `cria plan` says 831, because it takes a third of every part.) In NF4,
# unpacking and multiplying take longer than the copies at every length.

# %% tags=["deep"]


def hidden_from(estimate):
    """From how many tokens on the work takes as long as the copies, in 16 bits."""

    def hidden(tokens):
        copies, work = estimate(bits["16-bit"], tokens)
        return copies < work

    return next(tokens for tokens in range(1, 4096) if hidden(tokens))


def in_plan(recipe, tokens):
    """Return what `cria plan` adds for the copies, and almost nothing."""
    parts = folds.time_of(recipe, eight, t4, tokens).parts
    return next(p.seconds for p in parts if p.name == "fetched blocks"), 1e-6


in_forward, in_totals = hidden_from(forward_pass), hidden_from(copies_and_work)
print(f"16-bit: hidden in the forward pass from {in_forward} tokens on,", end=" ")
print(f"in the totals of a step from {in_totals}, in `cria plan` from", end=" ")
print(hidden_from(in_plan))
copies, work = forward_pass(bits["NF4"], 16)
print(f"NF4, forward pass of 16 tokens: copies {copies:.2f} s, work {work:.2f} s")
assert (round(in_forward, -2), in_totals, hidden_from(in_plan)) == (900, 524, 831)
assert work > copies

# %% [markdown]
# ## 5. The production switch
# As plain Hugging Face code, the first switch is one optimizer for each weight, and a hook, for a training loop of your
# own. For the second we give the package's `stream`, because `cpu_offload` of accelerate does not fetch ahead. (The
# printed code only shows the calls, with the learning rate of `full_1b`. An 8B needs NF4 and adapters.)
#
# ```bash
# cria train full_1b
# cria train big_14b
# cria plan kwanzaa --gpu t4 --set model=llama-3.1-8b --set data.max_length=256 \
#     --set tricks.gradient_checkpointing=true --set tricks.stream_layers=true
# ```
#
# `full_1b` has the settings of this lesson, and `big_14b` trains adapters of Qwen3-14B, with its frozen blocks in a
# file. The third command plans the 8B.

# %%
print(optimizer_in_backward.PLAIN, stream_layers.PLAIN)
print(diff(resolve(full, T4), resolve(ways["both"], T4)))  # what the package changes
streaming = with_settings(course.CAPSTONE, ["tricks.stream_layers=true"])
print(diff(resolve(course.CAPSTONE, T4), resolve(streaming, T4)))

# %% [markdown]
# `stream_layers=true` keeps the blocks in [pinned](../docs/glossary.md#pinned-memory) host memory, which the card can
# read directly. `file` keeps them in a file that is read like memory (*memory-mapped*), for a host that is too small.
# What do card and host need for an 8B with rows of 256 tokens, and for a 14B with rows of 2,048? The other switches of
# the course are on, and `card` includes what [the allocator may reserve](a_full_card.py).

# %% Print the bills of four runs tags=["hide-input"]
for model, tokens in (("llama-3.1-8b", 256), ("qwen3-14b", 2048)):
    for stream in ("false", "true", "file"):
        words = [
            f"model={model}",
            f"data.max_length={tokens}",
            f"tricks.stream_layers={stream}",
        ]
        recipe = with_settings(
            course.CAPSTONE, ["tricks.gradient_accumulation=1", *words]
        )
        needed = course.bill(recipe).needed_bytes / GIB
        host = host_bill(Target(find_shape(model), T4, host=COLAB), recipe)
        said = f"host {host.peak.bytes / 1e9:4.1f} GB ({host.verdict} in Colab)"
        print(f"{model:13} stream_layers={stream:6} card {needed:4.1f} GiB, {said}")
        assert model != "llama-3.1-8b" or (needed < 4) == (stream != "false")
    if model == "llama-3.1-8b":  # the numbers of the text
        found = course.bill(with_settings(recipe, ["tricks.stream_layers=true"]))
        stays = [line.bytes for line in found.lines if "all others" in line.name]
        assert f"{sum(stays) / GIB:.1f}" == "2.0"
        assert f"{(found.least_bytes - found.peak_bytes) / GIB:.1f}" == "0.4"
for recipe in (recipes.full_1b(T4), recipes.big_14b(T4)):
    found = course.bill(recipe)
    print(
        f"{recipe.name:7} peak {found.peak_bytes / GIB:4.1f} GiB, "
        f"card {found.needed_bytes / GIB:4.1f}: {found.verdict}"
    )
assert (
    course.bill(recipes.full_1b(T4)).peak_bytes == course.bill(ways["both"]).peak_bytes
)

# %% [markdown]
# With streaming, the 8B needs 3.3 instead of 6.4 GiB, so it fits a card of 4 GiB. (CUDA takes 0.4 of them, and 2.0 are
# embedding and head, which stay on the card.) The 12.7 GB of Colab's machine hold its blocks. The 14B takes half when
# it is streamed, but its blocks are too large for Colab's host, so they need `file`. `big_14b` needs 9.2 GiB, because
# it keeps block inputs for 4 micro-batches (deeper part).

# %% [markdown] tags=["deep"]
# ### Deeper: layer by layer, the optimizer on the host, and relatives
# `big_14b` also sets `tricks.layer_by_layer=true`: all micro-batches of a step go through a block before the next block
# comes, so each pass fetches it once for all of them, and not once for each. The price is that the inputs of all blocks
# are saved for all 4 micro-batches, and so are the outputs of the last block, with their gradients. Together these
# take 3.3 GiB.
#
# **Why not keep the optimizer on the host, too?** DeepSpeed can do that, and the processor takes the step. For each
# weight the host holds an fp32 copy (4 bytes), two states (8) and a gradient (2 or 4). For Llama-3.2-1B this is already
# more than Colab's host has.
#
# **Why not store the weights in bf16, too?** torchtune's settings for one card do so, with paged 8-bit AdamW and steps
# in the backward pass. That takes half of the weights' bytes, but [small updates are lost](mixed_precision.py).
#
# **Relatives**, with the figures of their authors; we measured none of them:
#
# | | instead of AdamW on the card | published |
# |---|---|---|
# | [LOMO](https://arxiv.org/abs/2306.09782) | plain gradient descent | 65B on 8 cards of 24 GB |
# | [BAdam](https://arxiv.org/abs/2404.02827) | one block learns at a time | 8B: 23.5 GB; MT-bench 6.67, LoRA 6.41 |
# | [LISA](https://arxiv.org/abs/2403.17919) | a few random blocks learn at a time | 7B in 24 GB |
# | [GaLore](https://arxiv.org/abs/2403.03507) | states of low rank | states 65.5 % smaller; 7B in 24 GB |
# | [APOLLO](https://arxiv.org/abs/2412.05270) | coarser learning rates | 7B under 12 GB, quantised |
# | [L2L](https://arxiv.org/abs/2002.05645) | steps on the host | 50B on a 16 GB V100, host 512 GB |
# | [ZeRO-Infinity](https://arxiv.org/abs/2104.07857) | steps on the host, states on SSDs | a trillion on one node |
#
# LOMO frees gradients, as this lesson does, and has no optimizer states, while the next four have smaller states. All
# five learn differently from AdamW, so their results differ. The last two methods of the table stream layers.

# %% tags=["deep"]
for model in ("llama-3.2-1b", "llama-3.1-8b"):
    low, high = (
        (4 + 8 + gradient) * find_shape(model).weights / 1e9 for gradient in (2, 4)
    )
    print(
        f"{model}: {low:.0f} to {high:.0f} GB; "
        f"Colab's host has {COLAB.memory_bytes / 1e9:.1f}"
    )
    assert low > COLAB.memory_bytes / 1e9

# %% [markdown]
# ## 6. Where it breaks
# **There is no message, but the model takes twice as many steps.** With [accumulation](gradient_accumulation.py) two
# micro-batches should make one step. But hooks take a step after each micro-batch, because its gradients are freed
# before the next one arrives. The package refuses this.

# %%
for hooked in (False, True):
    model, optimizer = made(hooked)
    for part in (ids[:5], ids[4:]):
        (F.cross_entropy(model(part[:-1]), part[1:]) / 2).backward()
    optimizer.step()
    steps = int(optimizer.state[model[0].weight]["step"])
    print(f"hooks: {hooked}, steps: {steps}")
    assert steps == 1 + hooked
print(refusal(ways["both"], "tricks.gradient_accumulation=8"))

# %% [markdown]
# **Clipping** limits the norm of *all* gradients. This norm is known only when the last gradient has arrived, and by
# then the others are gone. `optimizer_in_backward=clip` limits the gradient of each matrix by itself instead, so its
# results differ.
#
# **All weights become NaN, without a message**, if you use the hook of section 2 with the [loss
# scaler](../docs/glossary.md#loss-scale) of fp16, because the scaler looks for an overflow only after the backward
# pass. The package's switch checks each gradient before its step (deeper part).
#
# **There is no message, but the gradients are wrong**, if blocks are streamed without checkpointing. The loss is right,
# but the backward pass finds the weights of other blocks in the slots. Autograd does not notice, because its version
# check does not follow `.data`.

# %%
loss, *right = one_pass(resident, lambda block, x: block(x))
same_loss, *found = one_pass(streamed, lambda block, x: block(x))
wrong = [number for number in range(L) if not torch.equal(right[number], found[number])]
print(f"loss equal: {torch.equal(loss, same_loss)}; wrong gradients in blocks {wrong}")
assert wrong
print(refusal(bits["NF4"], "tricks.gradient_checkpointing=false"))

# %% [markdown] tags=["deep"]
# ### Deeper: NaN in all weights, and which blocks are wrong
# The loss scaler of fp16 looks for an overflow *after* the backward pass, and then skips the step of the optimizer.
# Hooks have taken their steps by then, so all weights become NaN, without a message. The package's switch divides each
# gradient by the scale and checks whether it is finite. The first gradient that is not ends the steps of this backward
# pass. But weights nearer to the loss have taken theirs, so here the run differs from a plain one.
#
# In the cell on wrong gradients, the last two blocks are right, because their weights are still in the slots. Block 3
# is right as well, because the gradient of its adapter needs only the weights of these two.

# %% tags=["deep"]
print(refusal(ways["both"], "train.max_grad_norm=1"))
for hooked in (False, True):
    model, optimizer = made(hooked)
    # 8 times this is too large even for fp32
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(8 * F.cross_entropy(model(ids[:-1]), ids[1:])).backward()
    scaler.step(optimizer)  # leaves the step out, if a gradient is not finite
    finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
    print(f"hooks: {hooked}, all weights finite: {finite}")
    assert finite != hooked

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A streamed model has 40 blocks, and an optimizer step has 8 micro-batches, one after the other. How
#    many blocks does the second step fetch?
# 2. **Build.** Fill in `careful(optimizer, limit)`. It returns a hook, which is a function of one weight. If the
#    gradient of the weight is finite, the hook scales a gradient whose norm is above `limit` down to that norm, and
#    lets `optimizer` take its step. In any case it frees the gradient.
# 3. **Reach.** From how many tokens on do the matrix multiplications of the forward pass hide its copies? Fill in
#    `tokens_to_hide(flops, link, size)`: operations a second, bytes a second, bytes of a stored weight. In the forward
#    pass each frozen weight is fetched once, and takes 2 operations a token. Count nothing else, and do not round.

# %% tags=["exercise"]
blocks_fetched = None


def careful(optimizer, limit):
    """FILL ME IN: return a function of one weight."""


def tokens_to_hide(flops, link, size):
    """FILL ME IN."""


# %% Check the exercises tags=["hide-input"]
def of_careful(answer):
    cases = {
        "short": [0.3, 0.4],
        "long": [6.0, 8.0],
        "infinite": [float("inf"), 1.0],
        "nan": [float("nan"), 1.0],
    }
    for name, numbers in cases.items():
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if (hook := answer(optimizer, 2.0)) is None:
            raise NotImplementedError
        weight.grad = torch.tensor(numbers)
        hook(weight)
        steps = {"short": [-0.3, -0.4], "long": [-1.2, -1.6]}
        right = torch.tensor(steps.get(name, [0.0, 0.0]))
        if name in steps:
            assert not torch.equal(weight, torch.zeros(2)), (
                "a finite gradient, and the weight took no step"
            )
        hints = {
            "short": "a norm of 0.5 is below the limit of 2: "
            "leave such a gradient as it is",
            "long": "a gradient of norm 10 must become one of norm 2, "
            "in the same direction",
        }
        hint = hints.get(
            name,
            "a gradient that is not finite reached the weight; "
            "look at its norm before the step",
        )
        assert torch.allclose(weight, right, atol=1e-5), hint
        assert weight.grad is None, (
            "the gradient is still there: free it, after a step and without one"
        )


def of_tokens(answer):
    for flops, link, size in ((18e12, 12e9, 2), (18e12, 12e9, 0.5), (100e12, 24e9, 2)):
        if (found := answer(flops, link, size)) is None:
            raise NotImplementedError
        course.about(
            size * flops / (2 * link),
            "seconds of a copy, size / link, are equal to seconds of products, "
            "2 x tokens / flops",
            mistakes={
                size * flops / (3 * link): "that is a whole step; "
                "the forward pass has half of the copies, and a third of the products",
                size * flops / (6 * link): "count the forward pass alone: "
                "one copy, and 2 operations a weight and token",
                size
                * flops
                / link: "a product is two operations a weight: multiply and add",
                flops / link: "a weight has size bytes, not always 2",
            },
        )(found)


course.check(
    1,
    blocks_fetched,
    course.about(
        608,
        "each micro-batch fetches L - 2 blocks forward and L - 2 backward",
        mistakes={
            640: "two blocks are in the slots already, whenever a pass begins",
            304: "the backward pass fetches blocks, too",
            320: "the backward pass fetches blocks, too, "
            "and two are in the slots when a pass begins",
            76: "that is one micro-batch, and each of them fetches again",
        },
        within=0,
    ),
    "a whole number",
)
course.check(
    2, careful, of_careful, "a function (optimizer, limit) -> a function of one weight"
)
course.check(
    3, tokens_to_hide, of_tokens, "a function (flops, link, size) -> a number of tokens"
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# blocks_fetched = 8 * 2 * (40 - 2)
#
#
# def careful(optimizer, limit):
#     def hook(weight):
#         norm = weight.grad.norm()
#         if norm.isfinite():
#             weight.grad.mul_((limit / norm).clamp(max=1))
#             optimizer.step()
#         weight.grad = None
#
#     return hook
#
#
# def tokens_to_hide(flops, link, size):
#     return size * flops / (2 * link)  # the size of the model cancels
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the gradients of all weights but the largest (an embedding that is also the head needs three tensors of
#   its size); and the frozen weights of all blocks but two.
# - **Costs** the use of accumulation and of clipping by the whole norm; $2(L - 2)$ blocks over PCIe for each
#   micro-batch, and host memory for all blocks, or a file.
# - **Exact**, bit for bit, without `clip`; except an fp16 step that overflows, where some weights have taken their
#   steps already.
# - **When**: steps in the backward pass, if all weights train and the gradients are at the peak; streaming, if frozen
#   weights are at the peak. In NF4, or on rows of 1,024 tokens and more, it adds almost no time (predicted).
# - **When not**: with LoRA the gradients are small anyway. If the model fits, streaming gains nothing.
#
# [What we left out, and why](../docs/left_out.md) answers "why is X not here?".
#
# ## Sources
# - Steps in the backward pass: PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward
#   pass"; Lv et al. 2023, *LOMO*, arXiv 2306.09782, section 3.
# - Streaming: Pudipeddi et al. 2020, *L2L*, arXiv 2002.05645, section 3; Rajbhandari et al. 2021, *ZeRO-Infinity*,
#   arXiv 2104.07857, section 5.1.
# - The table: the abstracts of these papers; READMEs of BAdam (github.com/Ledzy/BAdam) and, for LISA, of LMFlow
#   (github.com/OptimalScale/LMFlow).
# - Ours: `cria_tricks/techniques/optimizer_in_backward.py`, `stream_layers.py`, `load/streaming.py`, and their tests.
