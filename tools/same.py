"""Show that behaviour stayed: this tree and that of another commit make the same adapters, plans, bills and seconds.

    python -m tools.same BASE
    python -m tools.same BASE --only bills seconds
    python -m tools.same BASE --but "plans answers: how long answers take is no part of a plan any more"

Both trees run on this machine, side by side, on the cases that BASE draws (``tools/same_record.py``). Two numbers that
are not equal are printed with the case that is the first to differ in them. A key that changes on purpose is named with
``--but``, and why; ``--renamed OLD=NEW`` gives this tree a setting by its new name. The exit code is 1 if a key differs
that is not named, or if one is named that does not differ.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
RECORDER = Path("tools/same_record.py")
PARTS = ("adapters", "plans", "bills", "seconds")


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Go through the leaves of JSON data, each with its key, in which a ``*`` stands for every place of a list."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from flat(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(part, list | dict) for part in value):
        yield f"{key}.length", len(value)
        for part in value:
            yield from flat(part, f"{key}.*")
    else:
        yield key, value


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two records of a case differ, each with its values before and after."""
    if "refused" in before and "refused" in after:
        return {}
    if "refused" in before or "refused" in after:
        return {"refused": (before.get("refused", "not refused"), after.get("refused", "not refused"))}
    old: dict[str, list[Any]] = {}
    new: dict[str, list[Any]] = {}
    for found, record in ((old, before), (new, after)):
        for key, value in flat(record):
            found.setdefault(key, []).append(value)
    return {
        key: (old.get(key, ["nothing"]), new.get(key, ["nothing"]))
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }


def compare(
    part: str, before: dict[str, Any], after: dict[str, Any], named: dict[str, str]
) -> tuple[list[str], set[str]]:
    """Compare all cases of a part.

    Args:
        part: its name.
        before: the records of BASE, by the name of the case.
        after: those of this tree.
        named: patterns of keys that may differ, as ``plans answers.*``, and the reason of each.

    Returns:
        The lines to print, of which one that begins with "DIFFERS" is a fault; and the patterns that were met.
    """
    firsts: dict[str, tuple[int, str]] = {}
    equal = refused = 0
    for case, old in before.items():
        found = differences(old, after[case])
        equal += not found
        refused += not found and "refused" in old
        for key, (was, is_now) in found.items():
            many, first = firsts.get(key, (0, f"{case}\n      before: {_short(was)}\n      after:  {_short(is_now)}"))
            firsts[key] = many + 1, first
    lines = [f"{part}: {equal} of {len(before)} equal ({refused} of them refused by both)"]
    met: set[str] = set()
    for key, (many, first) in firsts.items():
        reasons = [pattern for pattern in named if fnmatchcase(f"{part} {key}", pattern)]
        met.update(reasons)
        because = f"named, {named[reasons[0]]}" if reasons else "DIFFERS"
        lines.append(f"  {because}: {key} in {many}, first in {first}")
    return lines, met


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Check a commit out beside this tree."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, commit)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", place, commit], cwd=HERE, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", place], cwd=HERE, check=True)


def _started(tree: Path, cache: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    """Start a tree's own recorder; a commit from before there was one takes ours."""
    own = tree / RECORDER
    recorder = own if own.is_file() else HERE / RECORDER
    # One thread, so that two trees side by side do not share cores, and that a fork is safe.
    environment = os.environ | {"PYTHONPATH": str(tree), "CRIA_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, recorder, *map(str, arguments)], cwd=tree, env=environment)


def _ended(*processes: "subprocess.Popen[bytes]") -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a tree could not be recorded; what it says is above")


def renamed(drawn: Any, names: Mapping[str, str]) -> Any:
    """Return the drawn cases with settings by their new names."""
    text = json.dumps(drawn)
    for old, new in names.items():
        text = text.replace(f'"{old}=', f'"{new}=')
    return json.loads(text)


def write_rows(file: Path, numbers: range) -> None:
    """Write rows so short that a step takes no time."""
    rows = [
        [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"{n} + {n} = {2 * n}."}]
        for n in numbers
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def recorded(base: str, parts: list[str], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Record both trees, BASE first."""
    with tempfile.TemporaryDirectory() as folder, tree_of(base) as old:
        drawn, drawn_here = Path(folder, "drawn.json"), Path(folder, "drawn_here.json")
        write_rows(Path(folder, "train.jsonl"), range(16))  # two steps of the recipes with the most accumulation
        write_rows(Path(folder, "eval.jsonl"), range(16, 18))
        _ended(_started(old, Path(folder, "0"), "draw", drawn))
        drawn_here.write_text(json.dumps(renamed(json.loads(drawn.read_text()), names)))
        trees = [(old, drawn), (HERE, drawn_here)]
        results = [Path(folder, f"{number}.json") for number in range(2)]
        _ended(
            *(
                _started(tree, Path(folder, str(number)), "record", cases, folder, results[number], *parts)
                for number, (tree, cases) in enumerate(trees)
            )
        )
        return [json.loads(result.read_text()) for result in results]


def main() -> None:
    """Compare, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--but", action="append", default=[], metavar="'PART KEY: REASON'")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    asked = parser.parse_args()
    named = {pattern: reason for pattern, _, reason in (but.partition(": ") for but in asked.but)}
    before, after = recorded(asked.base, asked.only, dict(pair.split("=") for pair in asked.renamed))
    unmet, differs = set(named), False
    for part in asked.only:
        lines, met = compare(part, before[part], after[part], named)
        unmet -= met
        differs |= any(line.startswith("  DIFFERS") for line in lines)
        print("\n".join(lines))
    for pattern in sorted(unmet):
        print(f"named, but equal: {pattern}")
    sys.exit(differs or bool(unmet))


if __name__ == "__main__":
    main()
