"""Find the token that ends an answer, so that rows train what generation stops at."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, first_line

GENERATION = "generation_config.json"
_MARK = "ANSWER-7"
"""An answer that no template contains."""


def behind_answer(tokenizer: Any) -> list[int] | None:
    """Tokenise what the chat template writes behind an answer; ``None`` without a template, or if it cannot be told."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        written = tokenizer.apply_chat_template(turns, tokenize=False)
        if _MARK not in written:
            return None
        return tokenizer(written.partition(_MARK)[2], add_special_tokens=False)["input_ids"]
    except Exception:  # a template is a program that came with the model; the rows themselves tell what is wrong
        return None


def of_template(tokenizer: Any) -> int | None:
    """Find the token with which the chat template ends an answer; ``None`` if it writes no control token there.

    Only a control token can end an answer. A line break cannot, because answers may contain it.
    """
    after = behind_answer(tokenizer)
    if not after:
        return None
    # An added token may be a control token although it is not marked as special; one of blanks is none.
    special, added = tokenizer.all_special_ids, tokenizer.added_tokens_decoder
    return next((token for token in after if token in special or str(added.get(token, "")).strip()), None)


def listed(named: int | Iterable[int] | None) -> list[int]:
    """Make a list of what a generation config says: a token, a list of them, or nothing."""
    return [named] if isinstance(named, int) else list(named or ())


def stops(tokenizer: Any, named: int | Iterable[int] | None) -> list[int]:
    """List the tokens at which generation stops: the tokenizer's EOS, those of the model's config, the template's end.

    Args:
        tokenizer: the model's tokenizer. It names only one token, and a chat model may end its turns with another.
        named: ``eos_token_id`` of the model's generation config.
    """
    found = (tokenizer.eos_token_id, *listed(named), of_template(tokenizer))
    return list(dict.fromkeys(token for token in found if token is not None))


def named_in(folder: Path) -> list[int] | None:
    """Read ``eos_token_id`` from a model's generation config, or else from its config; ``None`` if neither names one.

    Raises:
        BadInput: if the file is damaged.
    """
    path = next((folder / name for name in (GENERATION, "config.json") if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig")).get("eos_token_id")
        return None if found is None else [int(one) for one in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path}: its eos_token_id cannot be read: {first_line(error)}; copy the file again") from None


def write(folder: Path, tokenizer: Any, named: int | Iterable[int] | None) -> None:
    """Let the generation config in a folder name all tokens that end an answer, if the base's names fewer.

    Args:
        folder: where an adapter or a model has just been saved.
        tokenizer: its tokenizer.
        named: ``eos_token_id`` of the base's generation config.
    """
    wanted = stops(tokenizer, named)
    if set(wanted) == set(listed(named)):
        return
    path = folder / GENERATION
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(content | {"eos_token_id": wanted}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def choose(tokenizer: Any, token: str) -> None:
    """Make a token the tokenizer's EOS (``data.eos``).

    Raises:
        BadInput: if the tokenizer does not know it as one token, or the chat template ends answers with another.
    """
    known = tokenizer.get_vocab().get(token)
    if known is None:
        raise BadInput(
            f"data.eos={token}: is no token of this tokenizer, whose EOS is {tokenizer.eos_token}; name a token that "
            "it has, or leave data.eos out"
        )
    end = of_template(tokenizer)
    if end is not None and known not in (behind_answer(tokenizer) or ()):
        raise BadInput(
            f"data.eos={token}: the chat template ends an answer with {tokenizer.convert_ids_to_tokens(end)}; leave "
            "data.eos out"
        )
    tokenizer.eos_token = token


def warnings(tokenizer: Any, named: int | Iterable[int] | None) -> list[str]:
    """Say what is wrong if rows of chats end with a token at which plain generation would not stop.

    Args:
        tokenizer: the model's tokenizer.
        named: ``eos_token_id`` of the base's generation config.
    """
    after = behind_answer(tokenizer)
    if after is None:
        return []
    end = of_template(tokenizer)
    known = listed(named)
    eos = tokenizer.eos_token
    if end is None:
        written = repr(tokenizer.decode(after)) if after else "nothing"
        return [
            f"the chat template writes {written} behind an answer and no end token, and generation stops at {eos}, so "
            f"the model does not learn to stop: set data.eos={eos}, which trains {eos} behind each last answer"
        ]
    if end not in (known or [tokenizer.eos_token_id]):
        token = tokenizer.convert_ids_to_tokens(end)
        others = ", ".join(tokenizer.convert_ids_to_tokens(one) or f"token {one}" for one in known) or eos
        return [
            f"the chat template ends an answer with {token}, and the base's generation stops at {others}: cria stops "
            "at both, and the generation_config.json that is saved with the result names both; a program that reads "
            f"the base's needs eos_token_id={end}"
        ]
    return []
