"""Answers to a few prompts: the cache of transformers, and the one that ``cria chat`` writes in place."""

import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.conftest import keep
from cria_tricks import models
from cria_tricks.bench.case import WARM_UP, Setup, free_memory, stamp
from cria_tricks.bench.results import Case
from cria_tricks.hardware import this_device
from cria_tricks.load.cache import for_answers
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.tricks.flash_decoding import for_chat

ROWS = 4
NEW_TOKENS = 16


@pytest.mark.parametrize("name", ["off", "on"])
def test_kv_cache(request, benchmark, setup, name):
    keep(request.config, benchmark, answer(name, setup))


@torch.inference_mode()
def answer(name: str, setup: Setup, rows: int = ROWS, new_tokens: int = NEW_TOKENS) -> Case:
    """Answer prompts of the setup's length, all with as many new tokens, and time a new token of all rows."""
    free_memory()
    device = this_device()
    weights = models.find(f"random:{setup.shape}")
    model = AutoModelForCausalLM.from_pretrained(
        weights.path,
        dtype=torch.float16 if device.kind == "cuda" else torch.float32,
        device_map={"": 0} if device.kind == "cuda" else None,
        trust_remote_code=False,
        use_safetensors=True,
        **for_chat(device),
    ).eval()
    prompts = torch.randint(3, 200, (rows, setup.tokens), generator=torch.Generator().manual_seed(0)).to(model.device)

    def ask(tokens: int) -> float:
        given: dict[str, Any] = for_answers(model, setup.tokens + tokens) if name == "on" else {"use_cache": True}
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        began = time.perf_counter()
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **options, **given)
        if device.kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def a_token() -> float:
        """The time of the prompt and of its first token is in both."""
        return (ask(1 + new_tokens) - ask(1)) / new_tokens

    meter = Meter(device.kind)
    meter.track(every_tensor(model))
    meter.lap()
    with meter.watch():
        ask(1 + new_tokens)
    return Case(
        bench="kv_cache",
        name=name,
        against="" if name == "off" else "off",
        status="ok",
        settings=["cache=in place" if name == "on" else "cache=DynamicCache"],
        model=f"random:{setup.shape}",
        rows=rows,
        tokens_per_row=setup.tokens,
        tokens=rows,
        peak_allocated_bytes=meter.lap(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if device.kind == "cuda" else None,
        attention_kernel="",
        seconds=[a_token() for _ in range(WARM_UP + setup.rounds)][WARM_UP:],
        kind=device.kind,
        **stamp(),
    )
