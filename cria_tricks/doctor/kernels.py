"""Compare Triton's kernels with the same functions in plain PyTorch, for the selftest."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from cria_tricks.doctor.selftest_runs import apart
from cria_tricks.hardware.device import Device
from cria_tricks.load.fused import PLAIN, Parts, by_triton

MAY_DIFFER = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""The relative difference at which results count as the same: in 16 bits four times the rounding of one number."""


def furthest(device: Device, kernels: Parts | None = None) -> tuple[str, float]:
    """Run each kernel and its gradient, and find the result that is furthest from PyTorch's.

    Args:
        device: where they run.
        kernels: the functions to compare; Triton's if left out.

    Returns:
        The name of the kernel with its dtype, and its relative difference over what rounding may change. The second is
        NaN if a result is.
    """
    off: dict[str, float] = {}
    for (name, plain), dtype in itertools.product(PLAIN._asdict().items(), MAY_DIFFER):
        inputs, arguments = _inputs(name, dtype, device.kind)
        expected = _with_gradients(plain, inputs, arguments)
        found = _with_gradients(getattr(kernels or by_triton(device), name), inputs, arguments)
        for ours, theirs in zip(found, expected, strict=True):
            share = apart(theirs.double(), ours.double()) / MAY_DIFFER[dtype]
            label = f"{name} in {str(dtype).removeprefix('torch.')}"
            off[label] = share if share != share else max(off.get(label, 0.0), share)
    label = max(off, key=lambda name: (off[name] != off[name], off[name]))  # NaN, which is not equal to itself, first
    return label, off[label]


def _inputs(name: str, dtype: torch.dtype, kind: str) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Draw the tensors that need a gradient, and the other arguments; no size is a power of two."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(kind, dtype).requires_grad_()

    if name == "rms_norm":
        return [drawn(7, 576)], (drawn(576).detach(), 1e-5)
    if name == "gated":
        return [drawn(7, 1536), drawn(7, 1536)], (F.silu,)
    angles = torch.randn(2, 7, 24, generator=draw).repeat(1, 1, 2)
    tables = tuple(table.to(kind, dtype) for table in (angles.cos(), angles.sin()))
    return [drawn(2, 9, 7, 48), drawn(2, 3, 7, 48)], tables


def _with_gradients(
    run: Callable[..., Any], inputs: Sequence[torch.Tensor], arguments: tuple[Any, ...]
) -> list[torch.Tensor]:
    """Return the results of a function, and the gradients of its inputs."""
    found = run(*inputs, *arguments)
    results = list(found) if isinstance(found, tuple) else [found]
    loss = sum(result.float().square().sum() for result in results)
    return results + list(torch.autograd.grad(loss, inputs))
