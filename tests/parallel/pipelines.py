"""What the tests of pipelines share: a model of four blocks, ragged rows, a stage, a whole run."""

import contextlib
import functools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import SequentialSampler

from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.tokens import IGNORED
from cria_tricks.measure.counting import CountCollectives
from cria_tricks.parallel import dtensor, pipeline
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training
from cria_tricks.trainer.pipeline_stage import Stage
from cria_tricks.trainer.training import Share, with_filler
from tests.helpers import prepare, trained_weights

LORA = ("tricks.peft=lora", "lora.r=4", "tricks.gradient_accumulation=4", "train.learning_rate=0.005")
T = 24
# Two and four stages against one process, torch 2.13 on one thread of an AMD EPYC (2026-11-22), noise over two sets of
# rows.
GRADIENT = 2e-6  # of one matrix, the difference's length over the gradient's, fp32: noise 8.1e-7
LOSS = {"fp32": 5e-6, "fp16": 3e-4}  # of up to 20 steps, losses near 6: noise 1.4e-6 and 9.3e-5
WEIGHTS = {"fp32": 1e-4, "fp16": 5e-3}  # of one matrix after these steps, by lengths: noise 2.3e-5 and 1.2e-3


def ragged(many: int = 11) -> list[dict[str, list[int]]]:
    """Rows of up to T tokens, some without a prompt to mask; eleven leave the last window of four one row short."""
    draw = random.Random(0)
    made = []
    for _ in range(many):
        ids = [draw.randrange(3, 512) for _ in range(draw.randint(6, T))]
        prompt = draw.choice((0, draw.randrange(1, len(ids) - 2)))
        made.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return made


def make_four_blocks(folder: Path, tied: bool = True) -> Path:
    """Fill a folder with a narrow Llama of four blocks, whose head may be tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**widths, num_hidden_layers=4, vocab_size=512, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def learning(folder: Path, *settings: str, processes: int = 1) -> tuple[Recipe, Any, Any]:
    """Recipe, plan and model, whose LoRA is past its first step, in which half of the gradients are zero."""
    recipe, plan, loaded = prepare(folder, *LORA, *settings, processes=processes)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return recipe, plan, loaded.model


def piped(schedule: str = "1f1b", data: int = 1) -> tuple[str, ...]:
    """The settings of a pipeline, or of several."""
    chosen = (f"parallel.pipelines={data}", f"parallel.pipeline_schedule={schedule}")
    return ("parallel.strategy=pipeline", *chosen)


def stage_of(folder: Path, *settings: str, schedule: str = "1f1b", data: int = 1) -> tuple[Recipe, Stage]:
    """This process's stage, ready for a step, as the trainer would make it."""
    recipe, plan, model = learning(folder, *piped(schedule, data), *settings, processes=dist.get_world_size())
    world = World.of(data, "cpu", "stage")
    pipeline.spread(SimpleNamespace(model=model), plan, world)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(recipe.tricks.precision)
    contexts = functools.partial(torch.autocast, "cpu", half) if half else contextlib.nullcontext
    scaler = None
    if half == torch.float16:
        scaler = ShardedGradScaler("cpu", process_group=world.stage_group)
        scaler.scale(torch.zeros(()))
    model.train()
    return recipe, Stage(model, plan, world, contexts, scaler)


def windows(
    rows: list[dict[str, list[int]]], batch: int, micro_batches: int, share: int = 0, shares: int = 1, length: int = T
) -> Iterator[dict[str, torch.Tensor]]:
    """What a pipeline is given, step by step, of rows in this order."""
    mine = micro_batches // shares
    picked = Share(SequentialSampler(rows), batch, share, shares, len(rows), mine)
    collate, padded = PadToLongest(0, batch * mine, length), with_filler(rows, 0)
    for numbers in picked:
        yield collate([padded[number] for number in numbers])


def bytes_of_a_step(stage: Stage, steps: list[dict[str, torch.Tensor]]) -> dict[str, int]:
    """What the last of some steps sends, clipping and the search for an overflow with it."""
    optimizer = torch.optim.AdamW([p for p in stage.part.model.parameters() if p.requires_grad])
    for window in steps:
        with CountCollectives() as count:
            stage.step(window, 1)
            if stage.scaler is not None:
                stage.scaler.unscale_(optimizer)
            dtensor.clip(stage.part.model.parameters(), 1.0, stage.world.stage_group)
        if stage.scaler is not None:
            stage.scaler.update()
        optimizer.zero_grad()
    return dict(count.bytes)


def tokens_of(rows: list[dict[str, list[int]]]) -> int:
    """How many tokens are trained."""
    return sum(label != IGNORED for row in rows for label in row["labels"][1:])


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(folder: Path, many: int) -> dict[str, torch.Tensor]:
    """One process, one row after the other, without padding."""
    _, _, model = learning(folder)
    rows = ragged(many)
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        (model(input_ids=ids, labels=labels, num_items_in_batch=1).loss / tokens_of(rows)).backward()
    return gradients_of(model)


def trained(folder: Path, *settings: str, data: int = 1) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A whole run: its history, and what this stage has learnt."""
    recipe, plan, loaded = prepare(folder, *LORA, *piped(data=data), *settings, processes=dist.get_world_size())
    with tempfile.TemporaryDirectory() as out:
        world, checkpoints = World.of(data, "cpu", "stage"), Checkpoints(Path(out))
        run = fit(training(loaded, plan, recipe.train, ragged(), ragged(5), checkpoints, pad_id=2, world=world))
    return run.history, trained_weights(loaded)


def same_run(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """A pipeline's history is that of one process: the same entries with the same numbers."""
    for key in ("step", "tokens", "trained_tokens", "skipped", "learning_rate"):
        assert [entry.get(key) for entry in found] == [entry.get(key) for entry in expected], key
    for key in ("loss", "eval_loss"):
        for mine, other in zip(found, expected, strict=True):
            assert mine.get(key) == pytest.approx(other.get(key), abs=tolerance)
    assert [entry["grad_norm"] for entry in found if "loss" in entry] == pytest.approx(
        [entry["grad_norm"] for entry in expected if "loss" in entry], rel=200 * tolerance
    )
