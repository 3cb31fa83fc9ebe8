"""What the written pages say is so: links lead somewhere, quoted messages are ours, computed figures are computed."""

import ast
import importlib.metadata
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from cria_tricks import recipes
from cria_tricks.common.units import between, human, money, money_between
from cria_tricks.hardware.cards import CARDS, FLAVORS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, field_names, with_settings
from tools import pages
from tools.figures import with_blocks

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "lessons")  # those are made
OF_OTHERS = ("ERROR: ResolutionImpossible", "No module named 'cria_tricks'")
SYMPTOMS = [
    " ".join(found.split())
    for found in re.findall(r"^\*\*`(.+?)`", (ROOT / "docs/guide/colab.md").read_text(encoding="utf-8"), re.M | re.S)
]
SYMPTOMS_PAGE = (ROOT / "docs/symptoms.md").read_text(encoding="utf-8")

OF_LIBRARIES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ...": "",
    "... is reserved by PyTorch but unallocated": "",  # torch's c10/cuda/CUDACachingAllocator.cpp
    "CUDA error: out of memory": "",
    "Attempting to unscale FP16 gradients.": "torch/amp/grad_scaler.py",
    "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'": "",
    "expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != c10::Half": "",  # ATen's cuda/Blas.cpp
    "No inf checks were recorded for this optimizer.": "torch/amp/grad_scaler.py",
    "All labels in your dataset are -100. Training losses will be all 0.": "",  # Unsloth's
    "element 0 of tensors does not require grad and does not have a grad_fn": "torch/lib/libtorch_cpu.so",
    "A different number of tensors was saved during the original forward and recomputation": (
        "torch/utils/checkpoint.py"
    ),
    "Recomputed values for the following tensors have different metadata than during the forward pass.": (
        "torch/utils/checkpoint.py"
    ),
    "Only Tensors of floating point and complex dtype can require gradients": "torch/lib/libtorch_python.so",
    "FlashAttention only supports Ampere GPUs or newer.": "",  # flash-attention's csrc/flash_attn/flash_api.cpp
    "Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.": "bitsandbytes/cextension.py",
    "Your setup doesn't support bf16/gpu.": "transformers/training_args.py",
    "Paged optimizers are not supported on CPU. Falling back to non-paged optimizer behavior.": (
        "bitsandbytes/optim/optimizer.py"
    ),
    "torch._dynamo hit config.recompile_limit (8)": "torch/_dynamo/convert_frame.py",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!": (
        "torch/lib/libtorch_cpu.so"
    ),
    "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the one "
    "you're training on.": "accelerate/accelerator.py",
    "Watchdog caught collective operation timeout": "",  # torch's ProcessGroupNCCL.cpp
    "Weights only load failed.": "torch/serialization.py",
    "PytorchStreamReader failed reading zip archive": "torch/lib/libtorch_cpu.so",
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group": (
        "torch/optim/optimizer.py"
    ),
    "Target modules {...} not found in the base model.": "peft/tuners/tuners_utils.py",
    "The model is quantized with gguf and is not serializable": "transformers/modeling_utils.py",
    "TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'": "",  # Python's own
    "numpy.dtype size changed, may indicate binary incompatibility": "",  # Cython's, in any compiled package
    "xFormers can't load C++/CUDA extensions. xFormers was built for:": "",
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.": "",
}
"""The messages among the symptoms, and what says them; nothing where only a card's code or another package does."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_link_to_another_page_leads_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        place = (page.parent / target).resolve()
        if place.parent == ROOT / "docs" / "lessons":  # made of it by `make site`
            place = ROOT / "lessons" / f"{place.stem}.py"
        assert place.is_file(), target


@pytest.mark.parametrize("symptom", [found for found in SYMPTOMS if found not in OF_OTHERS])
def test_a_quoted_message_is_one_of_ours(symptom):
    parts = [part.strip(" ();:,.") for part in re.split(r"\.\.\.|; |data\.train", symptom)]
    quoted = [part for part in parts if len(part) > 2]
    assert quoted
    for part in quoted:
        assert any(part in message for message in _messages()), part


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_no_two_prices_are_taken_for_a_formula(page):
    """The site reads ``$...$`` as mathematics, so a dollar sign that would close a pair is escaped."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    for part in re.split(r"\n\s*\n|\||\n[-*] ", text):  # paragraphs, cells and list items
        assert not re.search(r"(?<!\\)\$\d[^$]*(?<![\s\\])\$", part), part


def test_there_are_symptoms_to_look_up():
    assert len(SYMPTOMS) > 20


def test_every_message_among_the_symptoms_is_looked_up():
    assert re.findall(r"^### `(.+?)`", SYMPTOMS_PAGE, re.M) == list(OF_LIBRARIES)


def test_every_symptom_has_an_anchor_of_its_own_and_links_among_them_lead_there():
    titles = re.findall(r"^#+ (.+)$", SYMPTOMS_PAGE, re.M)
    anchors = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles]
    assert len(set(anchors)) == len(anchors) > 50
    assert set(re.findall(r"\]\(#(.+?)\)", SYMPTOMS_PAGE)) <= set(anchors)


def test_every_word_of_the_glossary_has_an_anchor_of_its_own_and_they_are_sorted():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    letters = re.split(r"^## ", text, flags=re.M)[1:]
    assert [part[0] for part in letters] == sorted({part[0] for part in letters})
    for part in letters:
        words = re.findall(r"^### (.+?)(?: \{ #[\w-]+ \})?$", part, re.M)
        assert {word[0].upper() for word in words} == {part[0]}, part[:80]
    titles = re.findall(r"^### (.+?)(?: \{ #([\w-]+) \})?$", text, re.M)
    anchors = [anchor or re.sub(r"\W+", "-", title).strip("-").lower() for title, anchor in titles]
    assert len(set(anchors)) == len(anchors) > 80
    assert not re.search(r"### [^\n]+\n\n(#|\Z)", text), "a word without a definition"


def test_a_thread_among_the_symptoms_has_the_address_that_it_names():
    threads = re.findall(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\((.+?)\)", SYMPTOMS_PAGE)
    assert len(threads) > 40
    for repository, number, address in threads:
        kinds = [f"https://github.com/{repository}/{kind}/{number}" for kind in ("issues", "pull")]
        assert address in kinds, address


def test_the_settings_among_the_symptoms_can_be_set():
    found = re.findall(r"`((?:data|tricks|lora|train|eval|parallel)\.\w+)(=[^`]+)?`", SYMPTOMS_PAGE)
    assert len(found) > 15
    for name, value in found:
        assert name in field_names()
        if value:
            with_settings(Recipe(), [name + value])


@pytest.mark.parametrize(("symptom", "file"), [found for found in OF_LIBRARIES.items() if found[1]])
def test_a_message_among_the_symptoms_is_what_the_library_says(symptom, file):
    path = Path(importlib.util.find_spec(file.split("/")[0]).origin).parents[1] / file
    text = path.read_bytes()
    if path.suffix == ".py":  # strings over several lines
        text = re.sub(rb'"\s*\n\s*f?"', b"", text)
    elif sys.platform == "darwin":
        pytest.skip("compiled parts have other names there")
    for part in re.split(
        r", cuda:.*|\b0\b|\{\.\.\.\}|gguf|'\w+'|recompile_limit.*|(?<=failed) (?=reading)", symptom
    ):  # what is filled in
        assert part.strip().encode() in text, part


def test_the_flight_recorder_keeps_as_many_collectives_as_the_pages_say():
    """By default, and so without a variable in the commands that they print."""
    package = Path(importlib.util.find_spec("torch").origin).parent
    header = (package / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp").read_text(encoding="utf-8")
    if importlib.metadata.version("torch").startswith("2.13"):
        assert re.search(r'"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, 2000\)', header)
    for path in ("docs/guide/when_it_hangs.md", "lessons/monitoring.py"):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert "the last 2,000 collectives" in " ".join(text.replace("\n# ", " ").split())
        assert "TORCH_FR_BUFFER_SIZE=" not in text


@pytest.mark.parametrize("row", ["T4", "T4, the fewest bytes", "L4", "A10G", "A100-80"])
def test_the_table_of_costs_is_what_the_estimate_gives(row):
    text = (ROOT / "docs/guide/where_to_train.md").read_text(encoding="utf-8")
    said = next(line for line in text.splitlines() if line.startswith(f"| {row} |")).split(" | ")[1:]
    card = CARDS[row.partition(",")[0].lower()]
    recipe = recipes.kwanzaa(card.device)
    if "fewest" in row:
        recipe = recipes.capstone(card.device)
    target = Target(find_shape(recipe.model), card.device)
    found, run = plan_data.bill(target, recipe), plan_data.prices(target, recipe, 107)[0]
    a_step = between(*found.step_range)
    training = between(60 * run.minutes_low, 60 * run.minutes_high)
    assert said[:3] == [human(found.needed_bytes), a_step, training]
    cost = money_between(run.cost_low, run.cost_high)
    assert said[3:] == [money(FLAVORS[run.flavor].price), f"{cost} |"]


def test_the_map_is_what_the_estimate_gives():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert with_blocks(text, {"map": pages.the_map()}) == text, "run: make site"


def test_the_columns_of_the_map_do_not_add_up_to_the_peak_as_it_says():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    peak, *columns = (int(found.replace(",", "")) for found in re.findall(r"<td><b>([\d,]+)</b>", text))
    assert f"first line add up to {sum(columns):,} MiB, and the peak is {peak:,}" in text.replace("\n", " ")


def test_a_cell_of_the_map_opens_the_calculator_with_its_switch_and_those_above_it():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    found = re.findall(r'href="fit.html#([^"]+)" aria-label="\S+ MiB of .+? with (\S+): try it"', text)
    choices = [dict(setting.split("=") for setting in choice.split("&amp;")) for choice, _ in found]
    assert all(switch in choice.split("&amp;") for choice, switch in found)
    recipes_of = [with_settings(Recipe(), [f"tricks.{name}={value}" for name, value in one.items()]) for one in choices]
    assert recipes_of[0].tricks == with_settings(Recipe(), ["tricks.peft=lora"]).tricks
    assert recipes_of[-1].tricks == recipes.capstone(CARDS["t4"].device).tricks


@cache
def _messages() -> list[str]:
    """Every text in the code, whatever it fills in left out."""
    found = []
    for path in [*(ROOT / "cria_tricks").rglob("*.py"), *(ROOT / "lessons").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return found


def ours() -> list[tuple[str, str]]:
    """Every file of ours that a docstring of the package, CONTRIBUTING or a lesson's sources name, with where it is."""
    found = []
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs/reference/code.md"]
    for path in [*(ROOT / "cria_tricks").rglob("*.py"), *pages, *(ROOT / "lessons").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "lessons":
            text = text.partition("# - Ours:")[2]
        named = re.findall(r"`([\w./-]+\.py)\b", text)
        found += [(path.relative_to(ROOT).as_posix(), name) for name in named]
    return found


def test_files_that_are_named_are_there():
    """A move leaves no old name behind. Capital words stand for a name to be chosen."""
    folders = ("cria_tricks", "tests", "tools", "lessons", "benchmarks", "notebooks")
    files = {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    files.add("conftest.py")
    of_libraries = ("torch/", "bitsandbytes/")
    gone = [
        (where, name)
        for where, name in ours()
        if not name.startswith(of_libraries)
        and not re.search(r"[A-Z]{2}", name)
        and not any(file == name or file.endswith(f"/{name}") for file in files)
    ]
    assert len(ours()) > 150
    assert gone == []
