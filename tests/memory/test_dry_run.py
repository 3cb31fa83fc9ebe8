"""The dry run against real steps, whose live storages are counted: to a few numbers' bytes, whatever is switched on."""

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from cria_tricks.catalogue import CONFIGS
from cria_tricks.memory.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import resolve
from tests.helpers import train

BLOCKS, TOKENS = 3, 32

# Written as on the command line, without "tricks."; a leading 2 is the rows of a micro-batch.
SETS = """
-
precision=bf16 optimizer=adamw_8bit attention=sdpa gradient_checkpointing=true
peft=lora
peft=lora lora.dora=true
peft=lora lora.rslora=true lora.dropout=0.1
peft=lora precision=bf16 gradient_checkpointing=true
peft=head optimizer=adamw_8bit
peft=prompt_tuning
peft=side_network quantization=nf4 precision=bf16
peft=lora quantization=nf4
peft=lora quantization=nf4 double_quantization=true precision=bf16 lora.dora=true
peft=lora quantization=fp4 precision=bf16 lean_preparation=true
peft=lora quantization=int8 optimizer=adamw_8bit
peft=lora quantization=int8 precision=bf16
peft=lora paged_optimizer=true
peft=lora attention=sdpa precision=bf16
peft=lora attention=sdpa expand_kv=true precision=bf16
peft=lora packing=true
peft=lora packing=true attention=sdpa
peft=lora chunked_loss=true precision=fp16
peft=lora activation_offload=true
peft=lora activation_offload=true gradient_checkpointing=true
gradient_accumulation=2
2 peft=lora attention=sdpa
2 peft=lora attention=eager precision=bf16
2 peft=lora packing=true attention=sdpa
peft=lora quantization=nf4 double_quantization=true precision=bf16 lean_preparation=true gradient_checkpointing=true \
optimizer=adamw_8bit paged_optimizer=true attention=sdpa expand_kv=true chunked_loss=true gradient_accumulation=2
2 peft=lora quantization=int8 precision=bf16 gradient_checkpointing=true optimizer=adamw_8bit chunked_loss=true
""".strip().split("\n")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 with a few of its 30 blocks and random weights."""
    folder = tmp_path_factory.mktemp("smollm2")
    config = AutoConfig.for_model(**{**CONFIGS["smollm2"], "num_hidden_layers": BLOCKS})
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def settings_of(line: str) -> list[str]:
    batch, words = ("2", line.split()[1:]) if line[0] == "2" else ("1", line.split())
    named = [word if word.startswith("lora.") else f"tricks.{word}" for word in words if word != "-"]
    return [*named, f"train.batch_size={batch}", "train.max_steps=2", f"data.max_length={TOKENS}"]


@pytest.mark.parametrize("line", SETS)
def test_a_dry_run_has_the_peak_of_the_real_step(line, smollm2, tiny_model, tmp_path):
    settings = settings_of(line)
    folder = tiny_model if "fp16" in line else smollm2  # CPUs emulate fp16: SmolLM2's vocabulary would take minutes
    plan = resolve(with_settings(Recipe(), settings))
    rows = int(settings[-3][-1])
    if plan.collator:
        lengths = [TOKENS // 2] * 8  # two documents a row
    else:
        lengths = [TOKENS, TOKENS - 8][:rows] * (8 // rows)
    data = [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in lengths]
    trained = sum(lengths[:rows]) - rows

    run, _ = train(folder, data, tmp_path, *settings)

    peak = max(entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry)
    found = dry_run(plan, AutoConfig.from_pretrained(folder), rows, TOKENS, trained)
    assert abs(found.peak_bytes - peak) <= 128, f"{found} for {peak}"
