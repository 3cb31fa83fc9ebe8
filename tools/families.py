"""The table of families and techniques: every kind of causal language model of transformers, tried on its twin.

python -m tools.families                # write it: 16 minutes on one core of an EPYC without AVX512 (2026-11-29)
python -m tools.families llama gpt2     # these families alone; all other rows stay
"""

import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.load import twin
from cria_tricks.models.configs import KINDS
from cria_tricks.switches import fused_blocks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "families.md"
BEGIN, END = "<!-- families: python -m tools.families -->\n", "<!-- end of the families -->\n"
TECHNIQUES = (*twin.TRIALS,)
_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONV),
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""What must be set where a family's defaults leave out a kind of block, or make no model at all."""
VERSION = f"transformers {transformers.__version__}"
RIGHT, REFUSED, NO_TWIN = "yes", "refused", "no twin"


def empty(kind: str) -> Any:
    """Build a family's model of its default config, without weights.

    Raises:
        Exception: any of the family's own code.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FIELDS.get(kind, {})))


def row(kind: str) -> tuple[str, ...]:
    """Return a family's row: what is right, what is refused, and what could not be tried, which is refused, too."""
    try:
        model = empty(kind)
    except Exception as error:  # of a family's own code
        return (f"`{kind}`", *[NO_TWIN] * len(TECHNIQUES), f"its default config: {type(error).__name__}")
    if model.config.get_text_config() is not model.config:
        return (f"`{kind}`", *[REFUSED] * len(TECHNIQUES), "more than a text model")
    found = {}
    plain = "sdpa" if model._supports_sdpa else "eager"
    for technique in TECHNIQUES:
        attention = twin.IMPLEMENTATION if technique == "packing" and plain == "sdpa" else plain
        found[technique] = twin.tried(model, attention, [technique])[technique]
    if kind not in fused_blocks.KINDS:
        found["fused blocks"] = "not one of the kinds that are fused"
    words = [_word(said) for said in found.values()]
    return (f"`{kind}`", *words, "billed" if kind in KINDS else "")


def _word(said: str) -> str:
    if said.startswith(twin.UNTRIED):
        return NO_TWIN
    return REFUSED if said else RIGHT


def table(kinds: Collection[str]) -> str:
    """Return the table, with new rows for some kinds, and a sentence that counts it."""
    before = on_the_page()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row(kind) if kind in kinds or kind not in before else before[kind] for kind in sorted(NAMES)]
    counts = [
        f"{technique} in {sum(found[place] == RIGHT for found in rows)}"
        for place, technique in enumerate(TECHNIQUES, 1)
    ]
    counted = f"Exact, of the {len(rows)} families of {VERSION}: {', '.join(counts)}."
    return "\n".join([counted, "", *markdown_table(("family", *TECHNIQUES, ""), rows), ""])


def on_the_page() -> dict[str, tuple[str, ...]]:
    """Read the rows of the page, by their first cell."""
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in rows}


def main() -> None:
    """Write the table into its page."""
    if sys.argv[1:] and VERSION not in PAGE.read_text(encoding="utf-8"):
        sys.exit(f"the page is of another version than {VERSION}: make all rows again")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    transformers.utils.logging.set_verbosity_error()
    PAGE.write_text(before + BEGIN + table(sys.argv[1:] or NAMES) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
