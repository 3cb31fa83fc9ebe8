"""Figures for phones: narrow panels below each other, words that fit, and no variant where words would overlap."""

import pytest

from benchmarks import plot
from cria_tricks import course
from cria_tricks.bench import narrow, style
from cria_tricks.common.themes import THEMES

LONG = "one label with words, too long for a phone"


def width(svg: bytes) -> float:
    """The width of an SVG in points."""
    return float(plot.re.search(rb'<svg[^>]* width="([\d.]+)pt"', svg)[1])


def two_panels(theme):
    figure, both = style.panels(2, 2.5)
    for axes in both:
        axes.plot([0, 1], label=LONG)
        axes.plot([1, 0], label="short")
        axes.set(xlabel=LONG, ylabel="a name that is longer than its panel is high")
        axes.set_yticks([0, 1], [LONG, "short"])
        axes.legend(ncols=1)
    both[1].set_xticks(range(8), [f"the word {n}" for n in range(8)])
    return figure


def crowded(theme):
    sketch = course.Sketch(theme, 40, 10)
    for place in range(10):
        sketch.tensor(4 * place, 1, 3, 3, f"incompressible-{place}")
    return sketch.figure


def wordy(theme):
    sketch = course.Sketch(theme, 40, 10)
    for place in range(3):
        sketch.tensor(13 * place, 1, 12, 8, "words that need more than one line there")
    return sketch.figure


@pytest.mark.parametrize("theme", THEMES)
def test_panels_stand_below_each_other_and_their_words_fit(theme):
    wide, small = (style.save(two_panels, theme, narrow=is_narrow) for is_narrow in (False, True))
    assert (width(wide), width(small)) == (style.WIDTH * 72, narrow.WIDTH * 72)
    assert not style.is_narrow(), "the next figure would be narrow"
    token = style._narrow.set(True)
    try:
        figure = two_panels(THEMES[theme])
    finally:
        style._narrow.reset(token)
    before = narrow.collisions(figure)
    assert any("overlaps" in found for found in before), "nothing to mend"
    narrow.fit(figure)
    upper, lower = (axes.get_window_extent() for axes in figure.axes)
    assert upper.y0 > lower.y1
    assert (upper.x0, upper.x1) == pytest.approx((lower.x0, lower.x1), abs=2)
    assert narrow.collisions(figure) == []


def test_a_narrow_sketch_breaks_its_words_and_there_is_none_where_they_do_not_fit():
    assert width(style.save(wordy, "light", narrow=True)) == narrow.WIDTH * 72
    assert style.save(crowded, "light", narrow=True) == b""
    assert width(style.save(crowded, "light")) == style.WIDTH * 72


def test_a_number_at_a_bar_leaves_out_its_unit_where_the_axis_has_it():
    figure, (axes,) = style.panels(1, 2.0)
    axes.set_xlabel("peak, GiB")
    kept = [axes.text(0, 0, words) for words in (" 5.2 GiB", " 5.2 MiB", "a T4 has 14.7 GiB")]
    narrow.fit(figure)
    assert [text.get_text().replace("\n", " ") for text in kept] == [" 5.2", " 5.2 MiB", "a T4 has 14.7 GiB"]


def test_a_reader_of_a_notebook_gets_no_narrow_picture_but_under_the_sites_own_names(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.core.getipython.get_ipython", object)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    course.show(wordy, "words")
    course.show(crowded, "words")
    for data in shown:
        assert width(data["image/svg+xml"].encode()) == style.WIDTH * 72
    names = [{name for name in data if "narrow" in name} for data in shown]
    assert names == [{course.NARROW_LIGHT, course.NARROW_DARK}, set()]
    assert all(name.startswith("image/vnd.cria.") for name in names[0])
