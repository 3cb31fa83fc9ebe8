"""``cria film``: the dry run's bytes at every moment, tensors that a count by hand finds, files that stand alone."""

import json
import re
from xml.etree import ElementTree

import pytest
from transformers import AutoConfig

from cria_tricks.hardware import T4
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.predict.dry_run import dry_run, fake_training, later_step
from cria_tricks.predict.film import SAVED, Film, film
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import film_answer
from cria_tricks.report.film_answer import FilmAnswer
from cria_tricks.resolve import resolve
from tools import films, ladder

BLOCKS, TOKENS = 2, 48
CONFIG = {**CONFIGS["smollm2"], "num_hidden_layers": BLOCKS}
D, V, F = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["intermediate_size"]
SETS = {
    "plain": "",
    "accumulation": "gradient_accumulation=2",
    "checkpointing": "gradient_checkpointing=true",
    "in_backward": "gradient_checkpointing=true optimizer_in_backward=clip",
    "capstone": "peft=lora quantization=nf4 double_quantization=true precision=fp16 lean_preparation=true "
    "attention=sdpa gradient_checkpointing=true optimizer=adamw_8bit expand_kv=true chunked_loss=true "
    "gradient_accumulation=2",
    "offload": "peft=lora activation_offload=true gradient_checkpointing=true attention=sdpa",
}


def plan_of(name: str):
    return resolve(with_settings(Recipe(), [f"tricks.{word}" for word in SETS[name].split()]), T4)


_made: dict[str, Film] = {}


def filmed(name: str) -> Film:
    if name not in _made:
        _made[name] = film(plan_of(name), AutoConfig.for_model(**CONFIG), 1, TOKENS)
    return _made[name]


@pytest.mark.parametrize("name", SETS)
def test_each_part_has_the_dry_runs_peak_to_the_byte(name):
    dry = dry_run(plan_of(name), AutoConfig.for_model(**CONFIG), 1, TOKENS)
    assert {part: peak for part, (_, peak) in filmed(name).peaks().items()} == dry.moments


class Heard(LiveBytes):
    """Count live bytes, and keep the count after each allocation and each release."""

    def __init__(self):
        super().__init__()
        self.heard: list[int] = []

    def track(self, tensor):
        before = len(self._known)
        super().track(tensor)
        if len(self._known) > before:
            self.heard.append(self.live)

    def _free(self, key):
        super()._free(key)
        self.heard.append(self.live)


@pytest.mark.parametrize("name", ["plain", "in_backward"])
def test_the_lines_sum_to_the_live_bytes_at_every_moment(name):
    live = Heard()
    with fake_training(plan_of(name), AutoConfig.for_model(**CONFIG), live) as training:
        for part in later_step(training, 1, TOKENS):
            if part == "forward pass":
                live.heard = [live.live]
        heard = list(live.heard)
    shown = filmed(name)
    lines = shown.bytes()
    assert [sum(values) for values in zip(*lines.values(), strict=True)] == shown.totals()
    # What an operation needs inside is no tensor, so only the film has a moment for it.
    inside = {
        moment for shot in shown.shots if shot.how == "inside an operation" for moment in (shot.birth, shot.death)
    }
    assert [total for moment, total in enumerate(shown.totals()) if moment not in inside] == heard


def largest(name: str, part: str = ""):
    shown = filmed(name)
    peaks = shown.peaks()
    part = part or max(peaks, key=lambda one: peaks[one][1])
    return shown, peaks[part][0]


def test_without_the_chunked_loss_logits_are_as_large_as_by_hand():
    shown, moment = largest("offload", "forward pass")
    logits = [shot for shot in shown.alive(moment) if shot.line == "logits"]
    assert {shot.bytes for shot in logits} <= {4 * TOKENS * V, 4 * (TOKENS - 1) * V}
    assert len(logits) >= 2, "the logits, and what the loss makes of them"
    made = [shot for shot in shown.shots if shot.module == "lm_head" and shot.line == "logits" and shot.how == "mm"]
    assert [(shot.bytes, shot.shape[-1], shot.dtype) for shot in made] == [(4 * TOKENS * V, V, "float32")]
    chunked, moment = largest("capstone", "forward pass")
    # Of the 47 tokens that are trained, in one chunk.
    assert {shot.bytes for shot in chunked.alive(moment) if shot.line == "logits"} <= {4 * (TOKENS - 1) * V}


def test_without_checkpointing_each_mlp_keeps_its_activations():
    for name, blocks in (("plain", BLOCKS), ("checkpointing", 0)):
        shown = filmed(name)
        end = next(part.end for part in shown.parts if part.name == "forward pass") - 1
        saved = [shot for shot in shown.alive(end) if shot.line == SAVED and ".mlp" in shot.module]
        wide = [shot for shot in saved if shot.bytes == 4 * TOKENS * F]
        # Of gate, up, the activation of the gate, and the product of both: what down_proj gets.
        assert len(wide) == 4 * blocks
        assert {shot.module for shot in wide} == {
            f"layers.{block}.mlp{part}" for block in range(blocks) for part in ("", ".gate_proj", ".up_proj", ".act_fn")
        }


def test_full_fine_tuning_has_two_states_and_a_gradient_of_each_weight():
    shown, _ = largest("plain")
    end = shown.parts[-1].first  # after the backward pass
    there = shown.alive(end)
    embedding = 4 * V * D
    four = {(shot.module, shot.how) for shot in there if shot.bytes == embedding}
    assert four == {("embed_tokens.weight", how) for how in ("weight", "exp_avg", "exp_avg_sq", "gradient")}
    weights = sum(shot.bytes for shot in there if shot.how == "weight")
    lines = {line: values[end] for line, values in shown.bytes().items()}
    assert lines["gradients"] == weights
    assert 2 * weights <= lines["optimizer states"] <= 2 * weights + 8 * len(there), "and a step of 4 bytes each"
    never = filmed("in_backward")
    waiting = never.bytes()["gradients"]
    assert max(waiting) <= 3 * embedding, "a gradient is gone before the next one comes"
    assert waiting[never.parts[-1].first] == 0


def test_makers_are_named_in_both_passes():
    shots = filmed("checkpointing").shots
    hows = {(shot.module, shot.how) for shot in shots}
    assert ("layers.1.mlp.down_proj", "mm") in hows
    assert ("layers.1.mlp.down_proj", "mm, once more") in hows or ("layers.1.mlp.act_fn", "silu, once more") in hows
    assert ("layers.1.mlp.down_proj", "mm, backward") in hows
    assert not [shot for shot in shots if not shot.module]


def test_the_allocator_reserves_at_least_what_is_allocated():
    shown = filmed("capstone")
    assert len(shown.reserved) == shown.moments
    assert all(kept >= total for kept, total in zip(shown.reserved, shown.totals(), strict=True))


ABOUT = {
    "title": "A step",
    "model": "smollm2",
    "card": "Tesla T4",
    "capacity": T4.memory_bytes,
    "rows": 1,
    "tokens": TOKENS,
}


def test_the_data_keeps_the_peaks_and_names_the_largest_tensors():
    shown = filmed("capstone")
    data = json.loads(json.dumps(FilmAnswer(shown, ABOUT).data()))
    kept = list(film_answer.kept_moments(shown))
    totals = film_answer.stacked(data)[-1]
    assert totals == [shown.totals()[moment] for moment in kept]
    assert {name: totals[peak] for name, _, _, peak in data["parts"]} == FilmAnswer(shown, ABOUT).peaks()
    assert totals[data["peak"]] == max(shown.totals())
    assert data["x"] == sorted(data["x"])
    assert len(data["x"]) <= 2 * film_answer.STRIPS + 12
    for number in range(0, len(kept), 7):
        there = shown.alive(kept[number])
        named = [(data["tensors"][family], count) for family, count in data["largest"][number]]
        assert len(named) == film_answer.LARGEST
        for (line, size, shape, dtype, module, how), count in named:
            pattern = re.escape(module).replace(r"\*", r"\d+")
            same = [shot for shot in there if (shot.line, shot.bytes, shot.dtype, shot.how) == (line, size, dtype, how)]
            alike = [shot for shot in same if list(shot.shape) == shape and re.fullmatch(pattern, shot.module)]
            assert len(alike) == count
        together = [family[1] * count for family, count in named]
        assert together == sorted(together, reverse=True)
        assert together[0] >= there[0].bytes


def test_a_picture_is_readable_alone_and_a_page_needs_no_other_file(tmp_path):
    answer = FilmAnswer(filmed("capstone"), ABOUT)
    answer.write(tmp_path / "film.svg")
    root = ElementTree.fromstring((tmp_path / "film.svg").read_text())
    words = " ".join(root.itertext())
    assert "peak" in words
    assert all(part.name in words for part in filmed("capstone").parts[:2])
    answer.write(tmp_path / "film.html")
    page = (tmp_path / "film.html").read_text()
    assert not re.findall(r"(?:src|href)=", page.split("<script>")[0])
    assert '<div class="film">' in page


def test_the_command_says_the_peak_and_writes_nothing(run_cria, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("baseline", "--model", "random:tiny", "--gpu", "t4", "--set", "data.max_length=64")
    code, stdout, stderr = run_cria("film", *small)
    assert code == 0, stderr
    assert stdout.startswith("The peak of a step is ")
    assert "recording: backward pass" in stderr
    assert not list(tmp_path.iterdir())
    code, stdout, _ = run_cria("film", *small, "--json", "--out", "film.svg")
    found = json.loads(stdout)
    assert code == 0
    assert found["peak_bytes"] == max(found["peaks"].values())
    assert len(found["largest"]) >= 5
    assert (tmp_path / "film.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("kwanzaa --out film.png", "must end with .html or .svg"),
        ("kwanzaa --gpu t4x2", "a film is of one card"),
        ("kwanza --gpu t4", "unknown recipe"),
        ("kwanzaa --gpu t5", "t5"),
        ("baseline --model random:tiny --gpu t4 --set data.max_length=16 --out file/film.svg", "file"),
    ],
)
def test_a_wrong_question_is_one_line(arguments, said, run_cria, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    code, stdout, stderr = run_cria("film", *arguments.split())
    errors = [line for line in stderr.splitlines() if not line.startswith("recording: ")]
    assert (code, stdout) == (2, "")
    assert len(errors) == 1
    assert said in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


# The films of the home page


def test_a_committed_film_is_what_the_package_films_now():
    label = "chunked loss"  # in fp32; autocast frees its copies in another order each time
    recipe = ladder.recipes_of_steps()[label]
    assert json.loads(json.dumps(films.made(recipe))) == films.read()["films"][label]


def test_committed_films_are_all_there_and_small():
    committed = films.read()["films"]
    assert list(committed) == list(ladder.LADDER_STEPS)
    found = films.files(committed)
    assert {path.name for path in films.FOLDER.iterdir()} == set(found)
    for name, text in found.items():
        assert (films.FOLDER / name).read_text(encoding="utf-8") == text, "run: make films"
    assert len(found["home.js"]) <= 350_000
