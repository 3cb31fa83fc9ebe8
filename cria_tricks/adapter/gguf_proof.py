r"""Prove a GGUF file: read it again with transformers, and compare it with the model that it was written from.

Four things are compared, and the first three must hold, or the file is refused:

- Every weight w, with what its type may do to it. F16 rounds w to within 2^-11 of its size (or 2^-25, where it is
  tiny). Q8_0 and Q4_0 give 32 neighbours a scale s and store w as a whole number times s. So w is off by at most s/2,
  plus the rounding of s itself to 16 bits, times that number: s is the largest neighbour over 127, or over -8. Q4_0
  has the numbers -8 to 7. A neighbour near 8 s becomes 7 s, and is off by w - 7 s.
- The logits, with those of the original's code and settings over the file's weights. Only settings could make a
  difference here (a wrong base of the rotary embedding, a lost factor), so nothing but fp32's own rounding is allowed.
- The tokens of the rendered chat prompt and of a text full of numbers and blanks.
- The greedy answer. In F16 it must be the original's; it may part only where the original's best two tokens are
  closer than the file's logits are to the original's. With 8 or 4 bits it may part anywhere, and the table says where.

What 8 or 4 bits do to the logits of the original is reported, not limited: that is the price of the smaller file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import GenerationConfig

from cria_tricks.adapter import gguf_layout, gguf_tokens
from cria_tricks.common.errors import BadInput
from cria_tricks.models import gguf_reader, pretrained

NOISE = 1e-4
"""How much two fp32 runs with equal weights may differ, as a share of the largest logit; 2^-24 is one rounding."""
ANSWER = 32
"""The length of the greedy answer (tokens)."""
SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""The tokenizer's special tokens, and their names in the file."""
HARD = "In 1966  he counted:\n 1,234.5 + 67 = 1301.5\n\n\tIt's Kwanzaa's ñandú 東京 🙂 -- they'LL say  7  times… \r\n"
"""A text whose blanks, numbers, accents and apostrophes the ways of splitting text cut in different places."""


@dataclass(frozen=True)
class Original:
    """The model that the files were written from.

    Attributes:
        folder: its folder.
        model: in fp32.
        tokenizer: transformers' tokenizer.
        prompt: the prompt's token ids.
        answer: the ids of its greedy answer.
        logits: at every position of prompt and answer, shape (T, V).
        stops: the ids that end an answer.
    """

    folder: Path
    model: Any
    tokenizer: Any
    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor
    stops: list[int]


def original(folder: Path, tokenizer: Any, prompt: list[int], stops: list[int]) -> Original:
    """Load the model that is exported, and let it answer the prompt."""
    model = pretrained.causal_lm(folder, str(folder), dtype=torch.float32).eval()
    answer = _answer(model, prompt, stops)
    return Original(folder, model, tokenizer, prompt, answer, _logits(model, prompt + answer), stops)


def prove(file: Path, kind: str, of: Original) -> dict[str, Any]:
    """Compare a GGUF file with the model that it was written from.

    Args:
        file: the GGUF file.
        kind: its type, a key of :data:`cria_tricks.adapter.gguf_layout.KINDS`.
        of: the model.

    Returns:
        ``tensors`` (how many), ``error_of_limit`` (the largest error of a weight, as a share of its limit),
        ``largest_error`` of a weight, ``settings_difference`` (of logits over equal weights), ``largest_difference``
        of a logit to the original's, ``kl`` (mean over positions, nats), ``same_argmax``, ``tokens`` compared, the
        ``answer``, its ``answer_tokens``, and ``parts_at``, the first token of it that differs, or ``None``.

    Raises:
        BadInput: naming what does not hold.
    """
    with gguf_reader.read_once():
        reader = gguf.GGUFReader(file)
        model, tokenizer = pretrained.gguf(file, file.name)
    _divide_frequencies(model, reader)
    found = _compare_tensors(file, reader, model, of)
    found["tokens"] = _compare_tokens(file, reader, tokenizer, of)
    logits = _logits(model, of.prompt + of.answer)
    answer = _answer(model, of.prompt, of.stops)
    # From here on the original has the file's weights, and only its settings are its own.
    of.model.load_state_dict(model.state_dict(), assign=True)
    of.model.tie_weights()
    found["settings_difference"] = _compare_settings(file, logits, _logits(of.model, of.prompt + of.answer))
    found |= _compare_logits(logits, of.logits)
    found["answer"] = of.tokenizer.decode(answer, skip_special_tokens=True)
    found["answer_tokens"] = len(answer)
    found["parts_at"] = _parting(answer, of.answer)
    if kind == "f16" and found["parts_at"] is not None:
        _refuse_parting(file, found["parts_at"], logits, of)
    return found


@torch.no_grad()
def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def _answer(model: Any, prompt: list[int], stops: list[int]) -> list[int]:
    """Answer greedily; both models with the same settings, whatever their folders say of temperature or penalties."""
    model.generation_config = GenerationConfig(
        max_new_tokens=ANSWER, do_sample=False, eos_token_id=stops, pad_token_id=stops[0]
    )
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


def _divide_frequencies(model: Any, reader: Any) -> None:
    """Divide the rotary frequencies by the file's factors, as llama.cpp does; transformers does not read them."""
    for tensor in reader.tensors:
        if tensor.name == gguf_layout.ROPE_FREQS:
            model.model.rotary_emb.inv_freq /= torch.tensor(tensor.data)


def _compare_tensors(file: Path, reader: Any, model: Any, of: Original) -> dict[str, Any]:
    """Compare every weight with the original's, in transformers' names and order of rows."""
    kinds = {tensor.name: Kind(tensor.tensor_type) for tensor in reader.tensors}
    loaded = model.state_dict()
    config = of.model.config
    largest = 0.0
    share = 0.0
    number = 0
    for name, weight in gguf_layout.stored(of.folder, config):
        number += 1
        target = gguf_layout.gguf_name(name, config)
        if target not in kinds or name not in loaded:
            raise BadInput(f"{file.name}: {target} is missing in it")
        error = (loaded[name] - weight).abs()
        allowed = rounding_limit(weight, kinds[target])
        # "not <=" instead of ">", so that NaN is refused, too
        if not bool((error <= allowed).all()):
            worst = error.max().item()
            raise BadInput(
                f"{file.name}: {target} read again differs by up to {worst:.3g} from {name}, more than rounding to "
                f"{kinds[target].name} explains"
            )
        largest = max(largest, error.max().item())
        # Where nothing is allowed the error is 0, and 0 / tiny is 0, too.
        share = max(share, (error / allowed.clamp_min(1e-30)).max().item())
    more = len(kinds) - number - (gguf_layout.ROPE_FREQS in kinds)
    if more:
        raise BadInput(f"{file.name}: has {more} tensors that the model does not have")
    return {"tensors": number, "error_of_limit": share, "largest_error": largest}


def rounding_limit(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Compute how far each weight may be from itself after rounding; the module's docstring derives it.

    Args:
        weight: in fp32.
        kind: the type that it is rounded to.

    Returns:
        A limit for each number, of the same shape.
    """
    if kind == Kind.F32:
        return torch.zeros_like(weight)
    size = weight.abs()
    if kind == Kind.F16:
        return (size * 2**-11).clamp_min(2**-25)
    blocks = weight.reshape(-1, gguf_layout.BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    steps = 127 if kind == Kind.Q8_0 else 8
    scale = largest / steps
    inside = scale / 2
    if kind == Kind.Q4_0:
        # The scale has the sign that makes the largest neighbour -8 s. One of the other sign ends at 7 s.
        where = blocks.abs().argmax(-1, keepdim=True)
        sign = -torch.sign(blocks.gather(-1, where))
        inside = torch.maximum(inside, sign * blocks - 7 * scale)
    rounded_scale = steps * (scale * 2**-11).clamp_min(2**-25)
    arithmetic = largest * 2**-20  # a few roundings of fp32, 2^-24 each, of numbers up to the largest
    return (inside + rounded_scale + arithmetic).expand_as(blocks).reshape(weight.shape)


def _compare_tokens(file: Path, reader: Any, tokenizer: Any, of: Original) -> int:
    """Compare the chat template, the special tokens, and the ids of two texts; return how many ids were compared."""
    # These are read from the file itself, because transformers 5.16 takes other special tokens than it names.
    if _field(reader, "tokenizer.chat_template") != of.tokenizer.chat_template:
        raise BadInput(f"{file.name}: its chat template is not the model's")
    for name, key in SPECIAL.items():
        found = _field(reader, key)
        wanted = getattr(of.tokenizer, name)
        if found != wanted:
            raise BadInput(f"{file.name}: its {name} is {found}, and the model's is {wanted}")
    gguf_tokens.split_as_named(tokenizer, _field(reader, "tokenizer.ggml.pre"))
    compared = 0
    for text in (of.tokenizer.decode(of.prompt), HARD):
        ids = of.tokenizer(text, add_special_tokens=False)["input_ids"]
        at = _parting(tokenizer(text, add_special_tokens=False)["input_ids"], ids)
        if at is not None:
            raise BadInput(f"{file.name}: its tokenizer parts from the model's at token {at} of {text[:40]!r}")
        compared += len(ids)
    return compared


def _field(reader: Any, key: str) -> Any:
    """Return the value of a field of the file's metadata; ``None`` if it is not there."""
    field = reader.get_field(key)
    if field is None:
        return None
    return field.contents()


def _compare_settings(file: Path, found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found - wanted).abs().max().item()
    if not difference <= NOISE * wanted.abs().max().item():
        raise BadInput(
            f"{file.name}: with equal weights its logits differ by up to {difference:.3g} from the model's, so its "
            "settings are wrong (positions, norms or heads)"
        )
    return difference


def _compare_logits(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Say how far the file's logits, shape (T, V), are from the original's."""
    log_p = wanted.log_softmax(-1)
    log_q = found.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    same = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    return {
        "largest_difference": (found - wanted).abs().max().item(),
        "kl": max(kl, 0.0),  # rounding can make a zero slightly negative
        "same_argmax": same,
    }


def _parting(found: list[int], wanted: list[int]) -> int | None:
    """Return the first position at which two lists differ, or where the shorter one ends; ``None`` if they agree."""
    for at, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            return at
    if len(found) == len(wanted):
        return None
    return min(len(found), len(wanted))


def _refuse_parting(file: Path, at: int, logits: torch.Tensor, of: Original) -> None:
    """Refuse an answer in F16 that parts from the original's where rounding cannot be the reason."""
    position = len(of.prompt) + at - 1
    first, second = of.logits[position].topk(2).values.tolist()
    difference = (logits[position] - of.logits[position]).abs().max().item()
    if first - second > 2 * difference:
        raise BadInput(
            f"{file.name}: its greedy answer parts from the model's at token {at}, and F16 cannot explain it"
        )
