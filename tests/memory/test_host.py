"""A host without room for what is offloaded is refused before anything is loaded, with both numbers."""

from dataclasses import replace

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import Host
from cria_tricks.hardware.gpus import COLAB, KAGGLE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.host import OFFLOADED, STREAMED, host_bill, refuse_beyond_host
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import ready
from tests.memory.cases import recipe

LONG = "lora nf4 fp16 lean sdpa expand chunked checkpoint fused blocks"
TARGET = Target(find_shape("llama-3.1-8b"), T4)


def bytes_on_the_host(toggles: str) -> int:
    found = host_bill(replace(TARGET, host=COLAB), recipe(toggles, tokens=30_000))
    return sum(line.bytes for moment in found.moments for line in moment.lines if line.name == OFFLOADED)


def test_each_input_that_waits_is_a_pinned_block_of_a_power_of_two():
    an_input = 2**28  # 30,000 tokens of 4,096 numbers of two bytes are 234 MiB
    assert bytes_on_the_host(f"{LONG} offload") == 32 * an_input
    assert bytes_on_the_host(f"{LONG} overlap") == 31 * an_input, "the last one stays on the card"
    assert bytes_on_the_host(LONG) == 0


@pytest.mark.parametrize("optimizer", ["", "8bit"])
@pytest.mark.parametrize("method", ["lora nf4", ""])
def test_the_line_of_the_optimizer_says_how_much_is_paged_and_where(optimizer, method):
    """The same bytes as on the host, and all of them: without paging the line has both parts."""
    whole, paged = (
        next(line for line in TARGET.memory(recipe(words)).lines if line.name == "optimizer states")
        for words in (f"{method} fp16 {optimizer}", f"{method} fp16 {optimizer} paged")
    )
    moments = host_bill(replace(TARGET, host=COLAB), recipe(f"{method} fp16 {optimizer} paged")).moments
    [on_host] = [line.bytes for line in moments[1].lines if line.name == "paged optimizer states"]
    assert on_host == whole.bytes - paged.bytes > 0.4 * whole.bytes
    assert "paged" not in whole.why
    short = whole.why.replace("for each trained", "a")
    assert paged.why == f"{short}; {human(on_host)} are paged"


@pytest.mark.parametrize("way", ["offload", "overlap"])
def test_too_small_a_host_is_refused_with_the_number(way):
    wanted = recipe(f"{LONG} {way}", tokens=60_000)
    memory = host_bill(replace(TARGET, host=COLAB), wanted)
    with pytest.raises(BadInput, match="of activations would wait on the host") as refused:
        refuse_beyond_host(memory)
    assert human(memory.peak.bytes) in str(refused.value)
    assert human(COLAB.memory_bytes) in str(refused.value)
    refuse_beyond_host(host_bill(replace(TARGET, host=KAGGLE), wanted))
    refuse_beyond_host(host_bill(replace(TARGET, host=None), wanted))
    small = Host("a small machine", 10**9)
    nothing_waits = recipe(LONG, tokens=60_000)
    refuse_beyond_host(host_bill(replace(TARGET, host=small), nothing_waits))  # so no promise is broken


def test_a_run_asks_before_it_loads(tmp_path, monkeypatch):
    from cria_tricks.run.train import train

    def load(*_, **__):
        pytest.fail("weights were loaded")

    too_large = host_bill(replace(TARGET, host=COLAB), recipe(f"{LONG} offload", tokens=60_000))
    monkeypatch.setattr(ready, "host_bill", lambda *_: too_large)
    monkeypatch.setattr(ready, "load", load)
    wanted = with_settings(Recipe(model="random:tiny"), ["tricks.activation_offload=true", "train.max_steps=1"])
    with pytest.raises(BadInput, match="of activations would wait on the host"):
        train(wanted, tmp_path / "run")


def test_streamed_blocks_that_the_host_cannot_hold_are_refused_with_the_number():
    target = Target(find_shape("qwen3-14b"), T4)
    wanted = recipe("lora nf4 fp16 lean sdpa expand chunked checkpoint 8bit stream")
    memory = host_bill(replace(target, host=COLAB), wanted)
    assert memory is not None
    blocks = sum(line.bytes for line in memory.moments[-1].lines if line.name == STREAMED)
    assert blocks == target.memory(wanted).step.block_weight_bytes
    with pytest.raises(BadInput, match=rf"{human(blocks)} of frozen blocks would .* set tricks.stream_layers=file"):
        refuse_beyond_host(memory)
    from_file = with_settings(wanted, ["tricks.stream_layers=file"])
    in_file = host_bill(replace(target, host=COLAB), from_file)
    assert in_file is not None
    assert in_file.verdict == "fits"
    assert memory.peak.bytes - in_file.peak.bytes == blocks - blocks // target.shape.layers
    refuse_beyond_host(in_file)


@pytest.mark.parametrize(("tokens", "gib"), [(32_768, 8), (32_769, 16)])
def test_one_token_more_than_a_power_of_two_doubles_what_is_pinned(tokens, gib):
    memory = host_bill(replace(TARGET, host=COLAB), recipe(f"{LONG} offload", tokens=tokens))
    assert memory is not None
    assert sum(line.bytes for line in memory.moments[-1].lines if line.name == OFFLOADED) == gib * 2**30
