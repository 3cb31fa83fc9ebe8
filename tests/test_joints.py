"""What a trick asks of load and trainer by name is known when the plan is made, and each name is carried out."""

import types

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cria_tricks import resolve, switches
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import Device
from cria_tricks.load import adapters, attention, losses, model
from cria_tricks.models import pretrained
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.train import train
from cria_tricks.step_plan import NAMES, Plan
from cria_tricks.trainer import forward, optimizer

CPU = Device("cpu", "some CPU", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)
MODEL = torch.nn.Linear(2, 2)
ADAMW = torch.optim.AdamW(MODEL.parameters())
SCALER = torch.amp.GradScaler("cpu", enabled=False)
WRONG = [
    (lambda plan: plan.then("prepare_for_kbit_trainin"), "after_load=prepare_for_kbit_trainin", "after_load"),
    (lambda plan: plan.without("prepare_for_kbit"), "after_load=prepare_for_kbit", "after_load"),
    (lambda plan: plan.around("activation_ofload"), "step_context=activation_ofload", "step_context"),
    (lambda plan: plan.with_("loss", kind="chunkd"), "loss.kind=chunkd", "loss.kind"),
    (lambda plan: plan.with_("peft", kind="lorra"), "peft.kind=lorra", "peft.kind"),
    (lambda plan: plan.refine("model", attn_implementation="spda"), "model.attn_implementation=spda",
     "model.attn_implementation"),
    (lambda plan: plan.with_("optimizer", bits=16), "optimizer.bits=16", "optimizer.bits"),
    (lambda plan: plan.with_("optimizer", paged="no"), "optimizer.paged=no", "optimizer.paged"),
    (lambda plan: plan.with_("optimizer", in_backward="cut"), "optimizer.in_backward=cut", "optimizer.in_backward"),
    (lambda plan: plan.with_("collator", packed_lenght=8), "collator=packed_lenght", "collator"),
]  # fmt: skip
CHANGES = pytest.mark.parametrize(("change", "asked", "where"), WRONG, ids=[asked for _, asked, _ in WRONG])


def toy(change) -> types.ModuleType:
    """A trick that is switched on in every recipe, and asks for something."""
    made = types.ModuleType("cria_tricks.switches.toy")
    made.switch_on = lambda plan, recipe: change(plan)
    return made


@CHANGES
def test_a_wrong_name_is_refused_when_the_plan_is_made(change, asked, where, monkeypatch):
    monkeypatch.setattr(resolve, "TECHNIQUES", (*switches.TECHNIQUES, toy(change)))
    with pytest.raises(BadInput) as caught:
        resolve.resolve(Recipe(), CPU)
    assert str(caught.value) == f"trick toy asks for {asked}, which is none of {', '.join(map(str, NAMES[where]))}"


def test_a_plan_that_is_made_by_hand_is_held_to_the_same_names():
    with pytest.raises(BadInput, match=r"asks for after_load=ad_adapter, which is none of"):
        Plan(CPU, after_load=("add_adapter", "ad_adapter"))


def test_no_weight_is_loaded_for_a_wrong_name(tiny_model, tmp_path, monkeypatch):
    def load(*arguments, **named):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(pretrained, "causal_lm", load)
    monkeypatch.setattr(resolve, "TECHNIQUES", (*switches.TECHNIQUES, toy(WRONG[0][0])))
    recipe = with_settings(Recipe(model=str(tiny_model)), ["tricks.peft=lora", "train.max_steps=1"])
    with pytest.raises(BadInput, match=r"^trick toy asks for after_load=prepare_for_kbit_trainin, which is none of"):
        train(recipe, tmp_path / "run")


def test_each_name_is_carried_out_and_nothing_else_is():
    assert set(model.EDITS) == set(NAMES["after_load"])
    assert set(forward.CONTEXTS) == set(NAMES["step_context"])
    assert set(losses.LOSSES) == set(NAMES["loss.kind"])
    assert set(adapters.ADAPTERS) == set(NAMES["peft.kind"])
    for wanted in NAMES["optimizer.in_backward"]:
        assert optimizer.steps_in_backward(Plan(CPU, optimizer={"in_backward": wanted}), MODEL, ADAMW, 1.0, SCALER)
    libraries = {"eager", "sdpa", "flash_attention_2"}
    assert {*attention.ATTENTION, *libraries} == set(NAMES["model.attn_implementation"])
    assert set(NAMES["model.attn_implementation"]) - {"eager"} <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
