"""Compare the estimated peak of training and evaluation with the measured one, for settings drawn by a seed.

Each setting trains a small Llama for two steps on this machine's CPU, and counts all bytes.
Training rows, evaluation rows and prompts have lengths of their own, and every switch a value of its own. Rows are
random numbers, and every second one is a token shorter, so that there is padding.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.operation import EVALUATION
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.load.model import load
from cria_tricks.measure.memory import Meter
from cria_tricks.models import Weights
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.evaluation import Evaluated
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training
from cria_tricks.trainer.samples import Samples

CPU = Device("cpu", "a processor", (0, 0), real_bf16=True, memory_bytes=16 * 2**30)
VOCABULARY = 4096
VALUES = {
    "peft": ("lora", "lora", "lora", "none", "head", "side_network"),
    "quantization": ("none", "nf4", "int8"),
    "precision": ("fp32", "bf16"),
    "attention": ("sdpa", "eager"),
    "gradient_checkpointing": ("true", "false"),
    "chunked_loss": ("true", "false"),
    "lean_preparation": ("true", "false"),
    "fused_lora": ("true", "false"),
    "optimizer": ("adamw", "adamw_8bit"),
    "gradient_accumulation": ("1", "2"),
}
"""The values of each switch; one that is there twice is drawn twice as often."""


@dataclass(frozen=True)
class Case:
    """A setting: rows of a micro-batch, the lengths of all rows, the prompts that are answered, and the switches."""

    batch: int
    train: int
    evaluated: int
    samples: int
    sets: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """What is trained."""
        settings = [f"train.batch_size={self.batch}", f"data.max_length={self.train}", f"eval.samples={self.samples}"]
        return with_settings(
            Recipe(), [*settings, "train.max_steps=2", "train.warmup_ratio=0", "eval.max_new_tokens=40", *self.sets]
        )

    def __str__(self) -> str:
        plain = ("=false", "=none", "=1", "precision=fp32", "optimizer=adamw")
        sets = (one.removeprefix("tricks.") for one in self.sets)
        return " ".join(one for one in sets if not one.endswith(plain))


def cases(many: int, seed: int = 5) -> list[Case]:
    """Draw settings whose switches go together; every third one has longer evaluation rows than training rows."""
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < many:
        sets = tuple(f"tricks.{name}={draw.choice(values)}" for name, values in VALUES.items())
        lengths = draw.choice((16, 64, 200, 400)), draw.choice((16, 64, 200, 400))
        case = Case(draw.choice((1, 2, 3)), *lengths, draw.choice((0, 0, 2)), sets)
        try:
            resolve(case.recipe, CPU)
        except BadInput:
            continue
        found.append(case)
    return found


def model(folder: Path) -> Path:
    """Save a Llama of three blocks in a folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def predicted(case: Case, folder: Path) -> Bill:
    """Return the bill of training and evaluation."""
    target = Target(find_shape(str(folder)), CPU, evaluated=Evaluated(case.evaluated, case.evaluated // 2))
    return target.memory(case.recipe)


def errors(case: Case, folder: Path, out: Path) -> dict[str, float]:
    """Return how much larger the estimates are than what was measured: of the whole peak, and of an evaluation."""
    bill = predicted(case, folder)
    phases = measured(case, folder, out)
    evaluation = next(moment.bytes for moment in bill.moments if moment.name == EVALUATION)
    # An evaluation's phase is at least what stays from the training step, of which the last gradients are a part.
    return {"peak": bill.peak_bytes / max(phases.values()) - 1, EVALUATION: evaluation / phases["evaluate"] - 1}


def measured(case: Case, folder: Path, out: Path) -> dict[str, int]:
    """Train, and return the peak of each phase [bytes]."""
    plan = resolve(case.recipe, CPU)
    torch.manual_seed(0)
    loaded = load(plan, Weights(str(folder), str(folder), None))
    meter = Meter("cpu")
    samples = None
    if case.samples:
        prompts = [_ids(case.evaluated // 2, 7 + number) for number in range(case.samples)]
        numbers = range(case.samples)
        samples = Samples(_Tokenizer(), numbers, ["?"] * case.samples, prompts, case.recipe.eval.max_new_tokens)
    rows = 2 * case.recipe.rows_per_step
    train = [_row(case.train - number % 2, number) for number in range(rows)]
    evaluated = [_row(case.evaluated - number % 2, number) for number in range(case.batch)]
    checkpoints = Checkpoints(out)
    fit(
        training(loaded, plan, case.recipe.train, train, evaluated, checkpoints, pad_id=0, meter=meter, samples=samples)
    )
    return {name: peaks["allocated_bytes"] for name, peaks in meter.phases.items()}


class _Tokenizer:
    """What :class:`Samples` needs of a tokenizer, for answers that never end early."""

    eos_token_id = VOCABULARY - 1
    pad_token_id = 0

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))


def _row(length: int, seed: int) -> dict[str, list[int]]:
    ids = _ids(length, seed)
    return {"input_ids": ids, "labels": ids}


def _ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY - 1), k=length)
