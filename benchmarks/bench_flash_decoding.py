"""One new token after a long past: transformers' attention, and what ``cria chat`` asks for on this device."""

import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.conftest import keep
from cria_tricks import models
from cria_tricks.bench.case import WARM_UP, Setup, free_memory, stamp
from cria_tricks.bench.results import Case
from cria_tricks.hardware import this_device
from cria_tricks.hardware.attention_kernels import attention_kernel
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.tricks.flash_decoding import for_chat

TOKENS_PER_ROUND = 8


@pytest.mark.parametrize("name", ["eager", "off", "on"])
def test_flash_decoding(request, benchmark, setup, name):
    asked = {"eager": {"attn_implementation": "eager"}, "off": {}, "on": for_chat(this_device())}[name]
    keep(request.config, benchmark, decode(name, asked, setup))


@torch.inference_mode()
def decode(name: str, asked: dict[str, str], setup: Setup) -> Case:
    """Decode tokens one by one, each after the same past."""
    free_memory()
    device = this_device()
    weights = models.find(f"random:{setup.shape}")
    model = AutoModelForCausalLM.from_pretrained(
        weights.path,
        dtype=torch.float16 if device.kind == "cuda" else torch.float32,
        device_map={"": 0} if device.kind == "cuda" else None,
        trust_remote_code=False,
        use_safetensors=True,
        **asked,
    ).eval()
    past, new = torch.zeros(2, 1, setup.tokens, dtype=torch.long, device=model.device).unbind()
    cache = DynamicCache(config=model.config)
    model(past, past_key_values=cache, logits_to_keep=1)

    def token() -> Any:
        model(new[:, :1], past_key_values=cache)
        cache.crop(-1)

    def some() -> float:
        began = time.perf_counter()
        for _ in range(TOKENS_PER_ROUND):
            token()
        if device.kind == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / TOKENS_PER_ROUND

    meter = Meter(device.kind)
    meter.track((*every_tensor(model), *(t for layer in cache.layers for t in (layer.keys, layer.values))))
    meter.lap()
    with meter.watch():
        token()
    return Case(
        bench="flash_decoding",
        name=name,
        against="" if name == "off" else "off",
        status="ok",
        warnings=("cria chat asks for nothing here: the default is right",) if name == "on" and not asked else (),
        settings=[f"{key}={value}" for key, value in asked.items()],
        model=f"random:{setup.shape}",
        rows=1,
        tokens_per_row=setup.tokens,
        tokens=1,
        peak_allocated_bytes=meter.lap(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if device.kind == "cuda" else None,
        attention_kernel=attention_kernel(token),
        seconds=[some() for _ in range(WARM_UP + setup.rounds)][WARM_UP:],
        kind=device.kind,
        **stamp(),
    )
