"""The toggles on a CUDA card, for real. ``pytest -m gpu`` on a machine that has one."""

import signal

import pytest
import torch

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import this_device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import TECHNIQUES
from tests.helpers import At, Killed, kill, send, train, trained_weights
from tests.sweeps import toggle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SWITCHES = [switch.replace("=8", "=2") for trick in TECHNIQUES for switch in trick.TECHNIQUE.switches]


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_toggle_that_this_card_takes_trains_to_a_lower_loss(switch, tiny_model, rows, tmp_path):
    settings = ["tricks.peft=lora", *toggle(switch)]
    try:
        resolve(with_settings(Recipe(), settings))
    except BadInput as error:
        pytest.skip(f"refused on this card: {error}")
    shape = ["train.batch_size=2", "train.max_steps=8", "train.learning_rate=5e-3", "train.save_steps=1000"]
    run, _ = train(tiny_model, rows[:2], tmp_path, *settings, *shape)
    assert run.steps - run.skipped_steps >= 4
    assert run.training[-1]["loss"] < run.training[0]["loss"] - 0.05


def test_the_capstone_recipe_trains_and_its_memory_is_the_allocators(tiny_model, rows, tmp_path):
    from cria_tricks.measure.memory import Meter

    assert this_device().kind == "cuda"
    dumped = recipes.kwanzaa().tricks.model_dump()
    settings = [f"tricks.{name}={str(value).lower()}" for name, value in dumped.items()]
    meter = Meter("cuda")
    run, _ = train(tiny_model, rows, tmp_path, *settings, "train.learning_rate=5e-3", "train.max_steps=6",
                   eval_rows=rows, meter=meter)  # fmt: skip
    assert run.evaluations[-1]["eval_loss"] < run.evaluations[0]["eval_loss"]
    train_phase = meter.phases["train"]
    assert 0 < train_phase["allocated_bytes"] <= train_phase["reserved_bytes"]
    assert max(entry["peak_bytes"] for entry in run.training) <= train_phase["allocated_bytes"]


def test_paged_states_are_in_managed_memory(tiny_model, rows, tmp_path):
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, optimizer=None, **kwargs):
            large = [s["state1"] for p, s in optimizer.state.items() if p.numel() >= 100_000]
            self.paged = [getattr(state, "is_paged", False) for state in large]

    watch = Watch()
    # Full fine-tuning: the embedding's states have 131,072 elements, over the 100,000 from which states are paged.
    train(tiny_model, rows, tmp_path, "tricks.paged_optimizer=true", "train.max_steps=1", callbacks=[watch])
    assert watch.paged
    assert all(watch.paged)


def test_resumed_on_a_card_is_the_uninterrupted_run(tiny_model, rows, tmp_path):
    """Not to the bit: atomic sums in backward passes have no order on a GPU."""
    from cria_tricks.common.errors import Interrupted

    dumped = recipes.kwanzaa().tricks.model_dump()
    settings = [f"tricks.{name}={str(value).lower()}" for name, value in dumped.items()]
    settings += ["train.max_steps=6", "lora.dropout=0.1", "train.save_steps=2"]
    whole, straight = train(tiny_model, rows, tmp_path / "whole", *settings)
    with pytest.raises(Interrupted):
        train(tiny_model, rows, tmp_path / "cut", *settings, callbacks=[At(3, send(signal.SIGTERM))])
    run, resumed = train(tiny_model, rows, tmp_path / "cut", *settings, resume=True)
    assert [e["loss"] for e in run.training] == pytest.approx([e["loss"] for e in whole.training], abs=1e-3)
    for name, weight in trained_weights(straight).items():
        torch.testing.assert_close(trained_weights(resumed)[name], weight, rtol=1e-2, atol=1e-4)


def test_a_card_that_is_full_saves_the_last_whole_step(tiny_model, rows, tmp_path):
    from transformers import TrainerCallback

    from cria_tricks.common.errors import OutOfMemory
    from cria_tricks.store.checkpoints import Checkpoints

    class AskTooMuch(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                model.register_forward_pre_hook(lambda *_: torch.empty(2**44, device="cuda"))

    with pytest.raises(OutOfMemory, match="forward pass of step 4; the state after step 3 is in"):
        train(tiny_model, rows, tmp_path, "tricks.peft=lora", "train.max_steps=6", callbacks=[AskTooMuch()])
    assert Checkpoints(tmp_path).newest().step == 3


def test_paged_states_are_paged_again_after_a_resume(tiny_model, rows, tmp_path):
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            large = [s for p, s in optimizer.state.items() if p.numel() >= 100_000]
            self.paged = [getattr(state[name], "is_paged", False) for state in large for name in ("state1", "state2")]

    watch, sets = Watch(), ("tricks.paged_optimizer=true", "train.max_steps=3", "train.save_steps=1")
    with pytest.raises(Killed):
        train(tiny_model, rows, tmp_path, *sets, callbacks=[At(3, kill)])
    train(tiny_model, rows, tmp_path, *sets, resume=True, callbacks=[watch])
    assert watch.paged
    assert all(watch.paged)
