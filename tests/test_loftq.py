"""LoftQ's start: the adapter begins as the best part of rank r of the rounding error, and stays a plain adapter."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cria_tricks.adapter import folder
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.load import starts
from cria_tricks.load.model import count_trainable, refuse_unfit
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.models import Weights, weight_files
from cria_tricks.models.configs import CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import kwanzaa
from cria_tricks.resolve import resolve
from cria_tricks.run.train import train
from cria_tricks.switches.folds import estimate
from cria_tricks.techniques.lora import start_of
from tests.helpers import prepare, trained_weights
from tests.tolerances import LOFTQ, LORA

ROWS = Path(__file__).parents[1] / "cria_tricks" / "data" / "nguzo_saba_eval.jsonl"
NF4 = ("tricks.peft=lora", "tricks.quantization=nf4")
START = "lora.init=loftq"
IDS = torch.arange(3, 60)[None]
KINDS = {
    "nf4": ("tricks.quantization=nf4",),
    "double": ("tricks.quantization=nf4", "tricks.double_quantization=true"),
    "fp4": ("tricks.quantization=fp4",),
    "int8": ("tricks.quantization=int8",),
}


def error_of(d_out: int, d_in: int) -> torch.Tensor:
    return torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(d_out)) * 0.002


def least(error: torch.Tensor, r: int) -> float:
    """The length of what every approximation of rank r leaves, by Eckart and Young."""
    return torch.linalg.svdvals(error.double())[r:].square().sum().sqrt().item()


def adapted(model) -> dict:
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, "lora_A") and layer.lora_A}


def logits(model) -> torch.Tensor:
    """As in training: in eval mode a CPU's int8 products also round their inputs, and 4-bit ones may run in bf16."""
    return model.train()(input_ids=IDS).logits.detach().float()


@pytest.mark.parametrize("scale", [2, 0.25, 8.0])
@pytest.mark.parametrize(("d_out", "d_in"), [(24, 80), (80, 24), (40, 40)], ids=["wide", "tall", "square"])
def test_of_an_error_remains_what_its_rank_cannot_hold(d_out, d_in, scale):
    error = error_of(d_out, d_in)
    for r in (1, 4, 16):
        A, B = start_of(error, r, scale)
        assert (A.shape, B.shape) == ((r, d_in), (d_out, r))
        left = (error.double() - scale * B.double() @ A.double()).norm().item()
        assert left == pytest.approx(least(error, r), rel=LOFTQ)
        roots = A.norm(dim=1).double()
        torch.testing.assert_close(B.norm(dim=0).double(), roots, rtol=1e-3, atol=0, msg="one factor is larger")
        values = torch.linalg.svdvals(error.double())[:r].flip(0)
        torch.testing.assert_close(scale * roots**2, values, rtol=1e-3, atol=0)


def test_a_rank_as_large_as_the_matrix_repairs_all_of_it():
    for r in (24, 100):
        A, B = start_of(error_of(24, 80), r, 2)
        assert len(A) == 24
        torch.testing.assert_close(2 * B @ A, error_of(24, 80), rtol=0, atol=1e-8)


def test_it_is_pefts_decomposition_but_for_the_scale():
    from peft.utils.loftq_utils import _low_rank_decomposition

    error = error_of(24, 80)
    theirs = _low_rank_decomposition(error, reduced_rank=4)
    A, B = start_of(error, 4, 1)
    torch.testing.assert_close(B @ A, theirs["L"] @ theirs["R"], rtol=0, atol=1e-7)


def test_a_matrix_without_an_error_gets_an_adapter_that_can_learn():
    A, B = start_of(torch.zeros(24, 80), 4, 2)
    assert not (B @ A).any()
    assert B.norm(dim=0).min() > 0, "A and B that are both zero have no gradient"


def test_pefts_own_function_still_needs_cuda_and_leaves_the_scale_out():
    """Read in its code: if a version does better, ours may go."""
    from peft.utils import loftq_utils

    assert 'else "cuda"' in inspect.getsource(loftq_utils._loftq_init_new)
    assert "scaling" not in inspect.getsource(loftq_utils.replace_lora_weights_loftq)


@pytest.mark.parametrize("scaled", ["lora.alpha=32", "lora.alpha=3", "lora.rslora=true"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_matrix_begins_as_near_to_its_original_as_the_rank_allows(kind, scaled, tiny_model):
    settings = ("tricks.peft=lora", "lora.r=8", *KINDS[kind], scaled)
    stored = load_file(tiny_model / "model.safetensors")
    plain, repaired = (prepare(tiny_model, *settings, *more)[2].model for more in ((), (START,)))
    layers = adapted(repaired)
    assert len(layers) == 2 * 7
    for path, layer in layers.items():
        weight = layer.get_base_layer().weight
        assert torch.equal(weight.data, adapted(plain)[path].get_base_layer().weight.data), "the base is as it was"
        error = stored[path.removeprefix("base_model.model.") + ".weight"] - starts.unpacked(weight)
        left = (error - layer.get_delta_weight("default")).norm().item()
        assert left == pytest.approx(least(error, 8), rel=LOFTQ), path
        assert left < error.norm().item()
    whole = logits(prepare(tiny_model)[2].model)
    assert (logits(repaired) - whole).norm() < 0.99 * (logits(plain) - whole).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_rank_gives_the_unquantised_model_back(kind, tiny_model):
    settings = ("tricks.peft=lora", "lora.r=300", "lora.alpha=7", *KINDS[kind], START)
    repaired = prepare(tiny_model, *settings)[2].model
    torch.testing.assert_close(logits(repaired), logits(prepare(tiny_model)[2].model), rtol=0, atol=LORA)


def test_only_one_matrix_at_a_time_is_unquantised(tiny_model):
    model = prepare(tiny_model, *NF4, "lora.r=4")[2].model
    elements = 256 * 512  # of the largest matrix
    live = LiveBytes()
    live.track_all(every_tensor(model))
    before = live.live
    with live:
        starts.start_at_rounding_error(model)
    # Its original and what it unpacks to. Later, beside the error, the square of its shorter side, its eigenvectors
    # and the thin matrices. Half of one more for all that is small.
    assert live.peak - before <= 2.5 * 4 * elements
    assert live.live == before
    # No gradient, optimizer state or activation is there yet, so for the capstone this is far below a step's peak.
    largest = 2048 * 8192
    bill = estimate(with_settings(kwanzaa(T4), [START]), find_shape("llama-3.2-1b"), T4)
    weights = sum(line.bytes for line in bill.lines if line.name.startswith("weights"))
    assert weights + 2.5 * 4 * largest < bill.peak_bytes / 2


def test_a_step_takes_as_many_bytes_as_with_another_start():
    config = AutoConfig.for_model(**CONFIGS["tiny"])
    found = [dry_run(resolve(with_settings(Recipe(), [*NF4, *more]), T4), config, 1, 64) for more in ((), (START,))]
    assert found[0] == found[1]


def test_plain_peft_reads_the_adapter_over_the_same_base(tiny_model, tokenizer, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    ours = prepare(tiny_model, *NF4, "lora.r=8", START)[2].model
    folder.save(tmp_path / "adapter", ours, tokenizer, str(tiny_model), "", Recipe())
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=config, dtype="float32")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0, atol=LORA)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["init_lora_weights"] is True


def test_a_fused_adapter_begins_alike_and_has_the_same_gradients(tiny_model):
    gradients = []
    for switch in ("false", "true"):
        model = prepare(tiny_model, *NF4, "lora.r=8", START, f"tricks.fused_lora={switch}")[2].model
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    for name, grad in gradients[0].items():
        assert grad.any(), name
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_resumed_run_keeps_the_checkpoints_adapter_and_does_not_start_it_again(tmp_path, monkeypatch):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:2]))
    sets = ["model=random:tiny", *NF4, START, "lora.r=4", "train.max_steps=2", "train.save_steps=1"]
    sets += [f"data.train={few}", f"data.eval={few}", "data.max_length=320", "train.learning_rate=1e-2"]
    recipe = with_settings(Recipe(), sets)
    train(recipe, tmp_path / "run")
    whole = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    for name in ("adapter", "checkpoints/checkpoint-2"):
        shutil.rmtree(tmp_path / "run" / name)
    for name in ("report.json", "report.md", "report.png"):
        (tmp_path / "run" / name).unlink()
    monkeypatch.setattr(starts, "start_at_rounding_error", lambda model, plan: pytest.fail("started again"))
    train(recipe, tmp_path / "run", resume=True)
    resumed = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_a_start_draws_no_random_number_and_is_the_same_every_time(tiny_model):
    torch.manual_seed(0)
    first = trained_weights(prepare(tiny_model, *NF4, START)[2])
    drawn = torch.rand(3)
    second = trained_weights(prepare(tiny_model, *NF4, START)[2])
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(second[name], weight) for name, weight in first.items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("tricks.peft=lora",), "lora.init=loftq with tricks.quantization=none: it starts at the rounding error of"),
        ((), "lora.init with tricks.peft=none: it is for LoRA; set tricks.peft=lora"),
        (("tricks.peft=head", "tricks.quantization=nf4"), "lora.init with tricks.peft=head: it is for LoRA"),
        ((*NF4, "lora.dora=true"), "lora.init=loftq with lora.dora=true: peft sets DoRA's magnitudes first"),
    ],
)
def test_what_has_no_rounding_error_is_refused(settings, said):
    with pytest.raises(BadInput) as caught:
        resolve(with_settings(Recipe(), [*settings, START]), T4)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_pissa_is_no_value(tiny_model):
    with pytest.raises(BadInput, match="lora.init = 'pissa': must be default or loftq"):
        with_settings(Recipe(), ["lora.init=pissa"])


def changed(model: Path, copy: Path, change) -> Weights:
    """A copy of a model's folder with other tensors in its file."""
    shutil.copytree(model, copy)
    file = copy / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return Weights(str(copy), str(copy), None)


def test_the_originals_are_found_under_shorter_and_longer_names(tiny_model, tmp_path):
    """A backbone saved alone, and a language model inside a larger one."""
    base = prepare(tiny_model, *NF4)[2].model.get_base_model()
    linears = {path: layer.get_base_layer() for path, layer in adapted(base).items()}
    head = base.get_output_embeddings()
    names = [key for _, key, _ in starts.originals(linears, head, tiny_model)]
    assert len(names) == 2 * 7
    for number, rename in enumerate((lambda name: name.removeprefix("model."), lambda name: f"language_model.{name}")):

        def all_renamed(tensors, rename=rename):
            return {rename(name): tensor for name, tensor in tensors.items()}

        place = changed(tiny_model, tmp_path / str(number), all_renamed)
        found = [key for _, key, _ in starts.originals(linears, head, Path(place.path))]
        assert found == list(map(rename, names))


def test_a_file_without_the_matrix_is_refused_before_weights_are_loaded(tiny_model, monkeypatch):
    """As where transformers joins several matrices of a file into one."""
    gone = "model.layers.1.mlp.up_proj.weight"
    plan = resolve(with_settings(Recipe(model=str(tiny_model)), [*NF4, START]))
    weights = Weights(str(tiny_model), str(tiny_model), None)
    empty = refuse_unfit(plan, weights)
    headers = weight_files.tensors(tiny_model, "tiny")
    del headers[gone]
    monkeypatch.setattr(weight_files, "tensors", lambda folder, name: headers)
    with pytest.raises(BadInput, match=f"lora.init=loftq: .* does not hold {gone} as one matrix under this name; set"):
        count_trainable(empty, plan, weights)


def test_another_matrix_of_the_same_shape_is_refused(tiny_model, tmp_path):
    """As where the loader turns or permutes a matrix of the file."""
    model = prepare(tiny_model, *NF4)[2].model
    turned = changed(
        tiny_model,
        tmp_path / "turned",
        lambda tensors: {n: t.T.contiguous() if t.shape == (256, 256) else t for n, t in tensors.items()},
    )
    model.get_base_model().name_or_path = turned.path
    with pytest.raises(BadInput, match=r"lora.init=loftq: .*q_proj.weight in .* is not the weight that was quantised"):
        starts.start_at_rounding_error(model)
