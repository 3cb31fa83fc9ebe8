"""Run parts of a loaded model by the functions of ``techniques/``: fused_lora and fused_blocks.

The modules stay those of transformers and peft, and so do their names, their weights and the adapter's file. Only their
``forward`` is replaced. That of a matrix calls peft's own wherever peft would not compute W x + s B A x, e.g. while the
adapter is switched off.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
import transformers
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.step_plan import Plan
from cria_tricks.techniques.fused_blocks import gated, rms_norm, rotate
from cria_tricks.techniques.fused_lora import Matrix, gated_mlp, products

TOGETHER = ("q_proj", "k_proj", "v_proj")
"""Matrices of attention that multiply the same input."""
GATED = ("gate_proj", "up_proj", "down_proj")
"""The matrices of an MLP of the kinds below."""
GATED_MLPS = (
    "Gemma2MLP",
    "Gemma3MLP",
    "GemmaMLP",
    "GraniteMLP",
    "LlamaMLP",
    "MistralMLP",
    "Olmo2MLP",
    "Qwen2MLP",
    "Qwen3MLP",
    "SmolLM3MLP",
)
"""transformers' MLPs that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``; a test reads their code."""
NORMS = tuple(f"{family}RMSNorm" for family in ("Granite", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "SmolLM3"))
"""transformers' norms that compute what ``rms_norm`` does; the same test reads them."""


def fuse(model: torch.nn.Module, plan: Plan | None = None) -> torch.nn.Module:
    """Replace the forward passes of all matrices with adapters, and of the MLPs around them, in place.

    The plan, which each edit of a model gets, is not read.

    Raises:
        BadInput: if no matrix has an adapter.
    """
    if not any(map(_is_fusible, model.modules())):
        raise BadInput(
            "fuse: no linear layer of this model has an adapter; put LoRA on it first (peft.get_peft_model), or leave "
            "tricks.fused_lora out"
        )
    for module in list(model.modules()):
        children = dict(module.named_children())
        if type(module).__name__ in GATED_MLPS and all(_is_fusible(children[name]) for name in GATED):
            module.forward = _mlp(module)
            continue
        adapted = {name: child for name, child in children.items() if _is_fusible(child)}
        together = [adapted.pop(name) for name in TOGETHER if name in adapted]
        for group in (together, *([child] for child in adapted.values())):
            _Together(group)
    return model


class Parts(NamedTuple):
    """The functions of ``techniques/fused_blocks.py``, or others with the same arguments."""

    rms_norm: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]


PLAIN = Parts(rms_norm, gated, rotate)


def by_triton(device: Device) -> Parts:
    """Return the same functions as Triton kernels.

    Raises:
        BadInput: if Triton is missing, or does not run on the device.
    """
    # Imported here because only this setting needs Triton, which not every machine has.
    from cria_tricks.techniques import triton_blocks

    triton_blocks.refuse_unfit(device)

    def kernel_or_plain(gate: torch.Tensor, up: torch.Tensor, activation: Any) -> torch.Tensor:
        if activation is F.silu or type(activation).__name__ in ("SiLU", "SiLUActivation"):
            return triton_blocks.swiglu(gate, up)
        return gated(gate, up, activation)

    return Parts(triton_blocks.rms_norm, kernel_or_plain, triton_blocks.rotate)


def fuse_blocks(model: torch.nn.Module, plan: Plan | None = None, parts: Parts = PLAIN) -> torch.nn.Module:
    """Replace the forward passes of norms, MLPs and rotary positions in place, after :func:`fuse`."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in NORMS:
            module.forward = _norm(module, parts)
        elif kind in GATED_MLPS and "forward" not in vars(module):  # else fused_lora has this MLP already
            module.forward = _gated(module, parts)
        elif hasattr(module, "q_proj") and hasattr(module, "head_dim"):
            module.forward = _with_global(module.forward, apply_rotary_pos_emb=parts.rotate)
    return model


def fuse_blocks_by_triton(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Do as :func:`fuse_blocks`, by Triton kernels."""
    return fuse_blocks(model, plan, by_triton(plan.device))


def _norm(module: Any, parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: parts.rms_norm(x, module.weight, module.variance_epsilon)


def _gated(module: Any, parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: module.down_proj(parts.gated(module.gate_proj(x), module.up_proj(x), module.act_fn))


def _with_global(method: Any, **replaced: Any) -> Any:
    """Copy a method, with other functions under the global names that it calls; all other models keep theirs.

    Its decorators are left out. Those of transformers only translate old names of arguments.

    Raises:
        BadInput: if the method does not call one of these names.
    """
    function = inspect.unwrap(method.__func__)
    if not replaced.keys() <= set(function.__code__.co_names):
        raise BadInput(
            f"tricks.fused_blocks: {function.__qualname__} of transformers {transformers.__version__} does not call "
            f"{', '.join(replaced)}; set tricks.fused_blocks=false"
        )
    names = {**function.__globals__, **replaced}
    copied = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copied, method.__self__)


class _Together:
    """Modules that multiply the same input: the first one called computes the results of all.

    A model calls its modules one after the other, so the results of the others wait here until they are called.
    """

    def __init__(self, modules: list[Any]):
        self.modules = modules
        self.plain = [module.forward for module in modules]
        self.input: torch.Tensor | None = None
        self.waiting: dict[int, torch.Tensor] = {}
        for number, module in enumerate(modules):
            module.forward = self._forward_of(number)

    def _forward_of(self, number: int) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            if arguments or named or not all(map(_is_plain, self.modules)):
                return self.plain[number](x, *arguments, **named)
            if x is not self.input or number not in self.waiting:
                # Checkpointing may end a repetition of the block inside products. Noted before, x would stay alive.
                self.waiting = dict(enumerate(products(x, tuple(map(_matrix, self.modules)))))
                self.input = x
            result = self.waiting.pop(number)
            if not self.waiting:
                self.input = None  # otherwise the last block's input would stay in memory
            return result

        return forward


def _mlp(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward pass of an MLP."""
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        three = [getattr(module, name) for name in GATED]
        if not all(map(_is_plain, three)):
            return plain(x)
        gate, up, down = map(_matrix, three)
        return gated_mlp(x, gate, up, down, module.act_fn)

    return forward


def _is_fusible(module: torch.nn.Module) -> bool:
    """Tell whether a module is an adapted linear layer: not a Conv1D, an embedding, or experts in one tensor."""
    return (
        isinstance(module, LoraLayer)
        and isinstance(module.get_base_layer(), torch.nn.Linear)
        and not isinstance(module, ParamWrapper)
    )


def _is_plain(module: LoraLayer) -> bool:
    """Tell whether a module computes W x + s B A x, with one adapter."""
    one = len(module.active_adapters) == 1 and module.active_adapters[0] in module.lora_A
    return one and not module.merged and not module.disable_adapters


def _matrix(module: LoraLayer) -> Matrix:
    """Describe a linear layer and its adapter."""
    base = module.get_base_layer()
    (name,) = module.active_adapters
    return Matrix(
        times=base,
        # The weight is looked up when it is needed, because FSDP puts other tensors into the modules for each pass.
        unpacked=lambda dtype: _unpacked(base, dtype),
        A=_own(module.lora_A[name].weight),
        B=_own(module.lora_B[name].weight),
        scale=module.scaling[name],
    )


def _unpacked(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a linear layer in a dtype, by the operations of bitsandbytes' own backward pass."""
    if isinstance(base, bnb.nn.Linear4bit):
        scales = getattr(base.weight, "quant_state", base.quant_state)  # a weight that FSDP has gathered has no scales
        return bnb.functional.dequantize_4bit(base.weight.data, scales).to(dtype)
    if isinstance(base, bnb.nn.Linear8bitLt):
        return base.state.CB.to(dtype, copy=True).mul_(base.state.SCB.unsqueeze(1).mul(1.0 / 127.0))
    return _own(base.weight).detach().to(dtype)


def _own(weight: Any) -> torch.Tensor:
    """Return the part of a weight that this process multiplies by: under tensor parallelism it is cut."""
    return weight.to_local() if hasattr(weight, "to_local") else weight
