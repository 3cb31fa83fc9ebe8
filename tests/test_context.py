"""Rows that are longer than the model's context are a warning: in a plan, and before and after training."""

import json
import shutil
from pathlib import Path

import pytest

from cria_tricks import models
from cria_tricks.data.tokens import TokenRows
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.models.configs import beyond_context, context_of
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import summary

ROWS = Path(__file__).parents[1] / "cria_tricks" / "data" / "nguzo_saba_eval.jsonl"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_model_of_the_catalogue_says_its_context(name):
    said = CONFIGS[name]["max_position_embeddings"]
    assert find_shape(name).context == context_of(name) == said >= 2048


def test_a_context_is_found_in_a_config_of_any_kind(tmp_path):
    def of(**config) -> int:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return context_of(str(tmp_path))

    assert of(model_type="phi3", max_position_embeddings=4096, sliding_window=2047) == 4096, "a window is not it"
    assert of(model_type="gemma3_text") == 131_072, "what transformers takes"
    for unknown in ({}, {"max_position_embeddings": None}, {"max_position_embeddings": -1}):
        assert of(model_type="gpt2", **unknown) == 0
    assert context_of(str(tmp_path / "nowhere")) == 0


QWEN = {"max_position_embeddings": 32_768}
LLAMA = {"max_position_embeddings": 131_072}


@pytest.mark.parametrize(
    ("model", "fields", "tokens"),
    [
        ("qwen2.5-7b", QWEN | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 131_072),
        (
            "qwen3-8b",  # 40,960 positions, of which 32,768 were for the prompt and are scaled
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}},
            131_072,
        ),
        (
            "qwen3-8b",
            LLAMA
            | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}},
            131_072,
        ),
        (
            "llama-3.1-8b",
            LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
            131_072,
        ),
        ("llama-2-7b", {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2}}, 8192),
        ("llama-2-7b", {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        (
            "phi-4-mini",
            LLAMA
            | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "short_factor": [1]}},
            131_072,
        ),
        (
            "phi-4-mini",
            LLAMA | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "factor": 64.0}},
            262_144,
        ),
        ("gemma-3-1b", LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131_072),
        ("llama-2-7b", {"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ("llama-2-7b", {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn"}}, 4096),
        (
            "llama-2-7b",
            {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "default", "factor": 2.0}},
            4096,
        ),
        (
            "llama-2-7b",
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}},
            },
            8192,
        ),
    ],
)
def test_a_context_is_that_with_rope_scaling(tmp_path, model, fields, tokens):
    config = {name: value for name, value in CONFIGS[model].items() if not name.startswith("rope_")} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(str(tmp_path)).context == context_of(str(tmp_path)) == tokens


def test_a_plan_of_a_scaled_model_does_not_warn(run_cria, tmp_path):
    scaling = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-7b"] | QWEN | scaling))
    for tokens, many in ((131_072, 0), (131_073, 1)):
        options = ("--gpu", "h100", "--model", str(tmp_path), "--rows-full", "--set", f"data.max_length={tokens}")
        warnings = json.loads(run_cria("plan", "kwanzaa", *options, "--json")[1])["warnings"]
        assert len([one for one in warnings if "longer than the model's context" in one]) == many


@pytest.mark.parametrize(("context", "tokens", "warned"), [(64, 64, 0), (64, 65, 1), (64, 8, 0), (0, 10**6, 0)])
def test_it_takes_one_token_too_many(context, tokens, warned):
    said = beyond_context(context, tokens)
    assert len(said) == warned
    assert all(f"up to {tokens} tokens" in one and f"set data.max_length={context}," in one for one in said)


def test_a_plan_warns_of_rows_beyond_the_context(run_cria):
    def warnings(*settings) -> list[str]:
        sets = [word for setting in settings for word in ("--set", setting)]
        _, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "h100", "--model", "tinyllama-1.1b", *sets, "--json")
        return json.loads(stdout)["warnings"]

    [said] = warnings("data.max_length=2049")
    assert said.startswith("rows of up to 2049 tokens are longer than the model's context of 2048 ")
    assert "set data.max_length=2048, or take a model with a longer context" in said
    assert warnings("data.max_length=2048") == []
    assert warnings("data.max_length=4096", "tricks.packing=true") == [], "many short rows in one, each from position 0"
    _, shown, _ = run_cria("plan", "kwanzaa", "--gpu", "h100", "--model", "tinyllama-1.1b", "--longest")
    assert "; the model's context is 2,048" in shown


def test_only_rows_that_really_are_longer_are_counted():
    def rows(*lengths) -> TokenRows:
        return TokenRows([{"input_ids": [5] * n, "labels": [5] * n} for n in lengths], 0, 0)

    recipe = with_settings(Recipe(), ["data.max_length=4096"])
    assert summary.data_warnings({"train": rows(64, 8), "eval": rows(9)}, recipe, 64) == []
    assert summary.data_warnings({"train": rows(65, 8), "eval": rows(9)}, recipe) == [], (
        "of a context that is not known"
    )
    train, held_out = summary.data_warnings({"train": rows(65, 70, 64, 3), "eval": rows(99)}, recipe, 64)
    assert train.startswith("2 of 4 train rows are longer than the model's context of 64 tokens")
    assert "the longest has 70" in train
    assert "set data.max_length=64, or take a model with a longer context" in train
    assert held_out.startswith("1 of 1 eval rows are")


@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    """The tiny model, with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("model") / "short"
    tiny = models.find("random:tiny")
    shutil.copytree(tiny.tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


@pytest.mark.parametrize("stream", [False, True], ids=["list", "stream"])
def test_training_warns_before_the_model_is_loaded_and_in_the_report(short_model, tmp_path, run_cria, stream):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(ROWS.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    settings = [
        f"model={short_model}", "train.max_steps=1", "tricks.peft=lora", "lora.r=2", "tricks.gradient_accumulation=1",
        "data.max_length=320", f"data.train={few}", f"data.eval={few}", f"data.stream={str(stream).lower()}",
        "train.save_minutes=0",
    ]  # fmt: skip
    sets = [word for setting in settings for word in ("--set", setting)]
    code, _, said = run_cria("train", "smoke", "--out", tmp_path / "run", *sets)
    assert code == 0, said
    first = "rows of up to 320 tokens" if stream else "2 of 2 train rows"
    before, _, _ = said.partition("loading ")
    assert f"warning: {first} are longer than the model's context of 64" in before
    kept = json.loads((tmp_path / "run" / "report.json").read_text())["warnings"]
    assert [one for one in kept if one.startswith(first)]
    assert [one for one in kept if one.startswith("2 of 2 eval rows are longer")]
