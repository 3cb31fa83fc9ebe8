"""The page of models and cards is made from the code."""

from cria_tricks.hardware.gpus import GPUS
from cria_tricks.models.catalogue import CATALOGUE
from cria_tricks.models.configs import KINDS
from tests.test_families import CHOSEN
from tools import support


def test_the_page_is_the_one_of_today():
    page = support.page()
    assert support.PAGE.read_text(encoding="utf-8") == page, "run make update"
    for name in (*CATALOGUE, *GPUS):
        assert f"| `{name}` |" in page, name


def test_trained_means_that_a_twin_of_the_family_is_trained_here():
    assert {kind for kind, _ in CHOSEN} == set(KINDS)
    assert {find[3].strip("`") for find in support.model_rows()} <= set(KINDS)
