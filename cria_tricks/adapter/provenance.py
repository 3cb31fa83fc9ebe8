"""Record what decided an adapter's numbers, for provenance.json and the model card: the run's report, and more."""

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.data.sources import OpenedSource

PACKAGE = Path(__file__).parents[1]
"""The package's folder."""


def describe(
    report: Mapping[str, Any],
    found: Mapping[str, OpenedSource],
    other_base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the run's report without its steps, with what the folder of an adapter needs besides.

    New are ``processes``, ``package`` (see :func:`commit`), and ``data.train_sha256`` and ``data.eval_sha256``: the
    hash of the rows as they were read, or the fingerprint of a stream's files.

    Args:
        report: the run's report.
        found: the rows by part, ``train`` and ``eval``.
        other_base: identity of the base with which the run began, if it was resumed over a different one.
    """
    long = ("history", "monitor", "adapter")  # report.json has them; the last is a path of this machine
    made = {key: value for key, value in report.items() if key not in long}
    hashes = {f"{part}_sha256": source.sha256 for part, source in found.items()}
    made |= {"processes": len(report["monitor"]), "package": commit(), "data": {**report["data"], **hashes}}
    if other_base:
        made["base"] = {**report["base"], "other_than": other_base}
    return made


def commit() -> dict[str, Any]:
    """Find the git commit that this package's files come from.

    In a checkout git knows it, and whether a file was changed since. For a package that was installed from a
    repository, pip and uv have left a note (PEP 610).

    Returns:
        ``commit`` and ``changed``, each ``None`` if it cannot be found out.
    """
    try:
        # An installed package may lie inside somebody's checkout; the file recipe.py stands for all.
        _git("ls-files", "--error-unmatch", "recipe.py")
        return {"commit": _git("rev-parse", "HEAD"), "changed": bool(_git("status", "--porcelain", "."))}
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        installed = importlib.metadata.distribution("cria_tricks")
        note = json.loads(installed.read_text("direct_url.json") or "{}")
        if Path(str(installed.locate_file("cria_tricks"))).samefile(PACKAGE):  # and no other copy
            return {"commit": str(note["vcs_info"]["commit_id"]), "changed": None}
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError, TypeError):  # not as PEP 610 says
        pass
    return {"commit": None, "changed": None}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
