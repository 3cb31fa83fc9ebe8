"""Recipes as data: TOML in and out, --set, and errors in one line."""

import math
import tomllib
from dataclasses import replace

import pytest

from cria_tricks import recipes
from cria_tricks.bill.bill import Bill
from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import ALIASES, GONE, find_field, plain
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.cards import Host
from cria_tricks.hardware.gpus import COLAB, KAGGLE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.host import HostBill, host_bill
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, build, field_names, from_toml, with_settings
from cria_tricks.settings import Frozen, Tricks

H200 = Device("cuda", "NVIDIA H200", (9, 0), real_bf16=True, memory_bytes=150 * 10**9)


NUMBERS = {
    f"{group}.{name}": info
    for group, value in Recipe()
    if isinstance(value, Frozen)
    for name, info in type(value).model_fields.items()
    if info.annotation in (int, float)
}


@pytest.mark.parametrize("field", NUMBERS)
def test_each_number_is_taken_up_to_its_bounds_and_not_beyond(field):
    """``docs/reference/settings.md`` lists the bounds, and the defaults of all fields."""
    group, name = field.split(".")
    step = 1 if NUMBERS[field].annotation is int else 0.01
    found = set()
    for limit in NUMBERS[field].metadata:
        for end, beyond in (("ge", -step), ("gt", 0), ("le", step), ("lt", 0)):
            if not hasattr(limit, end):
                continue
            found.add(end)
            bound = getattr(limit, end)
            if beyond:
                assert getattr(getattr(build({group: {name: bound}}, "x", strict=True), group), name) == bound
            with pytest.raises(BadInput, match=rf"^x: {field} = .*: must be (less|greater) than"):
                build({group: {name: bound + beyond}}, "x", strict=True)
    assert found & {"ge", "gt"}


@pytest.mark.parametrize("text", ["", "en", "swa"])
def test_a_language_has_two_letters_or_three(text):
    assert build({"data": {"language": text}}, "x").data.language == text
    with pytest.raises(BadInput, match=r"data.language = .*: string should match pattern"):
        build({"data": {"language": f"{text}e" if len(text) != 2 else "e1"}}, "x")


@pytest.mark.parametrize(
    ("text", "found"),
    [("none", ()), ("tensorboard", ("tensorboard",)), ("[trackio, 'tensorboard',]", ("trackio", "tensorboard"))],
)
def test_trackers_are_none_a_word_or_a_list(text, found):
    assert with_settings(Recipe(), [f"train.report_to={text}"]).train.report_to == found
    assert build({"train": {"report_to": list(found) or "none"}}, "x", strict=True).train.report_to == found


def test_one_word_in_a_file_is_one_tracker():
    assert build({"train": {"report_to": "trackio"}}, "x", strict=True).train.report_to == ("trackio",)


@pytest.mark.parametrize("name", recipes.NAMED)
def test_toml_gives_the_same_recipe_back(name, tmp_path):
    recipe = recipes.get(name)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert from_toml(path) == recipe
    assert recipes.get(str(path)) == recipe


def on_a_t4(name: str, tokens: int, host: Host) -> tuple[Bill, HostBill]:
    """The memory of a recipe with rows of so many tokens, on a T4 and on the machine around it."""
    recipe = with_settings(recipes.get(name, T4), [f"data.max_length={tokens}"])
    target = Target(find_shape(recipe.model), T4)
    return target.memory(recipe), host_bill(replace(target, host=host), recipe)


@pytest.mark.parametrize(
    ("name", "tokens", "host"),
    [("full_1b", 1024, COLAB), ("long_8b", 65_536, KAGGLE), ("long_8b", 32_768, COLAB)],
)
def test_the_large_recipes_fit_a_t4_and_its_host(name, tokens, host):
    """With rows as long as they may be, neither is tight."""
    card, around = on_a_t4(name, tokens, host)
    assert (card.verdict, around.verdict) == ("fits", "fits")


def test_on_colab_a_longer_row_of_long_8b_has_no_room_on_the_host():
    """Pinned blocks are rounded up to a power of two, so a little more than 32,768 tokens take twice the bytes."""
    card, around = on_a_t4("long_8b", 34_000, COLAB)
    assert (card.verdict, around.verdict) == ("fits", "does not fit")
    most = max(around.peak.lines, key=lambda line: line.bytes)
    assert (most.name, most.bytes) == ("offloaded activations", 32 * 2**29)


@pytest.mark.parametrize("name", ["full_1b", "long_8b"])
def test_a_small_twin_has_the_same_switches(name):
    """Only the model, the rows and the run's length differ."""
    large, small = (recipes.get(one, T4) for one in (name, f"{name}_small"))
    assert large.tricks == small.tricks
    assert small.model == "smollm2"


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
        ("train.max_step=3", "did you mean train.max_steps?"),
        ("trian=3", "unknown field trian; did you mean a field of train? There are train.batch_size, train.epochs,"),
        ("train.rank=3", "unknown field train.rank; did you mean lora.r?"),
        ("train.colour=3", "unknown field train.colour; there are train.batch_size, train.epochs,"),
        ("colour=3", "unknown field colour; there are name, model, and fields of data, tricks, lora,"),
        (".lr=3", "unknown field .lr; did you mean train.learning_rate?"),
        ("train.lr=fast", "train.learning_rate = 'fast': must be a valid number"),
        ("train=5", "train is a group of fields; there are train.batch_size, "),
        ("train.=5", "unknown field train.; did you mean a field of train? There are train.batch_size, "),
        ("=5", "--set =5: the field before = is missing; write it as KEY=VALUE, e.g. train.max_steps=20"),
        ("tricks.peft=Lorra", "must be none, head, lora, prompt_tuning or side_network; did you mean lora?"),
        ("train.max_steps=-1", "greater than or equal to 0"),
        ("train.learning_rate=nan", "train.learning_rate"),
        ("train.learning_rate=inf", "train.learning_rate"),
        ("tricks.chunked_loss=maybe", "valid boolean"),
        ("gradient_checkpointing=-1", "= '-1': must be true, false, or the number of blocks, 0 or more"),
        ("data.train=", "must not be empty"),
        ("lora.target_modules=", "lora.target_modules = []: must not be empty"),
        ("train.time_budget=20x", "must be a time such as 90s, 20m or 1h30m"),
        ("data.overflow=cut", "must be truncate, drop or error"),
        ("tricks", "KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(setting, said):
    with pytest.raises(BadInput) as caught:
        with_settings(recipes.smoke(T4), [setting])
    assert said in str(caught.value)
    assert setting in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("written", "means"), [("true", True), ("false", False), ("8", 8), ("1", 1), ("0", False)])
def test_checkpointing_is_all_none_or_a_number_of_blocks(written, means, tmp_path):
    """Only true and false are bool. 1 is one block, although ``True == 1`` in Python; 0 blocks are none."""
    file = tmp_path / "recipe.toml"
    file.write_text(f"[tricks]\ngradient_checkpointing = {written}\n")
    typed = with_settings(Recipe(), [f"gradient_checkpointing={written.upper()}"])
    for found in (from_toml(file), typed):
        assert found.tricks.gradient_checkpointing is means or found.tricks.gradient_checkpointing == means != 1
        assert type(found.tricks.gradient_checkpointing) is type(means)
        file.write_text(found.to_toml())
        assert from_toml(file) == found == with_settings(found, [])


def test_one_block_is_not_all_blocks():
    one, all_blocks = (Recipe(tricks=Tricks(gradient_checkpointing=value)) for value in (1, True))
    assert one != all_blocks
    assert one == one.model_copy()
    assert len({one, all_blocks}) == 2
    assert hash(one.tricks) == hash(one.tricks.model_copy()) != hash(Tricks()), "as other recipes, it is a key"


@pytest.mark.parametrize("written", ["-1", "1.0", '"true"', '"8"'])
def test_a_file_has_types_so_checkpointing_takes_no_text(written, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(f"[tricks]\ngradient_checkpointing = {written}\n")
    with pytest.raises(BadInput, match="recipe.toml:2: .*must be true, false, or the number of blocks, 0 or more$"):
        from_toml(file)


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ("lr", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("Train.LR", "train.learning_rate"),
        ("learning-rate", "train.learning_rate"),
        ("rank", "lora.r"),
        ("lora.rank", "lora.r"),
        ("r", "lora.r"),
        ("lora_alpha", "lora.alpha"),
        ("batch", "train.batch_size"),
        ("bs", "train.batch_size"),
        ("batch_size", "train.batch_size"),
        ("train.bs", "train.batch_size"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("epochs", "train.epochs"),
        ("num_train_epochs", "train.epochs"),
        ("steps", "train.max_steps"),
        ("max_steps", "train.max_steps"),
        ("seq", "data.max_length"),
        ("seq_len", "data.max_length"),
        ("max_seq_length", "data.max_length"),
        ("data.max_seq_length", "data.max_length"),
        ("max_length", "data.max_length"),
        ("grad_accum", "tricks.gradient_accumulation"),
        ("gradient_accumulation_steps", "tricks.gradient_accumulation"),
        ("TRICKS.Gradient_Accumulation", "tricks.gradient_accumulation"),
    ],
)
def test_a_field_is_found_by_the_names_that_people_type(typed, field):
    """The recipe is the one that the full name gives, and no other field changes."""
    start = Recipe()
    group, _, name = field.partition(".")
    value = getattr(getattr(start, group), name)
    other = value / 2 if 0 < value < 1 else int(value) + 8
    found = with_settings(start, [f"{typed}={other}"])
    assert found == with_settings(start, [f"{field}={other}"])
    assert found != start
    assert tomllib.loads(found.to_toml())[group][name] == other


def test_every_other_name_is_of_one_field_and_of_nothing_else():
    known = field_names()
    last = {name.rpartition(".")[2] for name in known}
    assert set(ALIASES.values()) <= set(known)
    assert not set(ALIASES) & (last | {name.partition(".")[0] for name in known})
    for alias, field in ALIASES.items():
        assert alias == plain(alias)
        assert find_field(alias.upper(), known) == find_field(f"{field.partition('.')[0]}.{alias}", known) == field


@pytest.mark.parametrize("field", GONE)
def test_a_field_that_is_gone_is_refused_in_one_line_that_says_what_to_use_instead(field, tmp_path):
    assert field not in {*field_names(), *ALIASES.values()}
    group, _, name = field.rpartition(".")
    said = f"{field} is gone: {GONE[field]}"
    for key in (field, field.upper(), name):
        with pytest.raises(BadInput) as caught:
            with_settings(Recipe(), [f"{key}=adapt"])
        assert str(caught.value) == f"--set {key}=adapt: {said}"
    file = tmp_path / "old.toml"
    file.write_text(f'[{group}]\nbatch_size = 2\n{name} = "stop"\n')
    with pytest.raises(BadInput) as caught:
        from_toml(file)
    assert str(caught.value) == f"recipe {file}:3: {said}"


@pytest.mark.parametrize("field", field_names())
def test_a_field_is_found_by_its_own_name_in_any_case(field):
    assert find_field(field, field_names()) == find_field(field.upper(), field_names()) == field


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tricks.quantization=NF4", "nf4"),
        ("tricks.peft=LoRA", "lora"),
        ("optimizer=adamw-8bit", "adamw_8bit"),
        ("precision=FP16", "fp16"),
        ("model=SmolLM2", "smollm2"),
        ("model=Llama-3.2-1B", "llama-3.2-1b"),
        ("model=random:TINY", "random:tiny"),
        ("model=Owner/SmolLM2", "Owner/SmolLM2"),
    ],
)
def test_a_word_is_taken_in_any_case_and_kept_in_its_own(setting, value):
    found = with_settings(Recipe(model="qwen2.5-0.5b"), [setting])
    assert value in [found.model, *found.tricks.model_dump().values()]


def test_a_folder_here_is_no_short_name_in_other_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2").mkdir()
    assert Recipe(model="SmolLM2").model == "SmolLM2"
    assert Recipe(model="SMOLLM2").model == "smollm2"


def test_of_a_word_without_end_the_middle_is_left_out():
    with pytest.raises(BadInput) as caught:
        with_settings(recipes.smoke(T4), [f"train.max_steps{5000 * 'x'}=3"])
    assert "xxx...xxx" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tricks]\nquantization = ", "not valid TOML"),
        ("tricks = 3", "r.toml:1: tricks = 3: tricks is a group of fields; there are tricks.gradient_acc"),
        ("[train]\nmax_steps = 'many'", "r.toml:2: train.max_steps = 'many'"),
        ("[train]\nseed = 1\n\n[trian]\nseed = 1", "r.toml:4: unknown field trian; did you mean a field of train?"),
        ("[data]\nmax_length = 64\n[train]\n# batch_size\nbatch_size = 0", "r.toml:5: train.batch_size = 0: must be"),
        ("max_steps = 3", "r.toml:1: unknown field max_steps; did you mean train.max_steps?"),
        ("[Train]\nseed = 1", "r.toml:1: unknown field Train; did you mean a field of train?"),
        ("[train]\nSeed = 1", "r.toml:2: unknown field train.Seed; did you mean train.seed?"),
        ("name = ''", "r.toml:1: name = ''"),
        ("a = " + "[" * 5000, "not valid TOML: nested too deep"),
        ("[train]\nmax_steps = -1\nseed = -1", "r.toml:2: train.max_steps = -1: must be greater than or equal to 0"),
        ("[lora]\nr = 8\ntarget_modules = [1]", "r.toml:3: lora.target_modules.0 = 1: must be a valid string"),
        ("\n[data]\n\n# seed\n[train]\n 'seed' = -1", "r.toml:6: train.seed = -1"),
        ("[data.overlap]\nx = 1", "r.toml:1: data.overlap = {'x': 1}: must be a valid integer"),
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


@pytest.mark.parametrize("wrong", ["smok", "SMOK"])
def test_an_unknown_recipe_names_the_nearest(wrong):
    with pytest.raises(BadInput, match="did you mean smoke?"):
        recipes.get(wrong)


@pytest.mark.parametrize("name", ["kwanzaa_small", "Kwanzaa-Small", "KWANZAA_SMALL"])
def test_a_recipe_is_found_in_any_letter_case(name):
    assert recipes.get(name, T4) == recipes.kwanzaa_small(T4)


def test_a_recipe_is_given_back_as_it_is_and_another_thing_is_refused(tmp_path):
    recipe = Recipe(name="mine")
    assert recipes.get(recipe) is recipe
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    assert recipes.get(tmp_path / "mine.toml") == recipe
    with pytest.raises(BadInput, match="recipe 3: must be a Recipe, the name of one, or the path of a .toml file"):
        recipes.get(3)


def test_kwanzaa_is_the_original_run_but_for_the_rate():
    recipe = recipes.kwanzaa(T4)
    assert (recipe.lora.r, recipe.lora.alpha, recipe.train.epochs, recipe.train.learning_rate) == (16, 32, 3, 5e-4)
    assert recipe.train.learning_rate == pytest.approx(
        5e-4 * (2000 / find_shape(recipe.model).width) ** 0.781, rel=0.05
    )
    assert (recipe.train.batch_size, recipe.tricks.gradient_accumulation) == (1, 8)
    assert set(recipe.lora.target_modules) == set("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
    assert recipe.tricks.precision == "fp16", "a T4 only emulates bf16"
    assert recipes.kwanzaa(H200).tricks.precision == "bf16"
    small = recipes.kwanzaa_small(T4)
    assert (small.model, small.tricks, small.lora, small.data) == ("smollm2", recipe.tricks, recipe.lora, recipe.data)


def set_in(recipe: Recipe) -> dict:
    """What a recipe sets to something else than the default."""
    return recipe.model_dump(exclude_defaults=True)


SMALL = {"gradient_checkpointing": True, "chunked_loss": True}
"""What a card with room for the whole step leaves out."""
KWANZAA = {
    "quantization": "nf4", "double_quantization": True, "peft": "lora", "attention": "sdpa",
    "gradient_accumulation": 8, "optimizer": "adamw_8bit", "paged_optimizer": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "precision", "on_the_card"),
    [
        (T4, {"precision": "fp16"}, {"expand_kv": True, "lean_preparation": True}),
        (replace(T4, memory_bytes=recipes.ROOM), {"precision": "fp16"}, {"expand_kv": True, "lean_preparation": True}),
        (
            replace(T4, memory_bytes=recipes.ROOM - 1),
            {"precision": "fp16"},
            {"expand_kv": True, "lean_preparation": True, **SMALL},
        ),
        (
            Device("cuda", "7.9", (7, 9), False, 1),
            {"precision": "fp16"},
            {"expand_kv": True, "lean_preparation": True, **SMALL},
        ),
        (Device("cuda", "8.0", (8, 0), True, 1), {"precision": "bf16"}, {"lean_preparation": True, **SMALL}),
        (H200, {"precision": "bf16"}, {"lean_preparation": True}),
        (Device("cpu", "old", (0, 0), False, 1), {}, SMALL),
        (Device("cpu", "new", (0, 0), True, 1), {"precision": "bf16"}, SMALL),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_what_each_named_recipe_sets(device, precision, on_the_card):
    at_1024 = {"max_length": 1024}
    kwanzaa = {
        "data": {"train": "kwanzaa", "eval": "kwanzaa"},
        "tricks": {**KWANZAA, **precision, **on_the_card},
        "train": {"epochs": 3, "learning_rate": 5e-4, "save_steps": 7},
    }
    small = {**kwanzaa, "name": "kwanzaa_small", "train": {**kwanzaa["train"], "save_steps": 5}}
    assert set_in(recipes.smoke(device)) == {
        "name": "smoke", "data": at_1024, "train": {"learning_rate": 1e-3, "eval_steps": 4},
        "tricks": {"quantization": "nf4", "double_quantization": True, "peft": "lora", "chunked_loss": True,
                   "attention": "sdpa", "gradient_accumulation": 4, **precision},
    }  # fmt: skip
    assert set_in(recipes.kwanzaa(device)) == {**kwanzaa, "name": "kwanzaa", "model": "llama-3.2-1b"}
    smallest = {**kwanzaa, "name": "kwanzaa", "model": "llama-3.2-1b", "tricks": {**kwanzaa["tricks"], **SMALL}}
    assert set_in(recipes.capstone(device)) == smallest, "with a card's room, too"
    if device.kind == "cpu":
        small["tricks"] = {**kwanzaa["tricks"], "fused_lora": True, "fused_blocks": True}
        del small["tricks"]["gradient_checkpointing"]
    assert set_in(recipes.kwanzaa_small(device)) == small
    assert set_in(recipes.baseline(device)) == {"name": "baseline", "data": at_1024, "train": {"learning_rate": 2e-5}}


def test_an_unknown_recipe_without_a_near_one_lists_them_all():
    with pytest.raises(BadInput) as caught:
        recipes.get("xyzzy")
    assert str(caught.value) == (
        "unknown recipe xyzzy: there are smoke, qlora, lora, full, kwanzaa, kwanzaa_small, kwanzaa_curated, "
        "kwanzaa_curated_small, baseline, full_1b, full_1b_small, long_8b, long_8b_small, big_14b, big_14b_small, "
        "or name a .toml file"
    )


def test_frozen_and_closed():
    with pytest.raises(BadInput, match="unknown field tricks.colour"):
        build({"tricks": {"colour": "red"}}, "here")
    recipe = Recipe()
    with pytest.raises(ValueError, match="frozen"):
        recipe.model = "x"


@pytest.mark.parametrize("name", ["kwanzaa", "kwanzaa_small"])
def test_a_run_on_a_machine_that_goes_away_saves_at_least_twice_an_epoch(name):
    """Against its own number of steps: 107 rows, in windows of eight."""
    recipe = recipes.get(name)
    window = recipe.train.batch_size * recipe.tricks.gradient_accumulation
    steps_of_an_epoch = math.ceil(107 / window)
    assert 1 <= recipe.train.save_steps <= steps_of_an_epoch / 2
