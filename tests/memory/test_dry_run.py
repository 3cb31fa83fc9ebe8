"""The dry run against real steps, whose live storages are counted: to a few numbers' bytes, whatever is switched on."""

import contextlib

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from bitsandbytes.optim import GlobalOptimManager
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, masking_utils
from transformers.integrations import moe

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, Device, this_device
from cria_tricks.load import overlapped_offload
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.models.configs import find_config
from cria_tricks.models.shape import shape_of
from cria_tricks.predict.dry_run import DryRun, dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques import packing
from cria_tricks.techniques.activation_offload import Offloaded
from tests.helpers import prepare, train, trained_weights
from tests.memory.cases import skip_experts_shaped_by_numbers
from tests.sweeps import sample

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
gradient_checkpointing=1
peft=lora precision=bf16 gradient_checkpointing=2
gradient_checkpointing=true attention=sdpa keep_attention=true
2 peft=lora precision=bf16 gradient_checkpointing=1 attention=sdpa keep_attention=true
peft=lora packing=true gradient_checkpointing=2 attention=sdpa keep_attention=true activation_offload=true
peft=lora gradient_checkpointing=true activation_offload=overlapped
2 gradient_checkpointing=1 precision=bf16 attention=sdpa activation_offload=overlapped
peft=side_network gradient_checkpointing=true activation_offload=overlapped
peft=lora fused_lora=true
peft=lora quantization=nf4 precision=bf16 lean_preparation=true fused_lora=true
peft=lora quantization=int8 precision=bf16 fused_lora=true gradient_checkpointing=true
peft=lora activation_offload=true fused_lora=true
peft=lora precision=bf16 lean_preparation=true fused_blocks=true
peft=lora quantization=nf4 precision=bf16 lean_preparation=true fused_lora=true fused_blocks=true
peft=lora activation_offload=true fused_blocks=true gradient_checkpointing=1
tiled_mlp=8
peft=lora tiled_mlp=8 precision=bf16 gradient_checkpointing=true
peft=lora quantization=nf4 precision=bf16 tiled_mlp=8 fused_lora=true fused_blocks=true gradient_checkpointing=1
gradient_accumulation=2
optimizer_in_backward=clip
precision=bf16 optimizer=adamw_8bit attention=sdpa gradient_checkpointing=true optimizer_in_backward=clip
2 peft=lora precision=bf16 chunked_loss=true gradient_checkpointing=1 optimizer_in_backward=clip
peft=side_network gradient_checkpointing=true optimizer_in_backward=clip
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


def peaks(folder, line: str, out) -> tuple[DryRun, int]:
    """What a dry run finds, and the peak of real steps."""
    settings = settings_of(line)
    plan = resolve(with_settings(Recipe(), settings))
    rows = int(settings[-3][-1])
    two_documents, padded = [TOKENS // 2] * 8, [TOKENS, TOKENS - 8][:rows] * (8 // rows)
    lengths = two_documents if plan.collator else padded
    data = [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in lengths]
    run, _ = train(folder, data, out, *settings)
    found = dry_run(plan, AutoConfig.from_pretrained(folder), rows, TOKENS, sum(lengths[:rows]) - rows)
    return found, max(entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry)


@pytest.mark.parametrize("line", sample(SETS, 14))
def test_a_dry_run_has_the_peak_of_the_real_step(line, smollm2, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(overlapped_offload, "SMALL", 0)  # so that the inputs of these short rows travel
    folder = tiny_model if "fp16" in line else smollm2  # CPUs emulate fp16: SmolLM2's vocabulary would take minutes
    found, peak = peaks(folder, line, tmp_path)
    assert abs(found.peak_bytes - peak) <= 128, f"{found} for {peak}"


@pytest.mark.parametrize(
    ("kind", "more", "line"),
    [
        ("gemma2", {"head_dim": 64}, "peft=lora gradient_checkpointing=true"),
        ("gemma3_text", {"head_dim": 64, "sliding_window": 16}, "peft=lora attention=sdpa"),
        ("qwen2", {}, "peft=lora quantization=nf4 precision=bf16 lean_preparation=true"),
        ("qwen3", {"head_dim": 64}, "peft=lora attention=sdpa chunked_loss=true"),
        ("mixtral", {"num_local_experts": 4}, "peft=lora precision=bf16 lora.target_modules=q_proj,v_proj"),
    ],
)
def test_other_families_are_loaded_and_step_as_on_nothing(kind, more, line, tmp_path):
    """Windows that are shorter than a row, biases, norms of heads, experts."""
    config = AutoConfig.for_model(**{**CONFIGS["tiny"], "vocab_size": 512, "model_type": kind, **more})
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    found, peak = peaks(folder, line, tmp_path / "run")
    assert abs(found.peak_bytes - peak) <= 128, f"{found} for {peak}"
    _, _, loaded = prepare(folder, *settings_of(line))
    count = LiveBytes()
    count.track_all(every_tensor(loaded.model))
    assert found.weights_bytes == count.live


FAMILIES = {name: CONFIGS[name] for name in CATALOGUE}
FAMILIES |= {
    kind: {**CONFIGS["tiny"], "model_type": kind, "head_dim": 64}
    for kind in ("qwen3", "gemma", "gemma2", "gemma3_text")
}
QLORA = ("tricks.quantization=nf4", "tricks.gradient_checkpointing=true", "tricks.precision=fp16")


def test_shapes_that_depend_on_numbers_are_said_in_one_line(monkeypatch):
    def numbers(*shape):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    monkeypatch.setattr("cria_tricks.predict.dry_run.fake_window", numbers)
    with pytest.raises(BadInput, match=r"shapes inside a llama model depend on numbers.*leave --dry-run out"):
        dry_run(resolve(Recipe(), T4), AutoConfig.for_model(**CONFIGS["tiny"]), 1, 8)


@pytest.mark.parametrize("name", sample(FAMILIES, 10))
def test_every_family_goes_through(name):
    """Of each model one block, in full, with LoRA and with all of QLoRA; weights as many as its shape has."""
    skip_experts_shaped_by_numbers(name)
    raw = {**FAMILIES[name], "num_hidden_layers": 1}
    config, shape = AutoConfig.for_model(**raw), shape_of(raw, name)
    names = ("qkv_proj", "o_proj") if shape.joined else ("q_proj", "k_proj", "v_proj", "o_proj")
    targets = f"lora.target_modules={','.join(names)}"  # an expert is no linear

    def run(*settings: str) -> DryRun:
        return dry_run(resolve(with_settings(Recipe(), settings), T4), config, 1, 64)

    full, lora = run(), run("tricks.peft=lora", targets)
    qlora = run("tricks.peft=lora", targets, *QLORA, f"tricks.chunked_loss={not shape.beside_head}")
    assert full.weights_bytes - 4 * shape.weights <= 4 * 2 * 2 * shape.head_width, "but for the rotary frequencies"
    assert full.peak_bytes > 4 * 4 * shape.weights, "weights, gradients and two moments"
    assert lora.peak_bytes < full.peak_bytes
    assert qlora.weights_bytes < lora.weights_bytes
    adapter = 4 * 16 * sum(sum(shape.linears[t]) for t in names)
    assert lora.weights_bytes - full.weights_bytes == adapter


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("t5", {}, "is no causal language model"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "is no causal language model but BertForMaskedLM"),
        ("gemma2", {}, "set tricks.attention=eager"),
        ("mixtral", {}, "has no module named gate_proj"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_in_one_line(kind, more, says):
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora", "tricks.attention=sdpa"]), T4)
    if kind in ("t5", "bert"):
        plan = resolve(Recipe(), T4)
    with pytest.raises(BadInput, match=says) as error:
        dry_run(plan, AutoConfig.for_model(**{**CONFIGS["tiny"], "model_type": kind, **more}), 1, 16)
    assert "\n" not in str(error.value)


def tiny(device, *settings: str, tokens: int = 64, rows: int = 1, layers: int = 2) -> DryRun:
    config = AutoConfig.for_model(**{**CONFIGS["tiny"], "num_hidden_layers": layers})
    return dry_run(resolve(with_settings(Recipe(), settings), device), config, rows, tokens)


def test_what_is_offloaded_is_in_the_hosts_memory_and_not_on_the_card():
    """A card keeps nothing of a block but what checkpointing keeps besides; without a card the copies are here."""
    settings = ("tricks.peft=lora", "tricks.gradient_checkpointing=true")
    offload = "tricks.activation_offload=true"
    copied = 6 * 64 * 256 * 4  # of six blocks more the input
    for device, more_with, more_without in ((T4, 0, copied), (this_device(), copied, copied)):
        for extra, more in ((offload, more_with), ("tricks.activation_offload=false", more_without)):
            small, large = (tiny(device, *settings, extra, layers=layers) for layers in (2, 8))
            grown = large.moments["forward pass"] - small.moments["forward pass"]
            adapter = 6 * 16 * 4 * (2 * 512 + 2 * 384 + 3 * 768)
            lasting = large.weights_bytes - small.weights_bytes + 2 * adapter
            assert grown - lasting == pytest.approx(more, abs=6 * 6000), "but for the random state"


def test_of_overlapped_inputs_the_card_keeps_the_last_one(monkeypatch):
    """In the backward pass there is one more, which comes back ahead, and none for each further block."""
    monkeypatch.setattr(overlapped_offload, "SMALL", 0)
    settings = ("tricks.peft=lora", "tricks.attention=sdpa", "tricks.gradient_checkpointing=true")
    s = 64 * 256 * 4
    found = {}
    for value in ("true", "overlapped", "false"):
        for layers in (2, 8):
            counted = tiny(T4, *settings, f"tricks.activation_offload={value}", layers=layers)
            found[value, layers] = counted.moments["forward pass"]
    kept = {layers: found["false", layers] - found["overlapped", layers] for layers in (2, 8)}
    assert kept == {2: 0 * s, 8: 6 * s}, "of two blocks the embedding's result is kept in any case"


def test_paged_states_are_not_on_the_card():
    """bitsandbytes pages states of 100,000 elements and more: here the embedding's, and the six wide matrices'."""
    kept, paged = (tiny(T4, f"tricks.paged_optimizer={p}", layers=2) for p in ("false", "true"))
    shape = shape_of(CONFIGS["tiny"], "tiny")
    elements = shape.embedding_weights + 2 * 3 * 256 * 512
    moved = kept.moments["backward pass"] - paged.moments["backward pass"]
    assert moved == 8 * elements + 4 * 20, "and torch's AdamW counts its steps for each weight"
    cpu = tiny(this_device(), "tricks.paged_optimizer=true")
    assert cpu.moments["backward pass"] > paged.moments["backward pass"] + 8 * elements - 2**20


@pytest.mark.parametrize("device", [T4, this_device()], ids=lambda device: device.kind)
def test_adamw_needs_no_memory_of_its_own_to_step(device):
    """16 bytes a weight and no more; torch's other kinds of AdamW make square roots, 4 bytes a weight on a card."""
    found = tiny(device)
    window = 3 * 8 * 64  # tokens, mask and labels, which transformers holds in the optimizer step, too
    resting = found.weights_bytes + (4 + 8) * shape_of(CONFIGS["tiny"], "tiny").weights + window
    counts_and_norms = 20 * 4 * 4
    assert resting <= found.moments["optimizer step"] <= resting + counts_and_norms


def test_a_t4_holds_the_matrix_of_grouped_rows_without_a_mask_unless_they_are_expanded():
    """One row has no padding, so no mask; of two rows transformers repeats the heads itself."""
    T, H = 512, 4
    settings = ("tricks.peft=lora", "tricks.attention=sdpa", "tricks.chunked_loss=true")
    grouped, expanded = (tiny(T4, *settings, f"tricks.expand_kv={e}", tokens=T) for e in ("false", "true"))
    assert grouped.moments["forward pass"] - expanded.moments["forward pass"] > H * T * T * 4
    grouped, expanded = (tiny(T4, *settings, f"tricks.expand_kv={e}", tokens=T, rows=2) for e in ("false", "true"))
    assert grouped == expanded


def test_flash_attention_2_is_followed_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    a100 = Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=40 * 2**30)
    settings = ("tricks.peft=lora", "tricks.precision=bf16", "tricks.chunked_loss=true")
    for rows, packed in ((1, "false"), (2, "false"), (1, "true")):
        more = (f"tricks.packing={packed}", f"train.batch_size={rows}")
        T = 512
        found = tiny(a100, *settings, *more, "tricks.attention=flash_attention_2", tokens=T, rows=rows)
        eager = tiny(a100, *settings, *more, "tricks.attention=eager", tokens=T, rows=rows)
        assert eager.peak_bytes - found.peak_bytes > rows * 4 * T * T * 2


def test_llama_3_2_1b_with_everything_on_has_the_bytes_of_the_capstone():
    """4.127 bits a packed weight, the embedding in 16 bits, and what a T4 reaches at 1 x 2048: 1.5 GiB."""
    settings = (
        *QLORA,
        *"""tricks.peft=lora tricks.double_quantization=true tricks.attention=sdpa tricks.expand_kv=true
        tricks.chunked_loss=true tricks.lean_preparation=true tricks.optimizer=adamw_8bit""".split(),
    )
    config = AutoConfig.for_model(**find_config("llama-3.2-1b"))
    found = dry_run(resolve(with_settings(Recipe(), settings), T4), config, 1, 2048)
    adapter, mib = 4 * 11_272_192, 2**20
    assert round((found.weights_bytes - adapter) / mib) == 980
    assert 1450 <= found.peak_bytes / mib <= 1540


def state_of_the_process() -> list[object]:
    return [
        F.scaled_dot_product_attention,
        F.dropout,
        bnb.autograd._functions.MatMul8bitFp,
        bnb.functional.int8_vectorwise_quant,
        bnb.optim.optimizer.Optimizer8bit.get_state_buffer,
        torch.ops.bitsandbytes.int8_mixed_scaled_mm,
        GlobalOptimManager._instance,
        Offloaded.HOST,
        packing.document_lengths,
        masking_utils._ignore_causal_mask_sdpa,
        moe._can_use_grouped_mm,
        list(AttentionInterface._global_mapping),
        dict(AcceleratorState._shared_state),
        torch.is_autocast_enabled("cpu"),
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_dry_run_leaves_nothing_behind(fails, monkeypatch):
    config = AutoConfig.for_model(**CONFIGS["tiny"])
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora", *QLORA, "tricks.optimizer=adamw_8bit"]), T4)
    before, raw = state_of_the_process(), config.to_dict()
    if fails:
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        dry_run(plan, config, 1, 16)
    assert state_of_the_process() == before
    assert config.to_dict() == raw


def test_a_run_before_and_after_a_dry_run_is_the_same(tiny_model, rows, tmp_path):
    """And so is a dry run after a run, whose Accelerator and bitsandbytes' manager stay in the process."""
    settings = ("tricks.peft=lora", "tricks.precision=bf16", "tricks.optimizer=adamw_8bit", "train.max_steps=2")
    found = []
    for name in ("first", "second"):
        run, loaded = train(tiny_model, rows, tmp_path / name, *settings)
        losses = [entry["loss"] for entry in run.training]
        found.append((losses, trained_weights(loaded), tiny(this_device(), *settings[:-1])))
    (losses, weights, dry), (losses_again, weights_again, dry_again) = found
    assert losses == losses_again
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
    assert dry == dry_again
