"""What lessons share: the job and its bill so far, figures, checks of exercises."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from cria_tricks import recipes, tricks
from cria_tricks.bench import figures, results, style, tables
from cria_tricks.bench.style import Drawing, Theme
from cria_tricks.bill.bill import Bill
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe
from cria_tricks.tricks.folds import estimate

GIB, MIB = 2**30, 2**20
CAPSTONE = recipes.kwanzaa(T4)
LESSON_OF = {switch: trick.LESSON for trick in tricks.TRICKS for switch in trick.SWITCHES}
LIGHT, DARK = "image/vnd.cria.light+svg", "image/vnd.cria.dark+svg"
"""The MIME types of a figure for the site's two modes; a notebook shows the light one on white."""
CHECKS: list[tuple[int, str, str]] = []
"""The exercises that were checked in this process: number, ``right``, ``no`` or ``not yet``, and the words said."""


def so_far(lesson: str) -> Recipe:
    """The Kwanzaa run with the toggles that the course has reached.

    Args:
        lesson: its file's name, ``03_gradient_checkpointing``; its own toggles are on. ``00_the_bill`` has none: plain
            fp32 full fine-tuning of Llama-3.2-1B, one row of 2,048 tokens.
    """
    lesson_of = {field: LESSON_OF[toggles.named(CAPSTONE, field)] for field in toggles.switched_on(CAPSTONE)}
    return toggles.with_only(CAPSTONE, [field for field, taught in lesson_of.items() if taught[:2] <= lesson[:2]])


def bill(recipe: Recipe) -> Bill:
    """What one training step takes on a T4, by hand."""
    return estimate(recipe, find_shape(recipe.model), T4)


def show_bill(before: Recipe, after: Recipe) -> None:
    """Print two bills side by side, row by row, in MiB."""
    first, second = bill(before), bill(after)
    rows = {row.name: [row.bytes, 0] for row in first.rows}
    for row in second.rows:
        rows.setdefault(row.name, [0, 0])[1] = row.bytes
    rows["peak of a step"] = [first.peak_bytes, second.peak_bytes]
    rows["needed, with CUDA's own"] = [first.needed_bytes, second.needed_bytes]
    print(f"{'MiB':34}{'before':>10}{'after':>10}{'change':>11}")
    for name, (old, new) in rows.items():
        change = f"{(new - old) / MIB:+11,.1f}" if new != old else f"{'':>11}"
        print(f"{name:34}{old / MIB:10,.1f}{new / MIB:10,.1f}{change}")
    print(f"{'a T4 has':34}{T4.memory_bytes / MIB:20,.1f}")


def staircase(lesson: str) -> Drawing:
    """The bills of the course until this lesson, one toggle after the other; its own are drawn strong."""
    reached = so_far(lesson)
    fields = toggles.switched_on(reached)
    names = ["plain fp32", *(toggles.named(CAPSTONE, field) for field in fields)]
    peaks = [bill(toggles.with_only(reached, fields[:n])).needed_bytes / GIB for n in range(len(names))]
    own = [LESSON_OF.get(name, "00")[:2] == lesson[:2] for name in names]

    def draw(theme: Theme) -> Figure:
        drawn, axes = figure(height=0.36 * len(names) + 1.0)
        colours = [theme.series[0] if mine else theme.quiet for mine in own]
        axes.barh(range(len(names)), peaks, color=colours, height=0.66)
        for place, peak in enumerate(peaks):
            axes.text(peak, place, f" {peak:.1f} GiB", va="center", color=theme.ink)
        figures.capacity(axes, theme)
        axes.set_yticks(range(len(names)), style.readable(names))
        axes.set(xlabel="needed for a training step, GiB", xlim=(0, max(*peaks, T4.memory_bytes / GIB) * 1.15))
        axes.set_ylim(len(names) - 0.4, -1.2)
        axes.grid(axis="x")
        return drawn

    return draw


def figure(height: float = 3.0) -> tuple[Figure, Axes]:
    """An empty figure of the course, inches."""
    drawn, (axes,) = style.panels(1, height)
    return drawn, axes


def show(drawing: Drawing, says: str) -> None:
    """Show a figure, in both themes, with one sentence of what to see.

    Args:
        drawing: theme -> figure; called once for a light page and once for a dark one.
        says: the sentence; it is the picture's text for those who do not see it.
    """
    light, dark = (style.save(drawing, theme).decode() for theme in ("light", "dark"))
    try:
        # IPython is an optional package.
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:  # a plain script on a machine without notebooks
        return
    if get_ipython() is not None:
        white = light.replace("<defs>", '<rect width="100%" height="100%" fill="#ffffff"/>\n <defs>', 1)
        display({"image/svg+xml": white, LIGHT: light, DARK: dark, "text/plain": says}, raw=True)


class Sketch:
    """A picture of tensors: boxes with names and shapes, and arrows between them.

    Args:
        theme: whose colours are used.
        width: of the picture, in units; so is everything that is drawn.
        height: of the picture.
    """

    def __init__(self, theme: Theme, width: float, height: float):
        self.theme = theme
        self.figure, self.axes = figure(height=8.2 * height / width)
        self.axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        self.axes.axis("off")

    def tensor(self, x: float, y: float, w: float, h: float, name: str, *, color: int = 0, kept: bool = True) -> None:
        """A tensor: filled while it is kept, dashed once it is gone."""
        edge = self.theme.series[color]
        style: dict[str, Any] = {"facecolor": (*_rgb(edge), 0.22)} if kept else {"facecolor": "none", "linestyle": "--"}
        self.axes.add_patch(Rectangle((x, y), w, h, edgecolor=edge, linewidth=1.2, **style))
        self.text(x + w / 2, y + h / 2, name)

    def text(self, x: float, y: float, words: str, *, quiet: bool = False, align: str = "center") -> None:
        """Words, beside where they are put; ``align`` says on which side."""
        color = self.theme.quiet if quiet else self.theme.ink
        self.axes.text(x, y, words, ha=align, va="center", color=color, fontsize=9)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], *, color: int | None = None) -> None:
        """An arrow between two points."""
        ink = self.theme.quiet if color is None else self.theme.series[color]
        style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(start, end, color=ink, linewidth=1.2, **style))


def check(exercise: int, answer: Any, grade: Callable[[Any], Any], returns: str = "") -> None:
    """Print whether an answer to an exercise is right, wrong (with a hint) or not there yet, in one line.

    Args:
        exercise: its number in the lesson.
        answer: ``None`` until there is one.
        grade: raises ``AssertionError`` with a hint for a wrong answer, ``NotImplementedError`` for none, as when a
            function of the reader's returns nothing.
        returns: what a right answer is, with shape and units: ``"a number of MiB"``. It is the hint where the answer is
            of another kind, so that a reader never meets a bare traceback.
    """
    try:
        if answer is None:
            raise NotImplementedError
        grade(answer)
        found, said = "right", "right"
    except NotImplementedError:
        found, said = "not yet", "not yet" + (", it returns nothing" if callable(answer) else "")
    except AssertionError as wrong:
        found, said = "no", f"no: {wrong}" if str(wrong) else f"no: the answer is {returns}"
    except Exception as error:  # whatever a reader's code does, the lesson goes on
        found, said = "no", f"no: the answer is {returns} ({type(error).__name__}: {error})"
    CHECKS.append((exercise, found, said))
    print(f"{exercise}: {said}")


def about(
    right: float, hint: str, within: float = 0.01, mistakes: dict[float, str] | None = None
) -> Callable[[Any], None]:
    """Make a grade for a number: an answer is right within a share of it.

    Args:
        right: the answer.
        hint: what is printed for a wrong number.
        within: the share.
        mistakes: wrong numbers that a known mistake leads to, each with the hint that fits it better.
    """

    def is_it(number: float, other: float) -> bool:
        return abs(number - other) <= within * abs(other)

    def grade(answer: Any) -> None:
        number = float(_number(answer))
        fitting = next((its for wrong, its in (mistakes or {}).items() if is_it(number, wrong)), hint)
        assert is_it(number, right), f"not {number:,}; {fitting}"

    return grade


def equal(right: Any, hint: str = "") -> Callable[[Any], None]:
    """Make a grade for an answer that is right or wrong, with nothing between; a number may be of any numeric type."""

    def grade(answer: Any) -> None:
        value = _number(answer) if isinstance(right, int | float) and not isinstance(right, bool) else answer
        if type(right) in (list, tuple, set, dict, str, bool) and not isinstance(value, type(right)):
            raise TypeError(f"this is a {type(value).__name__}")
        assert value == right, f"not {value}" + (f"; {hint}" if hint else "")

    return grade


def _number(answer: Any) -> int | float:
    """Return a reader's number as an int or a float; it may also be an element of a torch or numpy array."""
    value = answer.item() if hasattr(answer, "item") else answer
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"this is a {type(answer).__name__}, not a number")
    return value


def on_a_gpu(bench: str, off: str, on: str, shorter: int = 1) -> None:
    """With a card, measure a step of Llama-3.2-1B's shape without a trick and with it; else show what is committed.

    Args:
        bench: of the trick, ``benchmarks/bench_BENCH.py``.
        off: the settings of the step without it, as in that file: ``"peft=lora attention=best precision=best"``.
        on: those with it.
        shorter: a part of 2,048 tokens, where that file takes shorter rows.
    """
    if torch.cuda.is_available():
        # It takes seconds to import, and only a card needs it.
        from cria_tricks.bench import case as cases

        setup = cases.default_setup()
        setup = replace(setup, tokens=setup.tokens // shorter)
        with torch.random.fork_rng():  # what the lesson draws next is what it draws without a card
            found = [cases.measure(bench, "off", off, setup), cases.measure(bench, "on", on, setup, "off")]
    else:
        found = [case for case in results.read(results.COMMITTED) if case.bench == bench]
    print(tables.tricks(found) if found else f"no GPU here, and no committed results of {bench} beside this package")


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(part, 16) / 255 for part in re.findall("..", color[1:]))
