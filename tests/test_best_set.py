"""``cria plan`` of a model answers for the best set that fits: never worse with more memory, the same everywhere."""

import functools
import itertools
import json
import random
import shlex

import pytest

import cria_tricks
from cria_tricks import recipes
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.hardware import T4
from cria_tricks.hardware.gpus import GPUS, find_gpu
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.run.asked import advice, asked
from tests.sweeps import sample
from tools.fit import bridge, fields

VERDICTS = ("does not fit", "tight", "fits")
"""From the worst to the best."""
SIZES = (3, 4, 6, 8, 10, 11, 12, 16, 20, 24, 40, 80)
LENGTHS = (1024, 4096)


@functools.cache
def drawn_models(number: int = 40, seed: int = 55) -> tuple[str, ...]:
    """All models of the catalogue, and some of their configs with other numbers of blocks, as JSON."""
    draw = random.Random(seed)
    others = []
    for name in draw.choices(list(CATALOGUE), k=number - len(CATALOGUE)):
        config = {**CONFIGS[name], "num_hidden_layers": draw.randrange(4, 60)}
        others.append(json.dumps({field: value for field, value in config.items() if field != "layer_types"}))
    return (*CATALOGUE, *others)


def named(model: str, folder) -> str:
    """A model as ``--model`` takes it; a config is written to a file."""
    if not model.startswith("{"):
        return model
    file = folder / "config.json"
    file.write_text(model)
    return str(file)


def rank(answer) -> int:
    return VERDICTS.index(answer.verdict)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("model", sample(drawn_models(), 2))
def test_no_verdict_gets_worse_with_more_memory(model, tokens, tmp_path):
    model = named(model, tmp_path)
    ask = functools.partial(cria_tricks.plan, model, settings=[f"data.max_length={tokens}"], rows_full=True)
    answers = [ask(gpu=f"{size}GiB:{capability}") for capability in ("7.5", "8.6") for size in sample(SIZES, 6)]
    for few, more in itertools.pairwise(answers):
        if few.capacity_bytes < more.capacity_bytes:
            assert rank(few) <= rank(more), (few.gpu, few.verdict, more.gpu, more.verdict)
    for answer in answers:
        own = ask(gpu=f"{answer.capacity_bytes / 2**30:g}GiB:{'7.5' if '7.5' in answer.gpu else '8.6'}", as_is=True)
        assert rank(answer) >= rank(own), "the recipe's own set is one of those that are searched"


@pytest.mark.parametrize(
    "change", ["data.max_length=8192", "tricks.attention=eager", "train.batch_size=8", "lora.r=64"]
)
def test_the_kwanzaa_recipe_with_a_change_of_yours_is_no_worse_on_a_larger_card(change):
    """From 10.5 GiB on it saves less memory, but only where there is room for it."""
    ranks = [rank(cria_tricks.plan("kwanzaa", gpu=f"{size}GiB", settings=[change], rows_full=True)) for size in SIZES]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("recipe", "model"), [("qlora", "qwen3-8b"), ("kwanzaa", "qwen3-8b"), ("lora", "llama-3.2-3b"), ("full", "smollm2")]
)
def test_the_second_line_names_the_set_and_as_is_gives_the_recipes_own(run_cria, recipe, model):
    words = ("plan", recipe, "--model", model, "--gpu", "t4", "--rows-full")
    code, stdout, _ = run_cria(*words)
    assert code == 0
    second = stdout.splitlines()[1]
    assert second.startswith("switches  tricks.")
    assert "--as-is" in stdout.partition("\npeak ")[0]
    own = json.loads(run_cria(*words, "--as-is", "--json")[1])
    assert "fit" not in own or own["fit"] is None
    recipe = asked(recipe, [f"model={model}"], T4, find_shape(model)).recipe
    assert own["needed_bytes"] == Target(find_shape(model), T4).memory(recipe).needed_bytes


def test_a_model_in_the_recipes_place_is_taken_with_qlora(run_cria, tmp_path):
    config = named(json.dumps(dict(CONFIGS["qwen3-4b"])), tmp_path)
    answers = [cria_tricks.plan(name, gpu="8GiB", rows_full=True) for name in ("qwen3-4b", "Qwen3-4B", config)]
    qlora = cria_tricks.plan("qlora", model="qwen3-4b", gpu="8GiB", rows_full=True)
    assert {one.needed_bytes for one in answers} == {qlora.needed_bytes}
    code, _, stderr = run_cria("train", "qwen3-4b")
    assert (code, stderr) == (
        2,
        "error: unknown recipe qwen3-4b: it is a model; name the recipe qlora with --set model=qwen3-4b\n",
    )


def test_what_the_user_has_set_stays_in_every_search():
    sets = ["tricks.chunked_loss=false", "tricks.gradient_checkpointing=true", "train.batch_size=2"]
    for aim in ("", "smallest", "nearest", "fastest"):
        found = cria_tricks.plan("qwen3-4b", gpu="t4", settings=sets, rows_full=True, fit=aim)
        assert found.fit
        assert not {one.partition("=")[0] for one in found.fit.chosen.set} & {one.partition("=")[0] for one in sets}
        assert found.batch == 2


def test_the_nearest_set_is_the_recipes_own_where_that_fits():
    found = cria_tricks.plan("qwen3-4b", gpu="12GiB", rows_full=True)
    assert found.fit
    assert (found.fit.aim, found.fit.chosen.set, found.verdict) == ("nearest", [], "fits")


def questions(number: int, seed: int = 300) -> list[tuple[str, str, dict[str, str]]]:
    """Models, cards and some numbers; cards whose host is assumed are left to the tests of the host."""
    draw = random.Random(seed)
    cards = (*GPUS, "6GiB", "8GiB", "11GiB:7.5", "12GiB", "16GiB:8.9", "24GB", "48GiB")
    found = []
    for _ in range(number):
        numbers = {"tokens": draw.choice(("512", "2048", "4096", "16384")), "batch": draw.choice("1114")}
        found.append((draw.choice(list(CATALOGUE)), draw.choice(cards), numbers))
    return found


@pytest.mark.parametrize(("model", "card", "numbers"), sample(questions(300), 5))
def test_command_api_and_page_give_one_verdict(run_cria, model, card, numbers):
    gpu = find_gpu(card)
    choice = fields.default() | fields.of_recipe(recipes.qlora(gpu.device)) | {"model": model, "card": card} | numbers
    needed = asked("qlora", [f"model={model}"], gpu.device, find_shape(model)).recipe
    choice |= {name: value for name, value in fields.of_recipe(needed).items() if name in fields.SWITCHES}
    settings = [f"data.max_length={numbers['tokens']}"]
    if numbers["batch"] != "1":
        settings.append(f"train.batch_size={numbers['batch']}")
    page = json.loads(bridge.call("answer", json.dumps({"choice": choice})))
    if "refused" in page:
        with pytest.raises(BadInput):
            cria_tricks.plan(model, gpu=card, settings=settings, rows_full=True)
        return
    answer = cria_tricks.plan(model, gpu=card, settings=settings, rows=int(choice["rows"]), rows_full=True)
    sets = [word for setting in settings for word in ("--set", setting)]
    code, stdout, _ = run_cria("plan", model, "--gpu", card, *sets, "--rows", choice["rows"], "--rows-full", "--json")
    command = json.loads(stdout)
    assert command == answer.to_dict()
    assert code == (0 if answer.fits else 3)
    assert (page["data"]["verdict"], page["data"]["fits"]) == (answer.verdict, answer.fits)


WORSE = [
    ("kwanzaa", "t4", ["tricks.gradient_checkpointing=false", "tricks.chunked_loss=false", "train.batch_size=4"]),
    (
        "qwen3-8b",
        "rtx3060",
        ["tricks.gradient_checkpointing=false", "tricks.chunked_loss=false", "data.max_length=4096"],
    ),
    ("llama-3.1-70b", "24GiB", []),
    ("llama-3.1-8b", "t4", ["tricks.quantization=none", "tricks.double_quantization=false"]),
    ("full", "t4", ["model=llama-3.2-3b"]),
    ("mistral-7b", "8GiB", ["data.max_length=30000"]),
    ("llama-3.1-8b", "t4", ["data.max_length=90000"]),
]
"""Questions whose answer is no."""


@pytest.mark.parametrize("as_is", [True, False], ids=["as it is", "searched"])
@pytest.mark.parametrize(("recipe", "card", "settings"), WORSE)
def test_each_suggestion_does_what_it_says(recipe, card, settings, as_is):
    """It is asked again on the same question: with it the run fits, and needs the bytes that were said."""
    ask = functools.partial(cria_tricks.plan, recipe, gpu=card, rows_full=True)
    answer = ask(settings=settings, as_is=as_is)
    if answer.verdict == "fits":
        return
    fitting = [one for one in answer.suggestions if one.fits]
    assert fitting, "something fits, or a single switch would have been enough"
    for one in fitting:
        after = ask(settings=[*settings, *one.set], as_is=as_is)
        assert after.fits, one
        if as_is:
            assert after.peak_bytes == one.peak_bytes
            assert answer.peak_bytes - after.peak_bytes == one.saved_bytes


def test_what_a_search_that_finds_nothing_names_fits():
    ask = functools.partial(cria_tricks.plan, "llama-3.1-8b", gpu="8GiB", rows_full=True)
    with pytest.raises(OutOfMemory) as caught:
        ask(settings=["tricks.quantization=none"], fit="smallest")
    ways = str(caught.value).partition("this fits: ")[2].split(", or ")
    assert len(ways) > 1
    for way in ways:
        sets = shlex.split(way)[1::2]
        kept = [] if any("quantization=nf4" in one for one in sets) else ["tricks.quantization=none"]
        assert ask(settings=[*kept, *sets], as_is=True).fits


def test_a_search_follows_what_a_refusal_asks_for(tmp_path):
    """Gemma 2 caps its attention's scores, so it takes eager attention; and a full run has no chunked loss."""
    assert advice("tricks.a=b: x is y; set tricks.peft=lora, or tricks.chunked_loss=false") == [
        "tricks.peft=lora",
        "tricks.chunked_loss=false",
    ]
    capped = named(json.dumps({**CONFIGS["gemma-3-1b"], "attn_logit_softcapping": 50.0}), tmp_path)
    toml = tmp_path / "own.toml"
    toml.write_text(recipes.qlora(T4).to_toml().replace('"smollm2"', f'"{capped}"'))
    full = {"recipe": "qlora", "model": "gemma-3-1b", "settings": ["tricks.peft=none", "tricks.quantization=none"]}
    for asked_for, setting in (
        ({"recipe": capped}, "tricks.attention=eager"),
        ({"recipe": toml}, "tricks.attention=eager"),
        (full, "tricks.chunked_loss=false"),
    ):
        for fit in ("fastest", "smallest", "nearest"):
            found = cria_tricks.plan(**asked_for, gpu="a100", rows_full=True, fit=fit)
            assert any(setting in warning for warning in found.warnings)
            assert found.fits
    with pytest.raises(BadInput, match=r"set tricks\.attention=eager"):
        cria_tricks.plan(toml, gpu="a100", rows_full=True)
    with pytest.raises(BadInput, match=r"set tricks\.attention=eager"):
        cria_tricks.plan(capped, gpu="a100", rows_full=True, settings=["tricks.attention=sdpa"])


def test_settings_of_the_starters_are_the_recipes_of_their_names():
    for name, peft, quantization in (("qlora", "lora", "nf4"), ("lora", "lora", "none"), ("full", "none", "none")):
        recipe = recipes.get(name, T4)
        assert (recipe.tricks.peft, recipe.tricks.quantization) == (peft, quantization)
        assert not Target(find_shape(recipe.model), T4).resolve(recipe).warnings
