r"""A LoRA adapter merged into its base: one model in 16 bits, held against the unmerged one.

The base is what it was in training: matrices that were quantised then are rounded the same way and unpacked, because
the adapter has learnt to make up for that rounding too.

W' = W + s B A (DoRA: with each output feature brought to its learnt length) is computed in fp32 and rounded once to
16 bits. A number so rounded is off by at most u times its size, u = 2^-8 in bf16 and 2^-11 in fp16. How far that moves
the logits depends on the model, so it is measured on this one and not guessed: the unmerged model is run in 16 bits
too, where every product's inputs and result are rounded with the same u. Both put relative errors of at most u on
factors of the same products, the merge on one factor, the run in 16 bits on both and on the result. So the merged
model's logits may differ from the unmerged ones, both computed in fp32, by no more than the unmerged model's own logits
do between 16 bits and fp32. What exceeds that is no rounding, and is refused. (SmolLM2-135M with random LoRA weights,
on a CPU: 0.32 of 0.67, with DoRA 0.40 of 0.76.) So is a merge that is off by more than half of what the adapter does:
then the 16 bits have swallowed it.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cria_tricks.adapter import model_card
from cria_tricks.adapter.chat import base_of, open_folder, other_than_trained_over
from cria_tricks.adapter.folder import CONFIGS, PROVENANCE, RECIPE, write_provenance
from cria_tricks.adapter.prompts import trained_kinds
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, first_line, is_out_of_memory, usable_path
from cria_tricks.data import sources
from cria_tricks.hardware import Device
from cria_tricks.load.adapter_files import SIDE_NETWORK
from cria_tricks.models import Weights, pretrained
from cria_tricks.recipe import Lora, Recipe, Tricks, from_toml

CPU = Device("cpu", "CPU", (0, 0), real_bf16=False, memory_bytes=0)
"""Where it is merged, on every machine: a card that trained on 4 bits may not hold the base in fp32."""
ROWS, TOKENS = 4, 64
"""How many fixed rows the models are compared on, and how long they are at most."""
NEITHER = "has nothing to merge into the weights"


def merge(
    adapter: str | Path,
    out: str | Path | None = None,
    *,
    base: str | Path | None = None,
    other_base: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Merge an adapter and write a whole model that plain transformers loads.

    Args:
        adapter: the adapter's folder, of ``cria train`` or of plain peft.
        out: the folder to write; ``merged`` beside the adapter when left out.
        base: where the base lies now, if it is not where the adapter says.
        other_base: whether the base may be another one than the adapter was trained over.
        say: takes a warning.

    Returns:
        ``merged``, ``dtype``, ``base``, and the check: ``positions``, ``largest_difference``, ``bound``,
        ``adapter_effect`` and ``same_argmax``.

    Raises:
        BadInput: if the folder is damaged or not safe, holds nothing that can be merged, or the merged model's logits
            differ by more than rounding can explain. Then nothing is written.
    """
    folder = usable_path("adapter", adapter)
    target = usable_path("--out", out) if out else folder.absolute().parent / "merged"
    config, below = base_of(folder, base)
    _refuse_unmergeable(folder, config)
    if target.exists():
        raise BadInput(f"--out {target}: is there already; name a new folder")
    assert below  # an adapter has one
    others = other_than_trained_over(folder, below, other_base)
    model, tokenizer = open_folder(folder, CPU, torch.float32, base=base, other_base=other_base, say=say)
    dtype = _stored_dtype(below)
    rows = _rows(tokenizer, model.get_input_embeddings().num_embeddings)
    unmerged = _logits(model, rows)
    with torch.autocast("cpu", dtype=dtype):
        rounded = _logits(model, rows)
    with model.disable_adapter():
        plain = _logits(model, rows)
    whole = _merged(model, folder)
    with atomic_files.new_folder(target) as aside:
        whole.to(dtype).save_pretrained(aside)
        del whole, model
        check = _compare(unmerged, _logits(_reloaded(aside), rows)) | {
            "bound": _largest(rounded, unmerged),
            "adapter_effect": _largest(plain, unmerged),
        }
        if others:
            check["other_base"] = "; ".join(others)
        _refuse_beyond_rounding(folder, check)
        tokenizer.save_pretrained(aside)
        _describe(aside, folder, below, dtype, check)
    return {"merged": str(target), "dtype": _name(dtype), "base": below.name, **check}


def _refuse_unmergeable(folder: Path, config: Path | None) -> None:
    if config is None:
        raise BadInput(f"{folder}: is a whole model already; transformers and cria chat load it as it is")
    if config.name == SIDE_NETWORK:
        raise BadInput(f"{folder}: a side network runs beside the base and {NEITHER}; use it with cria chat")
    kind = json.loads(config.read_text(encoding="utf-8")).get("peft_type")
    if kind == "PROMPT_TUNING":
        raise BadInput(f"{folder}: a learnt prompt is input and {NEITHER}; use it with peft or cria chat")
    if kind != "LORA":
        raise BadInput(f"{folder}: is a {kind} adapter, and only LoRA is merged here; try peft's merge_and_unload")


def _merged(model: Any, folder: Path) -> Any:
    try:
        whole = model.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, NotImplementedError) as error:  # not finite, or a kind of LoRA that peft cannot
        if is_out_of_memory(error):
            raise
        raise BadInput(f"{folder}: cannot be merged: {first_line(error)}; use it unmerged") from None
    head, embeddings = whole.get_output_embeddings(), whole.get_input_embeddings()
    if head is not None and head.weight is not embeddings.weight:
        whole.config.tie_word_embeddings = False  # a trained head was a copy; saved as tied it would be lost
    return whole


def _stored_dtype(base: Weights) -> torch.dtype:
    """bf16 for a base that is stored so; else fp16, the finer of the two."""
    stored = pretrained.config(base.path, base.name).dtype
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float16


def _rows(tokenizer: Any, vocabulary: int) -> list[torch.Tensor]:
    """The same rows every time: the first held-out ones of our own set, as the adapter's tokenizer cuts them."""
    texts = [
        "\n".join(message["content"] for message in row.messages)
        for row in sources.find("nguzo_saba", "eval").rows[:ROWS]
    ]
    rows = [torch.tensor([tokenizer(text)["input_ids"][:TOKENS]]) for text in texts]
    if max(int(row.max()) for row in rows) >= vocabulary:
        raise BadInput("the tokenizer gives tokens that the base model does not have; the two do not belong together")
    return rows


@torch.no_grad()
def _logits(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Of every position of every row, shape (N, V), in fp32."""
    return torch.cat([model(row, use_cache=False).logits[0].float() for row in rows])


def _reloaded(folder: Path) -> Any:
    """From the disk, as plain transformers loads it; computed in fp32, in which 16-bit weights are exact."""
    return pretrained.causal_lm(folder, str(folder), dtype=torch.float32).eval()


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def _compare(unmerged: torch.Tensor, merged: torch.Tensor) -> dict[str, Any]:
    same = (unmerged.argmax(-1) == merged.argmax(-1)).float().mean().item()
    return {
        "positions": len(unmerged),
        "largest_difference": _largest(unmerged, merged),
        "same_argmax": same,
    }


def _refuse_beyond_rounding(folder: Path, check: dict[str, Any]) -> None:
    found, effect = check["largest_difference"], check["adapter_effect"]
    why = ""
    if not found <= check["bound"]:  # not a number is beyond it too
        why = f"16 bits explain {check['bound']:.3g}"
    elif 0 < effect < 2 * found:
        why = f"the adapter itself moves them by {effect:.3g}: 16 bits would swallow it"
    if why:
        raise BadInput(
            f"{folder}: merged, its logits differ by up to {found:.3g} from the unmerged ones, and {why}; nothing was "
            "written: use the adapter unmerged"
        )


def _describe(aside: Path, folder: Path, base: Weights, dtype: torch.dtype, check: dict[str, Any]) -> None:
    """The card, and the adapter's recipe and provenance with what the merge found."""
    made: dict[str, Any] = {}
    name, recipe = folder.absolute().name, _recipe(folder)
    if (folder / RECIPE).is_file():
        (aside / RECIPE).write_bytes((folder / RECIPE).read_bytes())
    with contextlib.suppress(FileNotFoundError):  # an adapter of plain peft has none
        made = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        name = made["recipe"]["name"]
    write_provenance(aside, made | {"merge": {"base": base.name, "dtype": _name(dtype), **check}})
    kinds = trained_kinds(folder)
    text = model_card.merged_card(name, base.name, base.note, recipe, kinds, _name(dtype), check)
    (aside / "README.md").write_text(text, encoding="utf-8")


def _recipe(folder: Path) -> Recipe:
    """The recipe of an adapter's training; of plain peft's adapters as much as their config tells."""
    if (folder / RECIPE).is_file():
        return from_toml(folder / RECIPE)
    config = json.loads((folder / CONFIGS[0]).read_text(encoding="utf-8"))
    lora = Lora(dora=bool(config.get("use_dora")), rslora=bool(config.get("use_rslora")))
    return Recipe(tricks=Tricks(peft="lora"), lora=lora)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
