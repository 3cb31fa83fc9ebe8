"""What a new token of an answer takes: attention over a long past, and the cache that ``cria chat`` writes in place."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.conftest import keep
from cria_tricks import models
from cria_tricks.bench.case import WARM_UP, Setup, free_memory, stamp
from cria_tricks.bench.results import Case
from cria_tricks.hardware import this_device
from cria_tricks.load.answering import for_answers
from cria_tricks.measure.counting import attention_kernel
from cria_tricks.measure.memory import Meter, every_tensor
from cria_tricks.techniques.flash_decoding import for_chat

TOKENS_PER_ROUND = 8
ROWS = 4
NEW_TOKENS = 16


@pytest.mark.parametrize("name", ["eager", "off", "on"])
def test_flash_decoding(request, benchmark, setup, name):
    """One new token after a long past: transformers' attention, and what ``cria chat`` asks for on this device."""
    asked = {"eager": {"attn_implementation": "eager"}, "off": {}, "on": for_chat(this_device())}[name]
    keep(request.config, benchmark, decode(name, asked, setup))


@pytest.mark.parametrize("name", ["off", "on"])
def test_kv_cache(request, benchmark, setup, name):
    """Answers to a few prompts: the cache of transformers, and the one that ``cria chat`` writes in place."""
    keep(request.config, benchmark, answer(name, setup))


def base(setup: Setup, asked: dict[str, str]) -> Any:
    """Load a model with random weights, as ``cria chat`` loads one."""
    free_memory()
    cuda = this_device().kind == "cuda"
    return AutoModelForCausalLM.from_pretrained(
        models.find(f"random:{setup.shape}").path,
        dtype=torch.float16 if cuda else torch.float32,
        device_map={"": 0} if cuda else None,
        trust_remote_code=False,
        use_safetensors=True,
        **asked,
    ).eval()


def timed(ask: Callable[[], Any]) -> float:
    """Time something, until the device has finished (seconds)."""
    began = time.perf_counter()
    ask()
    if this_device().kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def case_of(setup: Setup, meter: Meter, once: Callable[[], Any], a_token: Callable[[], float], **about: Any) -> Case:
    """Count the bytes of something that runs once, and time a new token some times.

    Args:
        setup: the model and the length of the past.
        meter: it knows the tensors that are alive already.
        once: is counted.
        a_token: returns the seconds of a new token.
        **about: what a case says besides.
    """
    device = this_device()
    meter.lap()
    with meter.watch():
        once()
    about["peak_allocated_bytes"] = meter.lap()
    return Case(
        against="" if about["name"] == "off" else "off",
        status="ok",
        model=f"random:{setup.shape}",
        tokens_per_row=setup.tokens,
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if device.kind == "cuda" else None,
        seconds=tuple([a_token() for _ in range(WARM_UP + setup.rounds)][WARM_UP:]),
        kind=device.kind,
        **about,
        **stamp(),
    )


@torch.inference_mode()
def decode(name: str, asked: dict[str, str], setup: Setup) -> Case:
    """Decode tokens one by one, each after the same past."""
    model = base(setup, asked)
    past, new = torch.zeros(2, 1, setup.tokens, dtype=torch.long, device=model.device).unbind()
    cache = DynamicCache(config=model.config)
    model(past, past_key_values=cache, logits_to_keep=1)

    def token() -> None:
        model(new[:, :1], past_key_values=cache)
        cache.crop(-1)

    def some() -> None:
        for _ in range(TOKENS_PER_ROUND):
            token()

    meter = Meter(this_device().kind)
    meter.track((*every_tensor(model), *(t for layer in cache.layers for t in (layer.keys, layer.values))))
    return case_of(
        setup,
        meter,
        token,
        lambda: timed(some) / TOKENS_PER_ROUND,
        bench="flash_decoding",
        name=name,
        warnings=("cria chat asks for nothing here: the default is right",) if name == "on" and not asked else (),
        settings=[f"{key}={value}" for key, value in asked.items()],
        rows=1,
        tokens=1,
        attention_kernel=attention_kernel(token),
    )


@torch.inference_mode()
def answer(name: str, setup: Setup) -> Case:
    """Answer prompts of the setup's length, all with as many new tokens, and time a new token of all rows."""
    model = base(setup, for_chat(this_device()))
    prompts = torch.randint(3, 200, (ROWS, setup.tokens), generator=torch.Generator().manual_seed(0)).to(model.device)

    def ask(tokens: int) -> None:
        given: dict[str, Any] = for_answers(model, setup.tokens + tokens) if name == "on" else {"use_cache": True}
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **options, **given)

    def a_token() -> float:
        """The time of the prompt and of its first token is in both."""
        return (timed(lambda: ask(1 + NEW_TOKENS)) - timed(lambda: ask(1))) / NEW_TOKENS

    meter = Meter(this_device().kind)
    meter.track(every_tensor(model))
    return case_of(
        setup,
        meter,
        lambda: ask(1 + NEW_TOKENS),
        a_token,
        bench="kv_cache",
        name=name,
        settings=["cache=in place" if name == "on" else "cache=DynamicCache"],
        rows=ROWS,
        tokens=ROWS,
    )
