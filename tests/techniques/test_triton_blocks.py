"""The Triton kernels are Llama's own operations, forward and backward, and save what their file says.

There is no GPU here, so Triton interprets the kernels on the CPU. It decides that when it is first imported, for all
kernels of a process, those of torch.compile and bitsandbytes, too. So the tests of this file run in a process of their
own, which has TRITON_INTERPRET=1; it is started once, and a test's failure comes back from it.
"""

import contextlib
import functools
import importlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.device import Device
from cria_tricks.measure.counting import SavedBytes, Traffic
from tests.tolerances import TRAJECTORY

EPS = 1e-5
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)
CPU = Device("cpu", "a CPU", (0, 0), False, 0)
WITHOUT = importlib.util.find_spec("triton") is None
pools: list[ProcessPoolExecutor] = []


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """The process with TRITON_INTERPRET=1, if Triton is there."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        pools.append(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        if not WITHOUT:
            pools[0].submit(_as_on_a_card).result()  # the process starts here
    yield
    pools.pop().shutdown()


def _as_on_a_card():
    """Cards round fp32 to the nearest bf16, the interpreter cuts it off: let it round."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        rounded = torch.tensor(data).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view("uint16")

    interpreter._convert_float = rounding


def interpreted(test):
    """Have the other process run a test."""

    @pytest.mark.skipif(WITHOUT, reason="Triton is not installed")
    @functools.wraps(test)
    def there(**arguments):
        pools[0].submit(_run, test.__name__, arguments).result()

    return there


def _run(name, arguments):
    torch.manual_seed(0)
    try:
        getattr(importlib.import_module(__name__), name).__wrapped__(**arguments)
    except pytest.fail.Exception as error:  # what pytest.raises raises cannot be sent back
        raise AssertionError(str(error)) from None


def kernels():
    from cria_tricks.techniques import triton_blocks

    return triton_blocks


def llama_norm(weight):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(len(weight), EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def llama_rotation(*arguments):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(*arguments)


def plain_norm(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def plain_swiglu(gate, up):
    return F.silu(gate) * up


def angles(batch, tokens, width, dtype):
    """cos and sin with equal halves, as all models have them."""
    angle = torch.randn(batch, tokens, width // 2, dtype=torch.float64).repeat(1, 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def queries_and_keys(batch, heads, tokens, width, dtype, transposed=True):
    found = (torch.randn(batch, tokens, each, width).to(dtype).transpose(1, 2) for each in heads)
    return tuple((x if transposed else x.contiguous()).requires_grad_() for x in found)


def with_gradients(call, *inputs):
    """The results of a call, and the gradients of its inputs for one drawn gradient of the results."""
    found = call(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=draw).to(y.dtype) for y in found]
    return found, torch.autograd.grad(found, inputs, grads)


def within(steps, found, exact, terms=None):
    """Whether each number is at most so many rounding steps of its dtype away from the exact one.

    A step is the distance of two neighbours, at most eps times the number, and not under that of the smallest normal
    number. Where a result is a sum, the steps are those of its largest term.
    """
    kind = torch.finfo(found.dtype)
    size = exact.abs() if terms is None else torch.maximum(exact.abs(), terms)
    error = (found.detach().double() - exact).abs() - steps * kind.eps * size.clamp_min(kind.smallest_normal)
    assert error.max() <= 0, f"{error.max():.3g} more than {steps} steps of {found.dtype}"


@pytest.mark.parametrize("wide_weight", [False, True], ids=["weight as x", "fp32 weight"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("d", [1, 3, 5, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_math(dtype, d, rows, wide_weight):
    """RMSNorm is LlamaRMSNorm, whose sum over a row may have another order; its gradient is the exact one, rounded."""
    x = torch.randn(rows, 2, d).to(dtype).requires_grad_()
    weight = (1 + torch.randn(d) / 8).to(torch.float32 if wide_weight else dtype)
    (y,), (dx,) = with_gradients(lambda x: kernels().rms_norm(x, weight, EPS), x)
    theirs = llama_norm(weight)(x).detach()
    exact = x.detach().double().requires_grad_()
    plain = plain_norm(exact, weight.double())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype).double()
    (exact_dx,) = torch.autograd.grad(plain, exact, dy)
    assert (y.dtype, y.shape, dx.dtype) == (theirs.dtype, x.shape, dtype)
    # fp32: half a step for each of square, sum (a tree of at most 7 levels), root, and two products; r's error counts
    # once in y. 16 bits: half a step each for n and y, and what is next to a tie may go the other way, one step.
    within(8 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps / torch.finfo(y.dtype).eps, y, plain.detach())
    # Of a difference the steps are those of its terms: r g and r n mean(g n), which |n| <= sqrt(d) bounds.
    g = (dy * weight.double()).abs()
    r = (exact.pow(2).mean(-1, keepdim=True) + EPS).rsqrt().detach()
    n = (exact * r).abs().detach()
    within(16 if dtype == torch.float32 else 1, dx, exact_dx, r * (g + n * (g * n).mean(-1, keepdim=True)))
    if dtype != torch.float32:  # fp32 sums in another order round n to its neighbour now and then, and no further
        assert (y == theirs).double().mean() > 0.9
        step = torch.finfo(dtype).eps * theirs.abs() + torch.finfo(dtype).tiny
        assert ((y - theirs).abs() <= 2 * step).all()


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 100), (1, 1024), (5, 411)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_math_of_swiglu(dtype, shape):
    gate, up = ((3 * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2))
    (h,), (de, dg) = with_gradients(kernels().swiglu, gate, up)
    (theirs,), _ = with_gradients(plain_swiglu, gate, up)
    e, g = (x.detach().double() for x in (gate, up))
    dh = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    s = e.sigmoid()
    # fp32: exp, sum, quotient and product, and exp turns a rounded argument of 16 into 16 half steps. 16 bits: half a
    # step for each rounding: two in h, one in the gradients.
    steps = 16 if dtype == torch.float32 else 0.5
    within(2 * steps + 0.01, h, e * s * g)
    within(steps + 0.01, dg, dh * e * s)
    within(steps + 0.01, de, dh * g * s * (1 + e * (1 - s)), (dh * g * s).abs() * (1 + (e * (1 - s)).abs()))
    if dtype != torch.float32:
        assert (h == theirs).double().mean() > 0.9  # torch's exp is another: silu may round to its neighbour


@pytest.mark.parametrize("wide_angles", [False, True], ids=["angles as q", "fp32 angles"])
@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "d", "transposed"),
    [
        (1, (4, 4), 1, 2, True), (2, (1, 1), 1, 64, True), (2, (3, 1), 13, 6, True), (1, (6, 2), 13, 100, True),
        (2, (5, 1), 3, 10, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_math_of_rotate(dtype, rows, heads, tokens, d, transposed, wide_angles):
    """Every product is rounded where transformers rounds it, so all bits are the same, those of the gradients, too."""
    q, k = queries_and_keys(rows, heads, tokens, d, dtype, transposed)
    for batch in {1, rows}:
        cos, sin = angles(batch, tokens, d, torch.float32 if wide_angles else dtype)
        found, grads = with_gradients(lambda q, k, c=cos, s=sin: kernels().rotate(q, k, c, s), q, k)
        theirs, their_grads = with_gradients(lambda q, k, c=cos, s=sin: llama_rotation(q, k, c, s), q, k)
        for ours, expected, x in zip(found, theirs, (q, k), strict=True):
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected)
            assert ours.stride() == torch.empty_like(x).stride()  # as queries lie, so attention gets them
        for ours, expected in zip(grads, their_grads, strict=True):
            assert ours.dtype == dtype
            if wide_angles and dtype in HALVES:  # torch rounds both terms to 16 bits before it adds them
                step = torch.finfo(dtype).eps
                torch.testing.assert_close(ours, expected, rtol=step, atol=step * 4)
            else:
                assert torch.equal(ours, expected)


@interpreted
def test_math_in_double_precision():
    """gradcheck: the hand-written gradients are those of finite differences."""
    double = {"dtype": torch.float64}
    x, gate, up = (torch.randn(2, 3, **double, requires_grad=True) for _ in range(3))
    weight = torch.randn(3, **double)
    assert torch.autograd.gradcheck(lambda x: kernels().rms_norm(x, weight, EPS), x)
    assert torch.autograd.gradcheck(lambda x: kernels().rms_norm(x / 1000, weight, EPS), x)  # eps counts
    assert torch.autograd.gradcheck(kernels().swiglu, (gate, up))
    q, k = queries_and_keys(1, (2, 1), 2, 4, torch.float64)
    cos, sin = angles(1, 2, 4, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: kernels().rotate(q, k, cos, sin), (q, k))
    torch.testing.assert_close(kernels().rms_norm(x / 1000, weight, EPS), plain_norm(x / 1000, weight))
    torch.testing.assert_close(kernels().swiglu(gate, up), plain_swiglu(gate, up))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@interpreted
def test_numbers_whose_square_overflows_16_bits(dtype):
    """6e4 squared is no fp16 number; what is infinite or not a number in torch is here, too."""
    large = torch.full((2, 5), 6e4).to(dtype)
    large[1, :2] = torch.tensor([float("inf"), -6e4])
    weight = torch.ones(5, dtype=dtype)
    found = kernels().rms_norm(large, weight, EPS)
    assert torch.equal(found[0], torch.ones(5, dtype=dtype))
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(found, llama_norm(weight)(large), **same)
    gate = torch.tensor([6e4, -6e4, float("inf"), float("-inf"), float("nan"), 0.0]).to(dtype)
    for up in (gate.flip(0).contiguous(), torch.full_like(gate, 2)):
        torch.testing.assert_close(kernels().swiglu(gate, up), plain_swiglu(gate, up), **same)


@interpreted
def test_gradients_of_other_strides():
    """The gradient of a sum is one number with strides of 0, and a slice of queries has gaps."""
    x = torch.randn(4, 6, 5)[:, ::2].requires_grad_()
    weight = torch.ones(5)
    for call, plain in (
        (lambda x: kernels().rms_norm(x, weight, EPS), lambda x: plain_norm(x, weight)),
        (lambda x: kernels().swiglu(x.contiguous(), x.contiguous()), lambda x: plain_swiglu(x, x)),
    ):
        (ours,), (theirs,) = (torch.autograd.grad(each(x).sum(), x) for each in (call, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    qk = torch.randn(2, 13, 5, 12)[..., :10].transpose(1, 2).requires_grad_()
    cos, sin = (x.expand(2, 13, 10) for x in angles(1, 13, 10, torch.float32))
    both = [
        (y, torch.autograd.grad(sum(each.sum() for each in y), qk)[0])
        for y in (rotation(qk[:, :4], qk[:, 4:], cos, sin) for rotation in (kernels().rotate, llama_rotation))
    ]
    (ours, dx), (theirs, their_dx) = both
    assert all(map(torch.equal, (*ours, dx), (*theirs, their_dx)))


class Launches(TorchDispatchMode):
    """Count operations that are no views, and only allocate nothing: a kernel each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and not func.overloadpacket.__name__.startswith(("empty", "detach", "_unsafe"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_mechanism(dtype):
    """The bytes saved are those of the formula, and PyTorch's part of the table in the file's docstring is counted."""
    n, d, size = 8, 4096, dtype.itemsize
    weight = torch.ones(d, dtype=dtype)
    x, gate, up = (torch.randn(n, d).to(dtype).requires_grad_() for _ in range(3))
    q, k = queries_and_keys(1, (256, 256), 8, 16, dtype)
    cos, sin = angles(1, 8, 16, dtype)
    cases = {
        "rms_norm": (lambda x: kernels().rms_norm(x, weight, EPS), llama_norm(weight), (x,), [weight]),
        "swiglu": (kernels().swiglu, plain_swiglu, (gate, up), ()),
        "rotate": (lambda *x: kernels().rotate(*x, cos, sin), lambda *x: llama_rotation(*x, cos, sin), (q, k), ()),
    }
    saved, chain = {}, {}
    for name, (ours, theirs, inputs, besides) in cases.items():
        with SavedBytes(besides) as here:
            y = ours(*inputs)
        own = here.now
        with SavedBytes(besides) as there, Traffic() as forward, Launches() as forward_launches:
            y = theirs(*inputs)
        saved[name] = own, there.now
        outputs = y if isinstance(y, tuple) else (y,)
        grads = [torch.randn_like(each) for each in outputs]
        with Traffic() as backward, Launches() as backward_launches:
            torch.autograd.grad(outputs, inputs, grads)
        numbers = sum(each.numel() for each in outputs)
        chain[name] = (
            int(forward.others / numbers), forward_launches.count,
            int(backward.others / numbers), backward_launches.count,
        )  # fmt: skip
        del y, outputs
    assert saved["rms_norm"][0] == n * d * size + 4 * n
    assert saved["swiglu"][0] == 2 * n * d * size
    assert saved["rotate"][0] == saved["rotate"][1] == (cos.numel() + sin.numel()) * size
    assert saved["swiglu"][1] == 3 * n * d * size
    assert saved["rms_norm"][1] - n * d * 4 in (4 * n, 8 * n)  # and the roots, or what they are the roots of
    if dtype in HALVES:
        assert chain == {"rms_norm": (36, 8, 88, 14), "swiglu": (10, 2, 18, 3), "rotate": (20, 10, 28, 14)}
        table = kernels().__doc__
        for name, (moved, launches, moved_back, launches_back) in chain.items():
            line = next(line for line in table.splitlines() if line.split()[:1] == [name]).split()
            assert line[1:4] == [str(moved), "bytes,", str(launches)]
            assert line[6:9] == [str(moved_back), "bytes,", str(launches_back)]


@interpreted
def test_warps_are_a_power_of_two():
    """Triton compiles nothing else, also where heads are no power of two; the interpreter takes any number."""
    for width in (1, 5, 32, 64, 576, 2048, 16384):
        for heads in range(1, 65):
            warps = kernels()._sizes(width, torch.float16, heads)["num_warps"]
            assert warps in (1, 2, 4, 8, 16)


@interpreted
def test_what_is_refused():
    refused = [
        (kernels().rms_norm, (torch.ones(2, 3), torch.ones(3, requires_grad=True), EPS), "frozen"),
        (kernels().rms_norm, (torch.ones(2, 3), torch.ones(2), EPS), "shape"),
        (kernels().swiglu, (torch.ones(2, 3), torch.ones(3, 2)), "one shape"),
        (kernels().swiglu, (torch.ones(2, 3), torch.ones(2, 3).half()), "one dtype"),
        (kernels().swiglu, (torch.ones(2, 3), torch.ones(3, 2).mT), "contiguous"),
    ]
    q = torch.ones(2, 3, 5, 4)
    table = torch.ones(1, 5, 4)
    for arguments in (
        (q, q[:, :, :4], table, table), (q, q.half(), table, table), (q, q, table[:, :4], table),
        (q, q, table, table.half()), (q, q, table.clone().requires_grad_(), table),
        (q[..., :3], q[..., :3], table[..., :3], table[..., :3]),
    ):  # fmt: skip
        refused.append((kernels().rotate, arguments, "rotate needs"))
    for call, arguments, words in refused:
        with pytest.raises(ValueError, match=words):
            call(*arguments)


@interpreted
def test_switch(tiny_model, rows, tmp_path):
    """A run with tricks.fused_blocks=triton starts each kernel in every block, and has the losses of the plain ones."""
    from tests.helpers import train

    settings = ("tricks.peft=lora", "lora.r=4", "train.max_steps=2", "train.learning_rate=1e-3", "data.max_length=32")
    losses, ran = {}, Counter()
    for value in ("true", "triton"):
        with contextlib.ExitStack() as stack:
            for name in ("rms_norm", "swiglu", "rotate"):
                kernel = getattr(kernels(), name)
                counted = lambda *given, kernel=kernel, name=name: ran.update([name]) or kernel(*given)  # noqa: E731
                stack.enter_context(mock.patch.object(kernels(), name, counted))
            run, _ = train(tiny_model, rows[:2], tmp_path / value, *settings, f"tricks.fused_blocks={value}")
        losses[value] = [entry["loss"] for entry in run.training]
        assert bool(ran) == (value == "triton")
    assert ran == {"rms_norm": 2 * (2 * 2 + 1), "swiglu": 2 * 2, "rotate": 2 * 2}, "two blocks, and the last norm"
    assert losses["triton"] == pytest.approx(losses["true"], abs=TRAJECTORY)


@interpreted
def test_what_fits_is_asked_first():
    """Before a weight is read, whether the device and Triton fit."""
    volta, ampere = Device("cuda", "a V100", (7, 0), False, 0), Device("cuda", "an A100", (8, 0), True, 0)
    version = functools.partial(mock.patch.object, kernels().triton, "__version__")
    refuse = kernels().refuse_unfit
    for fitting in ("3.2.0", "3.4.0", "3.6.0", "3.30.0"):
        with version(fitting):
            refuse(T4)
            refuse(ampere)
    with version("3.3.1"):
        refuse(ampere)
        with pytest.raises(
            BadInput, match=r"^Triton kernels on Tesla T4: Triton 3.3.1 is broken .* 7.5; .* plain PyTorch"
        ):
            refuse(T4)
    with pytest.raises(BadInput, match=r"^Triton kernels on a V100: they need compute capability 7.5, and it has 7.0"):
        refuse(volta)
    refuse(CPU)  # this process interprets
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"), pytest.raises(BadInput, match="on a CPU: .* a CUDA card"):
        refuse(CPU)


def test_without_triton_the_import_says_so_in_one_line():
    """It is an ImportError to Python, and a BadInput to a command; the rest of the package does without."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from cria_tricks.switches import TECHNIQUES\n"
        "from cria_tricks.techniques import code_of\n"
        "list(map(code_of, TECHNIQUES))\n"
        "from cria_tricks.common.errors import BadInput\n"
        "try:\n    import cria_tricks.techniques.triton_blocks\n"
        "except ImportError as error:\n    print(isinstance(error, BadInput), error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True Triton kernels: the package triton is missing; pip install triton")
    assert done.stdout.count("\n") == 1
