"""The commands print what tests/snapshots keeps; nothing is cut at 80 columns, and nothing is wrapped in a pipe."""

import pytest

from cria_tricks.doctor import machine
from tests import snapshots

CASES = [(name, width) for name in snapshots.CASES for width in snapshots.WIDTHS]


@pytest.mark.parametrize(("name", "width"), CASES)
def test_a_command_prints_what_is_kept(name, width):
    kept = snapshots.path(name, width).read_text(encoding="utf-8")
    assert snapshots.answer(snapshots.CASES[name], width) == kept, "meant? then run make update"


def test_each_file_belongs_to_a_case():
    assert {path.name for path in snapshots.FOLDER.iterdir()} == {snapshots.path(*case).name for case in CASES}


@pytest.mark.parametrize(("name", "width"), CASES)
def test_nothing_is_cut_and_tables_keep_to_the_width(name, width):
    kept = snapshots.path(name, width).read_text(encoding="utf-8")
    assert "…" not in kept
    screen = kept.partition("\nFrom scratch, in ")[0]  # code stays as it was written, and the terminal wraps it
    assert max(map(len, screen.splitlines())) <= width


@pytest.mark.parametrize("name", snapshots.CASES)
def test_a_pipe_gets_every_word_in_as_many_columns_as_it_needs(name):
    piped = snapshots.answer(snapshots.CASES[name], None)
    narrow = snapshots.path(name, 80).read_text(encoding="utf-8")
    words, others = (sorted(text.replace("─", "").split()) for text in (piped, narrow))
    assert words == others, "the same words, whatever the width"
    assert len(piped.splitlines()) <= len(narrow.splitlines())


def test_a_long_sentence_is_one_line_in_a_pipe():
    assert max(map(len, snapshots.answer(snapshots.CASES["plan_all"], None).splitlines())) > 300


def test_the_pretended_machine_has_every_entry_of_a_real_one():
    real, pretended = machine.examine(), snapshots._pretended()
    assert pretended.keys() == real.keys()
    assert pretended["device"].keys() == real["device"].keys()
    assert pretended["versions"].keys() == real["versions"].keys()
