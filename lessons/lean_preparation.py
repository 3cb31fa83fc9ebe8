# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Lean preparation: no fp32 copies that nobody asked for
# > **Promise.** One line of nearly every QLoRA script costs this run 1,155 MiB. You find every byte of them, take them
# > back, and train in 1,516 MiB what took 2,671. And you know which bits that changes, and which it does not.
#
# > **Card.** saves the embedding's fp32 copy, the head's 16-bit one, half of what waits between blocks / costs sums in
# > 16 bits / approximate: a sum between blocks is off by half a step of its 16-bit format at most / 30 minutes / after
# > [the lesson on the chunked loss](chunked_loss.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB; its bill stands
# at 2,671 MiB. In [the lesson on NF4](nf4.py) NF4 saved 1,377 MiB of weights, and the peak fell by 239. The rest was
# given back by peft's `prepare_model_for_kbit_training`. What is it for?

# %% Imports and settings tags=["hide-input"]
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from cria_tricks import course
from cria_tricks.bench import results, tables
from cria_tricks.bench.style import Theme
from cria_tricks.hardware import T4
from cria_tricks.load import losses
from cria_tricks.load.model import EDITS, forbid_cpu_repacking, quiet_libraries
from cria_tricks.measure.counting import SavedBytes, Traffic
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff

quiet_libraries()
torch.manual_seed(0)
MIB, fp16, bf16 = 2**20, torch.float16, torch.bfloat16
V, D, L = 512, 128, 4  # vocabulary, width, blocks
B, T = 2, 64  # rows, tokens of a row
widths = {
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
config = LlamaConfig(
    vocab_size=V,
    num_hidden_layers=L,
    tie_word_embeddings=True,
    use_cache=False,
    **widths,
)
folder = TemporaryDirectory()
LlamaForCausalLM(config).half().save_pretrained(folder.name)


def packed(dtype=fp16):
    """The small Llama, fresh: its matrices in 4 bits, all else in 16."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    where = {"device_map": {"": "cpu"}, "dtype": dtype}  # beside a card, too
    model = AutoModelForCausalLM.from_pretrained(
        folder.name, quantization_config=four_bits, **where
    )
    forbid_cpu_repacking(model)  # a trap of bitsandbytes on CPUs: load.py tells
    return model


ids = torch.randint(V, (B, T))
batch = {"input_ids": ids, "labels": ids}

# %% [markdown]
# ## 1. The bill
# Read it, in peft 0.21: it freezes all weights, then raises every parameter in fp16 or bf16 to fp32, unless it is
# packed. What is left in 16 bits beside packed matrices? The embedding, $V$ words of width $D$, which here is the head
# as well, and $2L + 1$ norms of $D$ numbers. How many MiB is that for $V = 128{,}256$, $D = 2048$ and $L = 16$? Guess.
# Then hold the formula against the real function, on a Llama small enough to train here.

# %% Your guess: MiB left in 16 bits tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def raised_bytes(V, D, L):
    return 2 * (V * D + (2 * L + 1) * D)  # two bytes more each


def stored(model):
    return sum(p.nbytes for p in model.parameters())


model = packed()
at_first = stored(model)
prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
print(
    f"small Llama: predicted {raised_bytes(V, D, L):,} bytes more, "
    f"counted {stored(model) - at_first:,}"
)
print(f"Llama-3.2-1B: {raised_bytes(128_256, 2048, 16) / MIB:,.1f} MiB more")
assert stored(model) - at_first == raised_bytes(V, D, L)
course.reveal(guess, raised_bytes(128_256, 2048, 16) / MIB, "MiB")

# %% [markdown]
# That is 501 of 1,155 MiB. The other 654 are not in the weights.
#
# ## 2. From scratch, in five steps
# **Write it down.** All that it does to weights:


# %%
def usual(model):
    for p in model.parameters():
        p.requires_grad = False
        if p.dtype in (fp16, bf16):  # packed ones are uint8
            p.data = p.data.float()
    return model


assert [p.dtype for p in usual(packed()).parameters()] == [
    p.dtype for p in model.parameters()
]

# %% [markdown]
# **Follow the dtypes.** An fp32 table gives fp32 vectors. fp32 plus fp16 is fp32. A 4-bit product computes in 16 bits,
# and answers in the dtype of its input. So in which dtype is the *stream*, what passes from block to block?


# %%
def dtypes(model):
    first, seen = model.model.layers[0], {}
    places = {"embedding": model.model.embed_tokens, "norm": first.input_layernorm}
    places |= {"4-bit product": first.self_attn.q_proj, "stream": first}
    for name, place in places.items():
        place.register_forward_hook(
            lambda module, given, out, name=name: seen.update({name: out.dtype})
        )
    with torch.autocast("cpu", fp16):
        model(ids)
    return seen


for name, model, dtype in (
    ("usual", usual(packed()), torch.float32),
    ("left alone", packed(), fp16),
):
    found = dtypes(model)
    print(
        f"{name:10}",
        {place: str(its).removeprefix("torch.") for place, its in found.items()},
    )
    assert set(found.values()) == {dtype}


# %% Draw figure 1 tags=["hide-input"]
def stream(theme: Theme):
    """Bytes of an element on the way through the model."""
    sketch = course.Sketch(theme, 41, 12.6)
    for n, name in enumerate(("table", "stream", "norm", "product", "stream", "head")):
        sketch.text(9.5 + 5.6 * n, 0.7, name, quiet=True)
    for row, (name, sizes) in enumerate(
        (("usual", (4, 4, 4, 4, 4, 2)), ("lean", (2, 2, 2, 2, 2, 0)))
    ):
        bottom = 5.8 + 6 * row
        sketch.text(0, bottom - 1, name, align="left")
        for n, size in enumerate(sizes):
            left = 7.5 + 5.6 * n
            sketch.tensor(
                left,
                bottom - (size or 2),
                4,
                size or 2,
                str(size) if size else "the table",
                color=2 if n == 5 and size else 1 if size == 4 else 0,
                kept=bool(size),
            )
            if n < 5:
                sketch.arrow((left + 4.2, bottom - 1), (left + 5.4, bottom - 1))
    return sketch.figure


course.show(
    stream,
    "Figure 1. Bytes of an element on its way. "
    "With an fp32 table everything behind it is fp32, and the head, the same "
    "table, is copied back to 16 bits (green). Lean, the head is the table itself.",
)

# %% [markdown]
# So checkpointing keeps $4 B T D$ bytes a block in place of $2 B T D$, for $B$ rows of $T$ tokens.
#
# **Ask what fp32 buys.** The table: it was stored in 16 bits, and raising it appends zeros. The head: autocast casts it
# straight back. The norms: 256 squared is more than fp16 holds, so a norm *computed* in fp16 overflows. But Llama's
# computes in fp32, whatever it is given.

# %%
table, norm = packed().model.embed_tokens.weight, packed().model.norm
assert torch.equal(table.float().half(), table)

large = torch.full((1, D), 300.0).half()
print(
    f"300 squared in fp16: {large.square()[0, 0]}; Llama's norm of 300, in fp16: "
    f"{norm(large)[0, 0]}"
)
assert norm(large).dtype == fp16
torch.testing.assert_close(norm(large), norm(large.float()).half())


# %% [markdown]
# **Keep in fp32 what learns, and cast it at use.** One thing needs fp32: the adapters' *master weights*, for updates
# that are small (section 6). Products are in 16 bits, so something is cast: the wide input up to fp32, to meet $A$, and
# by autocast back again; or the thin $A$ down. What does either way keep for the backward pass, beside input and
# weights?


# %%
def input_up(x, A, B):
    return F.linear(F.linear(x.float(), A), B)


def weights_down(x, A, B):
    return F.linear(F.linear(x, A), B)  # autocast casts A and B


def run(way, *given):
    """Bytes kept, and the output with all gradients."""
    with SavedBytes(besides=given) as saved, torch.autocast("cpu", fp16):
        y = way(*given)
    return saved.peak, (y, *torch.autograd.grad(y.float().square().sum(), given))


given = [torch.randn(T, D).half(), torch.randn(8, D), torch.randn(D, 8)]
(up, first), (down, second) = (
    run(way, *(g.requires_grad_() for g in given)) for way in (input_up, weights_down)
)
print(
    f"kept: {up:,} bytes with the input up, {down:,} with weights down; "
    f"predicted 2 T D = {2 * T * D:,} fewer"
)
assert up - down == 2 * T * D
assert all(map(torch.equal, first, second))

# %% [markdown]
# No bit differs: up and down again is where it was. Where does peft cast inputs up? In adapters over a 16-bit matrix,
# always. Over a 4-bit one only outside of autocast, and it asks for *CUDA's* (`lora/bnb.py`). So, by its source, our
# run on a T4 never does. This notebook's autocast is a CPU's, so here it does:

# %%
with torch.autocast("cpu", fp16):
    assert not torch.is_autocast_enabled()  # "cuda" is understood


# %% [markdown]
# **Leave out, and leave alone.** Lean is the adapter, and nothing before it.


# %%
def left_alone(model):
    return model


def adapted(model, cast=False):
    """With adapters that have learnt something already; peft makes them fp32, and
    freezes all else."""
    model = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16
        ),
    )
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = cast
    return learnt(model)


def learnt(model):
    draw = torch.Generator().manual_seed(1)
    for p in trained(model):
        p.data = 0.02 * torch.randn(p.shape, generator=draw)
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


assert {p.dtype for p in trained(adapted(packed()))} == {torch.float32}

# %% [markdown]
# ## 3. Prove it
# The claim is *approximate*. First find what is exact: the cast of inputs, in whole models. Usual or lean, with the
# cast or without it, loss and all gradients have the same bits.


# %%
def step(model, dtype=fp16):
    """The loss and all gradients."""
    with torch.autocast("cpu", dtype):
        loss = losses.full_loss_sum(model, batch) / ids.numel()
    # lifted, as by a loss scale
    return loss.detach(), *torch.autograd.grad(1024 * loss, trained(model))


for prepared in (usual, left_alone):
    with_it, without = (
        step(adapted(prepared(packed()), cast)) for cast in (True, False)
    )
    assert all(map(torch.equal, with_it, without))

plan = resolve(
    with_settings(course.so_far("lean_preparation"), ["lora.r=8", "lora.alpha=16"]),
    T4,
)
production = packed()
for edit in plan.after_load:  # what the package does with a model that is loaded
    production = EDITS[edit](production, plan)
assert all(map(torch.equal, step(adapted(packed())), step(learnt(production))))
print(
    "cast or not: the same bits; ours, and the package's",
    plan.after_load,
    ": the same bits",
)

# %% [markdown]
# **The bytes.** Checkpointed, the stream should keep $2 L B T D$ fewer.


# %%
def waiting(model):
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    with (
        SavedBytes(besides=[*model.parameters(), *model.buffers()]) as saved,
        torch.autocast("cpu", fp16),
    ):
        # a name, so that it lives while we count
        _hidden = model.train().get_base_model().model(ids)
        return saved.now


kept = [waiting(adapted(prepared(packed()))) for prepared in (usual, left_alone)]
print(
    f"usual keeps {kept[0]:,} bytes, lean {kept[1]:,}; "
    f"predicted {2 * L * B * T * D:,} fewer"
)
assert kept[0] - kept[1] == 2 * L * B * T * D


# %% Helper: the stream after each sum tags=["hide-input"]
def watch(model, dtype):
    """The stream after each sum, and what was added: from a forward pass of a lean
    model."""
    stream, added, base = [], [], model.get_base_model().model

    def enter(module, given, named):
        stream.append(given[0] if given else named["hidden_states"])

    def leave(module, given, out):
        added.append(out[0] if isinstance(out, tuple) else out)

    for block in base.layers:
        for norm, part in (
            (block.input_layernorm, block.self_attn),
            (block.post_attention_layernorm, block.mlp),
        ):
            norm.register_forward_pre_hook(enter, with_kwargs=True)
            part.register_forward_hook(leave)
    base.norm.register_forward_pre_hook(enter, with_kwargs=True)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        base(ids)
    return [x.double() for x in stream], [x.double() for x in added]


# %% [markdown]
# **The bound.** Inside a block, what lies between two products is now rounded once more; products took 16 bits before,
# too. But the stream is carried through all blocks, so there errors can pile up. It is a sum: the embedding, and what
# each of $2L$ parts of blocks adds. In 16 bits each sum is off by at most $u$ of its result: $u = 2^{-11}$ in fp16,
# $2^{-8}$ in bf16. So in the end it is off from the exact sum of the same parts by $u \sum_i |x_i|$ at most, over the
# stream $x_i$ after each sum.
#
# What all roundings together do to gradients we measure, and predict only that bf16 is $2^3$ times worse.

# %%
gap = {}
for name, dtype, u in (("fp16", fp16, 2.0**-11), ("bf16", bf16, 2.0**-8)):
    xs, parts = watch(adapted(packed(dtype)), dtype)
    assert len(parts) == len(xs) - 1 == 2 * L
    off, bound = (xs[-1] - (xs[0] + sum(parts))).abs(), u * sum(x.abs() for x in xs[1:])
    assert (off <= bound).all()
    grads = [
        torch.cat([g.flatten() for g in step(adapted(p(packed(dtype))), dtype)[1:]])
        for p in (usual, left_alone)
    ]
    gap[name] = ((grads[1] - grads[0]).norm() / grads[0].norm()).item()
    print(
        f"{name}: the stream uses {(off / bound).max():.0%} of its bound; "
        f"gradients {gap[name]:.2%} apart"
    )
assert 4 < gap["bf16"] / gap["fp16"] < 16

# %% [markdown]
# ## 4. What it costs
# **Time**: less, if anything. The products are the same; all other operations read and write fewer bytes. Count them.

# %%
moved = []
for prepared in (usual, left_alone):
    with Traffic() as traffic:
        step(adapted(prepared(packed())))
    moved.append(traffic)
print(
    f"all but products: {moved[0].others / MIB:.0f} MiB usual, "
    f"{moved[1].others / MIB:.0f} lean"
)
assert moved[0].products == moved[1].products
assert moved[1].others < 0.6 * moved[0].others

# %%
step_of = (
    "peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true quantization=nf4"
)
course.on_a_gpu("lean_preparation", off=step_of, on=f"{step_of} lean_preparation=true")

# %% [markdown]
# (On a CPU that benchmark runs in fp32, where there is nothing to save, and the switch says so.)
#
# **Quality**: SmolLM2-135M, 20 steps on real rows, loss on held-out rows, three seeds in bf16 and one in fp16:

# %% Show the committed runs tags=["hide-input"]
runs = [
    run
    for run in (results.study("quality") or {}).get("runs", ())
    if "16 + nf4" in run["case"]
]
print(tables.quality(runs) if runs else "no committed results beside this package")
for when in ("before", "after"):
    found = {(run["case"], run["seed"]): run[f"eval_loss_{when}"] for run in runs}
    for case, seed in found:
        if (lean := (f"{case} + lean", seed)) in found:
            print(
                f"lean, {when} training, over {case}, seed {seed}: "
                f"{found[lean] - found[case, seed]:+.4f}"
            )

# %% [markdown]
# In bf16 lean is as good before the first step, and 0.017 to 0.019 behind after 20. So bf16 does not harm the answers
# but the learning. That is half of what another seed changes, but it has the same sign each time. (Our gradients
# were 0.7 % apart with four blocks; SmolLM2 has thirty.) In fp16, in which a T4 computes, the rounding is an eighth as
# large, and lean is 0.0001 behind. A CPU has measured that, with fp16 products computed in fp32 and rounded; a T4 has
# not. In bf16 lean preparation lowered the peak from 1.7 GiB to 1.2.
#
# ## 5. The production switch

# %%
before, after = course.so_far("chunked_loss"), course.so_far("lean_preparation")
print("--set tricks.lean_preparation=true")
print(diff(resolve(before, T4), resolve(after, T4)))
course.show_bill(before, after)

# %% [markdown]
# One edit of the loaded model is left out, another is put in. Now predict every row, and the sum.

# %%
shape, n = find_shape(after.model), 2048
predicted = {
    "weights: all others": -raised_bytes(shape.vocabulary, shape.width, shape.layers),
    # the table is in 16 bits: nothing to cast
    "16-bit copy of the head": -2 * shape.vocabulary * shape.width,
    "saved activations": -2 * shape.layers * n * shape.width,
    "final norm": -2 * n * shape.width,  # its result is part of the stream
    # as they were picked, before they were cast
    "hidden states for the loss": -4 * (n - 1) * shape.width,
    "batch": -2 * 2 * n * shape.head_width,  # cosines and sines take the stream's dtype
}
old, new = (
    {line.name: line.bytes for line in course.bill(recipe).lines}
    for recipe in (before, after)
)
assert predicted == {name: new.get(name, 0) - old[name] for name in predicted}
saved = course.bill(before).peak_bytes - course.bill(after).peak_bytes
print(
    f"{saved / MIB:,.1f} MiB, "
    f"of which {100 * -sum(list(predicted.values())[:2]) / saved:.0f} % are one table"
)
assert saved == -sum(predicted.values())

# %% [markdown]
# In [the lesson on NF4](nf4.py) nearly as much was lost, but not on the same lines of the bill: the final norm's 8 MiB
# and the hidden states' 16 came with the chunked loss. And the second edit, inputs uncast, saves nothing here: at this
# moment no block is open, and on a T4 peft would not cast anyway.
#
# What is left? And what would a T4 hold now?

# %%
model_itself = sum(line.bytes for line in course.bill(after).lines[:2])
peaks = sorted(
    ((moment.bytes, moment.name) for moment in course.bill(after).moments), reverse=True
)
print(
    f"{model_itself / MIB:,.0f} MiB are the model; "
    f"the next peak, in the {peaks[1][1]}, is {peaks[1][0] / MIB:,.1f}"
)
for name, recipe in (("before", before), ("after", after)):
    print(
        f"{name}: "
        f"rows of up to {toggles.longest(toggles.Target(shape, T4), recipe):,} "
        "tokens fit a T4"
    )
course.show(
    course.staircase("lean_preparation"),
    "Figure 2. The bill so far. No step as large is left.",
)

# %% [markdown]
# ## 6. Where it breaks
# **`Attempting to unscale FP16 gradients.`** Somebody went one step further, and has the adapters in 16 bits as well:
# by peft's `autocast_adapter_dtype=False` over a 16-bit base, or because they were stored so. Dividing fp16 gradients
# by the loss scale would lose what it saved, so torch refuses. Cure: fp32, for what trains and for nothing else.

# %%
leaner = adapted(packed())
for p in trained(leaner):
    p.data = p.data.half()


def unscale(model):
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", fp16):
        loss = losses.full_loss_sum(model, batch) / ids.numel()
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(trained(model)))


try:
    unscale(leaner)
except ValueError as error:
    print(error)
    assert str(error) == "Attempting to unscale FP16 gradients."
for p in trained(leaner):
    p.data, p.grad = p.data.float(), None  # the cure
unscale(leaner)

# %% [markdown]
# **No message at all: updates vanish.** bf16 needs no scale, so nobody refuses 16-bit master weights there. Between
# $2^e$ and $2^{e+1}$ numbers of $p$ significant bits ($p = 11$ in fp16, 8 in bf16) are $2^{e+1-p}$ apart. An update
# $\eta$ below half of that, $2^{e-p}$, is rounded back to where it came from. peft starts $A$ evenly between
# $\pm 1/\sqrt{D}$. Which share of its weights stands still?


# %%
def still(dtype, p, eta):
    """The share of weights that an update leaves where they are: by the rule, and by
    rounding."""
    w, ways = start.to(dtype).float(), torch.randint_like(start, 2) * 2 - 1
    by_rule = 2.0 ** (w.abs().log2().floor() - p) > eta
    return by_rule.float().mean().item(), (
        (w + eta * ways).to(dtype) == w
    ).float().mean().item()


start = (2 * torch.rand(100_000) - 1) / 2048**0.5
for name, dtype, p in (("fp16", fp16, 11), ("bf16", bf16, 8)):
    # the job's highest rate, a tenth of it, about its 38th of 42
    for eta in (2e-4, 2e-5, 5e-6):
        predicted, counted = still(dtype, p, eta)
        print(
            f"{name}, update of {eta:.0e}: predicted {predicted:.0%} stand still, "
            f"counted {counted:.0%}"
        )
        assert abs(counted - predicted) < 0.01


# %% Draw figure 3 tags=["hide-input"]
def standing(theme: Theme):
    """The share that stands still, against the update."""
    drawn, axes = course.figure(height=2.9)
    # powers of two themselves are ties
    sizes = [2.0 ** (-e / 3) for e in range(34, 70) if e % 3]
    for (name, dtype, p), color in zip(
        (("fp16", fp16, 11), ("bf16", bf16, 8)), theme.series, strict=False
    ):
        found = [still(dtype, p, eta) for eta in sizes]
        axes.plot(
            sizes,
            [100 * rule for rule, _ in found],
            color=color,
            linewidth=1.2,
            label=f"{name}, predicted",
        )
        counted = [100 * got for _, got in found]
        axes.plot(
            sizes,
            counted,
            color=color,
            marker="o",
            markersize=4,
            linestyle="",
            label="counted",
        )
    for eta, says in ((2e-4, " highest rate"), (5e-6, " 38th of 42 steps")):
        axes.axvline(eta, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(eta, 104, says, color=theme.quiet)
    axes.set(
        xscale="log",
        xlabel="size of the update",
        ylabel="weights that stand still, %",
        ylim=(-3, 112),
    )
    axes.invert_xaxis()
    axes.grid(axis="y")
    axes.legend(loc="center right")
    return drawn


course.show(
    standing,
    "Figure 3. The smaller the update, the more weights of A it leaves where they "
    "are, if they are kept in 16 bits. "
    "AdamW's updates are about as large as the learning rate, or smaller.",
)

# %% [markdown]
# Cure: master weights in fp32. For 11,272,192 of them that is 21.5 MiB more than 16 bits. An adapter alone, at our
# learning rate and at a tenth of it, both falling to zero; after each step its weights are kept in a format:


# %%
def train(kept_in, D=64, r=8, steps=400, rate=2e-4):
    torch.manual_seed(2)
    x = torch.randn(256, D)
    # what the base leaves to be learnt
    target = x @ (torch.randn(D, 4) @ torch.randn(4, D)).T / 64
    A, B = (
        nn.Parameter(((2 * torch.rand(r, D) - 1) / D**0.5).to(kept_in).float()),
        nn.Parameter(torch.zeros(D, r)),
    )
    optimizer = torch.optim.AdamW([A, B], weight_decay=0)
    for n in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - n / steps)
        optimizer.zero_grad()
        loss = F.mse_loss(2 * (x @ A.T) @ B.T, target)
        loss.backward()
        optimizer.step()
        for weight in (A, B):
            weight.data = weight.data.to(kept_in).float()
    return loss.item()


for rate, steps in ((2e-4, 400), (2e-5, 4000)):
    in_fp32, in_fp16, in_bf16 = (
        train(dtype, rate=rate, steps=steps) for dtype in (torch.float32, fp16, bf16)
    )
    print(
        f"rate {rate:.0e}: fp32 reaches {in_fp32:.4f}, fp16 {in_fp16:.4f}, "
        f"bf16 {in_bf16:.4f}"
    )
    assert in_bf16 > 1.2 * in_fp32
    assert (in_fp16 > 1.2 * in_fp32) == (rate < 1e-4)

# %% [markdown]
# bf16 is left behind. fp16 gets away with it at our rate, and not at a tenth of it.
#
# **`nan`, in fp16.** The usual preparation does buy one thing: an fp32 stream cannot overflow. fp16 holds numbers up
# to 65,504. How near does a model come? We ran SmolLM2 in fp32 over all real rows, 107 to train and 27 to evaluate:

# %% Show what was measured on the real model tags=["hide-input"]
study = results.study("activations")
if study:
    largest, end, blocks = (
        max(study["blocks"]),
        torch.finfo(fp16).max,
        len(study["blocks"]),
    )
    print(
        f"{largest:,.0f}, after block {study['blocks'].index(largest) + 1} of {blocks}"
    )
    print(f"fp16 ends at {end:,.0f}: {end / largest:.2f} times as much")
    assert {(round(row["largest"]), row["module"]) for row in study["rows"]} == {
        (24_929, "model.layers.11")
    }
    assert 2.62 < end / largest < 2.64

# %% [markdown]
# The largest activation is the same in each row. It belongs to the first token, which is always the same and sees no
# other. Other models, and training, change it, so a run in lean fp16 first checks its first batch. If the largest
# activation is above a quarter of 65,504, as here, the trainer prints a warning with the number. If it overflows, the
# trainer refuses to start.
#
# Some models that were trained in bf16 pass 65,504. Then the fp16 stream becomes `inf`, and its norm `nan`. Cure: bf16
# on a card that computes it, or the usual preparation.

# %%
for dtype in (fp16, torch.float32):
    passed = (
        torch.full((1, D), 60_000.0, dtype=dtype) + torch.full((1, D), 8_000.0).half()
    )
    print(f"{dtype}: {passed[0, 0]}, its norm {norm(passed)[0, 0]}")
    assert norm(passed).isfinite().all() == (dtype == torch.float32)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-8B has the same vocabulary, is 4,096 wide, and its head is a table of its own. How many MiB
#    does the usual preparation add to the *weights*? Your answer is a number of MiB. (Leave the norms out.)
# 2. **Build.** A script that you cannot change has prepared the model the usual way, and put adapters on. Fill in
#    `undo(model, dtype)`. It changes the model in place to what lean would have made, with `dtype` as the 16-bit
#    format, and returns nothing. (About six lines.)
# 3. **Reach.** 16-bit master weights can learn if rounding is random: a draw for each number sends it up or down to a
#    neighbour, so that the *mean* is right. Fill in `to_bf16_by_lot(x)`. It takes an fp32 tensor and returns a bf16
#    tensor of the same shape. (bf16 is the upper half of an fp32's bits, `x.view(torch.int32)`: what do random lower
#    halves do?)

# %% tags=["exercise"]
mib_for_8b = None


def undo(model, dtype):
    """FILL ME IN: change the model in place."""


def to_bf16_by_lot(x):
    """FILL ME IN: return a bf16 tensor shaped like x."""


# %% Check the exercises tags=["hide-input"]
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


def of_lot(answer):
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
        assert (alike.std(way) > 0).all(), "each number needs a draw of its own"


course.check(
    1,
    mib_for_8b,
    course.about(
        2004,
        "which tables are not packed, and how many bytes more does each of "
        "their numbers take?",
        mistakes={
            1002: "twice too few: the head is a table of its own, "
            "and a number goes from 2 bytes to 4",
            4008: "twice too many: a number goes from 2 bytes to 4, so it takes 2 more",
            501: "this model is 4,096 wide, and has two tables",
            15_317: "packed matrices stay packed; only tensors in 16 bits become fp32",
            2004 * 2**20: "that is a number of bytes; give MiB",
        },
    ),
    "a number of MiB",
)
course.check(
    2,
    undo,
    of_undo,
    "a function (model, dtype) that changes the model in place and returns nothing",
)
course.check(3, to_bf16_by_lot, of_lot, "a function x -> a bf16 tensor shaped like x")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# mib_for_8b = 2 * 2 * 128_256 * 4096 / 2**20
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
# def to_bf16_by_lot(x):
#     bits = x.view(torch.int32)
#     # carries into the upper half as often as it should
#     bits = bits + torch.randint_like(bits, 2**16)
#     return (bits & -65536).view(torch.float32).bfloat16()
# ```
#
# </details>
#
# ## In one breath
# - **Saves** 1,154.6 MiB of 2,670.8: the table's fp32 copy, the 16-bit copy of that as head, half of the stream.
# - **Costs** sums of the stream in 16 bits; in bf16 0.017 to 0.019 of loss after 20 steps of a small model.
# - **Approximate**: the stream is off by $u$ of each sum at most. Inputs left uncast change no bit.
# - **When**: a quantised model in 16-bit arithmetic; the larger the vocabulary beside the blocks, the more.
# - **When not**: fp16 with a stream beyond 65,504; fp32 arithmetic, where it has no effect; bf16 and the last hundredth
#   of loss.
#
# ## Sources
# - peft 0.21: `utils/other.py` (`prepare_model_for_kbit_training`), `tuners/lora/layer.py` and `tuners/lora/bnb.py`
#   (the casts), `helpers.py` (`disable_input_dtype_casting`).
# - Issues: peft 3265 (about 1 GB), bitsandbytes 1569 (63.1 to 81.1 GB), TRL pull request 4335 (19.1 to 14.2 GB,
#   Qwen3-14B), AgileRL 623 (inputs uncast: 20 to 24 % less, gradients bitwise equal).
# - bitsandbytes 0.50: `nn/modules.py` (`Linear4bit.forward`). transformers 5.23: `LlamaRMSNorm`. Overflow in fp16:
#   gemma_pytorch issue 24.
# - Micikevicius et al. 2018, *Mixed Precision Training*, arXiv 1710.03740, section 3.1 (master weights). Gupta et al.
#   2015, *Deep Learning with Limited Numerical Precision*, arXiv 1502.02551 (rounding by lot).
# - Ours: `cria_tricks/tricks/lean_preparation.py`, `tests/tricks/test_lean_preparation.py`.
