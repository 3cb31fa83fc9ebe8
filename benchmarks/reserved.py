"""How much more PyTorch's allocator reserves than tensors take: drawn settings, replayed through the allocator's model.

    python -m benchmarks.reserved --settings 204     # most of an hour on one core; goes on where it was stopped
    python -m benchmarks.reserved --settings 0       # fit again on what is in the file, and print how far it is off

A setting is drawn as in ``benchmarks/estimate_error.py``, for a card, with rows of at least 256 tokens, and with all
blocks of the model up to 32. It is trained on fake tensors: one window of shorter rows, one of full rows, and an
evaluation (``predict/memory_trace.py``). The shares in ``bill/bill.py`` are fitted on these
replays and on nothing that was published. Writes ``benchmarks/results/dry-run/reserved.json``.
"""

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import HERE
from benchmarks.estimate_error import DEVICES, Setting, by_hand, mark, setting
from cria_tricks.bench.case import stamp
from cria_tricks.bill.bill import EXPANDABLE, SEGMENTS, parts
from cria_tricks.common import atomic_files
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.predict.allocator import Settings
from cria_tricks.predict.memory_trace import memory_trace, replay
from cria_tricks.resolve import resolve

RESULTS = HERE / "results" / "dry-run" / "reserved.json"
SEED = "reserved"
MOST_BLOCKS = 32
LEAST_TOKENS = 256
UNDER = 0.02
"""By how much the rule may underestimate a replay, as a share."""
KINDS = {"segments": Settings(), "expandable": Settings(expandable_segments=True)}
"""The two ways in which the allocator can take memory, as ``PYTORCH_CUDA_ALLOC_CONF`` chooses them."""


def settings(count: int) -> Iterator[Setting]:
    """Draw settings for cards, with rows that are long enough to matter and whole models."""
    number = 0
    while count:
        one = setting(SEED, number)
        number += 1
        if one.device == "cpu" or one.recipe.data.max_length < LEAST_TOKENS:
            continue
        count -= 1
        yield replace(one, blocks=min(CONFIGS[one.model]["num_hidden_layers"], MOST_BLOCKS), trained=None)


def replayed(one: Setting) -> dict[str, int]:
    """The peaks of one setting: what tensors take, and what is reserved in both ways [bytes]."""
    from transformers import AutoConfig

    recipe = one.recipe
    plan = resolve(recipe, DEVICES[one.device])
    events = memory_trace(plan, AutoConfig.for_model(**one.config), recipe.train.batch_size, recipe.data.max_length)
    gc.collect()
    found = {name: replay(events, kind) for name, kind in KINDS.items()}
    return {"allocated": found["segments"].allocated_bytes} | {
        name: result.reserved_bytes for name, result in found.items()
    }


def sweep(count: int, out: Path, console: Console) -> dict[str, Any]:
    """Replay what is missing, and return all cases by the text of their setting."""
    known: dict[str, Any] = json.loads(out.read_text())["cases"] if out.is_file() else {}
    found = {}
    for one in settings(count):
        name = str(one)
        found[name] = known.get(name) or replayed(one)
        console.print(f"{mark(name)} {name}: {found[name]}")
        atomic_files.write_file(out, json.dumps(stamp() | {"cases": known | found}, indent=1) + "\n")
    return known | found


def fitted(cases: dict[str, Any], kind: str) -> tuple[float, ...]:
    """Return the smallest shares by which no case is underestimated by more than :data:`UNDER`.

    A linear program: the sum of the relative errors is made as small as it can be.
    """
    from scipy.optimize import linprog

    features, allocated, reserved = table_of(cases, kind)
    needed = (1 - UNDER) * reserved - allocated
    relative = features / reserved[:, None]
    found = linprog(relative.sum(0), A_ub=-relative, b_ub=-needed / reserved, bounds=[(0, None)] * 4)
    assert found.success, found.message
    return tuple(found.x)


def table_of(cases: dict[str, Any], kind: str) -> tuple[Any, Any, Any]:
    """Return what the rule sees of each case, and by hand the allocated and by replay the reserved bytes."""
    import numpy as np

    rows = []
    for one in settings(len(cases)):
        memory = by_hand(one)
        rows.append((*parts(memory.peak.lines), memory.allocated_bytes, cases[str(one)][kind]))
    found = np.array(rows, dtype=float)
    return found[:, :4], found[:, 4], found[:, 5]


def errors(cases: dict[str, Any], kind: str, shares: Sequence[float]) -> Any:
    """Return for each case how much larger the estimate is than the replay, as a share."""
    features, allocated, reserved = table_of(cases, kind)
    return (allocated + features @ list(shares)) / reserved - 1


def show(cases: dict[str, Any], console: Console) -> None:
    """Print how much is reserved beyond the tensors, and how far the fitted rule and the package's are off."""
    import numpy as np

    def quantiles(values: Any) -> str:
        return ", ".join(f"{value:+.1%}" for value in np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))

    for kind, used in (("expandable", EXPANDABLE), ("segments", SEGMENTS)):
        more = [case[kind] / case["allocated"] - 1 for case in cases.values()]
        best = fitted(cases, kind)
        console.print(f"{kind}, {len(cases)} cases (least, quarter, median, three quarters, most)")
        console.print(f"  reserved over allocated: {quantiles(more)}")
        console.print(f"  fitted shares: {', '.join(f'{share:.4g}' for share in best)}; used: {tuple(used)}")
        console.print(f"  estimate over replay: {quantiles(errors(cases, kind, used))}")


def main() -> None:
    """Read the command line and sweep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", type=int, default=204)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    show(sweep(given.settings, given.out, console), console)


if __name__ == "__main__":
    main()
