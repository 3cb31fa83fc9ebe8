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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
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
from cria_tricks.switches import adamw_8bit, folds


@dataclass(frozen=True)
class Rows:
    """How large the measured pieces are on one kind of device.

    On a GPU each kernel must outlast its launch. The estimate counts launches on their own, and a rate that holds their
    time would make longer rows too slow: with 512 tokens an H200 seemed to move 0.3 TB/s between products.

    Attributes:
        products: the row of the large products [tokens].
        chunk: the row of the head's products [tokens].
        blocks: how many blocks' weights take turns in products, so that a processor's cache does not hold them.
        attention: the row of attention; a short one takes too little time there [tokens].
        scores: the row whose attention scores are all in memory, which grow with its square [tokens].
        memory: the row of the pieces that wait for memory [tokens].
        loss: the chunk of the loss [tokens].
        unpacked: how many blocks' weights are unpacked in one call.
    """

    products: int
    chunk: int
    blocks: int
    attention: int
    scores: int
    memory: int
    loss: int
    unpacked: int


COPIES = 6
ROWS = {
    "cpu": Rows(512, 256, COPIES, 1024, 1024, 512, 256, 1),
    "cuda": Rows(2048, 1024, COPIES, 4096, 2048, 8192, 1024, 8),
}
FEW = {"products": 32, "chunk": 16, "blocks": 1}
"""Products in a precision that the processor does not compute in, which take many times as long."""
SECONDS = 1.5
"""How long each piece is repeated [s]."""
LEAST = 3
"""How often each piece is repeated at least."""
RANK = 16
"""Of the thin matrices."""
LARGE = (1024, 2048)
"""The size of a tensor whose optimizer states no cache holds."""
NO_LINK = 1e15
"""The rate of a link that a CPU does not need, because its activations are in host memory already [bytes/s]."""

Piece = tuple[str, float, Callable[[], Any]]
"""The name of a rate, as in ``Card.measured``; the work of a call [operations or bytes]; the call."""


def measure(say: Callable[[str], None], model: str = "", seconds: float = SECONDS) -> Calibration:
    """Measure this machine.

    Args:
        say: called with the name of each piece before it is measured.
        model: whose shapes are measured; when left out, SmolLM2 on a CPU and Llama-3.2-1B on a GPU.
        seconds: how long each piece is repeated [s].
    """
    quiet_libraries()
    device = this_device()
    model = model or ("llama-3.2-1b" if device.kind == "cuda" else "smollm2")
    rates: dict[str, float] = {}
    with keep_freed_memory(device):  # as a run does
        for name, work, run in _pieces(find_shape(model), device):
            say(name)
            rates[name] = work / _median(run, device, seconds)
    say("launches")
    return Calibration(
        device=device.name,
        kind=device.kind,
        threads=threads(),
        versions=dict(versions()),
        date=datetime.date.today().isoformat(),
        model=model,
        launch=_launch(device),
        link_rate=_link_rate(device),
        rates=rates,
    )


def _median(run: Callable[[], Any], device: Device, seconds: float) -> float:
    """Repeat a function for some seconds, and return the median time of a call [s]; the first call warms up."""
    wait = torch.cuda.synchronize if device.kind == "cuda" else torch.cpu.synchronize
    run()
    taken: list[float] = []
    while len(taken) < LEAST or sum(taken) < seconds:
        wait()
        began = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _pieces(shape: Shape, device: Device) -> Iterator[Piece]:
    """List what is measured. Each is made when its turn comes, so that memory holds few at a time."""
    rows = ROWS[device.kind]
    for precision in ("fp32", "bf16" if device.real_bf16 or device.kind == "cpu" else "fp16"):
        emulated = precision == "bf16" and not device.real_bf16
        about = (shape, device.kind, getattr(torch, DTYPE[precision]), replace(rows, **FEW) if emulated else rows)
        found = chain(_products(*about), _attention(*about), _small_operations(*about), _weights(*about))
        for name, work, run in chain(found, _optimizers(device.kind)):
            yield f"{name} {precision}", work, run
    if device.kind == "cpu":
        name, work, run = next(_products(shape, device.kind, torch.float16, replace(rows, **FEW)))
        yield f"{name} fp16", work, run


def _products(shape: Shape, device: str, dtype: torch.dtype, rows: Rows) -> Iterator[Piece]:
    """Products of the blocks' matrices, of LoRA's thin ones, and of the head, with those of their gradients."""
    ones = partial(torch.ones, dtype=dtype, device=device)

    def of_matrices(matrix: torch.Tensor, x: torch.Tensor) -> None:
        (x @ matrix.T) @ matrix

    def of_adapter(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        low = x @ a
        back = low @ b  # as large as the gradient of the output
        low.T @ back
        gradient = back @ b.T
        x.T @ gradient
        gradient @ a.T

    sizes = list(shape.linears.values())
    tokens = rows.products
    blocks = min(rows.blocks, shape.layers)
    pairs = [(ones(d_out, d_in), ones(tokens, d_in)) for d_in, d_out in sizes * blocks]
    flops = sum(2 * 2 * tokens * d_in * d_out for d_in, d_out in sizes) * blocks
    yield "flops products", flops, partial(_for_each, of_matrices, pairs)
    tokens = rows.memory
    thin = [(ones(tokens, d_in), ones(d_in, RANK), ones(RANK, d_out)) for d_in, d_out in sizes]
    flops = sum(6 * tokens * RANK * (d_in + d_out) for d_in, d_out in sizes)
    yield "flops adapter", flops, partial(_for_each, of_adapter, thin)
    head = ones(shape.vocabulary, shape.width)
    x = ones(rows.chunk, shape.width)
    yield "flops head", 2 * 2 * rows.chunk * head.numel(), partial(of_matrices, head, x)


def _for_each(call: Callable[..., Any], several: Sequence[tuple[Any, ...]]) -> None:
    for tensors in several:
        call(*tensors)


def _learns(device: str, dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Make a tensor of random numbers that gets a gradient."""
    return torch.randn(size, device=device).to(dtype).requires_grad_()


def _attention(shape: Shape, device: str, dtype: torch.dtype, rows: Rows) -> Iterator[Piece]:
    """Attention of one row, the shared heads repeated: torch's kernel without a mask, and all scores in memory."""
    q, k, v = (_learns(device, dtype, 1, shape.heads, rows.attention, shape.head_width) for _ in range(3))
    # The estimate counts half of seven products: two forward, five backward.
    flops = 0.5 * 7 * 2 * shape.query_width * rows.attention**2
    attend = F.scaled_dot_product_attention
    yield "flops attention", flops, lambda: attend(q, k, v, is_causal=True).sum().backward()
    tokens = rows.scores
    few_q, few_k, few_v = (_learns(device, dtype, 1, shape.heads, tokens, shape.head_width) for _ in range(3))
    mask = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)

    def eager() -> None:
        scores = few_q @ few_k.transpose(2, 3) * shape.head_width**-0.5 + mask
        (F.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ few_v).sum().backward()

    yield "bytes attention", sum(moved_bytes.SCORE) * shape.heads * tokens**2, eager


def _small_operations(shape: Shape, device: str, dtype: torch.dtype, rows: Rows) -> Iterator[Piece]:
    """What stands between products (norm, activation, rotation, residual sum, casts), and the loss of a chunk."""
    x, weight = (_learns(device, dtype, rows.memory, shape.width) for _ in range(2))
    gate, up = (_learns(device, dtype, rows.memory, shape.inner) for _ in range(2))

    def between() -> None:
        wide = x.float()
        normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        half = shape.width // 2
        turned = normed * weight + torch.cat((-normed[:, half:], normed[:, :half]), -1) * weight
        ((x + turned).float().sum() + (F.silu(gate) * up).sum()).backward()

    with Traffic() as seen:
        between()
    yield "bytes between products", seen.others, between
    logits = _learns(device, dtype, rows.loss, shape.vocabulary)
    labels = torch.zeros(rows.loss, dtype=torch.long, device=device)
    moved = moved_bytes.LOGIT * logits.numel()
    yield "bytes loss", moved, lambda: F.cross_entropy(logits.float(), labels).backward()


def _weights(shape: Shape, device: str, dtype: torch.dtype, rows: Rows) -> Iterator[Piece]:
    """Unpacking the NF4 weights of some blocks, whose scales are quantized, too; and casting fp32 weights."""
    # Imported here, because the libraries take seconds, and the command says first what it does.
    from bitsandbytes import functional

    blocks = min(COPIES, shape.layers)
    packed = []
    for _ in range(math.ceil(blocks / rows.unpacked)):
        for d_in, d_out in shape.linears.values():
            weight = torch.randn(rows.unpacked * d_out, d_in, device=device).to(dtype)
            packed.append(functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True))
    stored = 0.5 + (1 + 4 / 256) / 64
    moved = sum(state.shape.numel() for _, state in packed) * (stored + dtype.itemsize)
    yield "bytes unpacking", moved, partial(_for_each, functional.dequantize_4bit, packed)
    if dtype == torch.float32:
        return
    sizes = [(d_out, d_in) for d_in, d_out in shape.linears.values()] * blocks
    weights = [torch.ones(size, device=device) for size in (*sizes, (shape.vocabulary, shape.width))]

    def cast() -> None:
        kept = [weight.to(dtype) for weight in weights]  # as autocast keeps them, each in memory of its own
        kept.clear()

    yield "bytes casts of weights", sum(weight.numel() for weight in weights) * (4 + dtype.itemsize), cast


def _optimizers(device: str) -> Iterator[Piece]:
    """A step of AdamW in one kernel and of the 8-bit AdamW, each with clipping."""
    from bitsandbytes.optim import AdamW8bit  # imported late for the same reason

    weights = [torch.nn.Parameter(torch.ones(*LARGE, device=device)) for _ in range(COPIES)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)

    def update(optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    numbers = sum(weight.numel() for weight in weights)
    clip = moved_bytes.CLIP
    adamw = torch.optim.AdamW(weights, fused=True)
    yield "bytes optimizer", (moved_bytes.ADAMW + clip) * numbers, partial(update, adamw)
    yield "bytes 8-bit optimizer", (adamw_8bit.STEP_BYTES + clip) * numbers, partial(update, AdamW8bit(weights))


def _launch(device: Device) -> float:
    """Time a narrow Llama with LoRA, whose tensors are too small to take time, and divide by its operations [s]."""
    # imported late for the same reason
    from transformers import LlamaConfig, LlamaForCausalLM

    from cria_tricks.load.adapters import with_lora

    widths = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.attention=sdpa", "lora.r=2"])
    taken = {}
    for layers in (2, 10):
        config = LlamaConfig(**widths, vocab_size=64, num_hidden_layers=layers, use_cache=False)
        model = LlamaForCausalLM(config).to(device.kind)
        adapted = with_lora(model, r=2, target_modules=list(recipe.lora.target_modules))
        ids = torch.zeros(1, 4, dtype=torch.long, device=device.kind)

        def run(adapted: Any = adapted, ids: torch.Tensor = ids) -> None:
            adapted(input_ids=ids, labels=ids).loss.backward()

        taken[layers] = _median(run, device, SECONDS)
    shape = replace(find_shape("tiny"), layers=8)
    step = folds.step_of(recipe, shape, device, 4)
    return max(1e-7, (taken[10] - taken[2]) / launches.of_blocks(step, products.blocks(step)))


def _link_rate(device: Device) -> float:
    """Time copies between pinned host memory and the card [bytes/s]."""
    if device.kind == "cpu":
        return NO_LINK
    here = torch.ones(2**26, dtype=torch.uint8, pin_memory=True)
    there = here.to(device.kind)
    return 2 * here.numel() / _median(lambda: (there.copy_(here), here.copy_(there)), device, SECONDS / 2)
