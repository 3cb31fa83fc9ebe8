"""Export a model as GGUF files with a Modelfile for Ollama and llama.cpp, and prove each file before it gets its name.

Llama and Qwen2 with a byte-level BPE tokenizer are written; llama.cpp has a script for others. It differs from
transformers in three ways:

- It rotates neighbouring numbers of a head (0 with 1, 2 with 3), and transformers number i with number i + d/2 of a
  head of width d. So the rows of Llama's W_q and W_k change their order; Qwen2's stay.
- It divides the low rotary frequencies of Llama 3 by the tensor ``rope_freqs.weight``.
- It knows each way of splitting text by a name, ``tokenizer.ggml.pre``. Under a wrong name the file loads and answers,
  but numbers or blanks become other tokens than in training.

The proof reads the file again with transformers. Each weight must be the model's, rounded to the file's type. The
logits must be those of the model's own code over these weights, so the settings are right. Template, special tokens and
the tokens of a prompt must be the same. What 8 bits do to the model's logits is reported.

The Modelfile tells Ollama the prompt format, the system message and the stops. Ollama does not run the Jinja template
of a GGUF file. It recognises some common ones; for others it would give the model a prompt that it was not trained on,
without an error. So the pieces between the messages are read off from a conversation that the Jinja template writes,
are compared with it on other ones, and go into the Modelfile.
"""

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.chat import prompt_format, trained_system, write_prompt
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.data.tokens import DATE
from cria_tricks.load import host_memory
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models import ends, pretrained

KINDS = ("f16", "q8_0")
"""The types of file: how matrices are stored."""
WRITTEN: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"rope_type": ("default", "llama3"), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"rope_type": ("default",), "use_sliding_window": (False,)},
}
"""The settings that can be written, by model type. llama.cpp knows no others of these kinds, or ignores them."""
NOISE = 1e-4
"""How much two fp32 runs with equal weights may differ, as a share of the largest logit; 2^-24 is one rounding."""
HARD = "In 1966  he counted:\n 1,234.5 + 67 = 1301.5\n\n\tIt's Kwanzaa's ñandú 東京 🙂 -- they'LL say  7  times… \r\n"
"""A text whose blanks, numbers, accents and apostrophes the ways of splitting text cut in different places."""


def _split(numbers: str) -> dict[str, Any]:
    letters = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return {"type": "Split", "pattern": {"Regex": letters + numbers + rest}, "behavior": "Isolated", "invert": False}


_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = {**_WORDS, "use_regex": False}
PRE: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_WORDS],
    "smollm": [{"type": "Digits", "individual_digits": True}, _WORDS],
    "llama-bpe": [_split(r"\p{N}{1,3}"), _BYTES],
    "qwen2": [_split(r"\p{N}"), _BYTES],
}
"""llama.cpp's name of a way of splitting text -> the steps in tokenizer.json that it stands for."""
WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Names under which llama.cpp takes a word that is in the vocabulary whole, without its merges (``ignore_merges``)."""


def export(
    folder: str | Path,
    kinds: Sequence[str] | None = None,
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Write GGUF files of a model and a Modelfile, and compare every file with the model.

    Args:
        folder: of a whole model; an adapter is merged first, with ``cria merge``.
        kinds: the types of file, of :data:`KINDS`; both when left out.
        out: the folder to write; ``gguf`` beside the model when left out.
        say: called with one sentence for each step.

    Returns:
        ``folder``, ``model`` (what was exported), ``stops``, ``versions``, ``template`` (whether the Modelfile has
        one), and ``files``: for each ``file``, ``type``, ``bytes``, the number of ``tensors`` and ``tokens`` that were
        compared, and how its rounding changes the logits of a prompt: ``largest_difference``, ``kl`` (mean over
        positions, nats) and ``same_argmax`` (share of positions).

    Raises:
        BadInput: if the folder is damaged, its model cannot be written as GGUF, memory is too small, or a proof fails.
    """
    whole = artifact.whole_model(folder)
    wanted = list(dict.fromkeys(kind.lower() for kind in kinds or KINDS))
    for kind in wanted:
        if kind not in KINDS:
            raise BadInput(f"--type {kind}: there are f16 and q8_0; ollama create --quantize makes others of f16")
    target = usable_path("--out", out or whole.absolute().parent / "gguf")
    if target.exists():
        raise BadInput(f"--out {target}: is there already; name a new folder")
    quiet_libraries()
    artifact.refuse_damaged(whole)
    why = _unwritten(pretrained.config(whole, str(whole)))
    if not why:
        tokenizer = pretrained.tokenizer(whole, str(whole))
        if not _pre(tokenizer) or isinstance(tokenizer.chat_template, dict):
            why = f"has a tokenizer that is no byte-level BPE like {', '.join(PRE)} with one template"
    if why:
        raise BadInput(f"{whole}: {why}, which is not written as GGUF here; take llama.cpp's convert_hf_to_gguf.py")
    host_memory.refuse_too_large(whole, 8, f"cria export {whole}")  # the model's weights and the file's, both in fp32
    chats = prompt_format(whole, tokenizer).template
    stops = [token for token in ends.stops(tokenizer, ends.named_in(whole)) if tokenizer.convert_ids_to_tokens(token)]
    if not stops:
        raise BadInput(f"{whole}: its tokenizer has no end token, so no answer would end; set eos_token in its config")
    say(f"loading {whole}")
    model = pretrained.causal_lm(whole, str(whole), dtype=torch.float32).eval()
    pretrained.refuse_unknown_tokens(model, max(tokenizer.get_vocab().values()), str(whole))
    template = ollama_template(tokenizer) if chats else "{{ .Prompt }}"
    found: dict[str, Any] = {
        "folder": str(target),
        "model": str(whole),
        "stops": tokenizer.convert_ids_to_tokens(stops),
        "versions": {name: version(name) for name in ("gguf", "transformers", "torch")},
        "template": bool(template),
        "files": [],
    }
    with atomic_files.new_folder(target) as aside:
        for kind in wanted:
            file = aside / f"model-{kind}.gguf"
            say(f"writing {file.name}, and comparing it with {whole}")
            _write(file, kind, model, tokenizer, "/".join(whole.absolute().parts[-2:]))
            proof = _prove(file, kind, model, tokenizer, chats)
            found["files"].append({"file": file.name, "type": kind, "bytes": file.stat().st_size, **proof})
        smallest = "q8_0" if "q8_0" in wanted else "f16"
        text = modelfile(f"model-{smallest}.gguf", template, found["stops"], trained_system(whole))
        (aside / "Modelfile").write_text(text, encoding="utf-8")
        (aside / "export.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return found


def _unwritten(config: Any) -> str:
    """Say why a model cannot be written: its kind, or a setting that llama.cpp does not know; empty if it can."""
    if config.model_type not in WRITTEN:
        return f"is of the kind {config.model_type}"
    if getattr(config, "quantization_config", None):
        return "is quantised already"
    settings = {**config.to_dict(), **config.rope_parameters}
    for name, values in {"hidden_act": ("silu",), **WRITTEN[config.model_type]}.items():
        if settings.get(name, values[0]) not in values:
            return f"has {name}={settings[name]}"
    return ""


def _pre(tokenizer: Any) -> str:
    """Find llama.cpp's name for the way in which a tokenizer splits text; empty if it has none in :data:`PRE`."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = parts["model"]
    first = parts["pre_tokenizer"] or {}
    steps = first.get("pretokenizers", [first])
    for step in steps:
        if "trim_offsets" in step:
            step["trim_offsets"] = True  # it changes positions in the text, and no token
    found = next((pre for pre, known in PRE.items() if steps == known), "")
    # Qwen2's tokenizer also composes accents. llama.cpp does not; only text with separate accents differs.
    plain = not parts["normalizer"] or (found == "qwen2" and parts["normalizer"]["type"] == "NFC")
    words_first = bool(bpe.get("ignore_merges")) == (found in WHOLE_WORDS_FIRST)
    if bpe["type"] == "BPE" and not bpe.get("byte_fallback") and plain and words_first:
        return found
    return ""


def _write(file: Path, kind: str, model: Any, tokenizer: Any, title: str) -> None:
    """Write a model and its tokenizer into one file, of a type in :data:`KINDS`."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(file, config.model_type)
    try:
        writer.add_type("model")
        writer.add_name(title)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(writer, tokenizer, config.vocab_size)
        if config.rope_parameters["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", _rope_factors(config, width).numpy())
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
        for name, weight in model.named_parameters():  # a tied head is not named again
            rows = _permuted(weight.detach(), name, config).contiguous()
            packing = _packing(rows, kind)
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(target, gguf.quants.quantize(rows.numpy(), packing), raw_dtype=packing)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, rows: int) -> None:
    """Add all tokens in the order of ids with their kinds, the merges, the special tokens, and the chat template."""
    tokens = [f"[PAD{number}]" for number in range(rows)]  # llama.cpp wants a name for each row of the embedding
    kinds = [gguf.TokenType.UNUSED] * rows
    for token, number in tokenizer.get_vocab().items():
        tokens[number] = token
        kinds[number] = gguf.TokenType.NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        kinds[number] = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for key, value in _special(tokenizer).items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_add_bos_token(adds_bos(tokenizer))
    writer.add_add_eos_token(tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _special(tokenizer: Any) -> dict[str, int | None]:
    """Return the special tokens' ids by their names in the file."""
    return {
        gguf.Keys.Tokenizer.BOS_ID: tokenizer.bos_token_id,
        gguf.Keys.Tokenizer.EOS_ID: tokenizer.eos_token_id,
        gguf.Keys.Tokenizer.EOT_ID: ends.of_template(tokenizer),
        gguf.Keys.Tokenizer.UNK_ID: tokenizer.unk_token_id,
        gguf.Keys.Tokenizer.PAD_ID: tokenizer.pad_token_id,
    }


def _packing(weight: torch.Tensor, kind: str) -> Kind:
    """Choose how a tensor is stored: norms and biases in fp32; rows that are no multiple of 32 in 16 bits."""
    if weight.dim() == 1:
        return Kind.F32
    return Kind.F16 if weight.shape[-1] % 32 else Kind[kind.upper()]


def _permuted(weight: torch.Tensor, name: str, config: Any) -> torch.Tensor:
    """Reorder the rows of Llama's W_q and W_k, shape (heads * d, C), in each head to 0, d/2, 1, d/2 + 1, and so on."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _rope_factors(config: Any, width: int) -> torch.Tensor:
    """Compute by what Llama 3 divides each rotary frequency, shape (d/2,)."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return plain / scaled


@torch.no_grad()
def _prove(file: Path, kind: str, model: Any, tokenizer: Any, chats: bool) -> dict[str, Any]:
    """Compare a GGUF file with the model that it was written from, and say what rounding did to the logits."""
    reader = gguf.GGUFReader(file)
    read, its_tokenizer = pretrained.gguf(file, file.name)
    prompt = write_prompt(tokenizer, [{"role": "user", "content": HARD}] if chats else HARD)["input_ids"]
    _refuse_other_tokens(file, reader, its_tokenizer, tokenizer, tokenizer.decode(prompt[0]))
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":  # transformers does not read it
            read.model.rotary_emb.inv_freq /= torch.tensor(tensor.data)
    its_weights = read.state_dict()
    stored = {name: its_weights[name] for name, _ in model.named_parameters()}  # a tied head is not named again
    for name, weight in model.named_parameters():
        packing = _packing(weight, kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), packing), packing)
        if not np.array_equal(stored[name].numpy(), rounded):
            raise BadInput(f"{file.name}: {name} read again is not the model's, rounded to {packing.name}")
    found = read(prompt, use_cache=False).logits[0]
    wanted = torch.func.functional_call(model, stored, (prompt,), {"use_cache": False}).logits[0]
    difference = (found - wanted).abs().max().item()
    if not difference <= NOISE * wanted.abs().max().item():  # "not <=", so that NaN is refused, too
        raise BadInput(
            f"{file.name}: with equal weights its logits differ by up to {difference:.3g} from the model's, so its "
            "settings are wrong (positions, norms or heads)"
        )
    unrounded = model(prompt, use_cache=False).logits[0]
    log_p = unrounded.log_softmax(-1)
    return {
        "tensors": len(reader.tensors),
        "tokens": prompt.shape[1],
        "largest_difference": (found - unrounded).abs().max().item(),
        "kl": max(0.0, (log_p.exp() * (log_p - found.log_softmax(-1))).sum(-1).mean().item()),
        "same_argmax": (found.argmax(-1) == unrounded.argmax(-1)).float().mean().item(),
    }


def _refuse_other_tokens(file: Path, reader: Any, read: Any, tokenizer: Any, text: str) -> None:
    """Compare the chat template, the special tokens, and the tokens of a text."""
    # From the file itself: transformers 5.16 takes other special tokens than it names, and knows only some names of
    # ways to split text.
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    for key, value in {"tokenizer.chat_template": tokenizer.chat_template, **_special(tokenizer)}.items():
        if fields.get(key) != value:
            raise BadInput(f"{file.name}: {key} in it is not the model's")
    parts = json.loads(read.backend_tokenizer.to_str())
    pre = fields["tokenizer.ggml.pre"]
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE[pre]}
    parts["model"]["ignore_merges"] = pre in WHOLE_WORDS_FIRST
    ids = Tokenizer.from_str(json.dumps(parts)).encode(text, add_special_tokens=False).ids
    if ids != tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise BadInput(f"{file.name}: its tokenizer cuts a prompt into other tokens than the model's")


ROLES = {"s": "system", "u": "user", "a": "assistant"}
TRIED = ("u", "su", "uau", "suauau")
"""The conversations on which the pieces are compared with the Jinja template, by the roles of their messages."""


def adds_bos(tokenizer: Any) -> bool:
    """Tell whether the tokenizer puts the BOS token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def ollama_template(tokenizer: Any) -> str:
    """Return the chat template in Ollama's language, which is that of Go; empty if it is not made of fixed pieces."""
    # llama.cpp puts this token before every prompt, and two of them would be another prompt than in training.
    bos = tokenizer.bos_token if adds_bos(tokenizer) else ""

    def jinja(roles: str, *texts: str) -> str:
        messages = [{"role": ROLES[role], "content": text} for role, text in zip(roles, texts, strict=True)]
        # Some templates write today's date. The Modelfile has the date that was in the training rows.
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
        return written.removeprefix(bos)

    try:
        # No template contains these words, so they mark where a message goes.
        before_system, _, rest = jinja("suau", "SYSTEM-7", "USER-7", "ANSWER-7", "LAST-7").partition("SYSTEM-7")
        after_system, _, rest = rest.partition("USER-7")
        after_user, _, rest = rest.partition("ANSWER-7")
        after_answer = rest.partition("LAST-7")[0]
        without_system = jinja("u", "USER-7").partition("USER-7")[0]
        for roles in TRIED:
            texts = [f"Say {number}, please." for number in range(len(roles))]
            found = without_system
            for role, text in zip(roles, texts, strict=True):
                if role == "s":
                    found = before_system + text + after_system
                else:
                    found += text + (after_user if role == "u" else after_answer)
            if found != jinja(roles, *texts):
                return ""
    except Exception:  # a template is a small program, and may refuse these conversations in its own words
        return ""
    pieces = (before_system, after_system, after_user, after_answer, without_system)
    if any("{{" in piece or '"""' in piece for piece in pieces):  # Ollama would read these as its own signs
        return ""
    system = "{{ if .System }}" + before_system + "{{ .System }}" + after_system
    user = '{{ if eq $m.Role "user" }}{{ $m.Content }}' + after_user
    answer = '{{ else if eq $m.Role "assistant" }}{{ $m.Content }}' + after_answer
    # Ollama joins all system messages in .System. They are in .Messages, too, so the loop leaves them out.
    loop = "{{ range $i, $m := .Messages }}" + user + answer + "{{ end }}{{ end }}"
    return system + "{{ else }}" + without_system + "{{ end }}" + loop


def modelfile(file: str, ollamas: str, stops: Sequence[str], system: str | None = None) -> str:
    """Return the text of a Modelfile for a GGUF file beside it; ``system`` is written where the user gives no other."""
    template = "# The chat template is not made of fixed pieces: write a TEMPLATE by hand, or Ollama guesses one."
    if ollamas:
        template = f'TEMPLATE """{ollamas}"""'
    lines = [f"FROM ./{file}", template]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    # Greedy decoding, as in ``cria chat``: the same question gets the same answer.
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"
