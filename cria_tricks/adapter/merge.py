r"""Merge a LoRA adapter into its base, save the result in 16 bits, and compare it with the unmerged model.

The base gets the weights that the adapter saw in training: matrices that were quantised in training are quantised in
the same way and unpacked, because the adapter has also learnt to correct that rounding.

The merged weight is W' = W + s B A, where W is the base's weight, A and B are the adapter's two thin matrices, and s is
LoRA's scaling. (DoRA then also rescales each output feature to its learnt magnitude.) W' is computed in fp32 and
rounded once to 16 bits. Rounding changes a number by at most u times its size: u is 2^-8 in bf16 and 2^-11 in fp16.

How much the rounding changes the logits depends on the model. So the limit is measured on this model: the unmerged
model is run in fp32 and again in 16 bits, and the largest difference between the two runs is the limit. The merge
should stay below it, because it rounds only one factor of each product, the weight. The run in 16 bits rounds both
factors and the result, with the same u. If the logits of the merged and the unmerged model, both computed in fp32,
differ by more than this limit, rounding cannot be the reason, and the merge is refused. (SmolLM2-135M with random LoRA
weights, on a CPU: a difference of 0.32 where 0.67 is the limit; with DoRA 0.40 of 0.76.) The merge is also refused if
the difference is more than half of what the adapter itself changes: rounding would destroy what the adapter learnt.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from cria_tricks.adapter import model_card
from cria_tricks.adapter.chat import trained_kinds
from cria_tricks.adapter.folder import CONFIGS, PROVENANCE, RECIPE, write_provenance
from cria_tricks.adapter.opening import base_of, open_folder
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, first_line, is_out_of_memory, usable_path
from cria_tricks.data import sources
from cria_tricks.hardware import Device
from cria_tricks.load.adapter_files import SIDE_NETWORK
from cria_tricks.models import ends, pretrained
from cria_tricks.recipe import Recipe, from_toml
from cria_tricks.settings import Lora, Tricks

CPU = Device("cpu", "CPU", (0, 0), real_bf16=False, memory_bytes=0)
"""Adapters are always merged on the CPU, because a GPU that trained on 4-bit weights may be too small for fp32 ones."""
ROWS = 4
"""The number of fixed rows on which the models are compared."""
TOKENS = 64
"""Length limit of these rows (tokens); the rest of a row is cut off."""
NOTHING_TO_MERGE = "has nothing to merge into the weights"


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
        adapter: the adapter's folder, written by ``cria train`` or by plain peft.
        out: the folder to write; ``merged`` beside the adapter when left out.
        base: folder or name of the base model, if it is no longer where the adapter's config says.
        other_base: whether to allow a base other than the one that the adapter was trained over.
        say: called with each warning.

    Returns:
        ``merged`` (the folder), ``dtype``, ``base``, and the result of the check: ``positions`` compared,
        ``largest_difference`` of a logit, its limit ``bound``, ``adapter_effect`` (the largest difference that the
        adapter makes), ``same_argmax`` (the share of equal most likely tokens), ``adapter_sha256`` (of the adapter's
        weights), and ``other_base`` if it was another.

    Raises:
        BadInput: if the folder is damaged, holds nothing that can be merged, or the merged model's logits
            differ by more than rounding can explain. In these cases nothing is written.
    """
    folder = usable_path("adapter", adapter)
    target = usable_path("--out", out or folder.absolute().parent / "merged")
    if target.exists():
        raise BadInput(f"--out {target}: is there already; name a new folder")
    below, others = base_of(folder, base, other_base)
    if below is None:
        raise BadInput(f"{folder}: is a whole model already; transformers and cria chat load it as it is")
    _refuse_unmergeable(folder)
    model, tokenizer = open_folder(folder, CPU, torch.float32, base=base, other_base=other_base, say=say)
    dtype = torch.float16  # rounds less
    if pretrained.config(below.path, below.name).dtype == torch.bfloat16:
        dtype = torch.bfloat16
    rows = _rows(tokenizer, pretrained.vocabulary(model))
    unmerged = _logits(model, rows)
    # The limit: how much the unmerged model's logits change when it computes in 16 bits.
    with torch.autocast("cpu", dtype=dtype):
        rounded = _logits(model, rows)
    # How much the adapter changes the logits. If the rounding changes them about as much, the adapter is lost in it.
    with model.disable_adapter():
        plain = _logits(model, rows)
    _untie(model.get_base_model())  # or the change of the one end would be added to the other, too
    whole = _merged(model, folder)
    with atomic_files.new_folder(target) as aside:
        whole.to(dtype).save_pretrained(aside)
        del whole, model  # before the saved model is loaded: memory may be too small for all three
        # Loaded as plain transformers does; fp32 represents 16-bit weights exactly.
        saved = pretrained.causal_lm(aside, str(aside), dtype=torch.float32).eval()
        check = _compare(unmerged, _logits(saved, rows)) | {
            "dtype": str(dtype).removeprefix("torch."),
            "base": below.name,
            "bound": _largest(rounded, unmerged),
            "adapter_effect": _largest(plain, unmerged),
            "adapter_sha256": atomic_files.entry(folder / pretrained.ADAPTER)["sha256"],
        }
        if others:
            check["other_base"] = "; ".join(others)
        _refuse_beyond_rounding(folder, check)
        tokenizer.save_pretrained(aside)
        ends.write(aside, tokenizer, ends.named_in(aside))
        _describe(aside, folder, below.note, check)
    return {"merged": str(target), **check}


def _refuse_unmergeable(folder: Path) -> None:
    if (folder / SIDE_NETWORK).is_file():
        raise BadInput(f"{folder}: a side network runs beside the base and {NOTHING_TO_MERGE}; use it with cria chat")
    kind = json.loads((folder / CONFIGS[0]).read_text(encoding="utf-8")).get("peft_type")
    if kind == "PROMPT_TUNING":
        raise BadInput(f"{folder}: a learnt prompt is input and {NOTHING_TO_MERGE}; use it with peft or cria chat")
    if kind != "LORA":
        raise BadInput(f"{folder}: is a {kind} adapter, and only LoRA is merged here; try peft's merge_and_unload")


def _untie(model: Any) -> None:
    """Give the head a weight of its own, if it is tied to the embedding and one of the two is adapted."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    if isinstance(head, BaseTunerLayer) or isinstance(embedding, BaseTunerLayer):
        inner = getattr(head, "base_layer", head)
        inner.weight = torch.nn.Parameter(inner.weight.detach().clone(), requires_grad=False)


def _merged(model: Any, folder: Path) -> Any:
    try:
        whole = model.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, NotImplementedError) as error:  # weights not finite, or peft cannot merge it
        if is_out_of_memory(error):
            raise
        raise BadInput(f"{folder}: cannot be merged: {first_line(error)}; use it unmerged") from None
    head = whole.get_output_embeddings()
    embeddings = whole.get_input_embeddings()
    if head is not None and head.weight is not embeddings.weight:
        whole.config.tie_word_embeddings = False  # the trained head is a copy by now; saved as tied it would be lost
    return whole


def _rows(tokenizer: Any, vocabulary: int) -> list[torch.Tensor]:
    """Tokenise the first held-out rows of our own data set; each tensor has the shape (1, T)."""
    texts = [row.content for row in sources.find("nguzo_saba", "eval").rows[:ROWS]]
    rows = [torch.tensor([tokenizer(text)["input_ids"][:TOKENS]]) for text in texts]
    if max(int(row.max()) for row in rows) >= vocabulary:
        raise BadInput("the tokenizer gives tokens that the base model does not have; the two do not belong together")
    return rows


@torch.no_grad()
def _logits(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Compute the logits at all N positions of all rows, shape (N, V), in fp32."""
    return torch.cat([model(row, use_cache=False).logits[0].float() for row in rows])


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def _compare(unmerged: torch.Tensor, merged: torch.Tensor) -> dict[str, Any]:
    same = (unmerged.argmax(-1) == merged.argmax(-1)).float().mean().item()
    return {"positions": len(unmerged), "largest_difference": _largest(unmerged, merged), "same_argmax": same}


def _refuse_beyond_rounding(folder: Path, check: dict[str, Any]) -> None:
    found = check["largest_difference"]
    effect = check["adapter_effect"]
    why = ""
    if not found <= check["bound"]:  # "not <=" instead of ">", so that NaN is refused, too
        why = f"16 bits explain {check['bound']:.3g}"
    elif 0 < effect < 2 * found:
        why = f"the adapter itself moves them by {effect:.3g}: 16 bits would swallow it"
    if why:
        raise BadInput(
            f"{folder}: merged, its logits differ by up to {found:.3g} from the unmerged ones, and {why}; nothing was "
            "written: use the adapter unmerged"
        )


def _describe(aside: Path, folder: Path, note: str, check: dict[str, Any]) -> None:
    """Write the model card, the adapter's recipe, and its provenance with the results of the merge added."""
    made: dict[str, Any] = {}
    name = folder.absolute().name
    if (folder / PROVENANCE).is_file():
        made = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        name = made["recipe"]["name"]
    if (folder / RECIPE).is_file():
        (aside / RECIPE).write_bytes((folder / RECIPE).read_bytes())
        recipe = from_toml(folder / RECIPE)
    else:  # an adapter of plain peft, which has no provenance either
        config = json.loads((folder / CONFIGS[0]).read_text(encoding="utf-8"))
        lora = Lora(dora=bool(config.get("use_dora")), rslora=bool(config.get("use_rslora")))
        recipe = Recipe(tricks=Tricks(peft="lora"), lora=lora)
    write_provenance(aside, made | {"merge": check})
    text = model_card.merged_card(name, note, recipe, trained_kinds(folder), check)
    (aside / "README.md").write_text(text, encoding="utf-8")
