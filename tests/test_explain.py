"""``cria explain`` and the table: told from the modules, and the page's tables are theirs."""

import ast
import builtins
import inspect
import itertools
import re
import symtable
from pathlib import Path

import pytest

from cria_tricks.cli.techniques import described, technique
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.parallel import BESIDE, STRATEGIES
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import TECHNIQUES, technique_name
from cria_tricks.techniques import INFERENCE, code_of, lora, nf4, side_network
from tools import switches

ROOT = Path(__file__).parents[1]
SPREAD = (*STRATEGIES.values(), *BESIDE.values())


def test_the_page_has_the_tables_as_they_are_made(tmp_path):
    page = "docs/reference/switches.md"
    copy = tmp_path / "switches.md"
    copy.write_text((ROOT / page).read_text())
    switches.write_into(copy)
    assert copy.read_text() == (ROOT / page).read_text(), "run make update"
    assert all(all(switches.row(trick)) for tricks in switches.GROUPS.values() for trick in tricks)


@pytest.mark.parametrize("strategy", SPREAD, ids=technique_name)
def test_the_plain_code_of_a_strategy_names_what_there_is(strategy):
    """It needs several processes, so it is read, and what it imports is imported. What it lacks is the reader's."""
    code = strategy.PLAIN
    tree = ast.parse(code)
    ours = {"base", "device", "input_ids", "labels", "model", "my_blocks", "rank", "stages", "summed_loss"}
    names = symtable.symtable(code, technique_name(strategy), "exec").get_symbols()
    lacks = {one.get_name() for one in names if not (one.is_assigned() or one.is_imported())}
    assert lacks - set(dir(builtins)) <= ours
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), technique_name(strategy), "exec"), {})


@pytest.mark.parametrize("trick", [*TECHNIQUES, *INFERENCE, *SPREAD], ids=technique_name)
def test_the_whole_card_is_shown(trick):
    """No word of the docstring is lost on the way."""
    about = described(technique(technique_name(trick)))
    shown = [about["title"], *itertools.chain(*about["card"].items())]
    assert " ".join(shown).split() == code_of(trick).__doc__.replace("\nShapes: ", "\nShapes ").split()


def test_a_reference_is_shown_as_it_is_written():
    found = described(technique("nf4"))["reference"]
    assert all(inspect.getsource(getattr(nf4, name)).rstrip() in found for name in nf4.REFERENCE)
    assert described(technique("paged_optimizer"))["reference"].startswith("def page(self")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("nf4", "nf4"),
        ("NF4", "nf4"),
        ("quantization=nf4", "nf4"),
        ("tricks.quantization=nf4", "nf4"),
        ("Tricks.Quantization=NF4", "nf4"),
        ("double_quantization", "nf4"),
        ("LoRA", "lora"),
        ("peft=LoRA", "lora"),
        ("Flash-Attention", "flash_attention"),
        ("gradient checkpointing", "gradient_checkpointing"),
        ("FSDP", "fsdp"),
        ("parallel.strategy=fsdp", "fsdp"),
        ("gradient_checkpointing=8", "gradient_checkpointing"),
    ],
)
def test_a_technique_is_found_by_its_settings_too_in_any_letter_case(typed, name):
    assert technique_name(technique(typed)) == name


def test_the_plain_code_of_lora_adapts_the_matrices_that_the_toggle_adapts(tiny_model):
    known = {"base": str(tiny_model)}
    exec(lora.PLAIN, known)
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora"]), T4)
    config = known["config"]
    assert config.target_modules == set(plan.peft["target_modules"])
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"):
        assert getattr(config, name) == plan.peft[name]


def test_the_plain_code_of_a_side_network_trains_as_many_blocks_as_the_toggle(tiny_model):
    known = {"base": str(tiny_model)}
    exec(side_network.PLAIN, known)
    beside = [block for block in known["model"].model.layers if hasattr(block, "beside")]
    assert len(beside) == resolve(with_settings(Recipe(), ["tricks.peft=side_network"]), T4).peft["blocks"]


def test_an_unknown_technique_is_one_line_with_the_nearest():
    with pytest.raises(BadInput, match=re.escape("unknown trick nf5: did you mean nf4?")):
        technique("nf5")
    with pytest.raises(BadInput, match=re.escape("unknown trick QLoRA: did you mean lora?")):
        technique("QLoRA")
    with pytest.raises(BadInput, match="there are mixed_precision, int8"):
        technique("?")
