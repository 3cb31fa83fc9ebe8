"""Fused LoRA: the derivation by gradcheck, peft's numbers within rounding, the saved bytes of the formula, runs."""

import inspect
import statistics
import weakref
from collections import Counter
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from cria_tricks import recipes
from cria_tricks.adapter import folder
from cria_tricks.bill import fused_operations
from cria_tricks.bill.block import kept
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load import fused
from cria_tricks.load.adapters import without_adapter
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.techniques.fused_lora import Matrix, gated_mlp, products
from tests.hardware import models
from tests.helpers import difference, prepare, train
from tests.tolerances import TRAJECTORY

N, D, INNER, R = 12, 64, 160, 4
LORA = ("tricks.peft=lora", "lora.r=4")
FUSED = "tricks.fused_lora=true"
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def matrix(d_in: int, d_out: int, dtype: torch.dtype = torch.float64) -> Matrix:
    weight = torch.randn(d_out, d_in, dtype=dtype) / d_in**0.5
    A, B = (torch.randn(*shape, dtype=dtype) / 8 for shape in ((R, d_in), (d_out, R)))
    return Matrix(partial(F.linear, weight=weight), weight.to, A.requires_grad_(), B.requires_grad_(), 0.7)


def plain(x: torch.Tensor, one: Matrix) -> torch.Tensor:
    """What peft computes, operation by operation."""
    return one.times(x) + F.linear(F.linear(x, one.A), one.B) * one.scale


def plain_mlp(x, gate, up, down, activation):
    return plain(activation(plain(x, gate)) * plain(x, up), down)


def in_another(dtype: torch.dtype, one: Matrix) -> Matrix:
    """The same matrix and adapter: W in this dtype, an adapter in fp32 at least."""
    weight = one.unpacked(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    A, B = (each.detach().to(wide).requires_grad_() for each in (one.A, one.B))
    return Matrix(lambda x: F.linear(x, weight), weight.to, A, B, one.scale)


def gradients(mlp, x: torch.Tensor, three: list[Matrix], grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = mlp(x, *three, F.silu)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, *(each.grad for one in three for each in (one.A, one.B))]


@pytest.mark.parametrize("activation", [F.silu, partial(F.gelu, approximate="tanh")], ids=["silu", "gelu"])
def test_math(activation):
    """In double precision the gradients are those of finite differences, and the results those of the plain formula."""
    torch.manual_seed(0)
    three = [matrix(5, 7), matrix(5, 7), matrix(7, 5)]
    adapters = [each for one in three for each in (one.A, one.B)]
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gated_mlp(x, *three, activation), plain_mlp(x, *three, activation))
    assert torch.autograd.gradcheck(lambda x, *_: gated_mlp(x, *three, activation), (x, *adapters))
    assert torch.autograd.gradcheck(lambda x, *_: products(x, tuple(three[:2])), (x, *adapters[:4]))
    with torch.no_grad():
        torch.testing.assert_close(gated_mlp(x, *three, activation), plain_mlp(x, *three, activation))


@pytest.mark.parametrize("needs", [False, True])
def test_math_where_nobody_needs_the_gradient_of_the_input(needs):
    """In the first block: the adapters have theirs, and no weight is unpacked for it."""
    torch.manual_seed(0)
    asked = []
    one = matrix(D, INNER)
    weight = one.unpacked(torch.float64)
    one = Matrix(one.times, lambda dtype: asked.append(dtype) or weight, one.A, one.B, one.scale)
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=needs)
    products(x, (one,))[0].sum().backward()
    assert len(asked) == needs
    found = one.A.grad.clone()
    one.A.grad = None
    plain(x, one).sum().backward()
    torch.testing.assert_close(found, one.A.grad)


@pytest.mark.parametrize("precision", HALF)
def test_math_is_no_further_from_double_precision_than_pefts(precision):
    """The result, the gradient of the input and those of the six adapters, the mean of eight drawn MLPs.

    In fp32 it is also within rounding: a number is a sum of at most INNER + R terms, in each of three products.
    """
    dtype = HALF[precision] or torch.float32
    far: dict[str, list[list[float]]] = {"ours": [], "peft's": []}
    for seed in range(8):
        torch.manual_seed(seed)
        exact = [matrix(D, INNER), matrix(D, INNER), matrix(INNER, D)]
        exact = [in_another(torch.float64, in_another(dtype, one)) for one in exact]  # numbers that the dtype has
        x, grad = (torch.randn(N, D).to(dtype) for _ in range(2))
        expected = gradients(plain_mlp, x.double(), exact, grad)
        for name, mlp in (("ours", gated_mlp), ("peft's", plain_mlp)):
            with torch.autocast("cpu", dtype, enabled=HALF[precision] is not None):
                found = gradients(mlp, x, [in_another(dtype, one) for one in exact], grad)
            far[name].append(list(map(difference, found, expected)))
    ours, pefts = (statistics.mean(map(statistics.mean, far[name])) for name in ("ours", "peft's"))
    print(f"from double precision: {ours:.2e} ours, {pefts:.2e} peft's")
    if HALF[precision] is None:
        assert max(max(one) for one in far["ours"]) < 3 * (INNER + R) * 2**-24
    else:
        assert ours <= pefts


def test_math_of_gradients_that_16_bits_would_round():
    """The adapters are fp32, and so are their gradients; peft's path, as every product under autocast, rounds them."""
    torch.manual_seed(0)
    one = in_another(torch.bfloat16, matrix(D, INNER))
    x = torch.randn(N, D).bfloat16()
    found = {}
    for name, run in (("ours", lambda x, one: products(x, (one,))[0]), ("peft's", plain)):
        one.A.grad = one.B.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x, one)
        y.sum().backward()
        found[name] = torch.cat([one.A.grad.flatten(), one.B.grad.flatten()])
    rounded = {name: torch.equal(grad, grad.bfloat16().float()) for name, grad in found.items()}
    assert rounded == {"ours": False, "peft's": True}


# On a whole model: a Llama with real numbers, by the same edits that ``load`` makes.

WIDTHS = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}


def saved(recipe: Recipe) -> float:
    """Bytes that one more block saves for one more token: differences, so what is there once drops out."""

    def of(layers: int, tokens: int) -> int:
        model, plan = models.model(recipe, recipe.tricks.attention, **WIDTHS, num_hidden_layers=layers)
        with SavedBytes(besides=model.parameters()) as counted:
            alive = models.loss(model, plan, models.batch(1, tokens))
        assert alive.requires_grad
        return counted.now

    more = [of(3, tokens) - of(2, tokens) for tokens in (64, 128)]
    return (more[1] - more[0]) / 64


def by_formula(recipe: Recipe, shape, device) -> float:
    one, other = (folds.step_of(recipe, shape, device, tokens) for tokens in (64, 128))
    before, after = (sum(kept(facts.learning_operations(facts)).values()) for facts in (one, other))
    return (after - before) / 64


@pytest.mark.parametrize("lean", ["tricks.lean_preparation=true", "tricks.lean_preparation=false"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mechanism(precision, lean):
    """A block saves what the formula says, for each token: two of the MLP's four inner tensors and no A x."""
    settings = [*LORA, f"tricks.precision={precision}", lean, "tricks.attention=sdpa"]
    recipe = with_settings(Recipe(), [*settings, FUSED])
    shape = models.shape(**WIDTHS)
    cpu = resolve(recipe).device
    assert saved(recipe) == by_formula(recipe, shape, cpu)
    size = 2 if precision == "bf16" else 4
    less = saved(with_settings(Recipe(), settings)) - saved(recipe)
    assert less >= size * (2 * WIDTHS["intermediate_size"] + 7 * R)


def test_mechanism_of_llama_3_2_1b():
    """104 KiB a token and block with peft's path on a T4, and 4 D F less with ours: 72 KiB, and no A x."""
    shape = find_shape("llama-3.2-1b")
    base = with_settings(recipes.capstone(T4), ["tricks.gradient_checkpointing=false"])
    pefts, ours = (by_formula(with_settings(base, [switch]), shape, T4) for switch in (FUSED[:-4] + "false", FUSED))
    few = 2 * 7 * 16 + 4 * 32 + 2 * 4  # A x of seven matrices, the log-sum-exp of 32 heads, the roots of two norms
    assert pefts - few == 104 * 1024
    assert ours - few + 2 * 7 * 16 == 72 * 1024


class Kernels(TorchDispatchMode):
    """Count the matrix products, and all operations that write a tensor."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "detach", "_unsafe_view")):
            self.seen["all"] += 1
            self.seen["products"] += name in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


def in_a_block(*settings: str) -> Counter[str]:
    found = []
    for layers in (2, 3):
        recipe = with_settings(Recipe(), [*LORA, "tricks.attention=sdpa", *settings])
        model, plan = models.model(recipe, "sdpa", **WIDTHS, num_hidden_layers=layers)
        with Kernels() as kernels:
            models.loss(model, plan, models.batch(1, 16)).backward()
        found.append(kernels.seen)
    return found[1] - found[0]


def test_mechanism_products_and_kernels():
    """Seven thin products more, and fewer of all else; a checkpointed block does not repeat the product of down."""
    pefts, ours = in_a_block(), in_a_block(FUSED)
    assert pefts["products"] == 7 * 3 + 7 * 5, "forward; backward, of W, and of A and B for weight and input"
    assert ours["products"] == pefts["products"] + 7
    print(f"kernels of a block in fp32: {pefts['all']} and {ours['all']}")
    assert ours["all"] - ours["products"] <= pefts["all"] - pefts["products"] - 15
    repeated = in_a_block(FUSED, "tricks.gradient_checkpointing=true")
    assert repeated["products"] - ours["products"] == 3 * 6, "q, k, v, o, gate and up, with their adapters"


@pytest.mark.parametrize("more", [(), ("tricks.gradient_checkpointing=true",), ("tricks.activation_offload=true",)])
def test_mechanism_nothing_stays_alive(more):
    """When the backward pass is over, no saved tensor is left, and no block's input."""
    recipe = with_settings(Recipe(), [*LORA, FUSED, *more])
    model, plan = models.model(recipe, "eager", **WIDTHS)
    inputs: list[weakref.ref] = []
    for layer in model.base_model.model.model.layers:
        layer.register_forward_hook(lambda module, args, result: inputs.append(weakref.ref(args[0])))
    with SavedBytes(besides=model.parameters()) as counted:
        models.loss(model, plan, models.batch(1, 16)).backward()
    assert counted.now == 0
    assert inputs
    assert not any(reference() is not None for reference in inputs)


# The switch.


def test_switch(tiny_model, tokenizer, rows, tmp_path, monkeypatch, no_twin):
    """A run takes our functions for every block, follows peft's losses, and its adapter's file is peft's."""
    ran: Counter[str] = Counter()
    for name in ("gated_mlp", "products"):
        ours = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *given, ours=ours, name=name: ran.update([name]) or ours(*given))
    settings = (*LORA, "train.max_steps=6", "train.batch_size=2", "train.learning_rate=1e-3", "train.save_steps=100")
    losses, names = {}, {}
    for switch in ("false", "true"):
        run, loaded = train(tiny_model, rows, tmp_path / switch, *settings, f"tricks.fused_lora={switch}")
        losses[switch] = [entry["loss"] for entry in run.training]
        assert bool(ran) == (switch == "true")
        made = tmp_path / f"adapter-{switch}"
        folder.save(made, loaded.model, tokenizer, str(tiny_model), "", Recipe())
        names[switch] = {name: x.shape for name, x in load_file(made / "adapter_model.safetensors").items()}
    assert ran == {"gated_mlp": 2 * 6, "products": 2 * 2 * 6}, "blocks and steps; q, k and v together, and o"
    assert names["true"] == names["false"]
    assert losses["true"] == pytest.approx(losses["false"], abs=TRAJECTORY)
    assert losses["true"][-1] < losses["true"][0]


def test_switch_leaves_other_ways_to_peft(tiny_model):
    """With the adapter switched off it is the base, bit for bit; merged it is what peft merges; two adapters are peft's
    too."""
    _, _, loaded = prepare(tiny_model, *LORA, FUSED)
    _, _, base = prepare(tiny_model)
    model, ids = loaded.model.eval(), torch.arange(3, 40)[None]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05)
        adapted = model(ids).logits
        with without_adapter(model) as plain_base:
            assert torch.equal(plain_base(ids).logits, base.model.eval()(ids).logits)
        model.merge_adapter()
        torch.testing.assert_close(model(ids).logits, adapted, rtol=0, atol=1e-4)
        assert not torch.equal(model(ids).logits, adapted)
        model.unmerge_adapter()
        model.add_adapter("second", model.peft_config["default"])
        model.base_model.set_adapter(["default", "second"])  # the second one adds 0
        torch.testing.assert_close(model(ids).logits, adapted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("switch", ["lora.dropout=0.1", "lora.dora=true"])
def test_switch_says_where_it_falls_back(switch):
    plan = resolve(with_settings(Recipe(), [*LORA, FUSED, switch]))
    (warning,) = plan.warnings
    assert warning.startswith(f"fused_lora has no effect with {switch.split('=')[0]}: ")
    assert "load.fused.fuse" not in plan.after_load
    shape = find_shape("llama-3.2-1b")
    bills = [folds.estimate(with_settings(Recipe(), [*LORA, *more, switch]), shape, T4) for more in ((FUSED,), ())]
    assert bills[0].peak_bytes == bills[1].peak_bytes


def test_switch_takes_partly_adapted_blocks():
    """Targets without the whole MLP: peft's modules one by one, with the same gradients."""
    found = {}
    for switch in ("false", "true"):
        settings = [*LORA, "lora.target_modules=k_proj,v_proj,up_proj", f"tricks.fused_lora={switch}"]
        torch.manual_seed(0)
        model, plan = models.model(with_settings(Recipe(), settings), "eager")
        models.loss(model, plan, models.batch(2, 16)).backward()
        found[switch] = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found["true"].keys() == found["false"].keys()
    for name, grad in found["false"].items():
        torch.testing.assert_close(found["true"][name], grad, msg=name)


def test_the_mlps_that_are_fused_compute_what_is_fused():
    """Read in the code of the installed transformers, so that a new version with another formula is noticed."""
    kinds = {"SmolLM3": "smollm3", "Olmo2": "olmo2", "Granite": "granite"}
    for name in fused.GATED_MLPS:
        family = name.removesuffix("MLP")
        kind = kinds.get(family, family.lower())
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        code = inspect.getsource(getattr(module, name).forward)
        assert "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))" in code, name


def test_the_peak_of_llama_3_2_1b_falls_by_what_is_no_longer_saved():
    """On a T4 at 1 x 2,048 without checkpointing, by hand; the dry run says the same (tests/memory)."""
    base = with_settings(recipes.capstone(T4), ["tricks.gradient_checkpointing=false"])
    shape = find_shape("llama-3.2-1b")
    peaks = [folds.estimate(with_settings(base, more), shape, T4).peak_bytes for more in ([], [FUSED])]
    inner = 16 * 2048 * 2 * 8192 * 2
    a_x = 16 * 2048 * 7 * 16 * 2
    copies = 11_272_192 * 2
    assert peaks[0] - peaks[1] == inner + a_x + copies
    assert CARDS["t4"].device == T4
    assert fused_operations.MLP == fused.GATED


def test_a_model_without_adapted_linear_layers_is_refused_in_words():
    with pytest.raises(BadInput, match="no linear layer of this model has an adapter; put LoRA on it first"):
        fused.fuse(torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("kind", ["conv1d", "embedding"])
def test_what_is_no_linear_layer_keeps_pefts_forward(kind):
    other = {"conv1d": Conv1D(6, 6), "embedding": torch.nn.Embedding(6, 6)}[kind]
    model = torch.nn.ModuleDict({"other": other, "linear": torch.nn.Linear(6, 6)})
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["other", "linear"], init_lora_weights=False))
    forwards = [adapted.base_model.model[name].forward for name in ("other", "linear")]
    fused.fuse(adapted)
    now = [adapted.base_model.model[name].forward for name in ("other", "linear")]
    assert [before == after for before, after in zip(forwards, now, strict=True)] == [True, False]
