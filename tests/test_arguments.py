"""What the trainer is told: every argument, counted by hand, and nothing is trained."""

from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer import arguments
from cria_tricks.trainer.arguments import evaluated, leave_skipping_to_the_scaler, training_arguments

CPU = Device("cpu", "some CPU", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)
ON_A_GPU = {"use_cpu": False, "dataloader_pin_memory": True, "accelerator_config": {"non_blocking": True}}
PLAIN = {
    "use_cpu": True, "optim": "adamw_torch_fused", "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
    "max_steps": 5, "learning_rate": 2e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True, "save_strategy": "steps",
    "save_steps": 5, "logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False, "seed": 42,
    "data_seed": 42, "dataloader_pin_memory": False, "accelerator_config": {"non_blocking": False},
    "ignore_data_skip": False, "remove_unused_columns": False, "disable_tqdm": True,
    "report_to": "none", "gradient_accumulation_steps": 1,
}  # fmt: skip


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The keyword arguments of ``TrainingArguments``, without what it makes of them on this machine."""

    class Asked:
        __dataclass_fields__: ClassVar = {field.name: field for field in fields(TrainingArguments)}
        cards = 1

        def __init__(self, **named):
            self.named, self.n_gpu = named, self.cards

    def ask(*settings: str, rows=5, evaluates=True, start=None, device=CPU, data=1, cards=1):
        monkeypatch.setattr(Asked, "cards", cards)
        recipe = with_settings(Recipe(), settings)
        plan = resolve(recipe, device)
        plan = replace(plan, parallel={**plan.parallel, "data": data})
        found = training_arguments(plan, recipe.train, rows, evaluates, tmp_path, start)
        assert found.named.pop("output_dir") == str(tmp_path)
        assert hasattr(found, "_n_gpu") == (cards > 1)
        return found.named

    monkeypatch.setattr(arguments, "TrainingArguments", Asked)
    return ask


def test_five_rows_with_nothing_set(asked):
    assert asked() == PLAIN


@pytest.mark.parametrize(
    ("settings", "options", "differs"),
    [
        (["train.batch_size=2"], {}, {"max_steps": 3, "eval_steps": 3, "save_steps": 3,
         "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}),
        (["tricks.gradient_accumulation=2", "train.epochs=2.5", "train.warmup_ratio=0.3"], {},
         {"gradient_accumulation_steps": 2, "max_steps": 8, "eval_steps": 3, "save_steps": 3, "warmup_steps": 2}),
        (["tricks.gradient_accumulation=2"], {"data": 2, "rows": 9},
         {"gradient_accumulation_steps": 2, "max_steps": 3, "eval_steps": 3, "save_steps": 3}),
        (["train.max_steps=40", "train.warmup_ratio=0.24"], {}, {"max_steps": 40, "warmup_steps": 9}),
        (["train.max_steps=7"], {"rows": None},
         {"max_steps": 7, "eval_steps": 7, "save_steps": 7, "ignore_data_skip": True}),
        (["train.eval_steps=2", "train.save_steps=3"], {}, {"eval_steps": 2, "save_steps": 3}),
        ([], {"evaluates": False}, {"eval_strategy": "no", "eval_on_start": False}),
        (["train.learning_rate=0.5", "train.weight_decay=0.25", "train.max_grad_norm=7", "train.seed=3"], {},
         {"learning_rate": 0.5, "weight_decay": 0.25, "max_grad_norm": 7.0, "seed": 3, "data_seed": 3}),
        (["train.max_grad_norm=0"], {}, {"max_grad_norm": float("inf")}),
        (["tricks.optimizer=adamw_8bit"], {}, {"optim": "adamw_8bit"}),
        (["tricks.precision=fp16"], {}, {"fp16": True}),
        (["tricks.paged_optimizer=true"], {"device": T4},
         {"optim": "paged_adamw_32bit", **ON_A_GPU}),
        (["tricks.paged_optimizer=true", "tricks.optimizer=adamw_8bit"], {"device": T4, "cards": 2},
         {"optim": "paged_adamw_8bit", **ON_A_GPU}),
    ],
)  # fmt: skip
def test_what_a_setting_changes_and_nothing_else(settings, options, differs, asked):
    assert asked(*settings, **options) == PLAIN | differs


def entries(*steps: int) -> list[dict]:
    return [{"step": 1, "loss": 2.0}, *({"step": step, "eval_loss": 2.0} for step in steps)]


@pytest.mark.parametrize(
    ("step", "history", "due"),
    [
        (4, entries(0), True),  # a multiple of two, and cut off before it was evaluated
        (4, entries(0, 4), False),
        (3, entries(0, 2), False),
        (5, entries(0, 2, 4), False),
        (6, entries(0, 2, 4), True),
        (7, entries(0, 6), True),  # the end
        (7, entries(0, 6, 7), False),
        (8, entries(0, 6), True),
        (9, entries(0, 6), True),  # beyond the end, as the steps may have been fewer then
    ],
)
def test_a_resumed_run_evaluates_first_where_that_was_cut_off(step, history, due, asked, tmp_path):
    TrainerState(global_step=step, log_history=history).save_to_json(str(tmp_path / "trainer_state.json"))
    start = Checkpoint(tmp_path, step, {}, {})
    settings = ("train.max_steps=7", "train.eval_steps=2")
    assert asked(*settings, start=start)["eval_on_start"] is due
    assert asked(*settings, start=start, evaluates=False)["eval_on_start"] is False


def test_a_state_that_cannot_be_read_is_refused(asked, tmp_path):
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(BadInput, match=f"^--resume: {tmp_path} cannot be loaded: .*; start again in a new folder$"):
        asked(start=Checkpoint(tmp_path, 1, {}, {}))


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


def test_a_fused_optimizer_offers_no_skipping_of_its_own():
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)
    assert optimizer._step_supports_amp_scaling is True
    leave_skipping_to_the_scaler(optimizer)
    assert optimizer._step_supports_amp_scaling is False


def test_the_real_arguments_take_them(tmp_path):
    recipe = Recipe()
    found = training_arguments(resolve(recipe, CPU), recipe.train, 5, True, tmp_path, None)
    assert (found.max_steps, found.n_gpu, found.report_to) == (5, 0, [])
