"""The adapter folder: what plain peft loads, a truthful card, and a manifest that says if it is whole."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from cria_tricks import durable
from cria_tricks.catalogue import SMOLLM2
from cria_tricks.errors import BadInput, usable_path
from cria_tricks.recipe import Recipe
from cria_tricks.tricks.side_network import SideBlock
from cria_tricks.units import human

SIDE_NETWORK = "side_network.json"
CONFIGS = ("adapter_config.json", SIDE_NETWORK)
"""Files that name an adapter's base model: peft's, and ours for a side network."""
_LICENCES = {SMOLLM2: "apache-2.0"}
_LLAMA = "Llama-3.2"


def save(folder: Path, model: Any, tokenizer: Any, base: str, card: str, recipe: Recipe) -> None:
    """Write the folder aside and rename it, so that it is there whole or not at all.

    Args:
        folder: ``.../adapter`` for an adapter, ``.../model`` for a fully fine-tuned model.
        model: a ``PeftModel``, a model with a side network, or a whole one.
        tokenizer: saved beside it.
        base: the name of the base model that others can load; a cache folder of ours is none.
        card: the text of README.md.
        recipe: saved as recipe.toml, so that the run can be repeated.
    """
    with durable.new_folder(folder) as aside:
        save_weights(model, aside)
        tokenizer.save_pretrained(aside)
        for config in (aside / name for name in CONFIGS if (aside / name).exists()):
            content = json.loads(config.read_text())
            content["base_model_name_or_path"] = base
            if isinstance(content.get("target_modules"), list):
                content["target_modules"].sort()  # peft keeps a set, in another order in every process
            config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        (aside / "README.md").write_text(card, encoding="utf-8")
        (aside / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")


def save_weights(model: Any, folder: Path) -> None:
    """Write what trained into a folder: peft's adapter, a side network, or the whole model."""
    if hasattr(model, "peft_config"):
        # By default peft may ask the hub, and save embeddings that nobody trained.
        model.save_pretrained(folder, save_embedding_layers=False)
    elif blocks := sum(isinstance(module, SideBlock) for module in model.modules()):
        trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
        save_file(trained, folder / "side_network.safetensors")
        (folder / SIDE_NETWORK).write_text(json.dumps({"base_model_name_or_path": "", "blocks": blocks}) + "\n")
    else:
        model.save_pretrained(folder)


def load_side_network(model: Any, folder: Path) -> None:
    """Put the numbers of a side network into a model that has one of the same size.

    Raises:
        BadInput: if the file does not fit.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = load_file(folder / "side_network.safetensors")
    if {name: p.shape for name, p in trained.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        raise BadInput(f"{folder}: its side network does not fit this model")
    for name, parameter in trained.items():
        parameter.data.copy_(saved[name])


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found in a whole folder."""

    files: int
    bytes: int
    unlisted: tuple[str, ...]


def verify(folder: str | Path) -> Verified:
    """Compare every file with the manifest.

    Raises:
        BadInput: naming the first file that is missing or changed.
    """
    folder = usable_path("adapter", folder)
    if not (folder / durable.MANIFEST).is_file():
        raise BadInput(f"{folder}: has no {durable.MANIFEST}, so it is no folder that cria train wrote")
    if damage := durable.damage(folder):
        raise BadInput(f"{folder}: {damage}; take the folder from its source again")
    files = durable.listed(folder)
    return Verified(len(files), sum(entry["bytes"] for entry in files.values()), durable.unlisted(folder))


def model_card(report: Mapping[str, Any], base: str, note: str, recipe: Recipe) -> str:
    """README.md of the folder, from the report of the run that made it."""
    adapter = recipe.tricks.peft != "none"
    what = {
        "lora": "A LoRA adapter",
        "head": "A trained head",
        "prompt_tuning": "A learnt prompt",
        "side_network": "A side network",
        "none": "A fully fine-tuned model",
    }[recipe.tricks.peft]
    licence = _LICENCES.get(base) or ("llama3.2" if _LLAMA in base else None)
    front = [
        "---",
        f"base_model: {base}",
        f"library_name: {'peft' if adapter else 'transformers'}",
        *([f"license: {licence}"] if licence else []),
        "tags: [cria_tricks, qlora, generated-from-trainer]",
        "---",
    ]
    rows = [
        ("evaluation loss before (mean per trained token)", _loss(report["eval_loss_before"])),
        ("evaluation loss after", _loss(report["eval_loss_after"])),
        ("training loss, mean over steps", _loss(report["train_loss"])),
        ("optimizer steps", f"{report['steps']} ({report['skipped_steps']} skipped by the loss scaler)"),
        ("trained tokens", f"{report['data']['trained_tokens_seen']:,}"),
        ("trainable parameters", f"{report['parameters']['trainable']:,}"),
        ("peak memory", human(report["peak_bytes"])),
        ("device", report["device"]),
        ("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items())),
    ]
    use = (
        'from cria_tricks.chat import open_folder\n\nmodel, tokenizer = open_folder("path/to/this/folder")\n'
        if recipe.tricks.peft == "side_network"
        else "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")\n'
        if adapter
        else "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
    )
    licence_note = (
        f"Derived from {base}: its licence ({licence}) applies."
        if licence
        else f"Derived from {base}: see its licence."
    )
    return "\n".join(
        [
            *front,
            f"# {recipe.name}",
            "",
            f"{what} for `{base}`, trained with cria_tricks on chat rows, loss on the assistant's tokens only.",
            *(["", note] if note else []),
            "",
            "## Data",
            "",
            f"- train: {report['data']['train']}",
            f"- evaluation: {report['data']['eval']}",
            "",
            "## Results",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "The evaluation loss is all that was measured. Whether answers are true, well cited or safe was not.",
            "",
            "## Use",
            "",
            "```python",
            use + 'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            "```",
            "",
            "## Recipe",
            "",
            "`recipe.toml` repeats the run: `cria train recipe.toml`. `manifest.json` holds the sha256 of every file; "
            "`cria verify FOLDER` compares.",
            "",
            licence_note + " The training data's licence is named above where it is known.",
            "",
        ]
    )


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
