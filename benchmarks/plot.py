"""Committed results -> figures and tables: draws, and never measures.

    python -m benchmarks.plot                # docs/assets/benchmarks/*.svg, and the tables of the pages below
    python -m benchmarks.plot --into FOLDER  # the same elsewhere, to compare

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of NAME -->``; only what is there is drawn.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import curated_tables
from cria_tricks.bench import figures, results, speed_tables, style, tables
from cria_tricks.bench.results import Case, study
from cria_tricks.bench.style import Drawing

HERE = Path(__file__).parent
ROOT = HERE.parent
ASSETS = Path("docs") / "assets" / "benchmarks"
PAGES = (Path("docs/benchmarks.md"), Path("docs/guide/evaluate.md"), Path("docs/index.md"))


def drawings(cases: list[Case]) -> dict[str, Drawing]:
    """All figures, by name."""
    found: dict[str, Drawing] = {}
    if ladder := study("ladder"):
        found["ladder"] = figures.ladder(ladder["cases"])
    if frontier := study("frontier"):
        found["frontier"] = figures.frontier(frontier)
    return found | figures.of_cases(cases, counted_growth())


def blocks(cases: list[Case]) -> dict[str, str]:
    """All tables, by name."""
    found = tables.of_cases(cases, counted_growth())
    found["published"] = tables.published(json.loads((HERE / "peers" / "published.json").read_text()))
    found["public_runs"] = speed_tables.public_runs(json.loads((HERE / "results" / "published_runs.json").read_text()))
    if ladder := study("ladder"):
        found["ladder"] = tables.ladder(ladder["cases"])
    if without := study("without_checkpointing"):
        found["without_checkpointing"] = tables.without_checkpointing(without["cases"])
    if long_rows := study("long_rows"):
        found["long_rows"] = tables.long_rows(long_rows)
    if per_process := study("per_process"):
        large = [case for case in per_process["cases"] if case["model"] == "smollm2"]
        found["per_process"] = tables.per_process(large, "LoRA")
        found["per_process_of_all_weights"] = tables.per_process(large, "all weights")
        found["shared_rows"] = tables.shared_rows(large)
    if links := study("links"):
        found["links"] = tables.links(links["cases"])
    if frontier := study("frontier"):
        found["frontier"] = speed_tables.frontier(frontier)
    if seconds_error := study("seconds_error"):
        found["seconds_error"] = speed_tables.seconds_error(seconds_error)
    if step_profile := study("step_profile"):
        found["step_profile"] = speed_tables.step_profile(step_profile)
    if trajectories := study("trajectories"):
        found["trajectories"] = tables.trajectories(trajectories)
    if quality := study("quality"):
        found["quality"] = tables.quality(quality["runs"])
    if curated := study("kwanzaa_curated_small"):
        found["curated"] = curated_tables.scores(curated, "history_notes")
        found["curated_on_real_rows"] = curated_tables.scores(curated, "kwanzaa")
        found["curated_answers"] = curated_tables.answers(curated)
        found["curated_answer_on_home"] = curated_tables.answer_on_home(curated)
    if real_rows := study("kwanzaa_small"):
        found["real_rows"] = curated_tables.scores(real_rows, "kwanzaa")
        found["real_rows_with_the_contract"] = curated_tables.scores(real_rows, "kwanzaa with the contract")
    return found


def counted_growth() -> dict[str, Any]:
    """The dry runs of growth."""
    found = study("growth")
    return found["cases"] if found else {}


def with_blocks(text: str, found: Mapping[str, str]) -> str:
    """A page with its tables as they should be."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end of \2 -->)",
        lambda match: f"{match[1]}\n{found[match[2]]}\n\n{match[3]}" if match[2] in found else match[0],
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Draw everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT, help="the checkout when left out")
    into = parser.parse_args().into
    cases = results.read(HERE / "results")
    for name, drawing in drawings(cases).items():
        for theme in style.THEMES:
            path = into / ASSETS / f"{name}-{theme}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(style.save(drawing, theme))
    found = blocks(cases)
    for page in PAGES:
        path = into / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_blocks((ROOT / page).read_text(), found))


if __name__ == "__main__":
    main()
