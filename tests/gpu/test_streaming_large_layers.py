"""Streamed blocks of hundreds of MiB on a card: two backward passes give a resident model's gradients, bit for bit.

A copy of so large a block takes long enough that whatever reads a slot too early reads another block's bytes. The
blocks are as wide as those of a 32B model: 234 MiB in 4 bits without their scales, and 935 MiB in 16. Another project
found wrong gradients, at right losses, above some 165 MiB (Soup, ``benchmarks/gate-h100-validation.md``).
"""

import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks.load.streaming import stream
from cria_tricks.switches.stream_layers import SLOTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Size(NamedTuple):
    """The sizes of a model of random weights."""

    width: int
    inner: int
    blocks: int
    heads: int
    key_heads: int
    words: int = 4096

    @property
    def elements(self) -> int:
        """Of a block's frozen matrices."""
        return 2 * self.width**2 * (self.heads + self.key_heads) // self.heads + 3 * self.width * self.inner


LARGE = Size(5120, 27648, 8, 40, 10)
KINDS = ("nf4", "16 bits")
TARGETS = {"all": "all-linear", "q and v": ["q_proj", "v_proj"]}
"""Without an adapter on ``down_proj``, a block's last product saves nothing that checkpointing would see."""


def model_of(size: Size, kind: str, targets: str, device: str) -> nn.Module:
    """Make a Llama of random weights with adapters, whose second matrices are not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.blocks,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads, vocab_size=size.words, use_cache=False,
        attn_implementation="eager",  # its backward pass adds in the same order each time
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config).requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
    if kind == "nf4":
        for block in model.model.layers:
            _quantise(block, device)
        model.is_loaded_in_4bit = True  # so that peft adapts codes
    model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=TARGETS[targets]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.02)
    return model.to(device).train()


def _quantise(block: nn.Module, device: str) -> None:
    import bitsandbytes as bnb

    for name, linear in [(name, part) for name, part in block.named_modules() if isinstance(part, nn.Linear)]:
        codes = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        codes.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        block.set_submodule(name, codes.to(device))


def two_passes(model: nn.Module, ids: torch.Tensor) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return the loss and all gradients of each of two passes on the same input."""
    found = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in trained.values())
        found.append((loss.detach().clone(), {name: weight.grad.clone() for name, weight in trained.items()}))
    return found


def resident_and_streamed_are_equal(
    size: Size, kind: str, targets: str, checkpointing: bool, device: str, tokens: int
) -> None:
    """Compare two passes of a model in memory with two of the same model when its blocks are streamed."""
    model = model_of(size, kind, targets, device)
    if checkpointing:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    ids = torch.randint(3, size.words, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    expected = two_passes(model, ids)
    fetching = stream(model.get_base_model().model.layers, device)
    found = two_passes(model, ids)
    assert fetching.fetched == size.blocks + 3 * (size.blocks - SLOTS), "forward and backward, twice"
    for (loss, gradients), (same_loss, same_gradients) in zip(expected, found, strict=True):
        assert torch.equal(loss, same_loss)
        wrong = [name for name, gradient in gradients.items() if not torch.equal(gradient, same_gradients[name])]
        assert wrong == [], f"{len(wrong)} of {len(gradients)} gradients differ"


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "kept"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_large_blocks(kind, targets, checkpointing):
    resident_and_streamed_are_equal(LARGE, kind, targets, checkpointing, "cuda", tokens=64)
    gc.collect()  # the next model needs the room
    torch.cuda.empty_cache()
