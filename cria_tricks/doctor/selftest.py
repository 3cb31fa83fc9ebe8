r"""Look for silent failures of the libraries on this machine: ``cria doctor --selftest``.

A silent failure raises no error, and makes the result of a run wrong. Each check runs the real code (load, tokenise,
trainer, loss, evaluation) with the installed versions, and compares the result with the same thing computed in another
way. The model has the shape of ``random:tiny``, and its tokenizer makes a token of each byte. Both are made on the
spot, so the selftest needs no network and no cache, and leaves no files behind. No check depends on what another one
tests, so each failure is reported once. The checks stand in the order in which a run would meet the failures.
``lessons/when_libraries_lie.py`` shows every failure with the plain libraries.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from cria_tricks.common.errors import BadInput, Diverged, Interrupted, first_line, is_out_of_memory
from cria_tricks.common.version import versions
from cria_tricks.data.rows import check_rows
from cria_tricks.data.tokens import IGNORED, tokenize
from cria_tricks.hardware import this_device
from cria_tricks.load.model import Loaded, load, load_tokenizer, quiet_libraries
from cria_tricks.models import Weights
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import Run, fit, training

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
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template as most models have it: nothing in it marks which tokens are the assistant's."""
TokenRow = dict[str, list[int]]
"""``input_ids`` and ``labels`` of one row."""


def make(folder: Path) -> Weights:
    """Write a model with the shape of ``random:tiny``, and a tokenizer of single bytes with a chat template."""
    with torch.random.fork_rng(devices=[]):  # gives the caller its random state back; no GPU draws numbers here
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["tiny"]))
    model.to(torch.bfloat16).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    text = Tokenizer(BPE(letters, []))  # no merges, so every byte is a token of its own
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    return Weights("random:tiny", str(folder), str(folder))


def random_rows(*lengths: tuple[int, int]) -> list[TokenRow]:
    """Make rows of random bytes, the same ones every time.

    Args:
        lengths: for each row its length, and how many of its first tokens are not trained (tokens).
    """
    draw = torch.Generator().manual_seed(0)
    made = []
    for length, prompt in lengths:
        ids = torch.randint(1, 256, (length,), generator=draw).tolist()  # 0 is the padding id, see fitted
        made.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return made


class _Watch(TrainerCallback):
    """Keep the gradients before each step, and make a frozen matrix NaN after the first step if asked to.

    Attributes:
        gradient: of all trained weights in the last step, as one vector in float64 on the CPU; zeros for a weight that
            has none.
    """

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.poison and state.global_step == 1:
            next(p for p in model.parameters() if not p.requires_grad).data.fill_(math.nan)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        each = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in trained]
        self.gradient = torch.cat([gradient.flatten().double().cpu() for gradient in each])


def fitted(
    weights: Weights,
    rows: Sequence[TokenRow],
    *settings: str,
    eval_rows: Sequence[TokenRow] = (),
    watch: TrainerCallback | None = None,
) -> tuple[Run, Loaded]:
    """Train LoRA for one step, or for as many as the settings say, from the same initial adapter every time.

    The settings change the recipe, such as ``"train.max_steps=4"``. Without ``eval_rows`` the run is never evaluated.

    Returns:
        The run, and the model that it has trained.
    """
    usual = ("tricks.peft=lora", "lora.r=4", "tricks.attention=sdpa", "train.max_steps=1", "train.warmup_ratio=0")
    recipe = with_settings(Recipe(), [*usual, *settings])
    plan = resolve(recipe)
    torch.manual_seed(0)
    loaded = load(plan, weights)
    with tempfile.TemporaryDirectory() as folder:
        job = (loaded, plan, recipe.train, rows, eval_rows, Checkpoints(Path(folder)))
        return fit(training(*job, pad_id=0, callbacks=[watch] if watch else [])), loaded


def gradient_of(
    weights: Weights, rows: Sequence[TokenRow], *settings: str, eval_rows: Sequence[TokenRow] = ()
) -> torch.Tensor:
    """Train as :func:`fitted` does, and return the gradient of the last step, as one vector."""
    watch = _Watch()
    # The limit of the gradient's norm is so high that nothing is clipped.
    fitted(weights, rows, "train.max_grad_norm=1e9", *settings, eval_rows=eval_rows, watch=watch)
    return watch.gradient


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative difference of two gradients: the norm of their difference over the norm of the first.

    It is NaN if both are zero, so that a check without any gradient does not pass.
    """
    return ((one - other).norm() / one.norm()).item()


def token_mean(model: Any, rows: Sequence[TokenRow]) -> float:
    """Compute the mean loss of all trained tokens [nats] by its definition: row by row, without batches, in float64."""
    losses = []
    for row in rows:
        ids, labels = (torch.tensor(row[name], device=model.device) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()  # position t predicts token t + 1
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")[labels[1:] != IGNORED])
    return torch.cat(losses).mean().item()


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
    # rate is so low that the losses can be computed again afterwards.
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
    poison = _Watch(poison=True)
    try:
        run, loaded = fitted(weights, random_rows((24, 4)), "train.max_steps=4", watch=poison)
    except Diverged as stopped:
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
        look: the function that checks: from the model that :func:`make` wrote, whether all is well, and a sentence
            about what it found. For NaN it must say False, so it asks whether a difference is small, never whether it
            is large: ``NaN < x`` is false for every x.
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
        "transformers fills a missing tensor with random numbers, and says so in a report that scripts hide",
        "from_pretrained(..., output_loading_info=True): stop unless missing and unexpected are empty; fetch it again",
    ),
    Check(
        trained_tokens,
        "Are the trained tokens the assistant's, all of them and no others?",
        "return_assistant_tokens_mask gives zeros for a chat template without a {% generation %} block",
        "mask the prompt yourself, and print tokenizer.decode([t for t in labels if t != -100]) before you train",
    ),
    Check(
        packed_documents,
        "Is a packed document trained as if it were alone?",
        "an attention mask, even of ones, or a cache came beside position ids: transformers then sees one document",
        "hand over position_ids, no attention_mask, and use_cache=False; until this check holds, tricks.packing=false",
    ),
    Check(
        loss_in_fp32,
        "Is the loss of a run in 16 bits summed and returned in fp32?",
        "torch's cross_entropy returns the dtype of its input, and bf16 moves in steps of 0.06 between 8 and 16",
        "logits.float() before the loss; until this check holds, tricks.chunked_loss=false or tricks.precision=fp32",
    ),
    Check(
        nan_stops,
        "Does a NaN stop the run, before a weight is touched?",
        "transformers' logging_nan_inf_filter, on by default, logs a mean or 0.0 for a NaN, and the step is taken",
        "TrainingArguments(logging_nan_inf_filter=False), and stop when loss or grad_norm is not finite",
    ),
    Check(
        evaluation_is_token_mean,
        "Is the evaluation loss the mean over all trained tokens, whatever the batch?",
        "transformers' Trainer.evaluate takes the mean of the batches' means, by rows and not by tokens",
        "divide the sum of all losses by all trained tokens; until this check holds, compare only equal batches",
    ),
    Check(
        gradients_after_evaluation,
        "Are the gradients after an evaluation those of a run that was never evaluated?",
        "bitsandbytes 0.50 on a CPU with AVX512-BF16 repacks 4-bit weights in eval mode, for good",
        "after loading set support_avx512bf16_for_cpu = False in each bnb.nn.Linear4bit, or tricks.quantization=none",
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
