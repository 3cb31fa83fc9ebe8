"""What the tests of pipelines share: a model of four blocks, ragged rows, a stage's loop, a whole run."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cria_tricks.data.tokens import IGNORED
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.run.pipeline import find_blocks
from cria_tricks.trainer.arguments import training_arguments
from cria_tricks.trainer.pipeline_fit import fit
from cria_tricks.trainer.pipeline_loop import Loop
from tests.helpers import prepare

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


def make_four_blocks(folder: Path) -> Path:
    """Fill a folder with a narrow Llama of four blocks, whose head is tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**widths, num_hidden_layers=4, vocab_size=512, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def learning(folder: Path, *settings: str) -> tuple[Recipe, Any, Any]:
    """Recipe, plan and model, whose LoRA is past its first step, in which half of the gradients are zero."""
    recipe, plan, loaded = prepare(folder, *LORA, *settings)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return recipe, plan, loaded.model


def loop_of(folder: Path, *settings: str, schedule: str = "1f1b", data: int = 1) -> tuple[Recipe, Loop]:
    """This process's stage."""
    recipe, plan, model = learning(folder, *settings)
    stages = dist.get_world_size() // data
    mesh = init_device_mesh("cpu", (data, stages), mesh_dim_names=("data", "stage"))
    parts = find_blocks("", model.config.num_hidden_layers, stages, "llama")
    arguments = training_arguments(plan, recipe.train, 11, True, Path("unused"), None)
    loop = Loop(model, plan, arguments, mesh, recipe.tricks.gradient_accumulation // data, parts, schedule)
    loop.part.train()  # as step() does
    return recipe, loop


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(folder: Path, many: int) -> dict[str, torch.Tensor]:
    """One process, one row after the other, without padding."""
    _, _, model = learning(folder)
    rows = ragged(many)
    trained = sum(label != IGNORED for row in rows for label in row["labels"][1:])
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        (model(input_ids=ids, labels=labels, num_items_in_batch=1).loss / trained).backward()
    return gradients_of(model)


def trained(folder: Path, *settings: str, data: int = 1) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A whole run: its history, and what this stage has learnt."""
    recipe, plan, loaded = prepare(folder, *LORA, *settings)
    rows, stages = {"train": ragged(), "eval": ragged(5)}, dist.get_world_size() // data
    parts = find_blocks("", loaded.model.config.num_hidden_layers, stages, "llama")
    world = World(dist.get_rank(), dist.get_world_size(), data)
    loop, run = fit(loaded.model, plan, recipe, rows, parts, world, pad_id=2)
    return run.history, {name: p.detach() for name, p in loop.trained.items()}


def same_run(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """The loop keeps the shared trainer's history: the same entries with the same numbers."""
    for key in ("step", "tokens", "trained_tokens", "skipped", "learning_rate"):
        assert [entry.get(key) for entry in found] == [entry.get(key) for entry in expected], key
    for key in ("loss", "eval_loss"):
        for mine, other in zip(found, expected, strict=True):
            assert mine.get(key) == pytest.approx(other.get(key), abs=tolerance)
    assert [entry["grad_norm"] for entry in found if "loss" in entry] == pytest.approx(
        [entry["grad_norm"] for entry in expected if "loss" in entry], rel=200 * tolerance
    )
