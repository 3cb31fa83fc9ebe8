"""Write a byte-level BPE tokenizer into a GGUF file, with its special tokens and its chat template.

llama.cpp does not read ``tokenizer.json``. It knows each way of splitting text into words by a name,
``tokenizer.ggml.pre``, and the right name must be found from what ``tokenizer.json`` does. Under a wrong name the file
loads and answers, but it cuts numbers or blanks into other tokens than in training. So an unknown way is refused.
"""

import json
from typing import Any

import gguf
from tokenizers import Regex, pre_tokenizers

from cria_tricks.common.errors import BadInput

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


PRE: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_WORDS],
    "smollm": [_DIGITS, _WORDS],
    "llama-bpe": [_split(_CONTRACTIONS + r"\p{N}{1,3}" + _REST), _BYTES],
    "qwen2": [_split(_CONTRACTIONS + r"\p{N}" + _REST), _BYTES],
}
"""llama.cpp's name -> the steps in tokenizer.json that it stands for."""
WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Names under which llama.cpp takes a word that is in the vocabulary whole, without its merges (``ignore_merges``)."""
COMPOSED = ("qwen2",)
"""Names whose tokenizers also compose accents (NFC). llama.cpp does not; only text with separate accents differs."""


def refuse(tokenizer: Any, rows: int, name: str) -> None:
    """Refuse a tokenizer that this module cannot write, or that does not belong to the model.

    Args:
        tokenizer: transformers' tokenizer.
        rows: of the model's embedding.
        name: what the error calls the model.

    Raises:
        BadInput: with the reason, and what to do instead.
    """
    why = _unsupported(tokenizer)
    if why:
        raise BadInput(
            f"{name}: its tokenizer {why}; use the folder with transformers or vLLM, or convert it with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise BadInput(
            f"{name}: its tokenizer has a token {highest}, and the model has {rows} embeddings; the two do not belong "
            "together: put the model's own tokenizer into the folder"
        )


def _unsupported(tokenizer: Any) -> str:
    parts = _parts(tokenizer)
    model = parts["model"]
    if model["type"] != "BPE" or (parts["decoder"] or {}).get("type") != "ByteLevel" or model.get("byte_fallback"):
        return f"is no byte-level BPE (it is {model['type']}), and no other kind is written here"
    pre = pre_of(tokenizer)
    if not pre:
        return f"splits text in a way that has no name here; those that have one are {', '.join(PRE)}"
    if bool(model.get("ignore_merges")) != (pre in WHOLE_WORDS_FIRST):
        return f"splits text as {pre}, but merges words in another way (ignore_merges)"
    normalizer = parts["normalizer"]
    if normalizer and not (pre in COMPOSED and normalizer["type"] == "NFC"):
        return f"changes text before it splits it ({normalizer['type']}), and llama.cpp does not"
    if not isinstance(tokenizer.chat_template, str | None):
        return "has several chat templates, and a GGUF file has one: leave one"
    return ""


def _parts(tokenizer: Any) -> dict[str, Any]:
    return json.loads(tokenizer.backend_tokenizer.to_str())


def pre_of(tokenizer: Any) -> str:
    """Find llama.cpp's name for the way in which a tokenizer splits text; empty if it has none here."""
    first = _parts(tokenizer)["pre_tokenizer"] or {}
    steps = first.get("pretokenizers", [first])  # a sequence of steps, or a single one
    found = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    for name, known in PRE.items():
        if found == known:
            return name
    return ""


def split_as_named(tokenizer: Any, pre: str) -> None:
    """Make transformers split text as llama.cpp does under a name.

    transformers reads a GGUF file's ``tokenizer.ggml.pre``, but knows only some names: under ``smollm`` it splits as
    GPT-2, and under ``llama-bpe`` it still applies merges to whole words.

    Args:
        tokenizer: as transformers has read it from a GGUF file.
        pre: the name in the file.
    """
    backend = tokenizer.backend_tokenizer
    steps = [_step(known) for known in PRE[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.model.ignore_merges = pre in WHOLE_WORDS_FIRST


def _step(known: dict[str, Any]) -> Any:
    """Make one step of a pre-tokenizer from its entry in tokenizer.json."""
    if known["type"] == "Digits":
        return pre_tokenizers.Digits(individual_digits=True)
    if known["type"] == "ByteLevel":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=known["use_regex"])
    return pre_tokenizers.Split(Regex(known["pattern"]["Regex"]), behavior="isolated")


def adds_bos(tokenizer: Any) -> bool:
    """Tell whether the tokenizer puts the BOS token before a text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def write(writer: gguf.GGUFWriter, tokenizer: Any, rows: int, turn_end: int | None) -> None:
    """Add a tokenizer to the file.

    Args:
        writer: of the file.
        tokenizer: transformers' tokenizer.
        rows: of the model's embedding; ids without a token get a placeholder, because llama.cpp counts them.
        turn_end: the id of the token that ends an assistant's turn, if there is one.
    """
    tokens, kinds = _vocabulary(tokenizer, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_of(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(_merges(tokenizer))
    special = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: tokenizer.eos_token_id,
        writer.add_eot_token_id: turn_end,
        writer.add_unk_token_id: tokenizer.unk_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
    }
    for add, token in special.items():
        if token is not None:
            add(token)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(adds_bos(tokenizer))
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _vocabulary(tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    """List every token in the order of ids, and whether it is text, a control token, or not used."""
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [int(gguf.TokenType.UNUSED)] * rows
    for token, number in tokenizer.get_vocab().items():
        tokens[number] = token
        kinds[number] = int(gguf.TokenType.NORMAL)
    for number, added in tokenizer.added_tokens_decoder.items():
        tokens[number] = added.content
        kinds[number] = int(gguf.TokenType.USER_DEFINED)
        if added.special:
            kinds[number] = int(gguf.TokenType.CONTROL)
    return tokens, kinds


def _merges(tokenizer: Any) -> list[str]:
    """List the merges as llama.cpp reads them, two parts with a blank between; files have them as pairs or as text."""
    merges = _parts(tokenizer)["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
