"""Each technique switched off and on: the same optimizer step, ``off`` first.

    pytest --benchmark-only -k "technique and nf4"

A case's switches are those of its technique's base and its own. All but ``off`` are held against ``off``, unless
``against`` names another. What is paged is in managed memory, which CUDA's allocator does not see, and so no figure of
it here. On a CPU nobody can watch compiled kernels, so their bytes are not counted there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch

from benchmarks.common import real_lengths
from cria_tricks.bench.case import Setup
from cria_tricks.switches import NEEDS, TECHNIQUES, technique_name
from cria_tricks.techniques.packing import best_fit

DOCUMENTS = 16
"""Of an optimizer step with packing; fewer of the real lengths would not fill rows together."""


@dataclass(frozen=True)
class Bench:
    """The cases of one technique.

    Attributes:
        base: the switches of all cases; ``{tile}`` is an eighth of a row.
        cases: a case's name -> the switches that it has besides.
        against: a case -> its baseline, where that is not ``off``.
        tokens: the length of the longest row, where it is not the session's [tokens].
    """

    base: str
    cases: Mapping[str, str]
    against: Mapping[str, str] = field(default_factory=dict)
    tokens: Callable[[Setup], int] = lambda setup: setup.tokens


def shorter_on_a_cpu(setup: Setup) -> int:
    """Shorten rows on a CPU: one without 16-bit units computes such products a hundred times slower."""
    return setup.tokens if torch.cuda.is_available() else max(8, setup.tokens // 16)


FULL = "attention=best precision=best gradient_checkpointing=true"
LORA = "peft=lora attention=best precision=best"
CHUNKED = f"{LORA} chunked_loss=true"
SMALL = f"{LORA} gradient_checkpointing=true chunked_loss=true"
EXPANDED = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true"
BLOCKS = f"peft=side_network {FULL}"
BENCHES = {
    "activation_offload": Bench(
        CHUNKED,
        {
            "off": "",
            "on": "activation_offload=true",
            "checkpointed": "gradient_checkpointing=true",
            "checkpointed_on": "gradient_checkpointing=true activation_offload=true",
            "checkpointed_overlapped": "gradient_checkpointing=true activation_offload=overlapped",
        },
        {"checkpointed_on": "checkpointed", "checkpointed_overlapped": "checkpointed"},
    ),
    "adamw_8bit": Bench(BLOCKS, {"off": "", "on": "optimizer=adamw_8bit"}),
    "chunked_loss": Bench(
        f"{LORA} gradient_checkpointing=true", {"off": "", "on": "chunked_loss=true"}, tokens=lambda setup: setup.chunks
    ),
    "compile": Bench(CHUNKED, {"off": "", "on": "compile=true"}),
    "expand_kv": Bench(
        "peft=lora attention=sdpa precision=best chunked_loss=true gradient_checkpointing=true",
        {"off": "", "on": "expand_kv=true"},
    ),
    "flash_attention": Bench(
        "peft=lora precision=best chunked_loss=true gradient_checkpointing=true",
        {"off": "", "on": "attention=sdpa", "flash_attention_2": "attention=flash_attention_2"},
    ),
    "fused_blocks": Bench(
        EXPANDED, {"off": "", "on": "fused_blocks=true", "with_fused_lora": "fused_blocks=true fused_lora=true"}
    ),
    "fused_lora": Bench(
        EXPANDED,
        {
            "off": "",
            "on": "fused_lora=true",
            "checkpointed": "gradient_checkpointing=true",
            "checkpointed_on": "gradient_checkpointing=true fused_lora=true",
            "nf4": "quantization=nf4 lean_preparation=true",
            "nf4_on": "quantization=nf4 lean_preparation=true fused_lora=true",
        },
        {"checkpointed_on": "checkpointed", "nf4_on": "nf4"},
    ),
    "gradient_accumulation": Bench(
        CHUNKED,
        {
            "off": "train.batch_size=4",
            "half": "train.batch_size=2 gradient_accumulation=2",
            "on": "train.batch_size=1 gradient_accumulation=4",
        },
        tokens=lambda setup: setup.tokens // 2,
    ),
    "gradient_checkpointing": Bench(CHUNKED, {"off": "", "on": "gradient_checkpointing=true"}),
    "head_only": Bench(FULL, {"off": "", "on": "peft=head"}),
    "int8": Bench(SMALL, {"off": "", "on": "quantization=int8"}),
    "keep_attention": Bench(f"{EXPANDED} gradient_checkpointing=true", {"off": "", "on": "keep_attention=true"}),
    "layer_by_layer": Bench(
        f"{EXPANDED} gradient_checkpointing=true stream_layers=true gradient_accumulation=4",
        {"off": "", "on": "layer_by_layer=true"},
    ),
    "lean_preparation": Bench(f"{SMALL} quantization=nf4", {"off": "", "on": "lean_preparation=true"}),
    "lora": Bench(
        FULL,
        {"off": "", "on": "peft=lora", "rslora": "peft=lora lora.rslora=true", "dora": "peft=lora lora.dora=true"},
        {"rslora": "on", "dora": "on"},
    ),
    "mixed_precision": Bench(
        "peft=lora attention=best gradient_checkpointing=true chunked_loss=true",
        {"off": "", "fp16": "precision=fp16", "bf16": "precision=bf16"},
        tokens=shorter_on_a_cpu,
    ),
    "nf4": Bench(
        SMALL,
        {
            "off": "",
            "on": "quantization=nf4",
            "double": "quantization=nf4 double_quantization=true",
            "fp4": "quantization=fp4",
        },
        {"double": "on"},
    ),
    # Clipping by weight is another limit than clipping by the norm of all, so the losses are not the same run's.
    "optimizer_in_backward": Bench(
        FULL,
        {
            "off": "",
            "on": "optimizer_in_backward=clip",
            "off_8bit": "optimizer=adamw_8bit",
            "on_8bit": "optimizer=adamw_8bit optimizer_in_backward=clip",
        },
    ),
    "paged_optimizer": Bench(BLOCKS, {"off": "", "on": "paged_optimizer=true"}),
    "prompt_tuning": Bench(FULL, {"off": "", "on": "peft=prompt_tuning"}),
    "side_network": Bench(FULL, {"off": "", "on": "peft=side_network"}),
    "stream_layers": Bench(
        f"{EXPANDED} gradient_checkpointing=true",
        {
            "off": "",
            "on": "stream_layers=true",
            "file": "stream_layers=file",
            "nf4_off": "quantization=nf4",
            "nf4_on": "quantization=nf4 stream_layers=true",
        },
    ),
    "tiled_mlp": Bench(
        CHUNKED,
        {
            "off": "",
            "on": "tiled_mlp={tile}",
            "checkpointed_off": "gradient_checkpointing=true",
            "checkpointed_on": "gradient_checkpointing=true tiled_mlp={tile}",
        },
    ),
}
"""Technique -> its cases, where they are not those of :func:`off_and_on`."""


def off_and_on(technique: ModuleType) -> Bench:
    """A technique's first switch off and on, over what it needs."""
    switch = technique.TECHNIQUE.switches[0]
    needs = " ".join(need for need in NEEDS.get(switch, "").split() if not need.startswith("peft="))
    return Bench(f"{LORA} {needs}".format(half="best"), {"off": "", "on": switch})


for one in TECHNIQUES:
    if technique_name(one) != "packing":  # its rows depend on the switch, so it has a function of its own
        BENCHES.setdefault(technique_name(one), off_and_on(one))


@pytest.mark.parametrize(("bench", "name"), [(bench, name) for bench, of in BENCHES.items() for name in of.cases])
def test_technique(step, setup, bench, name):
    of = BENCHES[bench]
    words = f"{of.base} {of.cases[name]}".format(tile=setup.tokens // 8)  # 256 of 2,048 tokens, 16 of 128
    step(bench, name, words, of.against.get(name, "off"), tokens=of.tokens(setup))


@pytest.mark.parametrize("name", ["off", "on"])
def test_technique_packing(step, setup, name):
    """Documents of the real lengths, in padded batches of four and packed into full rows of four."""
    lengths = real_lengths(DOCUMENTS, setup.tokens)
    rows = len(best_fit(lengths, setup.tokens)) if name == "on" else DOCUMENTS
    packing = "packing=true" if name == "on" else ""
    words = f"{SMALL} train.batch_size=4 {packing} gradient_accumulation={-(-rows // 4)}"
    step("packing", name, words, lengths=lengths)
