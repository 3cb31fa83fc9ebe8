# ---
# jupyter:
#   question: Which failures of a training run raise no error, and which one-line check catches each of them before you
#     pay for the run?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # When libraries lie: seven failures that raise nothing
# > **Promise.** A training log shows a loss of 0.0, although every weight of the model is NaN, and no error was raised.
# > You build seven such silent failures from scratch, see the widely used libraries produce them (two on the page, five
# > in folded parts), and catch each with one line. At the end you put one of them into this package, and see a check
# > notice it.
# >
# > **Card.** saves runs that have failed without an error / costs seconds before a run / exact: no false alarm on a
# > healthy machine, and each failure is found by one check / about 25 minutes / after [a full card](a_full_card.py)
#
# This lesson does not change the memory bill by a byte: the job still needs 1,516 MiB at its peak. It matters because a
# cheap run that has learned nothing is still wasted.

# %% Imports and settings tags=["hide-input"]
import logging
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import bitsandbytes as bnb
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from cria_tricks import course
from cria_tricks.course import (
    CONFIGS,
    T4,
    PadToLongest,
    Target,
    Theme,
    check_rows,
    find_shape,
    prices,
    quiet_libraries,
    row_lengths,
    tokens,
)
from cria_tricks.techniques.packing import PackedRows

quiet_libraries()
folder = tempfile.TemporaryDirectory()  # goes with this process
bill = course.bill(course.so_far("when_libraries_lie"))
assert bill == course.bill(course.so_far("a_full_card"))
assert bill.peak_bytes // 2**20 == 1516

# %% [markdown]
# ## 1. The bill
# A crash costs the time before it, but a silent failure costs the whole run and every decision that you base on it. So
# this bill is in minutes, not in bytes. A comparison of 12 settings with three runs each needs 36 runs. How long do
# they take on a T4, with the real lengths of the 107 rows? A failed run can look well: in figure 4 below most adapters
# of a small model get no gradient (failure 6). Its loss still falls from 6.279 to 4.019; a healthy run ends at 2.113.

# %%
job = course.so_far("when_libraries_lie")
price = prices(Target(find_shape(job.model), T4), job, rows=107)[0]  # full rows
full = sum(tokens for tokens, _ in row_lengths("train")) / (107 * 2048)
minutes = full * price.minutes
low, high = full * price.minutes_low, full * price.minutes_high
print(f"one run on a T4: {low:.0f} to {high:.0f} minutes, predicted")
print(f"36 runs: {36 * minutes / 60:.1f} hours, for nothing if they failed in silence")
lost = 1 - (6.279 - 4.019) / (6.279 - 2.113)
print(f"failure 6: {lost:.0%} of the learning is missing")


# %% Draw figure 1 tags=["hide-input"]
def where_they_are(theme: Theme):
    """Draw a step from left to right, and the places of the first six failures."""
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
    "Figure 1. A training step from left to right, with the first six failures below "
    "the part in which they happen (the seventh is in the base).",
)

# %% [markdown]
# ## 2. From scratch
# `ask` puts the same question to a healthy case and to a faulty one: a good check says True and then False.
#
# **1. No token is trained**, because all labels are -100, which means "do not train this token", so the mean loss is
# $0/0$. The check looks for one label that is not -100.
#
# **2. Packed documents see each other**, because [packing](packing.py) puts two documents into one sequence, and the
# attention mask does not separate them. The check changes the neighbour: the output must stay the same.

# %%
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
asked = {}


def ask(name, check, healthy, faulty):
    asked[name] = check(healthy), check(faulty)
    print(f"{name}: {asked[name][0]} if healthy, {asked[name][1]} if faulty")


scores = torch.randn(24, 256)  # 24 tokens, 256 words
labels = torch.randint(256, (24,))
no_labels = torch.full((24,), -100)
print("losses:", F.cross_entropy(scores, labels), F.cross_entropy(scores, no_labels))
ask("trained tokens", lambda labels: bool((labels != -100).any()), labels, no_labels)

first, other, document = torch.randn(3, 24, 16)


def packed(neighbour, separate):
    """Attention over two documents in one sequence; the output of the second."""
    x = torch.cat([neighbour, document])
    visible = torch.ones(48, 48).tril().bool()  # no token looks ahead
    if separate:
        visible[24:, :24] = False
    # True in the mask: may be looked at
    return F.scaled_dot_product_attention(x, x, x, attn_mask=visible)[24:]


def apart(separate):
    return torch.equal(packed(first, separate), packed(other, separate))


ask("packed documents", apart, healthy=True, faulty=False)  # the mask separates, or not

# %% [markdown]
# **3. The loss is in bf16**, because torch's `cross_entropy` answers in the dtype of its input. bf16 has 8 significant
# bits, so between 4 and 8 it moves in steps of $1/32$, between 2 and 4 of $1/64$, and a small difference between two
# runs vanishes. The check rounds the loss to bf16 and to fp16: a loss that comes from 16 bits stays the same, and an
# fp32 loss changes (but for 1 in 8,192, by chance). The dtype alone proves nothing, because a cast to fp32 brings no
# bits back.
#
# **4. NaN is logged as a number**, because transformers' option `logging_nan_inf_filter` is on by default. A line of
# the log is a sum $S$ of losses, divided by its steps. In the $n$-th step of a line, the filter adds $S/n$ in place of
# a NaN, where $n$ counts this step, too. If the weights break before step 4, then step 4 multiplies $S$ by $5/4$, step
# 5 by $6/5$, and step 10 by $11/10$: together $11/4$. Later lines start with $S=0$, so they stay 0. (With eight
# [micro-batches](../docs/glossary.md#micro-batch) a step the filter acts eight times a step, so the first line
# explodes: $(11/4)^8 = 3{,}271$.) The check asks whether each loss is finite, before the optimizer's step.

# %%
exact = F.cross_entropy(scores, labels)
rounded = F.cross_entropy(scores.bfloat16(), labels)
print(f"the loss in fp32 {exact:.4f}, in bf16 {rounded:.4f}")
assert rounded.item() % (1 / 32) == 0


def in_fp32(loss):
    return bool(loss != loss.bfloat16()) and bool(loss != loss.half())


ask("loss in fp32", in_fp32, exact, rounded)


def log_lines(losses, every):
    """Return the mean loss of each line of a log, with NaN filtered."""
    lines, total, steps = [], 0.0, 0
    for loss in losses:
        steps += 1
        total += total / steps if math.isnan(loss) else loss
        if steps == every:
            lines.append(total / every)
            total, steps = 0.0, 0
    return lines


healthy, broken = [6.4, 6.2, 6.0], [6.4, 6.2, 6.0] + 17 * [math.nan]
print("a log of the broken run:", [round(x, 3) for x in log_lines(broken, every=10)])
ask("nan stops", lambda losses: all(map(math.isfinite, losses)), healthy, broken)

# %% [markdown]
# **5. The evaluation is no mean over tokens**, because it averages each batch first and then the batches. So a batch
# with few trained tokens counts as much as one with many. The check compares with the sum of all losses, divided by the
# number of all trained tokens.
#
# **6. Gradients are dropped**, because a frozen layer uses a fast kernel that has no backward pass. torch raises no
# error: it treats the output of such a kernel as a constant. So the adapters before it get no gradient or zeros, while
# the others still learn. bitsandbytes does this on a CPU with AVX512-BF16, never on a GPU: the first forward pass in
# eval mode switches to this kernel, and nothing switches back. Therefore the check asks every adapter for a gradient
# *after* an evaluation.
#
# **7. The base is half random**, because its file lacks one tensor, and the loader keeps the random numbers that were
# there. The check reads the missing names in the loader's report.

# %%
batches = [(120.0, 40), (20.0, 2)]  # the sum of the losses, and the trained tokens


def over_tokens(batches):
    return sum(loss for loss, _ in batches) / sum(tokens for _, tokens in batches)


def of_means(batches):
    return sum(loss / tokens for loss, tokens in batches) / len(batches)


print(f"over tokens {over_tokens(batches):.2f}, of means {of_means(batches):.2f}")
true = 140 / 42  # by hand
ask("evaluation", lambda way: math.isclose(way(batches), true), over_tokens, of_means)


class Repacked(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())  # a kernel without a backward pass


def gradients(layer):
    before, after = nn.Linear(8, 8), nn.Linear(8, 8)  # two adapters
    frozen = layer(8, 8).requires_grad_(False)
    x = torch.randn(4, 8)
    (frozen(before(x)) + after(x)).square().sum().backward()
    return [adapter.weight.grad for adapter in (before, after)]


def all_there(found):
    return all(gradient is not None and bool(gradient.any()) for gradient in found)


ask("gradients", all_there, gradients(nn.Linear), gradients(Repacked))


def report(file):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model.load_state_dict(file, strict=False)


file = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).state_dict()
torn = {name: tensor for name, tensor in file.items() if name != "1.weight"}
ask("whole base", lambda file: not report(file).missing_keys, file, torn)
assert list(asked.values()) == 7 * [(True, False)]

# %% [markdown]
# ## 3. Prove it
# Here transformers' own `Trainer` meets failures 1 and 4, and the folded parts show the other five with transformers,
# peft and bitsandbytes. A model of two blocks with random weights is enough.
#
# In **failure 1**, a row has no trained token. To train on answers only, transformers looks for a `{% generation %}`
# block in the chat template. Most templates have none, and then it marks no token and only writes a warning into its
# log (TRL 1.16 refuses such a mask). torch said that the loss of such a row is NaN. Which loss does the log of the
# `Trainer` show, with one step in a line?

# %% Helpers: a tiny model, a tokenizer, a plain trainer, and a row made the right way tags=["hide-input"]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three more?"},
    {"role": "assistant", "content": "Seven: 4 + 3."},
]
# A chat template as most models have it: nothing in it marks the assistant's tokens.
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_base(path):
    """Write a random Llama of two blocks, and a tokenizer of single bytes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIGS["tiny"] | {"vocab_size": 512})
    made = AutoModelForCausalLM.from_config(config)
    made.to(torch.bfloat16).save_pretrained(path)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {byte: number for number, byte in enumerate(bytes_)}
    text = Tokenizer(BPE(ids, []))  # no merges, so every byte is a token
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=text,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    ).save_pretrained(path)


def random_rows(*lengths):
    """Make rows of random bytes, from their lengths and how much of each is prompt."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for length, prompt in lengths:
        ids = torch.randint(1, 256, (length,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


tiny = folder.name
write_tiny_base(tiny)
tokenizer = AutoTokenizer.from_pretrained(tiny)
tokenizer.pad_token = tokenizer.eos_token
pad = DataCollatorForSeq2Seq(tokenizer)
model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
asked = {}  # from here on, of the libraries


def plain_trainer(model, rows, *callbacks, **settings):
    """Return transformers' Trainer with its own defaults, one row a micro-batch, on the
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


# The right way: the conversation up to an answer is the beginning of that with it.
chats = list(check_rows([({"messages": TURNS}, "here")]))
(ours,) = tokens.tokenize(chats, tokenizer, 2048).rows

# %% Your guess: the loss in the log tags=["predict"]
guess = "no guess"  # @param ["no guess", "0.0", "nan", "an error"]

# %%
made = tokenizer.apply_chat_template(
    TURNS, return_dict=True, return_assistant_tokens_mask=True
)
marks = zip(made["input_ids"], made["assistant_masks"], strict=True)
empty = {
    "input_ids": made["input_ids"],
    "labels": [token if mark else -100 for token, mark in marks],
}
run = plain_trainer(model, [empty], max_steps=3)
run.train()
lines = [entry for entry in run.state.log_history if "loss" in entry]
said = [(entry["loss"], entry["grad_norm"]) for entry in lines]
print("loss and norm of the gradient:", said)
assert said == [(0.0, 0.0)] * 3
course.reveal(guess, str(said[-1][0]))
trains = [label for label in ours["labels"] if label != -100]
print("what a good row trains:", repr(tokenizer.decode(trains)))  # read it once
ask("trained tokens", lambda row: max(row["labels"]) != -100, ours, empty)

# %% [markdown]
# The log shows 0.0, because failure 4 hides the NaN ($S$ is 0 in the first step of a line). So take a loss of exactly
# 0.0 for a NaN. One such row among good ones shows nowhere. The package finds answers in another way: the conversation
# up to an answer is the beginning of the conversation with it.
#
# For **failure 4**, a callback breaks the weights before step 4. Our `log_lines` predicts what a log with a line every
# ten steps shows: first a lower loss, then 0. The filter hides the losses, so the check reads the logged norm of the
# gradient, which is NaN. (With fp16 it is not finite either where the [loss scale](../docs/glossary.md#loss-scale)
# skips a step. There, switch the filter off, and check the loss.)


# %% Helpers: a trainer whose weights break before step 4, and five rows tags=["hide-input"]
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
rows = random_rows((12, 2), (40, 4), (33, 5), (50, 1), (21, 10))

# %%
every_step, ended = log(doomed()), doomed(logging_steps=10)
every_ten = log(ended)
good = [entry["loss"] for entry in every_step[:3]]
predicted = log_lines(good + 17 * [math.nan], every=10)
found = [entry["loss"] for entry in every_ten]
print("a line every step:", [round(entry["loss"], 2) for entry in every_step[:6]])
print(f"every ten: predicted {predicted[0]:.4f}, {predicted[1]}", end="; ")
print(f"found {found[0]:.4f}, {found[1]}")
assert abs(found[0] / predicted[0] - 1) < 1e-5
assert found[1] == predicted[1] == 0
assert all(p.isnan().any() for p in ended.model.parameters())


def finite(log):
    return all(math.isfinite(entry["grad_norm"]) for entry in log)


ask("nan stops", finite, every_step[:3], every_ten)


# %% Draw figure 2 tags=["hide-input"]
def nan_log(theme: Theme):
    """Draw what the log of a run says whose weights are NaN from step 4 on."""
    drawn, axes = course.figure(height=2.8)
    axes.plot(range(1, 4), good, color=theme.series[0], label="true, until it is NaN")
    axes.plot(
        (10, 20),
        [entry["loss"] for entry in every_ten],
        color=theme.series[1],
        marker="o",
        label="a line every ten steps",
    )
    axes.axvline(3.5, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(
        xlabel="step (the weights break before step 4)",
        ylabel="logged loss",
        xlim=(0, 21),
        ylim=(-0.3, 7),
    )
    axes.set_xticks(range(0, 21, 5))
    axes.grid(axis="y")
    axes.legend(loc="upper right")
    return drawn


course.show(
    nan_log,
    "Figure 2. The logged loss falls to zero while every weight of the model is NaN.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: failure 2, the leak, in transformers
# Positions that start again tell transformers where the second document begins, but only if there is no attention mask
# and no cache. A mask of ones hides nothing, so it looks harmless. However, it switches this detection off. So does a
# cache, which models have by default.

# %% tags=["deep"]
torch.manual_seed(0)
first, other, second = torch.randint(1, 256, (3, 1, 24))
positions = torch.arange(24).repeat(1, 2)


def of_the_second(neighbour, use_cache=False, **more):
    """Logits of the second document, (24, V)."""
    with torch.no_grad():
        both = torch.cat([neighbour, second], dim=1)
        return model(both, position_ids=positions, use_cache=use_cache, **more).logits[
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
with_a_cache = of_the_second(first, True), of_the_second(other, True)
assert not torch.equal(*with_a_cache)  # leaks, too, without a mask

# %% [markdown] tags=["deep"]
# ### Deeper: failure 3, a loss in bf16
# transformers' models cast logits to fp32 before the loss. torch's `cross_entropy` does not (outside autocast), and
# neither does its new `linear_cross_entropy` (2.13). With bf16 the loss can be only one of the two multiples of $1/32$
# around the true value. Double quantization costs 0.002 to 0.003 ([NF4](nf4.py)): in bf16 nobody would have seen it.

# %% tags=["deep"]
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
ask("loss in fp32", in_fp32, right, rounded)

# %% [markdown] tags=["deep"]
# ### Deeper: failure 5, an evaluation that is no mean over tokens
# `Trainer.evaluate` takes the mean of each batch, and averages these means by rows. Our rows have 10 to 49 trained
# tokens. The model learns two of the five rows, so that the difference is large. One model and the same rows give three
# numbers at three batch sizes. Only a single batch of all rows is right. Batches of one row are not: there a short
# answer counts as much as a long one.


# %% tags=["deep"]
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

# %% [markdown] tags=["deep"]
# ### Deeper: failure 6, gradients dropped by repacking
# On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a 4-bit matrix for a faster kernel. It does so at the first
# forward pass in eval mode, in place, and for good. That kernel has no backward pass. What reaches the loss only
# through another 4-bit matrix gets no gradient: five of the seven adapters of a block. The model stays on the CPU here
# even if you have a GPU. (On another CPU, and with bitsandbytes' library for CUDA, you see what we recorded. That
# library cannot tell whether a CPU has AVX512-BF16, so it never repacks.)

# %% Draw figure 3 tags=["hide-input", "deep"]
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
        "the residual stream, on the way back (B, T, D)",
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
        sketch.text(left + 12.7, 11.0, "repacked:\nno way back", quiet=True)
    return sketch.figure


course.show(
    around_a_block,
    "Figure 3. The backward pass through a repacked block: o and down write into the "
    "residual stream, so their adapters have a gradient, and the dashed ones do not.",
)


# %% tags=["deep"]
def adapted(cured):
    """LoRA over NF4, with transformers, peft and bitsandbytes."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        tiny,
        dtype=torch.float32,
        quantization_config=nf4,
        device_map={"": "cpu"},  # else transformers takes the GPU, if there is one
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

# %% [markdown] tags=["deep"]
# torch 2.13 shows its warning once in the life of a process and names no layer. Nothing else is said. The loss still
# falls, because the adapters of o and down learn.

# %% Draw figure 4 tags=["hide-input", "deep"]
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
fell = [curve[0] - curve[-1] for curve in curves.values()]
print(f"missing in the repacked run: {1 - fell[1] / fell[0]:.0%} of the learning")
assert abs(curves["healthy"][0] - curves["repacked"][0]) < 0.01
assert curves["healthy"][-1] < curves["repacked"][-1] - 1


def healthy_and_repacked(theme: Theme):
    """Draw the loss of a healthy run, and of one whose weights were repacked."""
    drawn, axes = course.figure(height=2.8)
    for (name, curve), color in zip(curves.items(), theme.series, strict=False):
        axes.plot(range(1, 41), curve, color=color, label=name)
    axes.set(xlabel="step, LoRA over NF4", ylabel="logged loss", ylim=(-0.3, 7))
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    healthy_and_repacked,
    "Figure 4. After an evaluation over repacked weights the loss falls, but much "
    "slower than in a healthy run.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: failure 7, a base that is half random
# The file of the base lacks one tensor, for example because a script saved only a part of the model. transformers loads
# it anyway: it fills the gap with random numbers and logs a warning. The first cell of this lesson silences the
# libraries, as many scripts do, so you do not see it. None of the 131,072 weights of the lost tensor is right.
# Fine-tuning repairs a part of the damage, so the loss falls, and the run looks as if it were learning.

# %% tags=["deep"]
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
ask("whole base", lambda info: not info["missing_keys"], whole, info)

# %% [markdown]
# ### Every check says yes once and no once
# A check that cannot fail proves nothing, and people switch off a check that fails on a healthy run. Here are the seven
# checks on the real libraries, and what the folded parts found.
#
# Such a check also belongs in the tests of your own code. The last cell checks our package: it packs two documents and
# makes a batch of them, once as it is, and once with a mask of ones added.

# %%
for name, (of_healthy, of_faulty) in asked.items():
    print(f"{name:32}healthy: {of_healthy!s:8}faulty: {of_faulty}")
assert len(asked) == 7
assert all(of_healthy and not of_faulty for of_healthy, of_faulty in asked.values())
print(f"2: another neighbour moves the logits by {leak:.0%} of the largest one")
print(f"3: a loss of {right:.4f} is {rounded.item()} in bf16")
print("5: three batch sizes, three losses:", *(f"{loss:.4f}" for loss in says.values()))
print(f"6: {len(repacked)} of 14 adapters get no gradient")
print(f"7: {(filled == lost).sum()} of {filled.numel():,} lost weights are right")

# %% Ask the package, as it is and with a mask tags=["hide-input"]
collate = PadToLongest.__call__


def with_a_mask(self, rows):
    batch = collate(self, rows)
    return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}


def gradient(neighbour, document):
    """Pack two documents by the package; only the second has labels."""
    batch = PadToLongest(0)(PackedRows([neighbour, document], 64))
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def stays(way):
    before, other, document = random_rows((24, 24), (24, 24), (16, 4))
    with mock.patch.object(PadToLongest, "__call__", way):
        alone, beside_another = gradient(before, document), gradient(other, document)
    moved = ((alone - beside_another).norm() / alone.norm()).item()
    print(f"another neighbour moves the gradient by {moved:.1e} of itself")
    return moved <= 1e-3


began = time.perf_counter()
ask("packed documents, in the package", stays, collate, with_a_mask)
seconds = time.perf_counter() - began
assert asked["packed documents, in the package"] == (True, False)

# %% [markdown]
# A check compares with a *limit*. Here a gradient may move by a thousandth of itself, and above a loss by a
# ten-thousandth. Healthy losses differ by 1e-7, because sums have another order, and each failure is far beyond its
# limit.
#
# ## 4. What it costs
# This check takes a moment, once, and no byte, because it is over before the job begins.

# %%
one_in = 60 * minutes / seconds
print(f"{seconds:.1f} s here, {60 * minutes:.0f} s for a run on a T4")
print(f"it pays if it saves one run in {one_in:.0f}")

# %% [markdown]
# During the run there is one more check: our trainer looks at the loss of every row, $3 \cdot 107 = 321$ times in
# three epochs, and on a GPU it must wait for the number each time.
#
# ## 5. The production switch
# `cria doctor --selftest` asks the package all seven questions. `cria train` refuses a base that lacks a tensor and a
# row without a trained token, and stops at a NaN; the folded list below says what keeps it from the other four. In your
# own code, ask before you train, on the machine that trains, and again after every update of a library. In plain
# Hugging Face code, lines 1 and 7 are checks, and 2 to 6 are cures:
#
# ```python
# assert all(max(row["labels"]) != -100 for row in rows)  # 1
# batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}  # 2: no mask
# loss = F.cross_entropy(logits.float(), labels)  # 3
# TrainingArguments("out", logging_nan_inf_filter=False)  # 4
# eval_loss = sum(sums_of_losses) / sum(trained_tokens)  # 5: one sum for each batch
# for module in model.modules():
#     if isinstance(module, bnb.nn.Linear4bit):
#         module.support_avx512bf16_for_cpu = False  # 6
# model, info = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)
# assert not info["missing_keys"]  # 7
# ```
#
# The checks save no byte, added to the earlier lessons or taken away from the whole job.

# %% [markdown] tags=["deep"]
# ### Deeper: what keeps the package from each failure
# - base: headers and config are compared, and the loader's report is read (`models/pretrained.py`)
# - mask: answers are found by prefix, and a row without any is refused (`data/tokens.py`)
# - leak: packed rows get positions and no mask (`data/batches.py`)
# - bf16: the sum is fp32, whatever comes in (`losses.py`)
# - NaN: no filter, and loss and norm are checked before the optimizer moves (`trainer/loop.py`)
# - evaluation: losses and tokens are added up, and divided once (`trainer/evaluate.py`)
# - repacking: forbidden when a model is loaded (`load/model.py`)

# %% [markdown]
# ## 6. Where it breaks
# **A NaN can pass a check**, because every comparison with NaN is false. Therefore `moved > limit` is false, and the
# check raises nothing; in the same way `max(0.0, nan)` is 0.0. The cure is to ask whether a number is small, never
# whether it is large.

# %%
moved, limit = math.nan, 1e-3
if moved > limit:
    raise RuntimeError("the gradient moved")
print(f"nothing was raised at {moved}; max says {max(0.0, moved)}")
try:
    if not moved <= limit:  # the cure
        raise RuntimeError("the gradient moved")
except RuntimeError as error:
    print(error)

# %% [markdown] tags=["deep"]
# ### Deeper: a check that holds on another machine, and `python -O`
# Failure 6 needs a certain CPU. If you ask the plain libraries on a machine without AVX512-BF16, such as the one where
# your tests run, all is well. A check speaks only for the machine that it ran on, so ask where you train.
#
# `python -O` removes every `assert`. Therefore let a check that guards a run compare and raise, not `assert`.

# %% tags=["deep"]
# as on another CPU
with mock.patch.object(bnb.nn.modules, "has_avx512bf16", return_value=False):
    elsewhere = dead(evaluated(adapted(cured=False)))
print(
    f"not cured: {len(elsewhere)} dead adapters elsewhere, "
    f"{len(repacked)} where it repacks"
)
assert not elsewhere

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Two runs end with losses between 1 and 2, in bf16. What is the smallest difference above zero that you
#    can see between them? Your answer is a loss.
# 2. **Build.** An eighth failure: SmolLM2's padding token *is* its end token. Code that masks labels by that number
#    also masks the end of every answer, so the model never learns to stop. Fill in `teaches_to_stop(row, end)`.
#    `row["labels"]` is a list of token ids, with -100 where nothing is trained, and `end` is the id of the end token.
#    Return True if the last trained label is `end`, else False; also False if no label is trained.
# 3. **Reach.** A run has 42 steps of one micro-batch, a line of the log every ten, a loss of 1.6 in steps 1 to 3, and
#    NaN from step 4 on. At the end transformers prints `train_loss`: the sum of all that its lines have summed, and the
#    two steps behind them, divided by 42. What is it?

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
        "in the first line each NaN adds S/n (failure 4), "
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
# - **Saves** runs that learn nothing, learn something else, or report something else: time, and wrong decisions.
# - **Costs** seconds before a run, and during it one look at each loss.
# - **Exact**: on a CPU healthy ways agree to the bit, or to a millionth, and each failure is far beyond the limit.
# - **When**: before the first run on a machine, and after every update of a library.
# - **When not**: it is not a proof. It knows seven failures and one model of two blocks, but not your data.
#
# ## Sources
# - The base: `_initialize_missing_keys` and `utils/loading_report.py` of transformers 5.23.
# - The mask: `apply_chat_template` in `tokenization_utils_base.py` of transformers 5.23; issues 30650, 34172. TRL 1.16
#   (`sft_trainer.py`) refuses an empty one.
# - The leak: transformers issue 31629; `_preprocess_mask_arguments` in `masking_utils.py`, 5.23.
# - bf16: `torch/nn/functional.py` of torch 2.13, `linear_cross_entropy`.
# - NaN and evaluation: `_run_epoch` and `evaluation_loop` in `trainer.py` of transformers 5.23.
# - Repacking: `nn/modules.py` (`Linear4bit.forward`) and `autograd/_functions.py` (`matmul_4bit`) of bitsandbytes
#   0.50.2. Its CUDA libraries lack the function `has_avx512bf16_cpu`.
# - Ours: the files of the folded list; `tests/test_pretrained.py`, `tests/data/test_tokens.py`,
#   `tests/techniques/test_packing.py`, `tests/test_trainer.py`, `tests/test_load.py`.
