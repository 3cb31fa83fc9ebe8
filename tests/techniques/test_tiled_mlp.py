"""Tiled MLP: gradcheck, the untiled numbers within rounding, saved bytes, bytes at the peak, products, passes, runs."""

import inspect
from collections import Counter
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.load.refusals import refuse
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.models.configs import KINDS
from cria_tricks.models.shape import PLAIN_BLOCKS, facts_of, find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.techniques import tiled_mlp
from cria_tricks.techniques.tiled_mlp import tiled
from tests.hardware import models
from tests.helpers import difference, prepare, train
from tests.techniques.test_fused_lora import LORA, by_formula, saved
from tests.tolerances import TRAJECTORY

D, INNER = 32, 80
TILE = "tricks.tiled_mlp=16"
BACK = "tricks.gradient_checkpointing=true"


def weights_of(width: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gate, up and down."""
    shapes = (inner, width), (inner, width), (width, inner)
    return [(torch.randn(shape, dtype=dtype) / shape[1] ** 0.5).requires_grad_() for shape in shapes]


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def in_tiles(x: torch.Tensor, *weights: torch.Tensor, tile: int) -> torch.Tensor:
    return tiled(lambda piece: gated(piece, *weights), x, tile, weights)


@pytest.mark.parametrize("tile", [1, 3, 8, 9])
def test_math(tile):
    """In double precision gradients are those of finite differences: two rows of 4 tokens, in tiles that cross rows."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weights = weights_of(3, 5, torch.float64)
    torch.testing.assert_close(in_tiles(x, *weights, tile=tile), gated(x, *weights))
    assert torch.autograd.gradcheck(lambda *given: in_tiles(*given, tile=tile), (x, *weights))
    frozen = [weight.detach() for weight in weights]
    assert torch.autograd.gradcheck(lambda x: tiled(lambda piece: gated(piece, *frozen), x, tile), (x,))
    with torch.no_grad():
        torch.testing.assert_close(in_tiles(x, *weights, tile=tile), gated(x, *weights))


def gradients(run, x: torch.Tensor, weights: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    weights = [weight.detach().requires_grad_() for weight in weights]
    y = run(x, *weights)
    return [y.detach(), *torch.autograd.grad(y, (x, *weights), grad.to(y.dtype))]


@pytest.mark.parametrize(("tokens", "tile"), [(7, 3), (37, 16), (64, 16), (33, 32), (50, 1), (5, 8), (16, 16)])
def test_math_at_odd_lengths(tokens, tile):
    """In fp32, both ways are within rounding of double precision; a row no longer than a tile is the same bit for bit.

    A number of y is a sum of INNER products of numbers that are sums of D: at most (D + INNER + 4) roundings of 2^-24,
    relative to the sums of sizes; the gradients have one product more, and a weight's gradient is a sum over the
    tokens, tile by tile.
    """
    torch.manual_seed(0)
    x, grad = torch.randn(1, tokens, D), torch.randn(1, tokens, D)
    weights = weights_of(D, INNER, torch.float32)
    exact = gradients(gated, x.double(), [weight.double() for weight in weights], grad.double())
    ours = gradients(lambda *given: in_tiles(*given, tile=tile), x, weights, grad)
    plain = gradients(gated, x, weights, grad)
    if tokens <= tile:
        assert all(map(torch.equal, ours, plain))
    roundings = 2 * (D + INNER) + tokens + 8
    for found, theirs, expected in zip(ours, plain, exact, strict=True):
        assert difference(found, expected) < roundings * 2**-24
        assert difference(found, theirs) < 2 * roundings * 2**-24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_math_under_autocast(dtype):
    """fp32 weights have their gradients, which are no further from double precision than the untiled ones."""
    far: Counter[str] = Counter()
    for seed in range(8):
        torch.manual_seed(seed)
        x, grad = torch.randn(1, 45, D), torch.randn(1, 45, D)
        weights = weights_of(D, INNER, torch.float32)
        exact = gradients(gated, x.double(), [weight.double() for weight in weights], grad.double())
        for name, run in (("tiled", lambda *given: in_tiles(*given, tile=16)), ("whole", gated)):

            def cast(*given, run=run):
                with torch.autocast("cpu", dtype):
                    return run(*given)

            found = gradients(cast, x, weights, grad)
            assert all(gradient.dtype == torch.float32 for gradient in found[1:])
            far[name] += sum(map(difference, found, exact))
    print(f"from double precision: {far['tiled']:.3e} tiled, {far['whole']:.3e} whole")
    # A tile's gradient of a weight is rounded to 16 bits, and then added up in fp32; the whole one is rounded once.
    assert far["tiled"] <= 1.05 * far["whole"]


def test_math_under_autocast_leaves_no_cast_weight_behind():
    """A weight that was cast where autograd is off has no history, and must not be what a later product takes."""
    x, weights = torch.randn(1, 40, D), weights_of(D, INNER, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        in_tiles(x, *weights, tile=16)
        later = F.linear(x, weights[0])
    (gradient,) = torch.autograd.grad(later.float().sum(), weights[0])
    assert difference(gradient, x.sum(1).expand_as(weights[0])) < 2**-6


def test_math_with_dropout():
    """The backward pass draws the masks of the forward pass again: y is linear in W, so <W, dW> = <y, dy>."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 50, D), torch.randn(D, D, requires_grad=True)
    y = tiled(lambda piece: F.linear(F.dropout(piece, 0.3), weight), x, 16, [weight])
    dy = torch.randn_like(y)
    before = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(7))  # somebody draws between the two passes
    after = torch.get_rng_state()
    (dW,) = torch.autograd.grad(y, weight, dy)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(before, after)
    assert (weight * dW).sum().item() == pytest.approx((y * dy).sum().item(), rel=1e-4)
    assert (F.dropout(x, 0.3) == 0).float().mean() > 0.2


# What is saved, what is alive, what is computed.


@pytest.mark.parametrize("more", [(), ("tricks.fused_lora=true",), ("tricks.fused_blocks=true",)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mechanism(precision, more):
    """A block saves what the formula says: of its MLP the input, and nothing that is F wide."""
    settings = [*LORA, f"tricks.precision={precision}", "tricks.attention=sdpa", *more]
    shape = models.shape(hidden_size=64, intermediate_size=224, num_attention_heads=4, num_key_value_heads=2)
    recipe = with_settings(Recipe(), [*settings, TILE])
    assert saved(recipe) == by_formula(recipe, shape, resolve(recipe).device)
    less = saved(with_settings(Recipe(), settings)) - saved(recipe)
    size = 2 if precision == "bf16" else 4
    kept = {(): 4, ("tricks.fused_lora=true",): 2, ("tricks.fused_blocks=true",): 3}[more]
    x = 4 * 64 * (precision == "bf16")  # the fp32 input, where only its cast copy was saved
    assert less >= size * kept * 224 - x


def at_the_peak(tokens: int, tile: int, inner: int) -> int:
    """Bytes of one MLP's forward and backward pass, beside its weights, its input and the gradient of its result."""
    x, dy = torch.randn(1, tokens, D, requires_grad=True), torch.randn(1, tokens, D)
    weights = [weight.detach() for weight in weights_of(D, inner, torch.float32)]
    return peak_bytes(
        lambda: tiled(lambda piece: gated(piece, *weights), x, tile).backward(dy), alive=[x, dy, *weights]
    )


def test_mechanism_at_the_peak():
    """For each token of the batch 4 D bytes twice, the result and the gradient of x; F counts for a tile's tokens."""
    assert at_the_peak(512, 16, INNER) - at_the_peak(256, 16, INNER) == 256 * 4 * 2 * D
    wide, narrow = (at_the_peak(256, 16, inner) for inner in (INNER + 8, INNER))
    assert wide - narrow == at_the_peak(512, 16, INNER + 8) - at_the_peak(512, 16, INNER), "whatever the batch is"
    # The deepest point of a tile is behind down: gate, its activation, up, and the gradients of the last two and of h.
    per_number = (wide - narrow) / 8 / 16 / 4
    print(f"{per_number} tensors of F numbers for each token of a tile")
    assert per_number == 6
    untiled = [at_the_peak(tokens, 10_000, INNER) for tokens in (256, 512)]
    assert untiled[1] - untiled[0] > 256 * 4 * 6 * INNER


def step_flops(*settings: str) -> int:
    recipe = with_settings(Recipe(), ["lora.r=4", *settings])
    model, plan = models.model(recipe)
    return flops(lambda: models.loss(model, plan, models.batch(2, 24)).backward())


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (("tricks.peft=lora", BACK), 2 * 4 * 64),  # the last thin product of down, which was left out
        (("tricks.peft=lora", "lora.target_modules=q_proj,v_proj", BACK), 2 * 64 * 96),  # down itself
        ((BACK,), 2 * 64 * 96),
        ((), 2 * 3 * 64 * 96),  # gate, up and down
        (("tricks.peft=lora", "lora.target_modules=q_proj,v_proj"), 2 * 3 * 64 * 96),
    ],
    ids=str,
)
def test_mechanism_products(settings, more):
    """What tiles add for each of 2 x 24 tokens in three blocks: with checkpointing only what that had left out."""
    assert step_flops(*settings, TILE) - step_flops(*settings) == 2 * 24 * 3 * more


@pytest.mark.parametrize(
    "settings",
    [
        (),
        (BACK,),
        ("tricks.gradient_checkpointing=2",),
        (BACK, "tricks.keep_attention=true", "tricks.attention=sdpa"),
        ("tricks.activation_offload=true",),
    ],
    ids=str,
)
def test_mechanism_passes(settings):
    """Every tile runs once in the forward pass and once in the backward pass, checkpointed or not; 37 tokens are 3."""
    recipe = with_settings(Recipe(), [*LORA, *settings, TILE])
    model, plan = models.model(recipe, recipe.tricks.attention)
    seen: list[int] = []
    for path, module in model.named_modules():
        if path.endswith("gate_proj"):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    loss = models.loss(model, plan, models.batch(1, 37))
    assert seen == 3 * [16, 16, 5]
    loss.backward()
    assert Counter(seen) == {16: 3 * 4, 5: 3 * 2}
    seen.clear()
    models.loss(model, plan, models.batch(1, 16)).backward()
    assert set(seen) == {16}, "a row no longer than a tile"
    assert len(seen) == 3 * (2 if settings and "checkpointing" in settings[0] else 1) - ("=2" in str(settings))


def test_mechanism_each_weight_has_one_gradient():
    """The sum over all tiles, by one hook: what DDP and FSDP wait for."""
    recipe = with_settings(Recipe(), [*LORA, BACK, TILE])
    model, plan = models.model(recipe)
    counts: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    models.loss(model, plan, models.batch(2, 40)).backward()
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * 7 * 2


class Unpacked(TorchDispatchMode):
    """Count how often bitsandbytes reads a 4-bit matrix: to multiply by it, or to unpack it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("gemm_4bit", "dequantize_4bit")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("settings", "uses"), [((), 2), ((BACK,), 3)], ids=str)
def test_mechanism_unpacks_once_a_tile_and_use(settings, uses, tiny_model):
    """NF4: an MLP's three matrices are used forward, again in its tiles, and backward, each time by every tile."""
    found = {}
    for tile in (4096, 16):
        tiles = f"tricks.tiled_mlp={tile}", "data.max_length=8192"
        _, plan, loaded = prepare(tiny_model, *LORA, "tricks.quantization=nf4", *tiles, *settings)
        ids = torch.arange(3, 43)[None]  # 40 tokens: three tiles
        with Unpacked() as unpacked:
            models.loss(loaded.model.train(), plan, {"input_ids": ids, "labels": ids}).backward()
        found[tile] = unpacked.count
    blocks, tiles, matrices = 2, 3, 3
    assert found[16] - found[4096] == blocks * matrices * (tiles * 3 - uses)


def test_mechanism_nothing_stays_alive():
    """When the backward pass is over, no saved tensor is left."""
    recipe = with_settings(Recipe(), [*LORA, TILE])
    model, plan = models.model(recipe)
    with SavedBytes(besides=model.parameters()) as counted:
        models.loss(model, plan, models.batch(1, 40)).backward()
    assert counted.now == 0


def test_mechanism_of_llama_3_2_1b():
    """On a T4 with 32,768 tokens: the open block's 8 F T bytes are those of 2,048, and their gradients with them."""
    shape = find_shape("llama-3.2-1b")
    base = with_settings(recipes.capstone(T4), ["data.max_length=32768"])
    plain, auto, one = (
        folds.estimate(with_settings(base, [f"tricks.tiled_mlp={tile}"]), shape, T4).peak_bytes
        for tile in ("false", "auto", "1")
    )
    print(f"{plain / 2**30:.2f} GiB, in tiles {auto / 2**30:.2f} GiB")
    assert plain - auto > 8 * 8192 * (32_768 - 2 * 2048)
    assert one <= auto


# The switch.


def test_switch(tiny_model, rows, tmp_path, monkeypatch):
    """A run takes tiles in every block and follows the untiled losses."""
    ran: Counter[int] = Counter()

    def counted(mlp, x, tile, weights):
        ran[x.shape[:-1].numel() > tile] += 1
        return tiled(mlp, x, tile, weights)

    monkeypatch.setattr(tiled_mlp, "tiled", counted)
    settings = (*LORA, "train.max_steps=6", "train.batch_size=2", "train.learning_rate=1e-3", "train.save_steps=100")
    losses = {}
    for tile in ("false", "8", "4096"):
        run, _ = train(tiny_model, rows, tmp_path / tile, *settings, f"tricks.tiled_mlp={tile}", "data.max_length=4096")
        losses[tile] = [entry["loss"] for entry in run.training]
        if tile == "8":
            assert ran == {True: 6 * 2}, "two blocks, six steps"
    assert ran == {True: 6 * 2, False: 6 * 2}, "tiles of 4,096 tokens are never full, so the MLP runs as it is"
    assert losses["8"] == pytest.approx(losses["false"], abs=TRAJECTORY)
    assert losses["4096"] == losses["false"]


def test_switch_is_as_long_as_the_model_is_wide(tiny_model):
    _, _, loaded = prepare(tiny_model, *LORA, "tricks.tiled_mlp=auto")
    seen: list[int] = []
    for path, module in loaded.model.named_modules():
        if path.endswith("up_proj"):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    with torch.no_grad():
        loaded.model(torch.zeros(3, 100, dtype=torch.long))
    assert seen == 2 * [256, 44]


def test_switch_refuses_and_warns():
    def asked(*settings: str, processes: int = 1):
        return resolve(with_settings(Recipe(), [*LORA, *settings]), processes=processes)

    with pytest.raises(BadInput, match=r"^tricks\.tiled_mlp=true: a compiled block .*; set tricks\.compile=false$"):
        asked("tricks.tiled_mlp=auto", "tricks.compile=true")
    with pytest.raises(BadInput, match=r"^tricks\.tiled_mlp=16: tensor parallelism .*; use parallel.strategy=ddp or"):
        asked(TILE, "parallel.strategy=tensor", processes=2)
    (warning,) = asked("tricks.tiled_mlp=4096", "data.max_length=2048", "train.batch_size=2").warnings
    assert warning == "tiled_mlp has no effect: no micro-batch has more than 4,096 tokens, and a tile has 4,096"
    plan = resolve(with_settings(Recipe(), ["tricks.tiled_mlp=2048", "data.max_length=4096"]))
    assert plan.after_load == ("techniques.tiled_mlp.tile_blocks",)
    with pytest.raises(BadInput, match=r"^tricks\.tiled_mlp: the MLP of mixtral-8x7b, .*; set tricks"):
        refuse(plan, facts_of(find_shape("mixtral-8x7b")), 1)
    for model in ("llama-3.1-8b", "phi-4-mini", "gemma-3-1b", "olmo-2-1b"):
        refuse(plan, facts_of(find_shape(model)), 1)


def test_the_mlps_that_are_tiled_map_each_token_by_itself():
    """Read in the installed transformers: a block calls ``self.mlp`` with its hidden states alone, and adds nothing."""
    assert set(PLAIN_BLOCKS) == set(KINDS) - {"mixtral"}
    for kind in PLAIN_BLOCKS:
        folder = kind.removesuffix("_text")
        module = import_module(f"transformers.models.{folder}.modeling_{folder}")
        name = next(name for name in dir(module) if name.endswith("DecoderLayer"))
        code = inspect.getsource(getattr(module, name).forward)
        assert "hidden_states = self.mlp(hidden_states)" in code, kind
