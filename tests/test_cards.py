"""The reference: cards with plain labels, no marks of Sphinx, and pages that say how to switch a technique on."""

import pytest

from cria_tricks.predict.toggles import off_the_capstone
from cria_tricks.switches import TECHNIQUES, technique_name
from cria_tricks.techniques import INFERENCE
from tools import techniques

cards = pytest.importorskip("tools.cards", reason="griffe, which renders the reference, is not installed")


def test_a_card_becomes_a_list_with_labels_that_need_no_context():
    card = "LoRA: freeze W.\n\nSaves    gradients\nClaim    exact\nBreaks   nothing\nOurs     one layer\n"
    assert cards.as_list(card).splitlines()[2:6] == [
        "- **Saves** gradients",
        "- **Changes results?** exact",
        "- **Fails when, or not with** nothing",
        "- **Our code** one layer",
    ]
    assert cards.as_list("Needs more") == "Needs more", "a sentence is no line of a card"


def test_marks_of_sphinx_are_left_out():
    text = "What :func:`~cria_tricks.spread` returned::\n\n    code\n\n::\n\n    more"
    assert cards.without_marks(text) == "What `cria_tricks.spread` returned:\n\n    code\n\n\n\n    more"


def test_every_technique_page_says_how_to_switch_it_on_and_what_it_saves():
    pages = techniques.pages()
    saved = off_the_capstone()
    for trick in TECHNIQUES:
        text = pages[f"reference/techniques/{technique_name(trick)}.md"]
        for switch in trick.TECHNIQUE.switches:
            assert f"`--set tricks.{switch}`" in text
            if amount := round(saved.get(switch, 0) / 2**20):
                assert f"`{switch}` {'saves' if amount > 0 else 'adds'} {abs(amount):,} MiB" in text
    for trick in INFERENCE:
        assert (
            f"`{trick.TECHNIQUE.command}` always uses it." in pages[f"reference/techniques/{technique_name(trick)}.md"]
        )
