r"""Look for silent failures of the libraries on this machine: ``cria doctor --selftest``.

A silent failure raises no error, and makes the result of a run wrong. Each check runs the real code (load, tokenise,
trainer, loss, evaluation) with the installed versions, and compares the result with the same thing computed in another
way. The model has the shape of ``random:tiny``, and its tokenizer makes a token of each byte. Both are made on the
spot, so the selftest needs no network and no cache, and leaves no files behind. No check depends on what another one
tests, so each failure is reported once. The checks stand in the order in which a run would meet the failures.
``lessons/when_libraries_lie.py`` shows every failure with the plain libraries.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cria_tricks.common.errors import BadInput, Diverged, Interrupted, first_line, is_out_of_memory
from cria_tricks.common.version import versions
from cria_tricks.data.rows import check_rows
from cria_tricks.data.tokens import IGNORED, tokenize
from cria_tricks.doctor.selftest_runs import Poison, apart, fitted, gradient_of, make, random_rows, token_mean
from cria_tricks.hardware import this_device
from cria_tricks.load.model import load, load_tokenizer, quiet_libraries
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve

SAME_GRADIENT = 1e-3
"""The largest relative difference at which two gradients count as the same.

On a CPU two such gradients do not differ at all. On a GPU they differ by some 1e-6, because its sums have no fixed
order. The failures change a gradient by 0.1 of its norm and more.
"""

SAME_LOSS = 1e-4
"""The largest relative difference at which two losses count as the same.

Sums in another order in fp32 differ by 1e-6. torch's own loss in bf16 is off by 1e-3 to 7e-3.
"""

A_TENSOR = "model.layers.1.mlp.up_proj.weight"
"""The tensor that :func:`whole_base` removes from the base model."""


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three more?"},
    {"role": "assistant", "content": "Seven: 4 + 3."},
]
"""A conversation, for :func:`trained_tokens`; only the two answers of the assistant must be trained."""


# The checks. Each returns whether the libraries behave, and a sentence about what it found; see Check.look.


def whole_base(weights: Weights) -> tuple[bool, str]:
    """Remove a tensor from the base model and load it: loading must fail."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(weights.path, folder, dirs_exist_ok=True)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        del tensors[A_TENSOR]
        save_file(tensors, file, {"format": "pt"})
        try:
            loaded = load(resolve(Recipe()), Weights("selftest", folder, folder))
        except BadInput:
            return True, f"a base without {A_TENSOR} is refused by the name of the tensor"
        made_up = loaded.model.get_parameter(A_TENSOR).std().item()
    return False, f"a base without {A_TENSOR} was loaded, with random numbers of size {made_up:.2g} there"


def trained_tokens(weights: Weights) -> tuple[bool, str]:
    """Tokenise a conversation, and compare the tokens that have a label with the assistant's answers."""
    tokenizer = load_tokenizer(weights)
    (row,) = tokenize(list(check_rows([({"messages": TURNS}, "selftest")])), tokenizer, 2048).rows
    labels = [label for label in row["labels"] if label != IGNORED]
    said = tokenizer.decode(labels)
    meant = "".join(turn["content"] + tokenizer.eos_token for turn in TURNS if turn["role"] == "assistant")
    if said == meant:
        return True, f"{len(labels)} of {len(row['labels'])} tokens are trained: the answers, each with its end"
    return False, f"trained is {said!r}, and should be {meant!r}"


def packed_documents(weights: Weights) -> tuple[bool, str]:
    """Change a document, and check that the gradient of its neighbour in the packed sequence stays the same."""
    # Only the document of 16 tokens has labels, so the whole gradient is its own.
    before, other, trained = random_rows((24, 24), (24, 24), (16, 4))
    packed = ("tricks.packing=true", "data.max_length=64")
    beside_one = gradient_of(weights, [before, trained], *packed)
    beside_another = gradient_of(weights, [other, trained], *packed)
    moved = apart(beside_one, beside_another)
    return moved <= SAME_GRADIENT, f"a document's gradient moves by {moved:.1e} of itself when its neighbour changes"


def loss_in_fp32(weights: Weights) -> tuple[bool, str]:
    """Train in 16 bits, and compare the logged losses with losses in float64 of the same logits."""
    device = this_device()
    half = "bf16" if device.kind == "cpu" else device.half_precision
    # Four rows, with one step each, because the rounding error of a single loss may be small by chance. The learning
    # rate is so low that the weights stay practically the same, so the losses can be computed again afterwards.
    rows = random_rows((48, 5), (40, 3), (31, 2), (23, 4))
    settings = ("train.max_steps=4", "train.learning_rate=1e-9", f"tricks.precision={half}")
    off = {}
    for name, chunked in (("whole", "false"), ("chunked", "true")):
        run, loaded = fitted(weights, rows, *settings, f"tricks.chunked_loss={chunked}")
        # Both lists are sorted, because the trainer draws the rows in a random order.
        found = torch.tensor(sorted(entry["loss"] for entry in run.training))
        expected = torch.tensor(sorted(token_mean(loaded.model, [row]) for row in rows))
        off[name] = (found / expected - 1).abs().max().item()  # torch's max returns NaN if there is one
    said = ", ".join(f"the {name} loss by {share:.1e}" for name, share in off.items())
    return all(share <= SAME_LOSS for share in off.values()), f"in {half} is off: {said} of itself"


def nan_stops(weights: Weights) -> tuple[bool, str]:
    """Make a frozen weight matrix NaN during a run, and check that the run stops."""
    poison = Poison()
    try:
        run, loaded = fitted(weights, random_rows((24, 4)), "train.max_steps=4", callbacks=[poison])
    except Diverged as stopped:
        if poison.filtered:
            return False, "the run stopped, but its log would hide a NaN: logging_nan_inf_filter is on"
        return True, first_line(stopped).partition(";")[0] + ", and the run stopped there"
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    spoilt = sum(not p.isfinite().all() for p in trained)
    said = ", ".join(f"{entry['loss']:.4g}" for entry in run.training)
    return False, f"the run went on, its log says {said}, and {spoilt} of {len(trained)} trained matrices are NaN"


def evaluation_is_token_mean(weights: Weights) -> tuple[bool, str]:
    """Overfit a short row, evaluate it in batches with long ones, and check that the loss is a mean over all tokens.

    The short row then has a low loss and the others a high one, so a mean over batches would differ from that.
    """
    # The row beside the short one in its batch is long, but only 4 of its tokens have labels.
    short, *long = random_rows((12, 2), (40, 36), (33, 5), (50, 1), (21, 10))
    settings = ("train.batch_size=2", "train.max_steps=6", "train.eval_steps=6", "train.learning_rate=0.02")
    run, loaded = fitted(weights, [short], *settings, "tricks.chunked_loss=true", eval_rows=[short, *long])
    found = run.evaluations[-1]["eval_loss"]
    expected = token_mean(loaded.model, [short, *long])
    return (
        abs(found / expected - 1) <= SAME_LOSS,
        f"the evaluation says {found:.4f}; over all trained tokens it is {expected:.4f}",
    )


def gradients_after_evaluation(weights: Weights) -> tuple[bool, str]:
    """Compare the gradients of two runs over a 4-bit base, one of which evaluates before it trains."""
    rows = random_rows((32, 6))
    never = gradient_of(weights, rows, "tricks.quantization=nf4", eval_rows=[])
    after = gradient_of(weights, rows, "tricks.quantization=nf4", eval_rows=rows)
    moved = apart(never, after)
    return moved <= SAME_GRADIENT, f"an evaluation moves the next gradient by {moved:.1e} of itself"


@dataclass(frozen=True)
class Check:
    """One check of a library's behaviour.

    Attributes:
        look: the function that checks. It gets the model that :func:`make` wrote, and returns whether all is well, and
            a sentence about what it found. It must return False for NaN, too. ``NaN < x`` is false for every x, so the
            function tests whether a difference is small, and never whether it is large.
        asks: the question that the check answers.
        cause: what causes the failure.
        cure: how to fix it.
    """

    look: Callable[[Weights], tuple[bool, str]]
    asks: str
    cause: str
    cure: str

    @property
    def name(self) -> str:
        """The name of the check, which is that of its function."""
        return self.look.__name__


CHECKS = (
    Check(
        whole_base,
        "Is a base refused of which a tensor is missing?",
        "transformers puts random numbers in the place of a missing tensor and leaves out one that it does not know; "
        "it says so in a report on the screen, which scripts hide",
        "from_pretrained(..., output_loading_info=True) gives what was missing and unexpected: stop unless both are "
        "empty; then fetch or save the base again",
    ),
    Check(
        trained_tokens,
        "Are the trained tokens the assistant's, all of them and no others?",
        "the mask is asked of the chat template (return_assistant_tokens_mask), which has no {% generation %} block: "
        "transformers gives zeros and a warning in the log",
        "find the answers by prefix, as cria_tricks/data/tokens.py does, and refuse a row without any; before you "
        "train, print tokenizer.decode([t for t in labels if t != -100])",
    ),
    Check(
        packed_documents,
        "Is a packed document trained as if it were alone?",
        "an attention mask, be it all ones, or a cache came beside position ids that start again: transformers tells "
        "documents apart only without both",
        "hand over position_ids, no attention_mask, and use_cache=False; until this check holds, tricks.packing=false",
    ),
    Check(
        loss_in_fp32,
        "Is the loss of a run in 16 bits summed and returned in fp32?",
        "torch's cross_entropy and linear_cross_entropy return the dtype of their input: bf16 has 8 bits, and moves in "
        "steps of 0.06 between 8 and 16",
        "logits.float() before the loss; until this check holds, tricks.chunked_loss=false or tricks.precision=fp32",
    ),
    Check(
        nan_stops,
        "Does a NaN stop the run, before a weight is touched?",
        "transformers' logging_nan_inf_filter, on by default, logs the mean of the losses before in place of a NaN, or "
        "0.0, and its trainer takes the step",
        "TrainingArguments(logging_nan_inf_filter=False), and stop when loss or grad_norm is not finite; look at the "
        "log of earlier runs for a loss of 0.0",
    ),
    Check(
        evaluation_is_token_mean,
        "Is the evaluation loss the mean over all trained tokens, whatever the batch?",
        "transformers' Trainer.evaluate takes the mean of the batches' means, by rows and not by tokens",
        "sum losses and trained tokens over all batches and divide once; until this check holds, compare only "
        "evaluations on the same rows in the same batches",
    ),
    Check(
        gradients_after_evaluation,
        "Are the gradients after an evaluation those of a run that was never evaluated?",
        "bitsandbytes 0.50 on a CPU with AVX512-BF16: the first forward pass in eval mode repacks 4-bit weights for a "
        "kernel without autograd, for good",
        "right after loading: for m in model.modules(): if isinstance(m, bnb.nn.Linear4bit): "
        "m.support_avx512bf16_for_cpu = False; until this check holds, tricks.quantization=none",
    ),
)
"""In the order in which a run would meet the failures."""


def examine() -> dict[str, Any]:
    """Run every check.

    Returns:
        - ``ok``: whether all checks hold;
        - ``seconds``: the time that they took;
        - ``device`` and ``versions``: the machine and the libraries for which the result is true, and for no others;
        - ``checks``: for each its ``name``, what it ``asks``, whether it ``holds``, what it ``found``, and ``cause``
          and ``cure``, which matter only if it does not hold.
    """
    began = time.perf_counter()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        weights = make(Path(folder))
        made = [_made(check, weights) for check in CHECKS]
    return {
        "ok": all(entry["holds"] for entry in made),
        "seconds": time.perf_counter() - began,
        "device": this_device().name,
        "versions": versions(),
        "checks": made,
    }


def _made(check: Check, weights: Weights) -> dict[str, Any]:
    """Run one check. An exception counts as a failure, except when memory runs out or the user stops the command."""
    try:
        holds, found = check.look(weights)
    except Interrupted:  # the user stopped the run inside the check
        raise KeyboardInterrupt from None
    except Exception as error:  # of any library: without an answer, the check does not hold
        if is_out_of_memory(error):
            raise
        holds = False
        found = f"{type(error).__name__}: {first_line(error)}"
    about = {"name": check.name, "asks": check.asks, "holds": bool(holds), "found": found}
    return about | {"cause": check.cause, "cure": check.cure}
