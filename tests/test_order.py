"""The order of the lessons: each of the path that can lower the peak does so, and the page says what was computed."""

import itertools

from cria_tricks.common.lessons import LESSONS, PARTS, number_of
from cria_tricks.course.job import CAPSTONE, LESSON_OF, so_far
from cria_tricks.predict import toggles
from tools import order


def test_the_page_is_as_computed():
    assert order.filled() == order.PAGE.read_text(encoding="utf-8"), "run make update"


def test_every_lesson_of_the_path_but_accumulation_lowers_the_peak():
    found = order.bills()
    for name, (before, after) in zip(order.ORDERED, itertools.pairwise(order.peaks(found, order.ORDERED)), strict=True):
        assert after < before, name
    assert order.peaks(found, order.ORDERED)[-1] < found[frozenset(order.TAUGHT)].memory.peak_bytes


def test_switches_lessons_and_the_jobs_bill_have_one_order():
    fields = [field for fields in order.TAUGHT.values() for field in fields]
    assert fields == toggles.switched_on(CAPSTONE)
    path = PARTS["One card"]
    assert [name for name in path if name in order.TAUGHT] == [*order.TAUGHT]
    for name, fields in order.TAUGHT.items():
        assert {LESSON_OF[toggles.named(CAPSTONE, field)] for field in fields} == {name}
        known = toggles.switched_on(so_far(name))
        assert known == [
            field for other in order.TAUGHT if number_of(other) <= number_of(name) for field in order.TAUGHT[other]
        ]
    assert so_far(path[-1]) == CAPSTONE == so_far(LESSONS[-1])
