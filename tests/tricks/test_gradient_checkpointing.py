"""Gradient checkpointing: the same bits, L s + a bytes, and as many more FLOPs as the card says."""

from dataclasses import fields
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import TrainerCallback, TrainingArguments

import cria_tricks.trainer.arguments
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.tricks import gradient_checkpointing
from cria_tricks.tricks.gradient_checkpointing import checkpointed
from tests.helpers import prepare, train

B, T, D, H, R, L = 2, 64, 8, 16, 2, 5  # batch, tokens, width, inner width, rank, blocks

WAYS = {
    "plain": lambda block, x: block(x),
    "reference": checkpointed,
    "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
}
KINDS = pytest.mark.parametrize("kind", ["all weights", "frozen", "lora"])
NEW_NAME = "activation_checkpointing" in {field.name for field in fields(TrainingArguments)}


class Block(nn.Module):
    """Two equal products, each maybe frozen and maybe with an adapter, and dropout between them."""

    def __init__(self, kind: str):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.3) for shape in ((H, D), (D, H)))
        self.weights.requires_grad_(kind == "all weights")
        shapes = ((R, D), (H, R), (R, H), (D, R)) if kind == "lora" else ()
        self.adapters = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.3) for shape in shapes)

    def product(self, i: int, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weights[i])
        if self.adapters:  # in peft's order
            y = y + F.linear(F.linear(x, self.adapters[2 * i]), self.adapters[2 * i + 1])
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.product(0, F.layer_norm(x, (D,))))
        return x + self.product(1, F.dropout(inner, 0.1, self.training))


def stack(kind: str, blocks: int = L) -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList(Block(kind) for _ in range(blocks)), torch.randn(B, T, D, requires_grad=True)


def forward(way: str, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = WAYS[way](block, x)
    return x


def step(way: str, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = forward(way, blocks, x)  # stays alive, as it does for a head above it
    loss = y.sum()
    loss.backward()
    return loss


@KINDS
@pytest.mark.parametrize("way", ["reference", "torch"])
def test_math(way, kind):
    """Dropout is on; loss, gradients and the random state afterwards are equal bit for bit."""
    found = {}
    for name in ("plain", way):
        blocks, x = stack(kind)
        loss = step(name, blocks, x)
        trained = [p.grad for p in blocks.parameters() if p.requires_grad]
        found[name] = [loss.detach(), x.grad, *trained, torch.get_rng_state()]
    assert len(found[way]) == 3 + L * {"all weights": 2, "frozen": 0, "lora": 4}[kind]
    for plain, other in zip(found["plain"], found[way], strict=True):
        assert torch.equal(plain, other)
    blocks, x = stack(kind)
    assert step("plain", blocks.eval(), x) != found["plain"][0], "dropout was on"


def test_the_cards_random_state_is_replayed_and_left_as_it_was(monkeypatch):
    """A generator of our own stands for the card's, from which dropout on a card draws."""
    of_a_card = torch.Generator()

    def block(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=of_a_card) > 0.5)

    def replayed() -> bool:
        x = torch.ones(B, T, D, requires_grad=True)
        y = gradient_checkpointing._Recompute.apply(block, x)
        of_a_card.seed()  # as after other blocks
        state = of_a_card.get_state()
        y.sum().backward()
        return torch.equal(x.grad, y.detach()) and torch.equal(of_a_card.get_state(), state)

    assert not replayed(), "the CPU's generator alone"
    monkeypatch.setattr(gradient_checkpointing, "generators_of", lambda x: [torch.default_generator, of_a_card])
    assert replayed()
    monkeypatch.undo()
    assert gradient_checkpointing.generators_of(torch.ones(1)) == [torch.default_generator]


def test_an_input_without_gradient_is_passed_by():
    """The first block of a frozen base: only its adapters learn."""
    found, products = {}, {}
    for way in ("plain", "reference"):
        (block,), x = stack("lora", 1)
        products[way] = flops(partial(step, way, [block], x.detach()))
        found[way] = [p.grad for p in block.adapters]
    assert all(map(torch.equal, found["plain"], found["reference"]))
    assert products["reference"] - products["plain"] == flops(partial(block, x.detach())), "nor does it get one"


def test_a_weight_that_the_block_does_not_use_has_no_gradient():
    (block,), x = stack("all weights", 1)
    block.idle = nn.Parameter(torch.zeros(1))
    step("reference", [block], x)
    assert block.idle.grad is None


def kept(kind: str) -> tuple[int, int]:
    """Predict s and a: the bytes of a block's input, and of all that its inside keeps."""
    s, inner, statistics = 4 * B * T * D, 4 * B * T * H, 4 * 2 * B * T
    a = statistics + 2 * inner  # of the norm; what gelu takes, and dropout's mask
    if kind != "frozen":
        a += s + inner  # whatever learns keeps what it multiplies: the two products' inputs
    if kind == "lora":
        a += 2 * 4 * B * T * R
    return s, a


@KINDS
def test_mechanism(kind):
    """Saved bytes of L blocks: L (s + a) without, L s + a with it, where a is one open block."""
    s, a = kept(kind)
    for way, after_forward, most in (("plain", L * (s + a), L * (s + a)), ("reference", L * s, L * s + a)):
        blocks, x = stack(kind)
        with SavedBytes(besides=blocks.parameters()) as saved:
            y = forward(way, blocks, x)
            assert saved.now == after_forward
            y.sum().backward()
        assert saved.peak == most
        assert saved.now == 0


@KINDS
def test_mechanism_alive(kind):
    """The same in storages that live: it counts torch's version too, whose open block the hooks cannot see."""
    s, a = kept(kind)
    peaks = {}
    for way in WAYS:
        for count in (L - 1, L):
            blocks, x = stack(kind, count)
            peaks[way, count] = peak_bytes(partial(step, way, blocks, x), (x, *blocks.parameters()))
    assert peaks["plain", L] - peaks["plain", L - 1] == s + a
    for way in ("reference", "torch"):
        assert peaks[way, L] - peaks[way, L - 1] == s
    # Beyond the kept bytes there is only what is at work for a moment: what is so without it; from the second block on
    # the gradients of the first one's weights; the loss and its gradient. The reference, which has no early stop, makes
    # the block's output again.
    gradients = sum(p.nbytes for p in blocks[0].parameters() if p.requires_grad)
    momentary = peaks["plain", L] - L * (s + a) + gradients + 2 * 4
    assert L * s + a <= peaks["torch", L] <= L * s + a + momentary
    assert L * s + a <= peaks["reference", L] <= L * s + a + momentary + s


RATIOS = {"all weights": (1 / 3, 1 / 6), "frozen": (1 / 2, 1 / 4), "lora": (0.44, 0.42)}
"""What recomputing adds to a step's FLOPs: to the end of every block, and with early stop."""


@KINDS
def test_mechanism_flops(kind):
    """In units of one product's p FLOPs, a plain step takes 6 p a block (all weights) or 4 p (frozen)."""
    p = 2 * B * T * D * H
    thin = 2 * B * T * R * (D + H) if kind == "lora" else 0  # one adapter's two products
    once = 2 * p + 2 * thin  # forward through a block
    plain = L * (once + 2 * p + (2 * p if kind == "all weights" else 0) + 4 * thin)
    last = 2 * B * T * R * D if kind == "lora" else p  # the product whose result nothing saves

    def count(way: str) -> int:
        return flops(partial(step, way, *stack(kind)))

    assert count("plain") == plain
    assert count("reference") == plain + L * once
    with set_checkpoint_early_stop(False):
        assert count("torch") == plain + L * once
    assert count("torch") == plain + L * (once - last)
    assert (L * once / plain, L * (once - last) / plain) == pytest.approx(RATIOS[kind])


def test_mechanism_flops_of_a_llama_with_lora(tiny_model, rows):
    """peft adds the adapter's product last, so early stop skips lora_B of down_proj and nothing else.

    And one thing more runs: transformers lets the embedding's output ask for a gradient, which only the reentrant
    checkpoint needs, so q, k and v of the first block make one.
    """
    ids, r = torch.tensor([rows[0]["input_ids"]]), 16
    t, d, kv, inner, layers = ids.shape[1], 256, 128, 512, 2
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, inner), (d, inner), (inner, d)]
    block = sum(2 * t * (i * o + r * (i + o)) for i, o in shapes) + 2 * 2 * t * t * d  # and q k, probabilities v
    unneeded = sum(2 * t * (i * o + r * i) for i, o in shapes[:3])
    counted = {}
    for on in (False, True):
        _, _, loaded = prepare(tiny_model, "tricks.peft=lora", f"lora.r={r}")
        model = loaded.model.train()
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        counted[on] = flops(lambda model=model: model(input_ids=ids).logits.sum().backward())
    assert counted[True] - counted[False] == layers * (block - 2 * t * r * d) + unneeded


class Watch(TrainerCallback):
    """What ran: forward passes of the first block, its checkpoint function, and the gradients."""

    def __init__(self):
        self.passes, self.gradients = 0, {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.layer = next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
        self.layer.mlp.register_forward_pre_hook(self.count)  # early stop leaves before its end
        draw = torch.Generator().manual_seed(0)
        for name, p in model.named_parameters():
            if "lora_B" in name:  # they begin at zero, and then lora_A has no gradient
                p.data.normal_(0, 0.1, generator=draw)

    def count(self, *_):
        self.passes += 1

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("peft", ["lora", "none"])
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_switch(name, peft, tiny_model, rows, tmp_path, monkeypatch):
    """The old name and the new: each block runs twice, through torch's non-reentrant checkpoint, to the same bits."""
    known = list(fields(TrainingArguments))
    if name == "gradient_checkpointing":  # a version that does not know the new one, as Colab's
        known = [field for field in known if not field.name.startswith("activation_")]
    elif not NEW_NAME:
        pytest.skip("this transformers has only the old name")
    given = {}

    def arguments(**named):
        given.update(named)
        return TrainingArguments(**named)

    monkeypatch.setattr(cria_tricks.trainer.arguments, "fields", lambda _: known)
    monkeypatch.setattr(cria_tricks.trainer.arguments, "TrainingArguments", arguments)

    sets = (f"tricks.peft={peft}", "lora.dropout=0.1", "train.max_steps=1", "train.max_grad_norm=1e9")
    seen = {}
    for on in (False, True):
        given.clear()
        watch = seen[on] = Watch()
        switch = f"tricks.gradient_checkpointing={str(on).lower()}"
        run, _ = train(tiny_model, rows[:1], tmp_path / str(on), switch, *sets, callbacks=[watch])
        watch.loss = run.training[0]["loss"]
        asked = {key for key in given if key.startswith(("gradient_check", "activation_"))}
        assert asked == ({name, f"{name}_kwargs"} if on else set())
        assert watch.layer.gradient_checkpointing is on
    assert (seen[False].passes, seen[True].passes) == (1, 2)
    assert seen[True].layer._gradient_checkpointing_func.keywords["use_reentrant"] is False
    assert seen[True].loss == seen[False].loss
    assert seen[True].gradients.keys() == seen[False].gradients.keys()
    assert all(torch.equal(seen[True].gradients[key], found) for key, found in seen[False].gradients.items())
