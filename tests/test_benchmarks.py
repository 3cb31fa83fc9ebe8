"""The benchmarks of the dry run, and of quality, hold together."""

import json
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import curated, dry_run_error, quality, step_profile
from benchmarks.common import HERE
from cria_tricks.bench import cases
from cria_tricks.bench.case import settings_of
from cria_tricks.hardware import T4, this_device
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import kwanzaa_curated_small, kwanzaa_small
from cria_tricks.resolve import resolve
from tools import tables


@pytest.mark.parametrize("words", ["peft=lora", "peft=lora gradient_checkpointing=true chunked_loss=true"])
def test_the_dry_run_is_within_one_per_cent_of_real_steps_made_now(words, tiny_model, monkeypatch):
    """By the benchmark's own comparison, on a small model; tests/memory/test_dry_run.py has more sets, to 128 bytes."""
    monkeypatch.setattr(dry_run_error.models, "find", lambda name: Weights(name, str(tiny_model), None))
    case = dry_run_error.compare(words, 64)
    assert case["error"] == case["dry_run"] / case["real"] - 1
    assert case["real"] > 4 * 512 * 256, "the embedding alone takes more"
    assert abs(case["error"]) <= 0.01


def test_the_committed_comparison_of_the_dry_run_is_of_the_sets_as_they_are():
    found = json.loads((HERE / "results" / "cpu" / "dry_run_error.json").read_text())
    assert [case["settings"] for case in found["cases"]] == [settings_of(words) for words in dry_run_error.SETS]


@pytest.mark.parametrize("case", cases.errors(T4), ids=lambda case: case.name)
def test_every_set_of_the_comparison_on_a_card_can_run_on_a_t4(case):
    assert resolve(with_settings(Recipe(), settings_of(case.words)), T4).device is T4


def test_the_comparisons_have_enough_sets():
    assert len(set(cases.ERRORS)) == len(cases.ERRORS) >= 16
    assert len(set(dry_run_error.SETS)) >= 20


def test_products_and_attention_in_fp16_are_computed_in_fp32_and_their_results_rounded():
    class Dtypes(TorchDispatchMode):
        """What reaches the kernels."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            seen.extend((func, one.dtype) for one in tensors if func in quality.PRODUCTS)
            return func(*args, **(kwargs or {}))

    def attended(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    seen = []
    a, b = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)).half()
    heads = [torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(n)).half() for n in range(3)]
    with Dtypes(), quality.RoundedProducts():
        found = [a @ b, a[0] @ b[0], torch.addmm(a[0], a[0], b[0])]
        in_half = attended(*(one.clone().requires_grad_() for one in heads))
    assert {func for func, _ in seen} == quality.PRODUCTS
    assert {dtype for _, dtype in seen} == {torch.float32}
    x, y = a.float(), b.float()
    for one, wanted in zip(found, [x @ y, x[0] @ y[0], torch.addmm(x[0], x[0], y[0])], strict=True):
        assert one.dtype == torch.float16
        assert torch.equal(one, wanted.half())
    for one, wanted in zip(in_half, attended(*(one.float().requires_grad_() for one in heads)), strict=True):
        assert one.dtype == torch.float16
        # Four roundings to 11 bits: the result, its gradient, their product, and what comes out.
        assert (one.float() - wanted).abs().max() <= 4 * 2**-11 * wanted.abs().max()


@pytest.mark.parametrize(
    ("operation", "group"),
    [
        ("aten::mm", "matrix products"),
        ("aten::mm_like", step_profile.REST),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("bitsandbytes::dequantize_4bit", "unpacking 4-bit weights"),
        ("aten::copy_", "copies and casts"),
        ("aten::mul", step_profile.REST),
    ],
)
def test_an_operation_belongs_to_its_group(operation, group):
    assert step_profile.group_of(operation) == group


def test_a_profiled_micro_batch_is_divided_among_the_groups():
    """Two blocks with LoRA in 14 linear layers, forward and backward: their products are all in one group."""
    row = {"input_ids": list(range(3, 51)), "labels": list(range(3, 51))}
    settings = ["model=random:tiny", *step_profile.BASE, *step_profile.WAYS["fused, NF4"]]
    found = step_profile.measure(with_settings(Recipe(), settings), [row, row], this_device())
    linear = 2 * 7
    assert found["calls"]["matrix products"] >= linear * 2 * 3, "of the weight, of A and of B, forward and backward"
    assert found["calls"]["unpacking 4-bit weights"] >= 2 * linear - 3, "again in the backward pass"
    assert found["calls"]["attention"] >= 2 * 2
    assert 0 < sum(found["seconds"].values()) <= found["wall_seconds"]
    text = tables.step_profile({"ways": {"fused, NF4": found}})
    shares = [float(share) for share in re.findall(r"([\d.]+)% in", text)]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_an_adapter_is_evaluated_as_it_was_trained_and_with_the_contract_beside():
    of_real_rows = list(curated.asked(kwanzaa_small(T4), ["kwanzaa"]))
    assert of_real_rows == [("kwanzaa", "kwanzaa", None), ("kwanzaa with the contract", "kwanzaa", True)]
    of_ours = list(curated.asked(kwanzaa_curated_small(T4), curated.LONGEST))
    assert of_ours == [(name, name, None) for name in curated.LONGEST], "it was trained with the contract"
    for recipe, asked in (("kwanzaa_curated_small", of_ours), ("kwanzaa_small", of_real_rows)):
        committed = json.loads((HERE / "results" / "cpu" / f"{recipe}.json").read_text())
        assert list(committed["evaluations"]) == [name for name, _, _ in asked]
