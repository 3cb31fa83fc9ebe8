"""Paged optimizer: the same bits on a device of any size, as much traffic as predicted, and what really is paged."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from benchmarks.peers.trl_sft import OPTIMIZERS
from cria_tricks.hardware import T4
from cria_tricks.load.model import load
from cria_tricks.measure.counting import peak_bytes
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.paged_optimizer import PagedAdamW, Pager
from cria_tricks.trainer.optimizer import make_optimizer
from tests.helpers import SMALL_LORA, prepare

SHAPES = ((40, 30), (64,), (7, 11), (1,))
E = 64  # elements of a page: the first weight ends in a page of 48, the third in one of 13
WEIGHT_PAGES = 19 + 1 + 2 + 1
PAGES = 2 * WEIGHT_PAGES
SETTINGS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def weights() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in SHAPES]


def train(optimizer, trained: list[torch.Tensor], steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in trained:
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()


@pytest.mark.parametrize("frames", [2, 3, 5, PAGES - 1, PAGES, PAGES + 1])
def test_math(frames):
    """Against torch's AdamW, each weight after 20 steps, and both of its moments, bit for bit."""
    plain, paged = weights(), weights()
    torchs = torch.optim.AdamW(plain, **SETTINGS, foreach=False)
    ours = PagedAdamW(paged, Pager(frames, E), **SETTINGS)
    train(torchs, plain, 20)
    train(ours, paged, 20)
    assert not torch.equal(plain[0], weights()[0])
    assert all(map(torch.equal, plain, paged))
    for number, weight in enumerate(plain):
        for moment, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
            expected = torchs.state[weight][name].view(-1)
            pages = [ours.pager.page((number, place, moment)).clone() for place in range(-(-len(expected) // E))]
            assert torch.equal(torch.cat(pages)[: len(expected)], expected)


def test_both_moments_of_a_weight_need_a_frame_each():
    with pytest.raises(ValueError, match="frames = 1"):
        Pager(1, E)


@pytest.mark.parametrize("frames", [2, PAGES // 2, PAGES - 1, PAGES])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_mechanism(frames, steps):
    """A device with room for all pages moves none; with one too few, every page travels both ways in every step."""
    trained = weights()
    optimizer = PagedAdamW(trained, pager := Pager(frames, E))
    train(optimizer, trained, steps)
    page = 4 * E
    if frames >= PAGES:
        assert (pager.bytes_to_device, pager.bytes_to_host) == (0, 0)
    else:
        assert pager.bytes_to_device == (steps - 1) * PAGES * page
        assert pager.bytes_to_host == (steps * PAGES - frames) * page
    assert pager.frames_FE.nbytes == frames * page, "all that the device holds"
    assert len(pager.resident) + len(pager.host) == PAGES
    assert not pager.resident.keys() & pager.host.keys(), "a page is in one place"


def test_the_least_recently_used_page_makes_room():
    pager = Pager(2, E)
    for key in ("a", "b", "a", "c"):
        pager.page(key).add_(1)
    assert list(pager.resident) == ["a", "c"]
    assert pager.host.keys() == {"b"}
    assert pager.page("a")[0] == 2, "it never left"
    assert pager.page("b")[0] == 1, "it came back as it went"


def test_mechanism_alive():
    """Live storages: beyond the frames and the host a step holds two pages for a moment, a root and a quotient."""
    trained = weights()
    optimizer = PagedAdamW(trained, pager := Pager(2, E))
    train(optimizer, trained, 1)
    alive = (
        tensor
        for group in (trained, [w.grad for w in trained], [pager.frames_FE], pager.host.values())
        for tensor in group
    )
    assert peak_bytes(optimizer.step, alive) == 2 * 4 * E


@pytest.mark.parametrize(
    ("optimizer", "paged", "states"),
    [("adamw", "false", None), ("adamw", "true", 32), ("adamw_8bit", "false", 8), ("adamw_8bit", "true", 8)],
)
def test_switch(optimizer, paged, states, tiny_model):
    """On a card the optimizer that is made is bitsandbytes', and it is a paged one: the same that a Trainer makes."""
    recipe = with_settings(Recipe(), [f"tricks.optimizer={optimizer}", f"tricks.paged_optimizer={paged}"])
    plan = resolve(recipe, T4)
    assert not plan.warnings
    model = load(resolve(Recipe()), Weights(str(tiny_model), str(tiny_model), None)).model
    made = make_optimizer(model, plan, recipe.train)
    name = OPTIMIZERS[plan.optimizer["bits"], plan.optimizer["paged"]]
    arguments = TrainingArguments("unused", optim=name, learning_rate=2e-4, use_cpu=True, report_to="none")
    kind, named = Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert type(made) is kind
    defaults = vars(made) | made.defaults | vars(getattr(made, "args", Recipe()))
    assert {key: value for key, value in defaults.items() if key in named} == named
    if states is None:
        assert made.defaults["fused"], "the other kinds need memory of their own for a moment"
    else:
        assert (made.is_paged, made.args.optim_bits) == (paged == "true", states)


def test_on_a_cpu_it_has_no_effect_and_says_so(tiny_model):
    _, plan, _ = prepare(tiny_model, "tricks.peft=lora", *SMALL_LORA, "tricks.paged_optimizer=true")
    assert plan.optimizer == {"bits": 32, "paged": False}
    assert "host memory already" in " ".join(plan.warnings)


@pytest.mark.parametrize(("elements", "pages"), [(99_999, False), (100_000, True)])
def test_bitsandbytes_pages_only_large_states(elements, pages, monkeypatch):
    """The card's memory is not here, but the choice can be watched: a stand-in for the call that asks for pages."""
    import bitsandbytes as bnb

    asked: list[int] = []
    monkeypatch.setattr(bnb.functional, "get_paged", lambda *shape, **rest: asked.append(shape[0]) or torch.zeros(0))
    monkeypatch.setattr(bnb.functional, "fill", lambda *arguments: None)
    optimizer = bnb.optim.PagedAdamW8bit([torch.nn.Parameter(torch.zeros(1))])
    with torch.device("meta"):
        optimizer.get_state_buffer(torch.zeros(elements))
    assert asked == ([elements] if pages else [])


def test_how_much_of_the_capstones_states_is_paged():
    """The card's figures: r = 16 on the seven linears of Llama-3.2-1B, 16 blocks, 8 bytes a trained weight."""
    widths = ((2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048))
    matrices = [16 * width for pair in widths for width in pair]
    large = [elements for elements in matrices if elements >= 100_000]
    assert (len(large), len(matrices)) == (3, 14)
    assert 16 * 8 * sum(large) == 50_331_648
    assert 16 * 8 * sum(matrices) == 90_177_536
