"""Gradient checkpointing: the same bits, L s + a bytes, and as many more FLOPs as the card says."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainerCallback

from cria_tricks.common.errors import BadInput
from cria_tricks.load import losses
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.techniques import gradient_checkpointing
from cria_tricks.techniques.gradient_checkpointing import checkpointed
from tests.helpers import prepare, train

B, T, D, H, R, L = 2, 64, 8, 16, 2, 5  # batch, tokens, width, inner width, rank, blocks

WAYS = {
    "plain": lambda block, x: block(x),
    "reference": checkpointed,
    "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
}
KINDS = pytest.mark.parametrize("kind", ["all weights", "frozen", "lora"])


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


def forward(way: str, blocks: nn.ModuleList, x: torch.Tensor, k: int = L) -> torch.Tensor:
    """Run all blocks, the first k in a way, the others plainly."""
    for number, block in enumerate(blocks):
        x = WAYS[way if number < k else "plain"](block, x)
    return x


def step(way: str, blocks: nn.ModuleList, x: torch.Tensor, k: int = L) -> torch.Tensor:
    y = forward(way, blocks, x, k)  # stays alive, as it does for a head above it
    loss = y.sum()
    loss.backward()
    return loss


@KINDS
@pytest.mark.parametrize("way", ["reference", "torch"])
@pytest.mark.parametrize("k", range(L + 1))
def test_math(k, way, kind):
    """Dropout is on; loss, gradients and the random state afterwards are equal bit for bit, for every k."""
    found = {}
    for name in ("plain", way):
        blocks, x = stack(kind)
        loss = step(name, blocks, x, k)
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
@pytest.mark.parametrize("k", range(L + 1))
def test_mechanism(k, kind):
    """Saved bytes: k s + (L - k) (s + a) after the forward pass; k s + a when block k is open. For k = 0 and L, too."""
    s, a = kept(kind)
    after_forward = k * s + (L - k) * (s + a)
    blocks, x = stack(kind)
    with SavedBytes(besides=blocks.parameters()) as saved:
        y = forward("reference", blocks, x, k)
        assert saved.now == after_forward
        y.sum().backward()
    assert saved.peak == max(after_forward, (k * s + a) * (k > 0))
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

    def count(way: str, k: int = L) -> int:
        return flops(partial(step, way, *stack(kind), k))

    assert count("plain") == plain
    for k in range(L + 1):
        assert count("reference", k) == plain + k * once
        assert count("torch", k) == plain + k * (once - last)
    with set_checkpoint_early_stop(False):
        assert count("torch") == plain + L * once
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
@pytest.mark.parametrize("newer", [True, False])
def test_switch(newer, peft, tiny_model, rows, tmp_path, monkeypatch):
    """The old name and the new: each block runs twice, through torch's non-reentrant checkpoint, to the same bits."""
    if newer and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers has only the old name")
    if not newer and hasattr(PreTrainedModel, "activation_checkpointing_enable"):  # as Colab's
        own = PreTrainedModel._activation_checkpointing_enable
        monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", own)
        monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable")
    sets = (f"tricks.peft={peft}", "lora.dropout=0.1", "train.max_steps=1", "train.max_grad_norm=1e9")
    seen = {}
    for on in (False, True):
        watch = seen[on] = Watch()
        switch = f"tricks.gradient_checkpointing={str(on).lower()}"
        run, _ = train(tiny_model, rows[:1], tmp_path / str(on), switch, *sets, callbacks=[watch])
        watch.loss = run.training[0]["loss"]
        assert watch.layer.gradient_checkpointing is on
    assert (seen[False].passes, seen[True].passes) == (1, 2)
    assert seen[True].layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}
    assert seen[True].loss == seen[False].loss
    assert seen[True].gradients.keys() == seen[False].gradients.keys()
    assert all(torch.equal(seen[True].gradients[key], found) for key, found in seen[False].gradients.items())


BLOCKS = 4


@pytest.fixture(scope="module")
def four_blocks(tmp_path_factory):
    """A folder with a Llama of four small blocks."""
    folder = tmp_path_factory.mktemp("four_blocks")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=BLOCKS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def learnt(folder, rows, *settings: str) -> tuple[list[int], list[torch.Tensor]]:
    """One micro-batch with dropout: how often each block ran, and the loss, all gradients and the random state."""
    _, plan, loaded = prepare(folder, *settings)
    model = loaded.model.train()
    draw = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # they begin at zero, and then lora_A has no gradient
            p.data.normal_(0, 0.1, generator=draw)
    runs = [0] * BLOCKS

    def count(number: int, *_) -> None:
        runs[number] += 1

    for number, block in enumerate(blocks_of(model)):
        block.mlp.register_forward_pre_hook(partial(count, number))
    half = plan.training.get("bf16")
    autocast = partial(torch.autocast, "cpu", torch.bfloat16) if half else contextlib.nullcontext
    ids = torch.tensor([rows[0]["input_ids"]])
    torch.manual_seed(1)
    with autocast():
        loss = losses.find(plan, autocast)(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return runs, [loss.detach(), *gradients, torch.get_rng_state()]


MODELS = {
    "all weights": (),
    "lora": ("tricks.peft=lora", "lora.dropout=0.1"),
    "lora, bf16": ("tricks.peft=lora", "lora.dropout=0.1", "tricks.precision=bf16"),
    "lora, NF4": ("tricks.peft=lora", "lora.dropout=0.1", "tricks.quantization=nf4", "tricks.chunked_loss=true"),
}


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_switch_the_first_k_blocks(settings, four_blocks, rows):
    """Of a real model exactly the first k blocks run twice, to the bits of no checkpointing, for every k."""
    plain_runs, plain = learnt(four_blocks, rows, *settings)
    assert plain_runs == [1] * BLOCKS
    for k in range(BLOCKS + 1):
        runs, found = learnt(four_blocks, rows, *settings, f"tricks.gradient_checkpointing={k}")
        assert runs == [2] * k + [1] * (BLOCKS - k)
        assert len(found) == len(plain)
        assert all(map(torch.equal, found, plain))


def test_switch_more_blocks_than_there_are(four_blocks):
    with pytest.raises(BadInput) as caught:
        prepare(four_blocks, f"tricks.gradient_checkpointing={BLOCKS + 1}")
    name = str(four_blocks)
    said = f"tricks.gradient_checkpointing=5: {name} has 4 blocks; set true for all, or 4 or less"
    assert str(caught.value) == said
