"""The page of measured cards, the schema of their files, and what the cards reached, from accepted files.

python -m tools.measured_cards          # write all three
python -m tools.measured_cards --page   # the page only

Files are ``benchmarks/results/DEVICE/measured_card.json``. One that is not accepted stops everything.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cria_tricks import recipes
from cria_tricks.bench import tables
from cria_tricks.bench.accept import accept, device_of, step_of
from cria_tricks.bench.measured_card import MeasuredCard
from cria_tricks.bench.results import Case, Predicted
from cria_tricks.bill import step_time
from cria_tricks.common.markdown_table import table
from cria_tricks.common.units import between, human
from cria_tricks.hardware import reached
from cria_tricks.hardware.cards import Card, Gpu
from cria_tricks.hardware.gpus import DATASHEETS, GPUS, by_datasheet
from cria_tricks.hardware.reached import Reached
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.answer import BACKED, NO_RUN
from cria_tricks.predict.toggles import Target
from tools import notebooks

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured_cards.md"
LEAST_CASES = 6
"""Timed steps without which a card keeps its old range: the range of n values holds the next in (n - 1) / (n + 1)."""
NARROWEST = 1.2
"""The least range around a measured card [ratio].

Half of the errors of 40 predicted sets on a calibrated CPU are about a tenth or more (``seconds_error.json`` of its
results), so a narrower one would promise more for other models and lengths than was measured.
"""
AT_PEAK = Reached(1, 1, 1, 0, 1, "the datasheet", link=1)

HEAD = """# Measured cards

`cria bench` measures one card into one file: the switches of the course, and steps of the Kwanzaa run's shape with
random weights. On a GPU without `--short` it adds the longest row and a table of prediction errors. The
first table has the cards that are measured, rented, or common; [more cards](reference/models.md#cards) can be planned.
What is not measured there is *predicted*; predicted times have a range ("by public runs": runs of others back it; "by
its datasheet": nothing else does). The second table has the measured cards. The page
is made from the files in `benchmarks/results/`, by `python -m tools.measured_cards`.

## Your card

[Open the notebook in Colab]({colab})

It needs a browser and some patience: it installs, measures, and shows the result. The repository is not public yet, so
the link does not work. Instead, build the wheel with `make dist`, open `notebooks/measure_your_card.ipynb` in Colab,
and upload the wheel to its folder. The same in a terminal:

```
pip install PATH/TO/THE.whl   # not public yet
cria bench --short            # predicted: ten minutes on a T4; without --short an hour
cria bench --check cria-bench/measured_card.json
```

If the session ends early, the same command goes on: it loses one case at most. The result is one JSON file, with its
tables in `report.md` beside it. `--check` accepts the file or says in one line what is wrong with it, and CI does the
same with every file of this page.

## Give your result

Open an issue with the form *I measured it on my card*, and drag `measured_card.json` into it. The file names the card,
its driver, the library versions, the host's memory, the times, and the command with its paths. It holds no training
rows and no model weights. Send it also if `--check` refuses it, with the line that it says.

`--check` changes nothing here. After a release with your file, `cria plan` uses its times for this GPU only. This needs
a GPU whose datasheet rates we know, and at least {least} timed cases with 16-bit products. The range covers all of them
and is never narrower than a factor of {narrowest}.

## All cards

The recipe `kwanzaa` on Llama-3.2-1B: what a card needs, and the time of an optimizer step with rows of 2,048 tokens.

"""
NONE = "No card has been measured yet.\n"


def accepted(results: Path = RESULTS) -> list[MeasuredCard]:
    """Accept all files of measured cards, in the order of their names.

    Raises:
        BadInput: for the first that is not accepted.
    """
    return [accept(file) for file in sorted(results.glob("*/measured_card*.json"))]


def efficiencies(cards: Iterable[MeasuredCard]) -> dict[str, dict[str, Any]]:
    """Return what each card reached, by its product name: the fields of :class:`Reached`.

    Only cards with a datasheet have such shares. A CPU has none, and its name does not say how fast it is.
    """
    by_name: dict[str, list[MeasuredCard]] = {}
    for card in cards:
        by_name.setdefault(card.device.name, []).append(card)
    found = {}
    for name, some in by_name.items():
        known = by_datasheet(device_of(some[0].device))
        cases = [case for card in some for case in card.cases if known and _counts(case, known)]
        if known and len(cases) >= LEAST_CASES:
            found[name] = asdict(_reached(some, cases, known))
    return found


def _counts(case: Case, card: Card) -> bool:
    """Return whether a case was timed, and has the 16-bit products whose share is fitted."""
    if case.status != "ok" or not case.median_seconds:
        return False
    return card.flops(step_of(case, card.device).precision) == card.half_flops


def _reached(measured: Sequence[MeasuredCard], cases: Sequence[Case], card: Card) -> Reached:
    """Fit one share on measured steps, as on public runs: of products, and of memory traffic."""
    calibrations = [one.calibration for one in measured if one.calibration]
    launch = statistics.geometric_mean(one.launch for one in calibrations)
    link = statistics.geometric_mean(one.link_rate for one in calibrations) / card.link_rate
    shares = [_seconds(case, replace(card, reached=AT_PEAK)) / (case.median_seconds or 1.0) for case in cases]
    first = statistics.geometric_mean(shares)
    rough = replace(AT_PEAK, half=first, full=first, memory=first, launch=launch)
    # A step that waits for launches says nothing about products and memory.
    busy = [share for case, share in zip(cases, shares, strict=True) if not _waits(case, replace(card, reached=rough))]
    share = statistics.geometric_mean(busy or shares)
    fitted = Reached(share, share, share, launch, 1.0, _source(measured, cases), link, len(measured))
    off = [(case.median_seconds or 1.0) / _seconds(case, replace(card, reached=fitted)) for case in cases]
    # The range is the same above and below, so that it holds every measured step.
    spread = max(max(off), 1 / min(off)) ** 2
    return replace(fitted, spread=max(NARROWEST, math.ceil(100 * spread) / 100))


def _seconds(case: Case, card: Card) -> float:
    return step_time.time_of(step_of(case, card.device), card).seconds


def _waits(case: Case, card: Card) -> bool:
    last = step_time.time_of(step_of(case, card.device), card).parts[-1]
    return last.name == "launches" and last.seconds > 0


def _source(measured: Sequence[MeasuredCard], cases: Sequence[Case]) -> str:
    days = sorted(card.provenance.began[:10] for card in measured)
    files = "1 measurement" if len(measured) == 1 else f"{len(measured)} measurements"
    return f"{files} of this card ({', '.join(dict.fromkeys(days))}), {len(cases)} timed steps"


def rows(cards: Sequence[MeasuredCard]) -> list[tuple[str, ...]]:
    """One row for each card that plans know: measured where it was, else predicted."""
    found: list[tuple[str, ...]] = []
    for name, gpu in GPUS.items():
        if gpu.count == 1:
            mine = [card for card in cards if card.device.name == gpu.device.name]
            if name in DATASHEETS and not mine:  # most of these will never be measured; docs/reference has all of them
                continue
            found.append((f"`{name}`", gpu.device.name, *_predicted(gpu), *_measured(mine)))
    return found


def _predicted(gpu: Gpu) -> tuple[str, str]:
    """Write the bytes and the time that a plan says."""
    recipe = recipes.kwanzaa(gpu.device)
    found = plan_data.bill(Target(find_shape(recipe.model), gpu.device), recipe)
    seconds = "no rates known"
    if found.step_range:
        seconds = f"predicted: {between(*found.step_range)}, {BACKED[found.seconds_by or NO_RUN]}"
    return f"predicted: {human(found.needed_bytes)}", seconds


def _measured(cards: Sequence[MeasuredCard]) -> tuple[str, str]:
    """Write what was measured of the capstone; its rows have the real lengths."""
    cases = [case for card in cards for case in card.of("capstone") if case.status == "ok"]
    if not cases:
        return "not yet", "not yet"
    peaks = sorted(case.peak_reserved_bytes or case.peak_allocated_bytes or 0 for case in cases)
    seconds = sorted(case.median_seconds or 0.0 for case in cases)
    return human(peaks[-1]), between(seconds[0], seconds[-1])


def summary(cards: Iterable[MeasuredCard]) -> str:
    """Lay out one line for each card: how far the predictions are from what was measured."""
    columns = ("device", "date", "version", "cases", "error of the bill", "error of the dry run",
               "times inside their range", "times, measured / predicted", "throttled by")  # fmt: skip
    return table(columns, [_summary(card) for card in cards])


def _summary(card: MeasuredCard) -> tuple[str, ...]:
    timed = [(case, case.predicted[0]) for case in card.cases if case.median_seconds and case.predicted]
    inside = sum(_inside(case, one) for case, one in timed)
    ratios = [(case.median_seconds or 0.0) / one.seconds for case, one in timed]
    short = "short" if card.settings.short else "full"
    throttled = [reason for case in card.cases if case.sensors for reason in case.sensors.throttled]
    return (
        card.device.name,
        card.provenance.began[:10],
        f"{short}, {card.settings.shape}",
        str(len(card.cases)),
        _errors([(case.estimated_bytes, case.peak_allocated_bytes) for case in card.cases]),
        _errors([(case.dry_run_bytes, case.peak_allocated_bytes) for case in card.cases]),
        f"{inside} of {len(timed)}" if timed else "no rates",
        f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}" if ratios else "",
        ", ".join(dict.fromkeys(throttled)),
    )


def _inside(case: Case, one: Predicted) -> bool:
    return one.low <= (case.median_seconds or 0.0) <= one.high


def _errors(pairs: Sequence[tuple[int | None, int | None]]) -> str:
    """Write the range of errors of predicted bytes."""
    errors = [100 * (predicted / real - 1) for predicted, real in pairs if predicted and real]
    if not errors:
        return ""
    low, high = (f"{round(error, 2) + 0.0:+.2f} %" for error in (min(errors), max(errors)))  # + 0.0: no -0.0
    return f"{low} to {high}"


def page(cards: Sequence[MeasuredCard]) -> str:
    """The whole page."""
    columns = ("name", "card", "bytes", "a step", "measured bytes", "measured step, real rows")
    colab = notebooks.colab_address("measure_your_card")
    head = HEAD.format(least=LEAST_CASES, narrowest=NARROWEST, colab=colab)
    parts = [head, table(columns, rows(cards)), "\n\n## Measured\n\n"]
    parts += [summary(cards) + "\n" if cards else NONE]
    for card in cards:
        parts += [f"\n## {card.device.name}, {card.provenance.began[:10]}\n\n", tables.of_card(card), "\n"]
    return "".join(parts)


def written(found: dict[str, dict[str, Any]]) -> str:
    """The file of what cards reached."""
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    """Write the shares, then the page in a new process, because its plans count with the new shares."""
    cards = accepted()
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(page(cards), encoding="utf-8")
        return
    reached.MEASURED.write_text(written(efficiencies(cards)), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tools.measured_cards", "--page"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
