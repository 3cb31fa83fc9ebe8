"""Measure this machine for about a minute, so that plans for it predict its own seconds.

What is measured are the pieces that ``bill/step_time.py`` adds up, at the widths of a real model: products of the
blocks, of LoRA's thin matrices and of the head; attention by torch's kernel, and with all scores in memory; the small
operations between products; the loss; unpacking 4-bit weights, and casts; the optimizers; the time that an operation
takes beside its work. Each is forward and backward, as in training. A rate is the counted work divided by the median
time, and the counts are those of the estimate.
"""

import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from cria_tricks.bill import launches, moved_bytes, products
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware.calibration import Calibration, threads, versions
from cria_tricks.hardware.device import Device, this_device
from cria_tricks.load.model import quiet_libraries
from cria_tricks.measure.counting import Traffic
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.allocator import keep_freed_memory
from cria_tricks.tricks import adamw_8bit, folds

TOKENS = {"cpu": 512, "cuda": 2048}
"""The row of the large products [tokens]: between the short and the long rows of a CPU, and a usual row of a GPU."""
MANY_TOKENS = {"cpu": 512, "cuda": 8192}
"""The row of the pieces that wait for memory [tokens].

A GPU takes so many that each kernel outlasts its launch. The estimate counts launches on their own, and a rate that
holds their time would make longer rows too slow: with 512 tokens an H200 seemed to move 0.3 TB/s between products.
"""
SCORE_TOKENS = {"cpu": 1024, "cuda": 2048}
"""The row whose attention scores are all in memory [tokens]: its memory grows with the square of this."""
LOSS_TOKENS = {"cpu": 256, "cuda": 1024}
"""The chunk of the loss [tokens]."""
PACKED_BLOCKS = {"cpu": 1, "cuda": 8}
"""How many blocks' weights are unpacked in one call, for the reason of ``MANY_TOKENS``."""
SECONDS = 1.5
"""How long each piece is repeated [s]."""
LEAST = 3
"""How often each piece is repeated at least."""
RANK = 16
"""Of the thin matrices."""
FEW_TOKENS = 32
"""The row for large products in a precision that the processor does not compute in, which take many times as long."""
COPIES = 6
"""How many blocks' weights take turns, so that a processor's cache does not hold them."""
LARGE = (1024, 2048)
"""The size of a tensor whose optimizer states no cache holds."""
NO_LINK = 1e15
"""The rate of a link that a CPU does not need, because its activations are in host memory already [bytes/s]."""

Say = Callable[[str], None]


def measure(say: Say, model: str = "", seconds: float = SECONDS) -> Calibration:
    """Measure this machine.

    Args:
        say: called with the name of each piece before it is measured.
        model: whose shapes are measured; when left out, SmolLM2 on a CPU and Llama-3.2-1B on a GPU.
        seconds: how long each piece is repeated [s].
    """
    quiet_libraries()
    device = this_device()
    model = model or ("llama-3.2-1b" if device.kind == "cuda" else "smollm2")
    shape = find_shape(model)
    rates: dict[str, float] = {}
    with keep_freed_memory(device):  # as a run does
        for name, work, run in _pieces(shape, device):
            say(name)
            rates[name] = work / _median(run, device, seconds)
    say("launches")
    launch = _launch(device)
    return Calibration(
        device=device.name,
        kind=device.kind,
        threads=threads(),
        versions=dict(versions()),
        date=datetime.date.today().isoformat(),
        model=model,
        launch=launch,
        link_rate=_link_rate(device),
        rates=rates,
    )


def _median(run: Callable[[], Any], device: Device, seconds: float) -> float:
    """Repeat a function for some seconds, and return the median time of a call [s]; the first call warms up."""
    run()
    taken: list[float] = []
    while len(taken) < LEAST or sum(taken) < seconds:
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _wait(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()


Piece = tuple[str, float, Callable[[], Any]]
"""The name of a rate, as in ``Card.measured``; the work of a call [operations or bytes]; the call."""


def _pieces(shape: Shape, device: Device) -> Iterator[Piece]:
    """List what is measured. Each is made when its turn comes, so that memory holds one at a time."""
    small = replace(shape, layers=1)
    for precision in ("fp32", "bf16" if device.real_bf16 or device.kind == "cpu" else "fp16"):
        dtype = getattr(torch, DTYPE[precision])
        emulated = precision == "bf16" and not device.real_bf16
        tokens = FEW_TOKENS if emulated else TOKENS[device.kind]
        chunk = FEW_TOKENS // 2 if emulated else LOSS_TOKENS[device.kind]
        yield _products(small if emulated else shape, device, precision, dtype, tokens)
        yield _adapters(shape, device, precision, dtype)
        yield _head(shape, device, precision, dtype, chunk)
        yield _attention(shape, device, precision, dtype)
        yield _scores(shape, device, precision, dtype)
        yield _between(shape, device, precision, dtype)
        yield _loss(shape, device, precision, dtype)
        yield _unpacking(shape, device, precision, dtype)
        if precision != "fp32":
            yield _casts(shape, device, precision, dtype)
        yield from _optimizers(device, precision)
    if device.kind == "cpu":
        yield _products(small, device, "fp16", torch.float16, FEW_TOKENS)


def _products(shape: Shape, device: Device, precision: str, dtype: torch.dtype, tokens: int) -> Piece:
    """Products of the blocks' matrices with activations, and with gradients."""
    pairs = []
    for _ in range(min(COPIES, shape.layers)):
        for d_in, d_out in shape.linears.values():
            matrix = torch.ones(d_out, d_in, dtype=dtype, device=device.kind)
            pairs.append((matrix, torch.ones(tokens, d_in, dtype=dtype, device=device.kind)))

    def run() -> None:
        for matrix, x in pairs:
            (x @ matrix.T) @ matrix

    flops = sum(2 * 2 * tokens * matrix.numel() for matrix, _ in pairs)
    return f"flops products {precision}", flops, run


def _adapters(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """LoRA's two products of each matrix, and the four of their gradients."""
    tokens = MANY_TOKENS[device.kind]
    sizes = list(shape.linears.values())
    made = [
        (
            torch.ones(tokens, d_in, dtype=dtype, device=device.kind),
            torch.ones(d_in, RANK, dtype=dtype, device=device.kind),
            torch.ones(RANK, d_out, dtype=dtype, device=device.kind),
        )
        for d_in, d_out in sizes
    ]

    def run() -> None:
        for x, a, b in made:
            low = x @ a
            back = low @ b  # as large as the gradient of the output
            low.T @ back
            gradient = back @ b.T
            x.T @ gradient
            gradient @ a.T

    flops = sum(6 * tokens * RANK * (d_in + d_out) for d_in, d_out in sizes)
    return f"flops adapter {precision}", flops, run


def _head(shape: Shape, device: Device, precision: str, dtype: torch.dtype, tokens: int) -> Piece:
    """The head's product, and that of its input's gradient, for the tokens of one chunk."""
    matrix = torch.ones(shape.vocabulary, shape.width, dtype=dtype, device=device.kind)
    x = torch.ones(tokens, shape.width, dtype=dtype, device=device.kind)

    def run() -> None:
        (x @ matrix.T) @ matrix

    return f"flops head {precision}", 2 * 2 * tokens * matrix.numel(), run


def _heads(shape: Shape, device: Device, dtype: torch.dtype, tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values of one row, the shared heads repeated."""
    size = (1, shape.heads, tokens, shape.query_width // shape.heads)
    return [torch.randn(size, device=device.kind).to(dtype).requires_grad_() for _ in range(3)]


def _attention(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """torch's attention without a mask; the estimate counts half of seven products: two forward, five backward."""
    tokens = 2 * TOKENS[device.kind]  # a short row takes little time in attention, so a long one sets the rate
    q, k, v = _heads(shape, device, dtype, tokens)

    def run() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return f"flops attention {precision}", 0.5 * 7 * 2 * shape.query_width * tokens**2, run


def _scores(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """Attention with all scores in memory, as transformers' eager one, on a row whose scores no cache holds."""
    tokens = SCORE_TOKENS[device.kind]
    q, k, v = _heads(shape, device, dtype, tokens)
    mask = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype, device=device.kind).triu(1)

    def run() -> None:
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask
        (F.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ v).sum().backward()

    return f"bytes attention {precision}", sum(moved_bytes.SCORE) * shape.heads * tokens**2, run


def _between(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """Norm, activation, rotation, residual sum and casts, on tensors as wide as the model's; bytes are counted once."""
    tokens = MANY_TOKENS[device.kind]

    def tensor(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, device=device.kind).to(dtype).requires_grad_()

    x, gate, up, weight = tensor(shape.width), tensor(shape.inner), tensor(shape.inner), tensor(shape.width)

    def run() -> None:
        wide = x.float()
        normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        half = shape.width // 2
        turned = normed * weight + torch.cat((-normed[:, half:], normed[:, :half]), -1) * weight
        loss = (x + turned).float().sum() + (F.silu(gate) * up).sum()
        loss.backward()

    with Traffic() as seen:
        run()
    return f"bytes between products {precision}", seen.others, run


def _loss(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """Cross-entropy over the logits of one chunk, which are fp32 from the loss on."""
    tokens = LOSS_TOKENS[device.kind]
    logits = torch.randn(tokens, shape.vocabulary, device=device.kind).to(dtype).requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.long, device=device.kind)

    def run() -> None:
        F.cross_entropy(logits.float(), labels).backward()

    return f"bytes loss {precision}", moved_bytes.LOGIT * logits.numel(), run


def _unpacking(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """Unpacking the NF4 weights of some blocks, whose scales are quantized, too."""
    # Imported here, because the libraries take seconds, and the command says first what it does.
    from bitsandbytes import functional

    packed = []
    together = PACKED_BLOCKS[device.kind]
    for _ in range(math.ceil(min(COPIES, shape.layers) / together)):
        for d_in, d_out in shape.linears.values():
            weight = torch.randn(together * d_out, d_in, device=device.kind).to(dtype)
            packed.append(functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True))

    def run() -> None:
        for data, state in packed:
            functional.dequantize_4bit(data, state)

    weights = sum(state.shape.numel() for _, state in packed)
    stored = 0.5 + (1 + 4 / 256) / 64
    return f"bytes unpacking {precision}", weights * (stored + dtype.itemsize), run


def _casts(shape: Shape, device: Device, precision: str, dtype: torch.dtype) -> Piece:
    """Casting fp32 weights of blocks and head; autocast keeps the copies, so each is made in memory of its own."""
    blocks = min(COPIES, shape.layers)
    sizes = [(d_out, d_in) for d_in, d_out in shape.linears.values()] * blocks
    sizes.append((shape.vocabulary, shape.width))
    weights = [torch.ones(size, device=device.kind) for size in sizes]

    def run() -> None:
        kept = [weight.to(dtype) for weight in weights]
        kept.clear()

    moved = sum(weight.numel() for weight in weights) * (4 + dtype.itemsize)
    return f"bytes casts of weights {precision}", moved, run


def _optimizers(device: Device, precision: str) -> Iterator[Piece]:
    """A step of AdamW in one kernel and of the 8-bit AdamW, each with clipping."""
    from bitsandbytes.optim import AdamW8bit  # imported late for the same reason

    makers: dict[str, tuple[Callable[[Any], Any], int]] = {
        "optimizer": (lambda weights: torch.optim.AdamW(weights, fused=True), moved_bytes.ADAMW),
        "8-bit optimizer": (AdamW8bit, adamw_8bit.STEP_BYTES),
    }
    for name, (make, each) in makers.items():
        weights = [torch.nn.Parameter(torch.ones(*LARGE, device=device.kind)) for _ in range(COPIES)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = make(weights)

        def run(weights: list[torch.nn.Parameter] = weights, optimizer: Any = optimizer) -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

        moved = (each + moved_bytes.CLIP) * sum(weight.numel() for weight in weights)
        yield f"bytes {name} {precision}", moved, run


def _launch(device: Device) -> float:
    """Time a narrow Llama with LoRA, whose tensors are too small to take time, and divide by its operations [s]."""
    # imported late for the same reason
    from transformers import LlamaConfig, LlamaForCausalLM

    from cria_tricks.load.adapters import add_lora

    widths = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.attention=sdpa", "lora.r=2"])
    taken = {}
    for layers in (2, 10):
        config = LlamaConfig(**widths, vocab_size=64, num_hidden_layers=layers, use_cache=False)
        model = LlamaForCausalLM(config).to(device.kind)
        adapted = add_lora(model, r=2, target_modules=list(recipe.lora.target_modules))
        ids = torch.zeros(1, 4, dtype=torch.long, device=device.kind)

        def run(adapted: Any = adapted, ids: torch.Tensor = ids) -> None:
            adapted(input_ids=ids, labels=ids).loss.backward()

        taken[layers] = _median(run, device, SECONDS)
    shape = replace(find_shape("tiny"), layers=8)
    work = folds.work(recipe, shape, device, 4)
    return max(1e-7, (taken[10] - taken[2]) / launches.of_blocks(work, products.blocks(work)))


def _link_rate(device: Device) -> float:
    """Time copies between pinned host memory and the card [bytes/s]."""
    if device.kind == "cpu":
        return NO_LINK
    here = torch.ones(2**26, dtype=torch.uint8, pin_memory=True)
    there = here.to(device.kind)
    return 2 * here.numel() / _median(lambda: (there.copy_(here), here.copy_(there)), device, SECONDS / 2)
