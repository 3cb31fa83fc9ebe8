"""How many steps a run has, when it is evaluated and saved, and with what it updates: counted by hand."""

from dataclasses import replace

import pytest
import torch
from transformers import TrainerState

from cria_tricks.hardware import Device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.trainer.evaluate import evaluated
from cria_tricks.trainer.optimizer import make_optimizer, make_scaler, make_scheduler
from cria_tricks.trainer.steps import Steps

CPU = Device("cpu", "some CPU", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)


def counted(*settings: str, rows: int | None = 5, evaluates: bool = True, data: int = 1) -> Steps:
    recipe = with_settings(Recipe(), settings)
    plan = resolve(recipe, CPU)
    plan = replace(plan, parallel={**plan.parallel, "data": data})
    return Steps.of(plan, recipe.train, rows, evaluates=evaluates)


@pytest.mark.parametrize(
    ("settings", "options", "found"),
    [
        ([], {}, (5, 5, 5, 5)),
        (["train.batch_size=2"], {}, (3, 3, 3, 3)),
        (["tricks.gradient_accumulation=2", "train.epochs=2.5"], {}, (3, 8, 3, 3)),
        (["tricks.gradient_accumulation=2"], {"data": 2, "rows": 9}, (3, 3, 3, 3)),
        (["train.max_steps=40"], {}, (5, 40, 5, 5)),
        (["train.max_steps=7"], {"rows": None}, (7, 7, 7, 7)),
        (["train.eval_steps=2", "train.save_steps=3"], {}, (5, 5, 2, 3)),
        ([], {"evaluates": False}, (5, 5, 0, 5)),
    ],
)
def test_the_steps_of_a_run(settings, options, found):
    """Of an epoch, in all, between evaluations, and between checkpoints."""
    steps = counted(*settings, **options)
    assert (steps.epoch, steps.total, steps.evaluate, steps.save) == found


def test_an_evaluation_counts_only_for_the_step_it_is_of():
    state = TrainerState(global_step=3)
    assert not evaluated(state)
    for entry, after in (({"step": 3, "loss": 1.0}, False), ({"step": 2, "eval_loss": 1.0}, False),
                         ({"step": 4, "eval_loss": 1.0}, False), ({"step": 3, "eval_loss": 1.0}, True)):  # fmt: skip
        state.log_history = [entry]
        assert evaluated(state) is after


def test_partial_batches_and_partial_windows_count():
    found = {
        (batch, window): [Recipe().train.model_copy(update={"batch_size": batch}).steps_per_epoch(window, rows)
                          for rows in (1, 4, 5, 12, 13)]
        for batch, window in ((1, 1), (4, 1), (1, 4), (2, 3))
    }  # fmt: skip
    assert found == {
        (1, 1): [1, 4, 5, 12, 13],
        (4, 1): [1, 1, 2, 3, 4],
        (1, 4): [1, 1, 2, 3, 4],
        (2, 3): [1, 1, 1, 2, 3],
    }


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)


def made(*settings: str):
    recipe = with_settings(Recipe(), settings)
    return make_optimizer(Small(), resolve(recipe, CPU), recipe.train), recipe.train


def test_what_trains_is_updated_and_matrices_alone_decay():
    optimizer, _ = made("train.learning_rate=0.5", "train.weight_decay=0.25")
    groups = [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert groups == [(0.5, 0.25, 1), (0.5, 0.0, 3)], "one matrix; a bias and the two of the norm"


def test_a_fused_optimizer_offers_no_skipping_of_its_own():
    assert torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)._step_supports_amp_scaling is True
    assert made()[0]._step_supports_amp_scaling is False


def test_the_warmup_is_a_share_of_the_steps():
    optimizer, settings = made("train.warmup_ratio=0.24", "train.schedule=constant", "train.learning_rate=1")
    scheduler = make_scheduler(optimizer, settings, 40)
    rates = []
    for _ in range(12):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([step / 9 for step in range(9)] + [1.0] * 3)


@pytest.mark.parametrize(("precision", "scales"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_scales_its_loss(precision, scales):
    plan = resolve(with_settings(Recipe(), [f"tricks.precision={precision}"]), CPU)
    assert make_scaler(plan, None).is_enabled() is scales
