# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # When libraries lie: seven failures that raise nothing
# > **Promise.** With plain libraries you switch on seven failures that stop no run, predict what the log will say, and
# > catch each with one line. The package asks all seven in one command, in seconds.
#
# > **Card.** saves runs that are dead and do not say so / costs seconds before a run, and no byte in it / exact: a
# > healthy machine passes, and each failure trips its own check alone / 30 minutes / after [Kwanzaa](kwanzaa.py)
#
# The job is QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a free T4 with 14.74 GiB. All its toggles
# are on, its bill stands where [the lesson on Kwanzaa](kwanzaa.py) left it, and this lesson does not move it by a byte.
# It asks whether what you paid for was done.

# %% Imports and settings tags=["hide-input"]
import logging
import math
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from cria_tricks import course
from cria_tricks.bench.style import Theme, panels
from cria_tricks.data import tokens
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.rows import check_rows
from cria_tricks.doctor import selftest, selftest_runs
from cria_tricks.hardware import T4
from cria_tricks.load import model as load
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.plan_data import prices
from cria_tricks.predict.toggles import Target

load.quiet_libraries()
folder = tempfile.TemporaryDirectory()  # goes with this process


def plain_trainer(model, rows, *callbacks, **settings):
    """transformers' own Trainer with its own defaults, a row a micro-batch, on the
    CPU."""
    arguments = TrainingArguments(
        output_dir=folder.name,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **{"per_device_train_batch_size": 1, "logging_steps": 1, **settings},
    )
    made = Trainer(
        model,
        arguments,
        pad,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
    )
    made.remove_callback(PrinterCallback)
    return made


# %% [markdown]
# ## 1. The bill
# A crash costs what ran before it. A silent failure costs the whole run, and whatever you decide by it. So this bill is
# in time. A comparison such as our quality table ([NF4](nf4.py)) needs each case three times. What would 42 runs of the
# whole job take on a T4? And of a run that failure 6 has met, how much is for nothing? A run of ours is on record:
# SmolLM2, NF4, 30 steps, from a loss of 2.534 to 1.258 in health, and to 2.365 after an evaluation.

# %%
before, after = course.so_far("kwanzaa"), course.so_far("when_libraries_lie")
assert course.bill(after) == course.bill(before)
print(f"the bill: {course.bill(after).least_bytes / 2**30:.2f} GiB, as before")
price = prices(Target(find_shape(after.model), T4), after, rows=107)[0]
minutes = price["minutes"]
print(
    f"the job: {price['minutes_low']:.0f} to {price['minutes_high']:.0f} minutes of "
    "a T4 by estimate"
)
print(
    f"42 of it: {42 * minutes / 60:.1f} hours, for nothing if all of them have "
    "failed in silence"
)
print(
    f"failure 6: {1 - (2.534 - 2.365) / (2.534 - 1.258):.0%} of the learning is missing"
)


# %% Draw figure 1 tags=["hide-input"]
def where_they_are(theme: Theme):
    """A step from left to right, and the places of the first six."""
    sketch = course.Sketch(theme, 41, 10.4)
    stations = (
        (0.2, "labels\n(B, T)", "1. mask of\nzeros", 0),
        (7.2, "batch\n(B, T)", "2. packing\nleak", 1),
        (14.2, "loss\n()", "3. returned\nin bf16", 2),
        (21.2, "log\na line a step", "4. NaN\nas 0.0", 0),
        (28.2, "evaluation\na number", "5. no mean\nof tokens", 2),
        (35.2, "next gradients\n(r, D), (D, r)", "6. dropped by\nrepacking", 1),
    )
    for place, (left, what, failure, kind) in enumerate(stations):
        sketch.tensor(left, 0.4, 5.6, 2.8, what, color=3)
        sketch.tensor(left, 4.2, 5.6, 2.6, failure, color=kind, kept=False)
        if place:
            sketch.arrow((left - 1.3, 1.8), (left - 0.1, 1.8))
    kinds = ("it learns nothing", "it learns something else", "it says something else")
    for kind, (left, says) in enumerate(zip((0.2, 14.2, 28.2), kinds, strict=True)):
        sketch.tensor(left, 8.4, 1, 1, "", color=kind, kept=False)
        sketch.text(left + 1.6, 8.9, says, align="left")
    return sketch.figure


course.show(
    where_they_are,
    "Figure 1. The way of a step, where the first six failures sit, "
    "and what becomes of the run. The "
    "seventh comes before: the base.",
)

# %% [markdown]
# ## 2. From scratch, seven times
# A model of two blocks with random weights and a tokenizer of single bytes will do: none of the seven needs a good
# model. Every check is one line, and is asked twice: of the healthy way, and of the other.

# %%
tiny = selftest_runs.make(Path(folder.name), vocab_size=512).path
tokenizer = AutoTokenizer.from_pretrained(tiny)
tokenizer.pad_token = tokenizer.eos_token
pad = DataCollatorForSeq2Seq(tokenizer)
model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
asked = {}


def ask(name, line, healthy, sick):
    """What one line says of both."""
    asked[name] = line(healthy), line(sick)
    print(f"{name}: {asked[name][0]} of the healthy, {asked[name][1]} of the sick")


# %% [markdown]
# **1. The mask of zeros.** Only answers are trained. transformers marks them where the chat template has a
# `{% generation %}` block. Most have none. Then it gives zeros, and a warning in the log. Guess: which loss is logged
# when no token has a label, so that the mean is $0/0$?

# %% Your guess: the loss in the log tags=["predict"]
guess = "no guess"  # @param ["no guess", "0.0", "nan", "an error"]

# %%
made = tokenizer.apply_chat_template(
    selftest.TURNS, return_dict=True, return_assistant_tokens_mask=True
)
marks = zip(made["input_ids"], made["assistant_masks"], strict=True)
empty = {
    "input_ids": made["input_ids"],
    "labels": [token if mark else -100 for token, mark in marks],
}
run = plain_trainer(model, [empty], max_steps=3)
run.train()
said = [
    (entry["loss"], entry["grad_norm"])
    for entry in run.state.log_history
    if "loss" in entry
]
print("loss and norm of the gradient:", said)
assert said == [(0.0, 0.0)] * 3
course.reveal(guess, str(said[-1][0]))

# %% [markdown]
# Not NaN: 0.0, a perfect loss. Failure 4 hides it. And one such row among good ones shows nowhere. The healthy way
# finds the answers by prefix: the conversation up to an answer is the beginning of the conversation with it.

# %%
chats = list(check_rows([({"messages": selftest.TURNS}, "here")]))
(ours,) = tokens.tokenize(chats, tokenizer, 2048).rows
# read it once, with your own eyes
print(repr(tokenizer.decode([label for label in ours["labels"] if label != -100])))
ask(
    "trained tokens",
    lambda row: any(label != -100 for label in row["labels"]),
    ours,
    empty,
)

# %% [markdown]
# **2. The leak.** Two documents share a row. Positions that start again tell transformers where the second begins, but
# only while there is no attention mask and no cache. A mask of ones hides nothing, so it looks harmless.

# %%
torch.manual_seed(0)
first, other, second = torch.randint(1, 256, (3, 1, 24))
positions = torch.arange(24).repeat(1, 2)


def of_the_second(neighbour, **more):
    """Logits of the second document, (24, V)."""
    with torch.no_grad():
        both = torch.cat([neighbour, second], dim=1)
        return model(both, position_ids=positions, use_cache=False, **more).logits[
            0, 24:
        ]


ones = {"attention_mask": torch.ones(1, 48, dtype=torch.long)}
leak = (
    of_the_second(first, **ones) - of_the_second(other, **ones)
).abs().max() / of_the_second(first).abs().max()
print(f"another neighbour moves the logits by {leak:.0%} of the largest")
ask(
    "packed documents",
    lambda more: torch.equal(
        of_the_second(first, **more), of_the_second(other, **more)
    ),
    {},
    ones,
)

# %% [markdown]
# **3. A loss in bf16.** transformers' models cast logits to fp32 before the loss. torch's `cross_entropy` does not: it
# answers in the dtype of its input (outside autocast), and so does its new `linear_cross_entropy` (2.13). bf16 has 8
# significant bits, so between 4 and 8 it moves in steps of $1/32$. Predict the two numbers that it can be.

# %%
half = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
with torch.no_grad():
    scores, following = half(second).logits[0, :-1], second[0, 1:]
right, rounded = (
    F.cross_entropy(scores.float(), following),
    F.cross_entropy(scores, following),
)
below = math.floor(32 * right.item()) / 32
off = abs(rounded / right - 1).item()
print(
    f"fp32 {right:.4f}; predicted in bf16 {below} or {below + 1 / 32}, "
    f"found {rounded.item()}, off by {off:.4f}"
)
assert rounded.item() in (below, below + 1 / 32)
ask("loss in fp32", lambda loss: loss != loss.bfloat16(), right, rounded)

# %% [markdown]
# A number that rounding to bf16 does not move has been there before. (Asking for the dtype is not enough: a cast to
# fp32 afterwards brings nothing back.) At a loss of 1.3 the steps are $1/128 = 0.0078$. Double quantization costs 0.002
# to 0.003 ([NF4](nf4.py)): in bf16 you would never have seen it.
#
# **4. NaN as 0.0.** `logging_nan_inf_filter`, on by default, puts in the place of a NaN the mean of what this line of
# the log has summed so far. A sum $S$ grows by $S/n$ in the $n$-th step. Say the weights break before step 4, and the
# log has a line every ten steps: seven times, $5/4 \cdot 6/5 \cdots 11/10 = 11/4$. Predict both lines.


# %%
class Accident(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            model.model.norm.weight.data.fill_(torch.nan)


def doomed(**settings):
    fresh = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    run = plain_trainer(fresh, rows, Accident(), max_steps=20, **settings)
    run.train()
    return run


def log(run):
    return [entry for entry in run.state.log_history if "loss" in entry]


# lengths, and how much of each is prompt
rows = selftest_runs.random_rows((12, 2), (40, 4), (33, 5), (50, 1), (21, 10))
every_step, ended = log(doomed()), doomed(logging_steps=10)
every_ten, good = log(ended), [entry["loss"] for entry in every_step[:3]]
predicted = sum(good) * 11 / 4 / 10
print(
    "a line every step:", [round(entry["loss"], 2) for entry in every_step[:6]], "..."
)
print(
    f"every ten: predicted {predicted:.4f} and 0, found",
    [round(entry["loss"], 4) for entry in every_ten],
)
assert abs(every_ten[0]["loss"] / predicted - 1) < 1e-5
assert every_ten[1]["loss"] == 0
assert all(p.isnan().any() for p in ended.model.parameters())
ask(
    "nan stops",
    lambda log: all(math.isfinite(entry["grad_norm"]) for entry in log),
    every_step[:3],
    every_ten,
)

# %% [markdown]
# From 6.2 to 5.1 to 0: a log to be proud of, and NaN in every matrix. Only the gradient's norm says so. In a trainer
# the line is `if not torch.isfinite(loss): stop`, *before* the optimizer's step.
#
# **5. An evaluation that is no mean of tokens.** `Trainer.evaluate` takes each batch's mean, and averages these by
# rows. Our rows have 10 to 49 trained tokens. The model learns two of the five, so that the difference is large.
# Predict what it says at three batch sizes.


# %%
def loss_sum(model, rows):
    batch = pad(rows)
    scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
        :, :-1
    ]
    return F.cross_entropy(
        scores.transpose(1, 2), batch["labels"][:, 1:], reduction="sum"
    )


def trained(rows):
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def learn(model, rows, steps, rate):
    """A plain loop; the mean loss of a token, step by step."""
    optimizer, curve = (
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate),
        [],
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_sum(model, rows) / trained(rows)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


learn(model, rows[:2], steps=5, rate=1e-3)
says, true = {}, {}
for B in (1, 2, 5):
    batches = [rows[start : start + B] for start in range(0, 5, B)]
    with torch.no_grad():
        sums = [loss_sum(model, batch).item() for batch in batches]
    predicted = (
        sum(
            len(batch) * total / trained(batch)
            for batch, total in zip(batches, sums, strict=True)
        )
        / 5
    )
    true[B] = sum(sums) / trained(rows)  # add up, and divide once
    says[B] = plain_trainer(model, rows, per_device_eval_batch_size=B).evaluate()[
        "eval_loss"
    ]
    print(
        f"batches of {B}: predicted {predicted:.4f}, it says {says[B]:.4f}; "
        f"true {true[B]:.4f}"
    )
    assert abs(says[B] / predicted - 1) < 1e-4
ask(
    "evaluation",
    lambda two: math.isclose(*two, rel_tol=1e-4),
    (true[1], true[2]),
    (says[1], says[2]),
)

# %% [markdown]
# One model, the same rows, three numbers. Only a single batch of all rows is right. A row a batch is not: there a short
# answer gets the weight of a long one.
#
# **6. Gradients dropped by repacking.** On a CPU with AVX512-BF16 bitsandbytes 0.50 repacks a 4-bit matrix for a faster
# kernel, at its first forward pass in eval mode, in place, for good. That kernel has no backward pass. What reaches the
# loss only through another 4-bit matrix gets nothing. Predict: which of a block's seven adapters are dead? (On another
# CPU you see what we recorded.)

# %% Draw figure 2 tags=["hide-input"]
REPACKS = bool(bnb.functional.has_avx512bf16())
# for other CPUs. AMD EPYC with AVX512-BF16, torch 2.13, bitsandbytes 0.50.2, 2026-11-22
RECORDED = {
    "dead": 2 * ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
    "loss": """
    6.279 6.206 5.956 5.696 5.560 5.510 5.417 5.379 5.340 5.425 5.295 5.249 5.218
    5.181 5.140 5.097 5.054 5.005 4.948 4.905 4.866 4.827 4.766 4.708 4.654 4.614
    4.570 4.522 4.484 4.433 4.396 4.352 4.303 4.249 4.202 4.167 4.122 4.115 4.058
    4.019""",
}


def around_a_block(theme: Theme):
    """The seven products of a block, and where the gradient comes from."""
    sketch = course.Sketch(theme, 41, 12.6)
    sketch.text(
        0.2,
        0.9,
        "the stream, and its gradient on the way back (B, T, D)",
        align="left",
        quiet=True,
    )
    sketch.arrow((40.6, 2.2), (0.2, 2.2), color=0)
    for left, inner, outer in ((2, ("q", "k", "v"), "o"), (22, ("gate", "up"), "down")):
        tops = [
            4.2 + 2.8 * row + (1.4 if outer == "down" else 0)
            for row in range(len(inner))
        ]
        for top, name in zip(tops, inner, strict=True):
            sketch.tensor(left, top, 5.4, 2, f"{name}: zeros", color=1, kept=False)
            sketch.arrow((left + 9.9, 8), (left + 5.6, top + 1))
        sketch.tensor(left + 10, 6.6, 5.4, 2.8, outer, color=0)
        sketch.arrow((left + 12.7, 2.4), (left + 12.7, 6.5), color=0)
        sketch.text(left + 12.7, 10.6, "repacked: no way back", quiet=True)
    return sketch.figure


course.show(
    around_a_block,
    "Figure 2. A repacked block on the way back. o and down write into the stream, "
    "so their adapters have a gradient; "
    "the others, dashed, could have theirs only through o and down.",
)


# %%
def adapted(cured):
    """LoRA over NF4, with transformers, peft and bitsandbytes."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, quantization_config=nf4
    )
    for module in base.modules():
        if cured and isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    torch.manual_seed(0)
    return get_peft_model(
        base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def evaluated(model):
    with torch.no_grad():
        loss_sum(model.eval(), rows)
    return model.train()


def dead(model):
    """Adapters whose B gets no gradient; A gets none before the first step anyway, as B
    is zero (the lesson on LoRA)."""
    loss_sum(model, rows).backward()
    return [
        n.split(".")[-4]
        for n, p in model.named_parameters()
        if "lora_B" in n and not p.grad.any()
    ]


with warnings.catch_warnings(record=True) as said:
    repacked = dead(evaluated(adapted(cured=False))) if REPACKS else RECORDED["dead"]
print(
    f"{'here' if REPACKS else 'on record'}: {len(repacked)} of 14 get no gradient:",
    *repacked[:5],
)
print(*(str(one.message).partition(" This behavior")[0] for one in said), sep="\n")
assert repacked == 2 * ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
ask(
    "gradients after an evaluation",
    lambda dead: not dead,
    dead(evaluated(adapted(cured=True))),
    repacked,
)

# %% [markdown]
# That warning of torch 2.13 is shown once in the life of a process and names no layer; nothing else is said. The loss
# hardly moves, and training goes on: the adapters of o and down still learn.

# %% Draw figure 3 tags=["hide-input"]
# it was read above
warnings.filterwarnings("ignore", message="bitsandbytes::gemv_4bit")
curves = {
    "healthy": learn(evaluated(adapted(cured=True)), rows, steps=40, rate=1e-2),
    "repacked": learn(evaluated(adapted(cured=False)), rows, steps=40, rate=1e-2)
    if REPACKS
    else [float(loss) for loss in RECORDED["loss"].split()],
}
for name, curve in curves.items():
    print(f"{name:10} loss of step 1 {curve[0]:.3f}, of step 40 {curve[-1]:.3f}")
assert abs(curves["healthy"][0] - curves["repacked"][0]) < 0.01
assert curves["healthy"][-1] < curves["repacked"][-1] - 1


def two_logs(theme: Theme):
    """What the logs of two runs say that learn little, or nothing."""
    drawn, (left, right) = panels(2, 2.8)
    for (name, curve), color in zip(curves.items(), theme.series, strict=False):
        left.plot(range(1, 41), curve, color=color, label=name)
    left.set(xlabel="step, LoRA over NF4", ylabel="logged loss", ylim=(-0.3, 7))
    right.plot(range(1, 4), good, color=theme.series[0], label="true, until it is NaN")
    logged = [entry["loss"] for entry in every_ten]
    right.plot(
        (10, 20),
        logged,
        color=theme.series[1],
        marker="o",
        label="a line every ten steps",
    )
    right.axvline(3.5, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    right.set(
        xlabel="step, the weights break before step 4", xlim=(0, 21), ylim=(-0.3, 7)
    )
    right.set_xticks(range(0, 21, 5))
    for axes in (left, right):
        axes.grid(axis="y")
        axes.legend(loc="upper right")
    return drawn


course.show(
    two_logs,
    "Figure 3. Two logs that look like learning: "
    "after an evaluation over repacked weights, and with every weight NaN.",
)

# %% [markdown]
# **7. A base that is half random.** The file of a base lacks one tensor, for example because a script saved only a part
# of the model. transformers loads the base all the same: it fills the gap with random numbers and logs a warning. The
# first cell of this lesson silences the libraries, as many scripts do, so you do not see it. The lost tensor has
# 131,072 weights. Predict how many are right.

# %%
tensors = load_file(Path(tiny) / "model.safetensors")
lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
torn = Path(folder.name) / "torn"
shutil.copytree(tiny, torn)
save_file(tensors, torn / "model.safetensors", {"format": "pt"})
other, info = AutoModelForCausalLM.from_pretrained(
    torn, dtype=torch.float32, output_loading_info=True
)
filled = other.model.layers[1].mlp.up_proj.weight.detach()
print(f"{(filled == lost).sum()} of {filled.numel():,} weights are right")
_, whole = AutoModelForCausalLM.from_pretrained(
    tiny, dtype=torch.float32, output_loading_info=True
)
print("missing:", *info["missing_keys"])
assert not (filled == lost).any()
ask(
    "whole base",
    lambda info: not (info["missing_keys"] or info["unexpected_keys"]),
    whole,
    info,
)

# %% [markdown]
# Not one weight of that tensor is right, so the base is broken. Fine-tuning repairs a part of the damage, so the loss
# falls, and the run looks as if it were learning.
#
# ## 3. Prove it
# A check that cannot fail proves nothing. One that fails on a healthy run is switched off within a week. So each line
# must say yes once and no once:

# %%
for name, (of_healthy, of_sick) in asked.items():
    print(
        f"{name:32}{'holds' if of_healthy else 'fails':8}"
        f"{'holds' if of_sick else 'fails'}"
    )
assert all(of_healthy and not of_sick for of_healthy, of_sick in asked.values())
assert len(asked) == 7

# %% [markdown]
# The package goes further: its seven checks drive the way that your run will take, from text to gradient, through
# loader, trainer and evaluation. Switch one failure on in it, and ask all. How many fail? `tests/test_selftest.py` does
# so for each of the seven; here it is the leak.

# %% Examine a trainer whose documents leak tags=["hide-input"]
collate = PadToLongest.__call__


def with_a_mask(self, rows):
    batch = collate(self, rows)
    return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}


def lines(found):
    return [
        f"{'holds' if c['holds'] else 'fails'}  {c['name']:<27}{c['found']}"
        for c in found["checks"]
    ]


with mock.patch.object(PadToLongest, "__call__", with_a_mask):
    leaking = selftest.examine()
print(*lines(leaking), sep="\n")
assert [c["name"] for c in leaking["checks"] if not c["holds"]] == ["packed_documents"]

# %% [markdown]
# Each check compares with a *limit*: a gradient may move by a thousandth of itself, a loss by a ten-thousandth. Healthy
# ways differ by 6e-8, sums in another order. The leak turned a gradient into another one, and bf16 moved our loss by
# more than a thousandth. The limit lies between.
#
# ## 4. What it costs
# Seconds once, and no byte: the selftest is over before the job begins. When is it worth that?

# %%
found = selftest.examine()
print(
    f"{found['seconds']:.0f} s here; "
    f"it pays if one run in {60 * minutes / found['seconds']:.0f} would be dead"
)

# %% [markdown]
# In the run itself there is one check more: our trainer looks at every loss, $3 \cdot 107 = 321$ times. On a card each
# look waits until the number is there. The gradient's norm is there anyway, for clipping.
#
# ## 5. The production switch

# %%
print("cria doctor --selftest && cria train kwanzaa")
print(*lines(found), sep="\n")
assert found["ok"]

# %% [markdown]
# Exit code 0 if all hold, else 1, with cause and cure of what fails; `--json` for scripts. Run it on the machine that
# trains, after every update of a library. What keeps the package from each failure is as short as its check:
#
# - base: headers and config are compared, and the loader's report is read (`models/pretrained.py`)
# - mask: answers by prefix, and a row without any is refused (`data/tokens.py`)
# - leak: packed rows get positions and no mask (`data/batches.py`)
# - bf16: the sum is fp32 whatever comes in (`losses.py`)
# - NaN: the filter is off, and loss and norm are looked at before the optimizer moves (`trainer/shared.py`)
# - evaluation: losses and tokens are added up, and divided once (`trainer/shared.py`)
# - repacking: forbidden at load (`load.py`)
#
# ## 6. Where it breaks
# **Nothing is raised, and the number is NaN.** Cause: every comparison with NaN is false, so `moved > limit` is, too.
# And `max(0.0, nan)` is 0.0: our own first draft took the larger of two errors, and would have passed a NaN. Cure: ask
# whether it is small, never whether it is large.

# %%
moved, limit = math.nan, 1e-3
if moved > limit:
    raise RuntimeError("the gradient moved")
print(f"nothing raised at {moved}; max says {max(0.0, moved)}")
try:
    if not moved <= limit:  # the cure
        raise RuntimeError("the gradient moved")
except RuntimeError as error:
    print(error)
    assert max(0.0, moved) == 0.0

# %% [markdown]
# **`holds`, on another machine.** Failure 6 needs a certain CPU. Ask the plain libraries on a machine without
# AVX512-BF16, such as the one where your tests run, and all is well. Cause: a check speaks for the machine that it ran
# on. Cure: ask where you train.

# %%
# as on another CPU
with mock.patch.object(bnb.nn.modules, "has_avx512bf16", return_value=False):
    elsewhere = dead(evaluated(adapted(cured=False)))
print(
    f"not cured: {len(elsewhere)} dead adapters elsewhere, "
    f"{len(repacked)} where it repacks"
)
assert not elsewhere
print(
    "the lines above speak for",
    found["device"],
    "and bitsandbytes",
    found["versions"]["bitsandbytes"],
)

# %% [markdown]
# A third: `python -O` takes every `assert` out. So the selftest has none; it compares, and returns.
#
# ## 7. Exercises
# 1. **Predict.** Two runs end with losses between 1 and 2, in bf16. What is the smallest difference, above zero, that
#    you can see between them? Your answer is a loss.
# 2. **Build.** An eighth failure: SmolLM2's padding token *is* its end token. Code that masks labels by that number
#    masks the end of every answer, and the model never stops. Fill in `teaches_to_stop(row, end)`. `row["labels"]` is a
#    list of token ids with -100 where nothing is trained, and `end` is the id of the end token. Return True if the last
#    trained label is `end`, else False; also False if no label is trained. (One line or two.)
# 3. **Reach.** 42 steps, a line every ten, a loss of 1.6 in steps 1 to 3, and NaN from step 4 on. At the end
#    transformers prints `train_loss`: the sum of what its lines have summed, over 42. What is it? Your answer is a
#    loss. (Our adapter's true loss on evaluation rows was 0.489.)

# %% tags=["exercise"]
smallest_difference = None


def teaches_to_stop(row, end):
    """FILL ME IN."""


train_loss_of_the_dead = None


# %% Check the exercises tags=["hide-input"]
def of_stopping(answer):
    end = tokenizer.eos_token_id
    (whole,) = tokens.tokenize(chats, tokenizer, 2048).rows
    masked = {
        **whole,
        "labels": [-100 if label == end else label for label in whole["labels"]],
    }
    # its first answer is whole, its second is not
    cut = {name: numbers[:-4] for name, numbers in whole.items()}
    padded = {"input_ids": [*cut["input_ids"], end], "labels": [*cut["labels"], -100]}
    untrained = {**whole, "labels": [-100] * len(whole["labels"])}
    cases = (
        (
            whole,
            True,
            "it is False for a good row, whose last label is -100: "
            "the closing line break is not trained",
        ),
        (
            masked,
            False,
            "it is True where the end token is in the text and its label is -100; "
            "look at the labels",
        ),
        (
            cut,
            False,
            "it is True for a row that was cut within its last answer; "
            "only the last trained label counts",
        ),
        (
            padded,
            False,
            "it is True for a cut answer with padding behind it; "
            "the padding's label is -100",
        ),
        (untrained, False, "it must be False for a row in which no label is trained"),
    )
    for row, right, hint in cases:
        try:
            found = answer({name: list(numbers) for name, numbers in row.items()}, end)
        except IndexError as error:
            raise AssertionError(
                "it fails on a row in which no label is trained"
            ) from error
        if found is None:
            raise NotImplementedError
        if not isinstance(found, bool):
            raise TypeError(f"it returned a {type(found).__name__}")
        assert found == right, hint


course.check(
    1,
    smallest_difference,
    course.about(
        2**-7,
        "bf16 has 8 significant bits, and from 1 to 2 the first of them stands "
        "before the point",
    ),
    "a loss: how far two neighbouring bf16 numbers between 1 and 2 are apart",
)
course.check(2, teaches_to_stop, of_stopping, "a function (row, end) -> True or False")
course.check(
    3,
    train_loss_of_the_dead,
    course.about(
        1.6 * 3 * 11 / 4 / 42,
        "in the first line each NaN adds the mean so far (failure 4), "
        "later lines hold 0, and 42 steps share the sum",
    ),
    "a loss: the sum over all lines, for each of 42 steps",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# smallest_difference = 2**-7  # 0.0078: 1 and 7 bits after the point
#
#
# def teaches_to_stop(row, end):
#     return [label for label in row["labels"] if label != -100][-1:] == [end]
#
#
# train_loss_of_the_dead = 1.6 * 3 * 11 / 4 / 42  # 0.314: better than any run that lived
# ```
#
# </details>
#
# ## In one breath
# - **Saves** runs that learn nothing, learn something else, or say something else: time, and decisions.
# - **Costs** seconds before a run; in it, one look at each loss.
# - **Exact**: on a CPU healthy ways agree to the bit, or to a millionth; each failure is far beyond the limit.
# - **When**: before the first run on a machine, and after every update.
# - **When not**: it is no proof. It knows seven failures, one model of two blocks, and not your data.
#
# ## Sources
# - The base: `_initialize_missing_keys` and `utils/loading_report.py` of transformers 5.23.
# - The mask: `apply_chat_template` in `tokenization_utils_base.py` of transformers 5.23; issues 30650, 34172. TRL 1.16
#   (`sft_trainer.py`) refuses an empty one.
# - The leak: transformers issue 31629; `_preprocess_mask_arguments` in `masking_utils.py`, 5.23.
# - bf16: `torch/nn/functional.py` of torch 2.13, `linear_cross_entropy`.
# - NaN and evaluation: `_run_epoch` and `evaluation_loop` in `trainer.py` of transformers 5.23.
# - Repacking: `nn/modules.py` (`Linear4bit.forward`) and `autograd/_functions.py` (`matmul_4bit`) of bitsandbytes
#   0.50.2. The recorded run of section 1 is our own, on two Xeon cores; its result file is not kept.
# - Ours: `cria_tricks/doctor/selftest.py`, `tests/test_selftest.py`.
