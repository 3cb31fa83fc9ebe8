"""A merged model is the adapted one, to the rounding of 16 bits, and a wrong merge is refused."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cria_tricks import models
from cria_tricks.adapter import model_card
from cria_tricks.adapter.folder import save, verify
from cria_tricks.adapter.merge import CPU, _compare, _describe, _merged, _refuse_beyond_rounding, _rows, merge
from cria_tricks.adapter.opening import open_folder
from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.load import host_memory
from cria_tricks.load.model import load_tokenizer
from cria_tricks.models import pretrained
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Lora, Tricks
from tests.helpers import prepare

TINY = "random:tiny"
LORAS = {
    "lora": ("lora.r=4",),
    "rslora": ("lora.r=4", "lora.rslora=true"),
    "dora": ("lora.r=4", "lora.dora=true"),
}


def adapter(folder, *settings, base: str = TINY, kind: str = "lora", size: float = 0.02):
    """Save an adapter whose numbers are drawn, so that it does something."""
    weights = models.find(base)
    _, _, loaded = prepare(weights.path, f"tricks.peft={kind}", *settings)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in loaded.model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += size * torch.randn(parameter.shape, generator=draw)
    tokenizer = load_tokenizer(models.find(TINY))
    save(folder / "adapter", loaded.model, tokenizer, base, "# card\n", Recipe(name="drawn"))
    return folder / "adapter"


@pytest.fixture
def wide_base(tmp_path):
    """The same base stored in fp32, so that fp16 is the finer one for it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models.find(TINY).path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", LORAS)
def test_every_weight_is_the_adapted_one_rounded_once(kind, tmp_path):
    """Held against the formula, not against peft: W + s B A, with DoRA's lengths; bf16 is off by 2^-8 at most."""
    folder = adapter(tmp_path, *LORAS[kind])
    found = merge(folder)
    assert found["dtype"] == "bfloat16"
    assert (found["base"], found["merged"]) == (TINY, str(tmp_path / "merged"))
    assert found["adapter_effect"] > 20 * found["bound"]
    assert 0 < found["largest_difference"] <= found["bound"]
    assert found["same_argmax"] > 0.95
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(models.find(TINY).path + "/model.safetensors")
    drawn = load_file(folder / "adapter_model.safetensors")
    scale = 32 / (2 if kind == "rslora" else 4)  # alpha over sqrt(r), or over r
    changed = 0
    for name, before in base.items():
        key = "base_model.model." + name.removesuffix(".weight")
        expected = before.float()
        if key + ".lora_A.weight" in drawn:
            changed += 1
            expected = expected + scale * drawn[key + ".lora_B.weight"] @ drawn[key + ".lora_A.weight"]
            if kind == "dora":
                lengths = drawn[key + ".lora_magnitude_vector"]
                expected = expected * (lengths / expected.norm(dim=1))[:, None]
        error = (whole[name].float() - expected).abs()
        assert whole[name].dtype == torch.bfloat16
        assert (error <= 1.01 * 2**-8 * expected.abs() + 1e-9).all(), name
    assert changed == 14


def test_plain_transformers_loads_it_and_verify_and_chat_take_it(tmp_path, run_cria):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = adapter(tmp_path, *LORAS["lora"])
    code, stdout, stderr = run_cria("merge", folder, "--out", tmp_path / "whole", "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found["merged"] == str(tmp_path / "whole")
    verify(tmp_path / "whole")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    adapted, _ = open_folder(folder, CPU, torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "whole")("Umoja means unity", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert (plain(ids).logits - adapted(ids).logits).abs().max() <= found["bound"]
    assert run_cria("chat", tmp_path / "whole", "--prompt", "Hi", "--max-new-tokens", "1")[0] == 0
    model_card = (tmp_path / "whole" / "README.md").read_text()
    assert f"{found['largest_difference']:.3g}" in model_card
    assert "Nothing else was measured" in model_card
    made = json.loads((tmp_path / "whole" / "provenance.json").read_text())
    assert made["merge"]["largest_difference"] == found["largest_difference"]
    code, _, stderr = run_cria("merge", folder, "--out", tmp_path / "whole")
    assert code == 2
    assert "is there already" in stderr


def test_the_adapters_provenance_goes_with_it(trained, tmp_path):
    merge(trained / "adapter", tmp_path / "merged")
    made = json.loads((tmp_path / "merged" / "provenance.json").read_text())
    before = json.loads((trained / "adapter" / "provenance.json").read_text())
    assert {key: value for key, value in made.items() if key != "merge"} == before
    assert (tmp_path / "merged" / "recipe.toml").read_bytes() == (trained / "adapter" / "recipe.toml").read_bytes()


def test_a_base_that_is_not_bf16_gives_fp16(wide_base, tmp_path):
    found = merge(adapter(tmp_path, *LORAS["lora"], base=str(wide_base)))
    assert found["dtype"] == "float16"
    assert found["bound"] < 0.005, "fp16 is finer: bf16 gives 0.011 here"
    assert load_file(tmp_path / "merged" / "model.safetensors")["model.norm.weight"].dtype == torch.float16


def test_a_trained_head_is_merged_untied(tmp_path):
    """The base ties its head to its embedding; a trained head is another one, and the embedding stays."""
    found = merge(adapter(tmp_path, kind="head"))
    assert found["adapter_effect"] > found["bound"] >= found["largest_difference"]
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    assert not torch.equal(whole["lm_head.weight"], whole["model.embed_tokens.weight"])
    base = load_file(models.find(TINY).path + "/model.safetensors")
    assert torch.equal(whole["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_lora_over_one_of_two_tied_ends_changes_only_that_one(target, tmp_path):
    found = merge(adapter(tmp_path, "lora.r=4", f"lora.target_modules={target},q_proj"))
    assert found["adapter_effect"] > found["bound"] >= found["largest_difference"]
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(models.find(TINY).path + "/model.safetensors")["model.embed_tokens.weight"]
    same = {name: torch.equal(whole[name], base) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert same == {"lm_head.weight": target != "lm_head", "model.embed_tokens.weight": target == "lm_head"}


@pytest.mark.parametrize("wrong", [0.0, 0.5, 2.0, float("nan")])
def test_a_wrong_merge_is_refused_and_leaves_nothing(wrong, tmp_path, monkeypatch):
    """Another scale than the adapter runs with: none of it, half, twice; and numbers that are none."""
    import peft.tuners.lora.layer as layer

    folder = adapter(tmp_path, *LORAS["lora"])
    honest = layer.Linear.get_delta_weight
    monkeypatch.setattr(layer.Linear, "get_delta_weight", lambda *a: wrong * honest(*a))
    with pytest.raises(BadInput, match="16 bits explain|cannot be merged: NaNs") as caught:
        merge(folder)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_an_adapter_that_16_bits_would_swallow_is_refused(tmp_path):
    folder = adapter(tmp_path, "lora.r=4", "lora.alpha=0.0001")
    with pytest.raises(BadInput, match="16 bits would swallow it"):
        merge(folder)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("prompt_tuning", "a learnt prompt is input and has nothing to merge .* use it with peft or cria chat"),
        ("side_network", "a side network runs beside the base and has nothing to merge .* use it with cria chat"),
        ("none", "is a whole model already"),
    ],
)
def test_what_cannot_be_merged_says_what_to_do_instead(kind, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        merge(adapter(tmp_path, kind=kind))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_another_kind_of_peft_adapter_is_named(tmp_path):
    folder = adapter(tmp_path, *LORAS["lora"])
    for name in ("manifest.json", "recipe.toml"):
        (folder / name).unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(BadInput, match="is a IA3 adapter, and only LoRA is merged here"):
        merge(folder)


@pytest.mark.parametrize(
    ("difference", "effect", "refused"),
    [
        (0.5, 10, ""),
        (0.501, 10, "16 bits explain 0.5"),
        (0.5, 1.0, ""),
        (0.5, 0.99, "16 bits would swallow it"),
        (0, 0, ""),
        (0.5, 0, ""),
        (0.001, 0.0001, "16 bits would swallow it"),
        (float("nan"), 10, "16 bits explain 0.5"),
    ],
)
def test_a_merge_is_refused_beyond_its_bound_and_not_before(difference, effect, refused):
    check = {"largest_difference": difference, "bound": 0.5, "adapter_effect": effect}
    with pytest.raises(BadInput, match=refused) if refused else contextlib.nullcontext():
        _refuse_beyond_rounding(Path("adapter"), check)


def test_logits_are_compared_by_their_largest_difference_and_by_the_words_they_choose():
    unmerged = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    merged = torch.tensor([[0.5, 1.0], [2.0, 2.5], [-1.0, 3.0]])
    assert _compare(unmerged, merged) == {
        "positions": 3,
        "largest_difference": 2.5,
        "same_argmax": pytest.approx(2 / 3),
    }


def test_four_rows_of_64_tokens_at_most_are_what_is_compared():
    asked = []

    def tokenizer(text):
        asked.append(text)
        return {"input_ids": list(range(40 + 20 * len(asked)))}

    found = _rows(tokenizer, 64)
    held_out = sources.find("nguzo_saba", "eval").rows[:4]
    assert asked == ["\n".join(message["content"] for message in row.messages) for row in held_out]
    assert [row.tolist() for row in found] == [[list(range(n))] for n in (60, 64, 64, 64)]
    with pytest.raises(BadInput, match="the tokenizer gives tokens that the base model does not have"):
        _rows(tokenizer, 63)


def whole(head: torch.nn.Module | None, embeddings: torch.nn.Module) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(tie_word_embeddings=True),
        get_output_embeddings=lambda: head,
        get_input_embeddings=lambda: embeddings,
    )


def test_a_head_of_its_own_is_not_saved_as_tied():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for head, tied in ((first, True), (None, True), (second, False)):
        made = whole(head, first)
        asked = []
        model = SimpleNamespace(merge_and_unload=lambda made=made, asked=asked, **given: asked.append(given) or made)
        assert _merged(model, Path("adapter")) is made
        assert made.config.tie_word_embeddings is tied
        assert asked == [{"safe_merge": True}]


def test_a_model_that_the_memory_cannot_hold_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    folder = adapter(tmp_path, *LORAS["lora"])
    weights = sum(tensor.numel() for tensor in load_file(models.find(TINY).path + "/model.safetensors").values())
    memory = SimpleNamespace(available=4 * weights - 2)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(free=1))
    monkeypatch.setattr(pretrained, "causal_lm", lambda *given, **more: pytest.fail("loaded"))
    with pytest.raises(
        BadInput, match=r"billion weights, which take .* of memory, and .* are free; close other programs"
    ):
        merge(folder)
    memory.available += 1
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path / "none")
    host_memory.refuse_too_large(Path(models.find(TINY).path), 4, "a merge")
    (tmp_path / "limit").write_text("1000\n")
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path / "limit")
    with pytest.raises(BadInput, match="a merge: "):
        host_memory.refuse_too_large(Path(models.find(TINY).path), 4, "a merge")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\nb"), RuntimeError("a"), NotImplementedError("a"),
        MemoryError("a"), RuntimeError("CUDA out of memory"),
    ],
)  # fmt: skip
def test_what_peft_cannot_merge_is_one_line_and_without_room_it_is_not_blamed(error):
    def raises(**options):
        raise error

    is_room = "emory" in f"{error!r}"
    with pytest.raises(type(error) if is_room else BadInput) as caught:
        _merged(SimpleNamespace(merge_and_unload=raises), Path("adapter"))
    assert (caught.value is error) is is_room
    if not is_room:
        assert str(caught.value) == "adapter: cannot be merged: a; use it unmerged"


def test_what_goes_beside_a_merged_model(tmp_path):
    """Of an adapter with a recipe and a provenance, and of one of plain peft, which has its folder's name."""
    numbers = {"positions": 5, "largest_difference": 0.5, "bound": 1.0, "adapter_effect": 9.0, "same_argmax": 1.0}
    check = {"base": "owner/base", "dtype": "float16", **numbers}
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    for folder in (ours, plain, tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    recipe, data = Recipe(tricks=Tricks(peft="lora", quantization="nf4")), {"train_kinds": {"text": 2}}
    (ours / "recipe.toml").write_text(recipe.to_toml())
    (ours / "provenance.json").write_text(json.dumps({"recipe": {"name": "mine"}, "data": data}))
    (plain / "adapter_config.json").write_text('{"use_dora": true}')
    dora = Recipe(tricks=Tricks(peft="lora"), lora=Lora(dora=True))
    _describe(tmp_path / "a", ours, "Read this first.", check)
    _describe(tmp_path / "b", plain, "Read this first.", check)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["README.md", "provenance.json"]
    assert (tmp_path / "a" / "recipe.toml").read_text() == recipe.to_toml()
    for folder, name, more, trained, kinds in (
        ("a", "mine", {"recipe": {"name": "mine"}, "data": data}, recipe, {"text": 2}),
        ("b", "plain", {}, dora, {}),
    ):
        made = json.loads((tmp_path / folder / "provenance.json").read_text())
        assert made == more | {"merge": check}
        page = (tmp_path / folder / "README.md").read_text()
        assert page == model_card.merged_card(name, "Read this first.", trained, kinds, check)
        assert "Read this first." in page
