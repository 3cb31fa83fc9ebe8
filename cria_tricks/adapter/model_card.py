"""Write the model card, README.md of an adapter's folder: origin, measurements, and what was not measured."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.adapter import card_code, provenance
from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.common.units import human
from cria_tricks.models import is_hub_id
from cria_tricks.models.catalogue import SMOLLM2
from cria_tricks.recipe import Recipe
from cria_tricks.trainer import what_ran

_LICENCES = {SMOLLM2: "apache-2.0"}
_LLAMA = "Llama-3.2"
_LLAMA_NOTICE = (
    "Built with Llama. Llama 3.2 is licensed under the Llama 3.2 Community License, Copyright © Meta Platforms, Inc. "
    "All Rights Reserved."
)
"""The words that section 1.b of the licence asks for when a model that was made from Llama 3.2 is distributed."""
_LIBRARIES = {"none": "transformers", "side_network": "cria_tricks"}
"""The library that loads the folder, by ``tricks.peft``; peft for all other values."""
COLUMNS = ("what", "value")
NOT_SCORED = " The answers were not scored; after `cria eval`, `cria card` writes the scores here."
"""A sentence of the card that goes when scores come."""
WHOLE = Recipe()
"""A recipe without an adapter: training it gives a whole model."""


def model_card(report: Mapping[str, Any], made: Mapping[str, Any], base: str, note: str, recipe: Recipe) -> str:
    """Return the text of README.md, the model card of an adapter or of a fully fine-tuned model.

    Args:
        report: the report of the run that trained it.
        made: its provenance, from :func:`cria_tricks.adapter.provenance.describe`.
        base: the base model's name.
        note: what a reader must know about the base's weights; often empty.
        recipe: the recipe of the run.
    """
    kinds = report["data"]["train_kinds"]
    return "\n".join(
        [
            *_front(base, _LIBRARIES.get(recipe.tricks.peft, "peft"), what_ran.tags(recipe)),
            f"# {recipe.name}",
            "",
            what_ran.in_words(recipe, base, kinds),
            *_paragraph(note),
            "",
            "## Data",
            "",
            f"- train: {report['data']['train']}",
            f"- evaluation: {report['data']['eval']}",
            "",
            "## Results",
            "",
            *markdown_table(COLUMNS, _results(report)),
            *_paragraph(_kept(made)),
            "",
            "The losses are all that the run measured of quality. It did not measure whether answers are true or safe."
            + NOT_SCORED,
            "",
            "## On a GPU",
            "",
            *markdown_table(COLUMNS, _on_a_gpu(report)),
            "",
            "## Where it comes from",
            "",
            *markdown_table(COLUMNS, _origin(made)),
            "",
            "`provenance.json` holds all of it, with the recipe, every metric and, where memory could be estimated, "
            "the estimate line by line.",
            "",
            "## Use",
            "",
            "```python",
            card_code.load(base, note, recipe) + card_code.ask(kinds),
            "```",
            "",
            "## Recipe",
            "",
            f"`recipe.toml` is what was asked for. {_again(report)} `manifest.json` holds the sha256 of every file; "
            "`cria verify FOLDER` compares.",
            "",
            *_licence_note(base),
        ]
    )


def merged_card(
    name: str, base: str, note: str, recipe: Recipe, kinds: Mapping[str, int], dtype: str, check: Mapping[str, Any]
) -> str:
    """Return the text of README.md, the model card of a merged model.

    Args:
        name: the recipe's name, or the name of the adapter's folder.
        base: the base model's name.
        note: what a reader must know about the base's weights; often empty.
        recipe: the recipe of the adapter's training, or as much of it as the adapter's config tells.
        kinds: number of training rows of each kind; empty if it is not known.
        dtype: dtype of the merged weights.
        check: what :func:`cria_tricks.adapter.merge.merge` found when it compared merged and unmerged model.
    """
    trained = rounded = ""
    if kinds:
        trained = f"The adapter was trained on {what_ran.rows_in_words(kinds)}."
    quantized = what_ran.quantized(recipe)
    if quantized:
        rounded = f"Its training quantised the base to {quantized}, so these weights are rounded in the same way."
    return "\n".join(
        [
            *_front(base, "transformers", ["merged", *what_ran.tags(recipe)]),
            f"# {name}, merged",
            "",
            f"`{base}` with {what_ran.adapter(recipe)} merged into its weights, in {dtype}. Plain transformers loads "
            "it.",
            *_paragraph(trained),
            *_paragraph(rounded),
            *_paragraph(note),
            "",
            "## Merged against unmerged",
            "",
            *markdown_table(COLUMNS, check_rows(check)),
            "",
            "Nothing else was measured on the merged model. What was measured on the adapter, and where it comes from, "
            "stands in `provenance.json` where the adapter brought one.",
            "",
            "## Use",
            "",
            "```python",
            card_code.load(base, note, WHOLE) + card_code.ask(kinds),
            "```",
            "",
            *_licence_note(base),
        ]
    )


def check_rows(check: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the results of a merge's check as (name, value), for the tables of the model card and the terminal."""
    rows = [
        ("positions compared", f"{check['positions']:,}"),
        ("largest difference of a logit", f"{check['largest_difference']:.3g}"),
        ("allowed: what 16 bits alone do to the unmerged model", f"{check['bound']:.3g}"),
        ("largest difference that the adapter itself makes", f"{check['adapter_effect']:.3g}"),
        ("same most likely token", f"{check['same_argmax']:.2%} of positions"),
    ]
    if "other_base" in check:
        rows.append(("the base", check["other_base"]))
    return rows


def _kept(made: Mapping[str, Any]) -> str:
    """Say which evaluation the folder ``best`` is of; empty for any other folder."""
    kept = made.get("kept")
    if not kept:
        return ""
    return (
        f"These are the weights after step {kept['step']}, whose evaluation loss of {kept['eval_loss']:.4f} was the "
        "lowest by then (`train.keep_best`). The run may have gone on; this card knows it up to this step only."
    )


def _paragraph(text: str) -> list[str]:
    """Return an empty line and the text; no lines for an empty text."""
    return ["", text] if text else []


def _front(base: str, library: str, tags: Sequence[str]) -> list[str]:
    """Return the YAML lines at the top of README.md, from which the hub reads base, library, licence and tags."""
    # Slow to import, and only a card needs it.
    from huggingface_hub import ModelCardData

    about = ModelCardData(
        base_model=base if is_hub_id(base) else None,  # the hub refuses any other name here
        library_name=library,
        license=_licence(base),
        tags=["cria_tricks", *tags],
    )
    return ["---", about.to_yaml(), "---"]


def _results(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("evaluation loss before (mean per trained token)", _loss(report["eval_loss_before"])),
        ("evaluation loss after", _loss(report["eval_loss_after"])),
        ("training loss, mean over steps", _loss(report["train_loss"])),
        ("optimizer steps", f"{report['steps']} of {report['planned_steps']}, {report['skipped_steps']} skipped"),
        ("trained tokens", f"{report['data']['trained_tokens_seen']:,}"),
        ("trainable parameters", f"{report['parameters']['trainable']:,}"),
        ("peak memory", human(report["peak_bytes"])),
        ("peak memory, estimated before it ran", _estimated(report)),
        ("minutes, loading and evaluation included", f"{report['seconds'] / 60:,.1f}"),
        ("device", report["device"]),
        ("processes", str(_processes(report))),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
    ]


def _on_a_gpu(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the run needed of its GPU. Every model card has the same lines, so that two can be compared."""
    names = (
        "card", "peak memory of training, allocated", "and reserved", "estimated before it ran",
        "tokens per second", "minutes, loading and evaluation included",
    )  # fmt: skip
    if report["plan"]["device"]["kind"] != "cuda":  # a run on a CPU does not tell what a GPU would need
        unmeasured = ["not measured: this run was on a CPU", *["not measured"] * 5]
        return list(zip(names, unmeasured, strict=True))
    training = report["memory"]["train"]
    values = [
        report["device"],
        human(training["allocated_bytes"]),
        human(training["reserved_bytes"]),
        _estimated(report),
        f"{report['tokens_per_second']:,.0f}",
        f"{report['seconds'] / 60:,.1f}",
    ]
    return list(zip(names, values, strict=True))


def _estimated(report: Mapping[str, Any]) -> str:
    estimated = report["estimated_peak_bytes"]
    if not estimated:
        return "not estimated: a kind of model that cannot be"
    found = report["estimate"]
    if not found or not found["ratio"]:
        return human(estimated)
    return f"{human(estimated)}, {found['ratio']:.3f} of the measured"


def _origin(made: Mapping[str, Any]) -> list[tuple[str, str]]:
    recipe = made["recipe"]
    before = made.get("continued_from")
    return [
        ("base model", provenance.in_words(made["base"])),
        *([("continued from", provenance.continued_in_words(before))] if before else []),
        *((f"{part} rows", _which(about)) for part, about in made["data"].items()),
        ("recipe", f"`{recipe['name']}`, switched: {_switched(recipe['tricks'])}"),
        ("seed", str(made["seed"])),
        ("cria_tricks", _package(made["package"])),
    ]


def _package(package: Mapping[str, Any]) -> str:
    if not package["commit"]:
        return f"{package['version']}, installed"
    changed = " with changes" if package["changed"] else ""
    return f"{package['version']}, commit {package['commit']}{changed}"


def _which(about: Mapping[str, Any]) -> str:
    """Describe the rows by number and hash; a stream has no number, because its rows are never counted."""
    if about["rows"] is None:
        return f"a stream, fingerprint {about['sha256']}"
    return f"{about['rows']}, sha256 {about['sha256']}"


def _switched(tricks: Mapping[str, Any]) -> str:
    """List the switches that differ from their defaults."""
    defaults = Recipe().tricks.model_dump(mode="json")
    switched = [f"{key}={json.dumps(value)}" for key, value in tricks.items() if value != defaults[key]]
    return ", ".join(switched) or "none"


def _again(report: Mapping[str, Any]) -> str:
    """Say whether the recipe repeats the run; a run that was lengthened later cannot be repeated in one go."""
    if report["lengthened"]:
        why = ", and ".join(map(what_ran.lengthened, report["lengthened"]))
        return f"`cria train recipe.toml` does not repeat the run, because {why}."
    several = ""
    if _processes(report) > 1:
        several = f", started in {_processes(report)} processes,"
    return f"`cria train recipe.toml`{several} repeats the run where the data that it names is at hand."


def _processes(report: Mapping[str, Any]) -> int:
    return len(report["monitor"])


def _licence(base: str) -> str | None:
    if _LLAMA in base:
        return "llama3.2"
    return _LICENCES.get(base)


def _licence_note(base: str) -> list[str]:
    licence = _licence(base)
    said = "see its licence."
    if licence:
        said = f"its licence ({licence}) applies."
    found = [f"Derived from {base}: {said} The training data's licence is named above where it is known.", ""]
    if _LLAMA in base:
        found += [_LLAMA_NOTICE, ""]
    return found


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
