"""The card, README.md of an adapter's folder: what it is, where it comes from, what was measured and what was not."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.adapter import provenance
from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.common.units import human
from cria_tricks.models import is_hub_id
from cria_tricks.models.catalogue import SMOLLM2
from cria_tricks.recipe import Recipe, Tricks
from cria_tricks.trainer import what_ran

_LICENCES = {SMOLLM2: "apache-2.0"}
_LLAMA = "Llama-3.2"
_LIBRARIES = {"none": "transformers", "side_network": "cria_tricks"}
"""What loads the folder; peft, where nothing is said."""
HERE = "path/to/this/folder"
"""Where the card's code says the folder is."""
WHOLE = Recipe()
"""A recipe without an adapter: its result is a whole model."""


def model_card(report: Mapping[str, Any], made: Mapping[str, Any], base: str, note: str, recipe: Recipe) -> str:
    """README.md of the folder.

    Args:
        report: of the run that made it.
        made: its provenance, from :func:`cria_tricks.adapter.provenance.describe`.
        base: the base model's name.
        note: what a reader must know about the base's weights; often empty.
        recipe: what was asked.
    """
    kinds = report["data"]["train_kinds"]
    return "\n".join(
        [
            *_front(base, _LIBRARIES.get(recipe.tricks.peft, "peft"), what_ran.tags(recipe)),
            f"# {recipe.name}",
            "",
            what_ran.in_words(recipe, base, kinds),
            *(["", note] if note else []),
            "",
            "## Data",
            "",
            f"- train: {report['data']['train']}",
            f"- evaluation: {report['data']['eval']}",
            "",
            "## Results",
            "",
            *markdown_table(("what", "value"), _results(report)),
            "",
            "This card knows the training run and nothing later. The losses are all that the run measured of quality: "
            "whether answers are true, well cited or safe, it did not measure. The scores of `cria eval`, where "
            "somebody ran it, are in the folder that it writes and not here.",
            "",
            "## On a GPU",
            "",
            *markdown_table(("what", "value"), _on_a_gpu(report)),
            "",
            "## Where it comes from",
            "",
            *markdown_table(("what", "value"), _origin(made)),
            "",
            "`provenance.json` holds all of it, with the recipe, every metric and, where memory could be estimated, "
            "the estimate row by row.",
            "",
            "## Use",
            "",
            "```python",
            _load(base, note, recipe) + _ask(kinds),
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
    """README.md of a merged model.

    Args:
        name: the recipe's, or the adapter folder's.
        base: the base model's name.
        note: what a reader must know about the base's weights; often empty.
        recipe: of the adapter's training, or what its config says of it.
        kinds: how many training rows of each kind there were; empty where nothing says so.
        dtype: of the merged weights.
        check: what :func:`cria_tricks.adapter.merge.merge` found when it held them against the unmerged model.
    """
    rounded, what = what_ran.quantized(recipe), what_ran.adapter(recipe)
    if rounded:
        rounded = f"Its training quantised the base to {rounded}, so these weights are rounded in the same way."
    return "\n".join(
        [
            *_front(base, "transformers", ["merged", *what_ran.tags(recipe)]),
            f"# {name}, merged",
            "",
            f"`{base}` with {what} merged into its weights, in {dtype}. Plain transformers loads it.",
            *(["", f"The adapter was trained on {what_ran.rows_in_words(kinds)}."] if kinds else []),
            *(line for sentence in (rounded, note) if sentence for line in ("", sentence)),
            "",
            "## Merged against unmerged",
            "",
            *markdown_table(("what", "value"), check_rows(check)),
            "",
            "Nothing else was measured on the merged model. What was measured on the adapter, and where it comes from, "
            "stands in `provenance.json` where the adapter brought one.",
            "",
            "## Use",
            "",
            "```python",
            _load(base, note, WHOLE) + _ask(kinds),
            "```",
            "",
            *_licence_note(base),
        ]
    )


def check_rows(check: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the merge's check, for the card and for the screen."""
    return [
        ("positions compared", f"{check['positions']:,}"),
        ("largest difference of a logit", f"{check['largest_difference']:.3g}"),
        ("allowed: what 16 bits alone do to the unmerged model", f"{check['bound']:.3g}"),
        ("largest difference that the adapter itself makes", f"{check['adapter_effect']:.3g}"),
        ("same most likely token", f"{check['same_argmax']:.2%} of positions"),
        *([("the base", check["other_base"])] if "other_base" in check else []),
    ]


def _front(base: str, library: str, tags: Sequence[str]) -> list[str]:
    """What the hub reads. It takes a base only by its id there."""
    licence = _licence(base)
    return [
        "---",
        *([f"base_model: {base}"] if is_hub_id(base) else []),
        f"library_name: {library}",
        *([f"license: {licence}"] if licence else []),
        f"tags: [{', '.join(['cria_tricks', *tags])}]",
        "---",
    ]


def _results(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("evaluation loss before (mean per trained token)", _loss(report["eval_loss_before"])),
        ("evaluation loss after", _loss(report["eval_loss_after"])),
        ("training loss, mean over steps", _loss(report["train_loss"])),
        ("optimizer steps", f"{report['steps']} of {report['planned_steps']}, {report['skipped_steps']} skipped"),
        ("trained tokens", f"{report['data']['trained_tokens_seen']:,}"),
        ("trainable parameters", f"{report['parameters']['trainable']:,}"),
        ("peak memory", human(report["peak_bytes"])),
        ("device", report["device"]),
        ("processes", str(_processes(report))),
        ("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items())),
    ]


def _on_a_gpu(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same lines on every card, so that two can be laid side by side; a CPU's numbers are none of a GPU's."""
    if report["plan"]["device"]["kind"] != "cuda":
        there = ["not measured: this run was on a CPU", *["not measured"] * 5]
    else:
        training, found = report["memory"]["train"], report["estimate"]
        beside = f", {found['ratio']:.3f} of the measured" if found and found["ratio"] else ""
        estimated = report["estimated_peak_bytes"]
        there = [
            report["device"],
            human(training["allocated_bytes"]),
            human(training["reserved_bytes"]),
            human(estimated) + beside if estimated else "not estimated: a kind of model that cannot be",
            f"{report['tokens_per_second']:,.0f}",
            f"{report['seconds'] / 60:,.1f}",
        ]
    names = (
        "card", "peak memory of training, allocated", "and reserved", "estimated before it ran",
        "tokens per second", "minutes, loading and evaluation included",
    )  # fmt: skip
    return list(zip(names, there, strict=True))


def _origin(made: Mapping[str, Any]) -> list[tuple[str, str]]:
    package, data = made["package"], made["data"]
    changed = " with changes" if package["changed"] else ""
    return [
        ("base model", provenance.in_words(made["base"])),
        *((f"{part} rows", _which(about)) for part, about in data.items()),
        ("recipe", f"`{made['recipe']['name']}`, switched: {_switched(made['recipe']['tricks'])}"),
        ("seed", str(made["seed"])),
        (
            "cria_tricks",
            package["version"] + (f", commit {package['commit']}{changed}" if package["commit"] else ", installed"),
        ),
    ]


def _which(about: Mapping[str, Any]) -> str:
    """Which rows exactly; nobody has counted those of a stream."""
    if about["rows"] is None:
        return f"a stream, fingerprint {about['sha256']}"
    return f"{about['rows']}, sha256 {about['sha256']}"


def _switched(tricks: Mapping[str, Any]) -> str:
    defaults = Recipe().tricks.model_dump(mode="json")
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in tricks.items() if value != defaults[key]) or "none"


def _again(report: Mapping[str, Any]) -> str:
    if report["lengthened"]:
        why = ", and ".join(map(what_ran.lengthened, report["lengthened"]))
        return f"`cria train recipe.toml` does not repeat the run, because {why}."
    processes = _processes(report)
    several = f", started in {processes} processes," if processes > 1 else ""
    return f"`cria train recipe.toml`{several} repeats the run where the data that it names is at hand."


def _processes(report: Mapping[str, Any]) -> int:
    return len(report["monitor"])


def _load(base: str, note: str, recipe: Recipe) -> str:
    """The lines that load model and tokenizer."""
    tricks = recipe.tricks
    if tricks.peft == "side_network":
        return f'from cria_tricks.adapter.chat import open_folder\n\nmodel, tokenizer = open_folder("{HERE}")\n'
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")\n'
    if tricks.peft == "none":
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{HERE}")\n{tokenizer}'
        )
    if tricks.quantization == "none":
        imports, config, chosen = "", "", ""
    else:
        imports, chosen = ", BitsAndBytesConfig", ", quantization_config=rounded"
        config = "# It was trained over quantised matrices. Over the base as it was published its loss is another.\n"
        config += f"rounded = BitsAndBytesConfig({_bits(tricks)})\n"
    if base.startswith("random:"):  # only this package can make these weights
        models, place = "from cria_tricks import models\n", f'models.find("{base}").path'
    else:
        models, place = "", json.dumps(base)
    if note:
        config += "# These are not exactly the weights that it was trained over: see above.\n"
    return (
        f"{models}from peft import PeftModel\n"
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{imports}\n\n{config}"
        f"base = AutoModelForCausalLM.from_pretrained({place}{chosen})\n"
        f'model = PeftModel.from_pretrained(base, "{HERE}")\n{tokenizer}'
    )


def _ask(kinds: Mapping[str, int]) -> str:
    """The lines that ask in the format that was trained."""
    if kinds.get("chat"):
        prompt = (
            'messages = [{"role": "user", "content": "Your question"}]\n'
            "prompt = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)'
        )
    else:
        why = "# It was trained on text as it is, without a chat template.\n" if kinds else ""
        prompt = why + 'prompt = tokenizer("The text to go on with", return_tensors="pt")'
    return (
        f"\n{prompt}\n"
        "out = model.generate(**prompt.to(model.device), max_new_tokens=200, do_sample=False)\n"
        'print(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))'
    )


def _bits(tricks: Tricks) -> str:
    if tricks.quantization == "int8":
        return "load_in_8bit=True"
    twice = ", bnb_4bit_use_double_quant=True" if tricks.double_quantization else ""
    return f'load_in_4bit=True, bnb_4bit_quant_type="{tricks.quantization}"{twice}'


def _licence(base: str) -> str | None:
    return _LICENCES.get(base) or ("llama3.2" if _LLAMA in base else None)


def _licence_note(base: str) -> list[str]:
    licence = _licence(base)
    said = f"its licence ({licence}) applies." if licence else "see its licence."
    return [f"Derived from {base}: {said} The training data's licence is named above where it is known.", ""]


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
