"""Recipes as data: TOML in and out, --set, and errors in one line."""

import math
import tomllib

import pytest

from cria_tricks import recipes
from cria_tricks.errors import BadInput
from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, Tricks, build, field_names, from_toml, with_settings

H200 = Device("cuda", "NVIDIA H200", (9, 0), real_bf16=True, memory_bytes=150 * 10**9)


def test_no_toggle_is_on_by_default():
    assert Tricks() == Tricks(
        gradient_accumulation=1,
        gradient_checkpointing=False,
        precision="fp32",
        quantization="none",
        double_quantization=False,
        peft="none",
        optimizer="adamw",
        paged_optimizer=False,
        attention="eager",
        expand_kv=False,
        packing=False,
        chunked_loss=False,
        lean_preparation=False,
    )


@pytest.mark.parametrize("name", recipes.NAMED)
def test_toml_gives_the_same_recipe_back(name, tmp_path):
    recipe = recipes.get(name)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert from_toml(path) == recipe
    assert recipes.get(str(path)) == recipe


def test_a_toml_file_needs_only_what_differs(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[tricks]\nquantization = "nf4"\npeft = "lora"\n')
    recipe = from_toml(path)
    assert recipe.tricks == Tricks(quantization="nf4", peft="lora")
    assert recipe.train == Recipe().train


def test_set_changes_one_field_of_a_copy():
    before = recipes.smoke(T4)
    after = with_settings(
        before,
        ["tricks.quantization=int8", "train.max_steps=20", "train.learning_rate=2e-4", "data.train=a=b.jsonl"],
    )
    assert after.tricks.quantization == "int8"
    assert after.train.max_steps == 20
    assert after.train.learning_rate == 2e-4
    assert after.data.train == "a=b.jsonl"
    assert before == recipes.smoke(T4)
    assert with_settings(before, ["lora.target_modules=q_proj, v_proj"]).lora.target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("tricks.quantization=nf5", "did you mean nf4?"),
        ("tricks.quantisation=nf4", "did you mean tricks.quantization?"),
        ("max_steps=3", "did you mean train.max_steps?"),
        ("train.max_steps=-1", "greater than or equal to 0"),
        ("train.batch_size=0", "greater than or equal to 1"),
        ("train.learning_rate=fast", "valid number"),
        ("train.learning_rate=nan", "train.learning_rate"),
        ("train.learning_rate=inf", "train.learning_rate"),
        ("tricks.chunked_loss=maybe", "valid boolean"),
        ("data.train=", "must not be empty"),
        ("lora.target_modules=", "lora.target_modules = []: must not be empty"),
        ("train.time_budget=20x", "must be a time such as 90s, 20m or 1h30m"),
        ("train.time_budget=-1", "greater than or equal to 0"),
        ("data.overflow=cut", "must be truncate, drop or error"),
        ("lora.r=99999999999999999999", "less than or equal to 65536"),
        ("tricks", "KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(setting, said):
    with pytest.raises(BadInput) as caught:
        with_settings(recipes.smoke(T4), [setting])
    assert said in str(caught.value)
    assert setting in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_a_word_without_end_the_middle_is_left_out():
    with pytest.raises(BadInput) as caught:
        with_settings(recipes.smoke(T4), [f"train.max_steps{5000 * 'x'}=3"])
    assert "xxx...xxx" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tricks]\nquantization = ", "not valid TOML"),
        ("[tricks]\nquantisation = 'nf4'", "unknown field tricks.quantisation; did you mean tricks.quantization?"),
        ("tricks = 3", "r.toml:1: tricks = 3: must be a table"),
        ("[train]\nmax_steps = 'many'", "r.toml:2: train.max_steps = 'many'"),
        ("[train]\nseed = 1\n\n[trian]\nseed = 1", "r.toml:4: unknown field trian; did you mean train?"),
        ("[data]\nmax_length = 64\n[train]\n# batch_size\nbatch_size = 0", "r.toml:5: train.batch_size = 0: must be"),
        ("train.batch_size = 0", "r.toml:1: train.batch_size"),
        ("name = ''", "r.toml:1: name = ''"),
        ("[train]\nmax_steps = true", "train.max_steps = True: must be a valid integer"),
        ("[lora]\nr = '8'", "lora.r = '8': must be a valid integer"),
    ],
)
def test_a_wrong_file_is_said_in_one_line(text, said, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        from_toml(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1h30m", 5400), ("45", 45), ("0.5", 0.5)])
def test_a_time_budget_is_written_as_people_do(text, seconds, tmp_path):
    recipe = with_settings(Recipe(), [f"train.time_budget={text}"])
    assert recipe.train.time_budget == seconds
    (tmp_path / "r.toml").write_text(recipe.to_toml())
    assert from_toml(tmp_path / "r.toml") == recipe


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        from_toml(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(BadInput, match="not UTF-8"):
        from_toml(tmp_path / "latin.toml")


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean smoke?"):
        recipes.get("smok")


def test_kwanzaa_is_the_original_run():
    recipe = recipes.kwanzaa(T4)
    assert (recipe.lora.r, recipe.lora.alpha, recipe.train.epochs, recipe.train.learning_rate) == (16, 32, 3, 2e-4)
    assert (recipe.train.batch_size, recipe.tricks.gradient_accumulation) == (1, 8)
    assert set(recipe.lora.target_modules) == set("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
    assert recipe.tricks.precision == "fp16", "a T4 only emulates bf16"
    assert recipes.kwanzaa(H200).tricks.precision == "bf16"
    small = recipes.kwanzaa_small(T4)
    assert (small.model, small.tricks, small.lora, small.data) == ("smollm2", recipe.tricks, recipe.lora, recipe.data)


def test_frozen_and_closed():
    with pytest.raises(BadInput, match="unknown field tricks.colour"):
        build({"tricks": {"colour": "red"}}, "here")
    recipe = Recipe()
    with pytest.raises(ValueError, match="frozen"):
        recipe.model = "x"


def test_every_field_that_scripts_set_is_there():
    wanted = "model data.train data.eval data.max_length lora.r lora.alpha lora.dropout lora.target_modules "
    wanted += "train.batch_size train.epochs train.max_steps train.learning_rate train.save_steps train.seed"
    assert set(wanted.split()) <= set(field_names())
    assert tomllib.loads(Recipe().to_toml())["tricks"]["precision"] == "fp32"


@pytest.mark.parametrize("name", ["kwanzaa", "kwanzaa_small"])
def test_a_run_on_a_machine_that_goes_away_saves_at_least_twice_an_epoch(name):
    """Against its own number of steps: 107 rows, in windows of eight."""
    recipe = recipes.get(name)
    window = recipe.train.batch_size * recipe.tricks.gradient_accumulation
    steps_of_an_epoch = math.ceil(107 / window)
    assert 1 <= recipe.train.save_steps <= steps_of_an_epoch / 2
