"""Widths read from a config: published parameter counts, transformers' own models, and what is no decoder."""

import json
import re
from dataclasses import replace

import pytest
from transformers import AutoConfig

from cria_tricks.common.errors import BadInput
from cria_tricks.load.model import built_empty
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.models.configs import KINDS
from cria_tricks.models.shape import REQUIRED, find_shape, shape_of
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve

PUBLISHED = {
    "smollm2": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
}
"""Parameters of the published weights."""

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "pad_token_id": 0,
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def of(kind: str = "llama", without: str = "", **fields):
    config = {"model_type": kind, **SMALL, **fields}
    return shape_of({name: value for name, value in config.items() if name != without}, "made-up")


def parameters(config: dict) -> int:
    """What transformers' own model has, built of tensors without data."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_model_of_the_catalogue_has_as_many_parameters_as_was_published(name):
    if name in PUBLISHED:
        assert find_shape(name).weights == PUBLISHED[name]
    for other in filter(None, (CATALOGUE[name].hub, f"random:{name}")):
        assert find_shape(other) == replace(find_shape(name), name=other)
    assert find_shape(name.upper()) == find_shape(name)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in PUBLISHED])
def test_a_model_without_a_published_count_has_as_many_as_transformers_and_its_name_say(name):
    """Its shape names its source. Billions are rounded in a name, and some count without the embedding."""
    weights = find_shape(name).weights
    assert CATALOGUE[name].source
    assert weights == parameters(CATALOGUE[name].config)
    said = re.search(r"([\d.]+)b$", name)
    if said:
        assert weights / 1e9 == pytest.approx(float(said[1]), rel=0.5)


def test_what_every_name_of_the_catalogue_counts_is_checked():
    assert set(PUBLISHED) < set(CATALOGUE)
    assert set(CATALOGUE) == set(CONFIGS) - {"tiny"}


@by_kind
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 8, "head_dim": 16, "tie_word_embeddings": True},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["grouped", "wide heads, tied", "own head", "biases"],
)
def test_any_kind_has_the_parameters_of_transformers_model(kind, fields):
    config = {"model_type": kind, **SMALL, **fields}
    shape = shape_of(config, "made-up")
    assert shape.weights == parameters(config)
    assert sum(many * elements for many, elements in shape.tensors) == shape.weights


@pytest.mark.parametrize(
    ("kind", "null"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in ("llama", "qwen2", "qwen3")]
)
def test_a_field_that_a_config_leaves_out_is_what_transformers_takes(kind, null):
    """64 heads, which each of the defaults divides; a null means as many key heads where transformers takes one."""
    from transformers import AutoConfig

    config = {"model_type": kind, **SMALL, "hidden_size": 192, "num_attention_heads": 64}
    del config["num_key_value_heads"]
    if null:
        config["num_key_value_heads"] = None
    shape, theirs = shape_of(config, "made-up"), AutoConfig.for_model(**config)
    assert shape.kv_heads == theirs.num_key_value_heads
    assert shape.head_width == (getattr(theirs, "head_dim", None) or 192 // 64)
    assert shape.tied == theirs.tie_word_embeddings
    assert shape.experts == getattr(theirs, "num_local_experts", 1)
    assert shape.experts_per_token == getattr(theirs, "num_experts_per_tok", 1)
    assert shape.window == (getattr(theirs, "sliding_window", None) or 0)
    assert shape.context == theirs.max_position_embeddings


@pytest.mark.parametrize(
    ("kind", "fields", "window"),
    [
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"sliding_window": 128}, 128),
        ("qwen2", {"sliding_window": 128}, 0),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, 128),
        ("qwen3", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, 0),
        ("gemma3_text", {"sliding_window": 512}, 512),
    ],
)
def test_a_window_counts_where_a_block_has_one(kind, fields, window):
    assert of(kind, **fields).window == window


def test_a_model_that_also_sees_is_refused(tmp_path):
    """An adapter of Gemma-3-4B would lie in its vision tower, too, for which there are no rows and no bill."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="gemma3 takes more than text, such as images"):
        find_shape(str(tmp_path))
    built = AutoConfig.for_model(
        "gemma3", text_config={**text, "num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1}
    )
    with pytest.raises(BadInput, match="gemma3 takes more than text, such as images"):
        built_empty(resolve(Recipe()), built, "this-one")


def test_widths_by_hand():
    """Llama-3.2-1B: 32 query heads and 8 key heads of 64."""
    shape = find_shape("llama-3.2-1b")
    assert (shape.query_width, shape.kv_width) == (2048, 512)
    assert shape.block_linear_weights == 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192 == 60_817_408
    assert shape.block_other_weights == 2 * 2048
    assert shape.embedding_weights == 128_256 * 2048
    assert shape.active_weights == 16 * 60_817_408 + 128_256 * 2048


def test_a_token_goes_through_some_of_the_experts():
    """Mixtral's 46.7 billion parameters are 12.7 for a token."""
    shape = find_shape("mixtral-8x7b")
    assert shape.block_linear_weights == 4096 * (4096 + 1024 + 1024 + 4096) + 8 * 3 * 4096 * 14336
    assert shape.block_other_weights == 2 * 4096 + 8 * 4096, "two norms and the router"
    assert shape.active_weights == 32 * (4096 * 10240 + 2 * 3 * 4096 * 14336) + 32000 * 4096


def refusal(call) -> str:
    with pytest.raises(BadInput) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba", None, 7, ["llama"]])
def test_what_is_no_decoder_that_we_know_is_refused(kind):
    said = refusal(lambda: of(kind))
    assert said.startswith(f"model made-up: we cannot estimate model_type {kind!r}; supported: ")
    assert "llama, mistral, mixtral" in said


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field):
    assert refusal(lambda: of(without=field)) == f"model made-up: its config.json has no {field}"
    assert refusal(lambda: of(**{field: None})) == f"model made-up: its config.json has no {field}"


@pytest.mark.parametrize(
    "field", [*REQUIRED, "num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [-1, 0, "64", True, 64.0, [64], float("nan")], ids=repr)
def test_a_number_that_is_none_is_named(field, value):
    said = refusal(lambda: of("mistral", **{field: value}))
    assert said == f"model made-up: {field} = {value!r} in its config.json must be a whole number above 0"


def test_heads_that_cannot_be_shared_are_refused():
    said = refusal(lambda: of(num_attention_heads=8, num_key_value_heads=3))
    cure = "correct num_attention_heads or num_key_value_heads in config.json"
    assert said == f"model made-up: 8 heads cannot share 3 key heads; {cure}"


def test_a_file_and_its_folder_are_one(tmp_path):
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps({"model_type": "llama", **SMALL}), encoding="utf-8")
    file, folder = find_shape(str(tmp_path / "config.json")), find_shape(str(tmp_path))
    assert file.weights == folder.weights == of().weights


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "cannot be read as JSON: Expecting property name"),
        (b"", "cannot be read as JSON: Expecting value"),
        (b"\xff\xfe", "cannot be read as JSON: 'utf-8' codec"),
        (b"[" * 100_000, "cannot be read as JSON: "),
        (b"[1]", "is no JSON object, so no config"),
        (b"{}", "we cannot estimate model_type None"),
    ],
    ids=["cut off", "empty", "no text", "deep", "a list", "nothing in it"],
)
def test_a_broken_file_is_named(tmp_path, text, said):
    file = tmp_path / "config.json"
    file.write_bytes(text)
    line = refusal(lambda: find_shape(str(file)))
    assert line.startswith(f"model {file}: ")
    assert said in line
