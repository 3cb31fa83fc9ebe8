"""Export a model as GGUF files for Ollama and llama.cpp, and prove each file before it gets its name."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf

from cria_tricks.adapter import gguf_layout, gguf_proof, gguf_tokens, modelfile, prompts
from cria_tricks.adapter.folder import PROVENANCE, RESULTS
from cria_tricks.adapter.merge import ADAPTER_WEIGHTS, merge
from cria_tricks.adapter.opening import base_of
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.names import hint, nearest
from cria_tricks.data import sources
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models import Weights, ends, pretrained

FORMATS = ("gguf",)
"""What a model can be exported to."""
REPORT = "export.json"
"""The file with the results of the proof."""
FOR_OLLAMA = ("q8_0", "f16", "q4_0")
"""Which file the Modelfile names: the first of these that was written."""


@dataclass(frozen=True)
class _Source:
    """What is exported: the folder of a whole model, with what all its files have in common."""

    folder: Path
    title: str
    config: Any
    tokenizer: Any
    chats: bool
    pieces: modelfile.Pieces | None
    stops: list[int]


def export(
    folder: str | Path,
    to: str = "gguf",
    kinds: Sequence[str] | None = None,
    out: str | Path | None = None,
    *,
    base: str | Path | None = None,
    other_base: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Write GGUF files of a model and a Modelfile, and compare every file with the model.

    An adapter is merged first, into ``merged`` beside it, unless that folder is there and was merged from this adapter.

    Args:
        folder: of an adapter, a merged or a fully fine-tuned model.
        to: the format, ``gguf``.
        kinds: the types of file, of ``f16``, ``q8_0`` and ``q4_0``; all three when left out.
        out: the folder to write; ``gguf`` beside the model when left out.
        base: folder or name of an adapter's base model, if it is no longer where the adapter's config says.
        other_base: whether to allow a base other than the one that the adapter was trained over.
        say: called with one sentence for each step, and with each warning.

    Returns:
        ``folder`` (what was written), ``model`` (what it was written from), ``prompt``, the model's ``answer``,
        ``stops``, ``versions``, ``modelfile`` (the file that it names, and whether it has the chat template), and
        ``files``: for each its ``file``, ``type``, ``bytes`` and the results of
        :func:`cria_tricks.adapter.gguf_proof.prove`.

    Raises:
        BadInput: if the folder is damaged, its model cannot be written as GGUF, or a proof fails. In these
            cases nothing is written.
    """
    folder = usable_path("adapter", folder)
    wanted = _kinds(to, kinds)
    target = usable_path("--out", out or folder.absolute().parent / "gguf")
    if target.exists():
        raise BadInput(f"--out {target}: is there already; name a new folder")
    quiet_libraries()
    whole = _whole(folder, base, other_base, say)
    source = _source(whole)
    say(f"loading {whole}, and answering a prompt")
    ids = prompts.write(source.tokenizer, _prompt(source.chats))["input_ids"][0].tolist()
    original = gguf_proof.original(whole, source.tokenizer, ids, source.stops)
    found = _about(source, target)
    found["answer"] = source.tokenizer.decode(original.answer, skip_special_tokens=True)
    with atomic_files.new_folder(target) as aside:
        for kind in wanted:
            found["files"].append(_one_file(aside, kind, source, original, say))
        _write_modelfile(aside, source, wanted, found)
        (aside / REPORT).write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return found


def _kinds(to: str, kinds: Sequence[str] | None) -> list[str]:
    """Check the format and the types, and return each type once."""
    if to not in FORMATS:
        raise BadInput(f"--to {to}: {hint(nearest(to, FORMATS), 'there is gguf')}")
    for kind in kinds or ():
        if kind.lower() not in gguf_layout.KINDS:
            there_are = f"there are {', '.join(gguf_layout.KINDS)}"
            raise BadInput(f"--type {kind}: {hint(nearest(kind, gguf_layout.KINDS, cutoff=0.7), there_are)}")
    if not kinds:
        return list(gguf_layout.KINDS)
    return list(dict.fromkeys(kind.lower() for kind in kinds))


def _whole(folder: Path, base: str | Path | None, other_base: bool, say: Callable[[str], None]) -> Path:
    """Return the folder of the whole model; an adapter's is made by merging, or found beside it."""
    config, below = base_of(folder, base)
    if config is None or below is None:
        return folder
    # Merging takes minutes, so a model that cannot be written is refused before.
    gguf_layout.refuse(pretrained.config(below.path, below.name), below.name)
    merged = folder.absolute().parent / "merged"
    if merged.exists():
        _refuse_foreign(merged, folder, below)
        base_of(merged)  # it checks that the folder is whole and safe
        say(f"{merged} was merged from this adapter already")
        return merged
    say(f"merging {folder} into {below.name}")
    merge(folder, base=base, other_base=other_base, say=say)
    return merged


def _refuse_foreign(merged: Path, folder: Path, below: Weights) -> None:
    """Refuse a merged folder that was not made from this adapter and this base."""
    try:
        made = json.loads((merged / PROVENANCE).read_text(encoding="utf-8"))["merge"]
        weights = atomic_files.entry(folder / ADAPTER_WEIGHTS)["sha256"]
        same = made["adapter_sha256"] == weights and made["base"] == below.name
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise BadInput(
            f"{merged}: is there, and does not say that it was merged from {folder}; take it away, or name it "
            "instead of the adapter"
        )


def _source(whole: Path) -> _Source:
    """Read what all files have in common, and refuse what cannot be written."""
    config = pretrained.config(whole, str(whole))
    gguf_layout.refuse(config, str(whole))
    tokenizer = pretrained.tokenizer(whole, str(whole))
    gguf_tokens.refuse(tokenizer, config.vocab_size, str(whole))
    form = prompts.of_folder(whole, raw=False) or prompts.of_tokenizer(tokenizer)
    pieces = modelfile.pieces(tokenizer, gguf_tokens.adds_bos(tokenizer)) if form.template else None
    title = whole.absolute().name
    if title in RESULTS:
        title = whole.absolute().parent.name
    stops = [token for token in ends.stops(tokenizer, ends.named_in(whole)) if tokenizer.convert_ids_to_tokens(token)]
    if not stops:
        raise BadInput(f"{whole}: its tokenizer has no end token, so no answer would end; set eos_token in its config")
    return _Source(whole, title, config, tokenizer, form.template, pieces, stops)


def _prompt(chats: bool) -> Any:
    """Return the prompt of the proof: the first held-out row of our own data, as a chat if it was trained on chats."""
    messages = sources.find("nguzo_saba", "eval").rows[0].messages
    asked = [dict(message) for message in messages if message["role"] != "assistant"]
    if not chats:
        return "\n".join(message["content"] for message in asked)
    return asked


def _about(source: _Source, target: Path) -> dict[str, Any]:
    """Begin the report: what was exported, with what, and from which versions."""
    return {
        "folder": str(target),
        "model": str(source.folder),
        "prompt": "nguzo_saba, first held-out row",
        "stops": source.tokenizer.convert_ids_to_tokens(source.stops),
        "versions": {name: version(name) for name in ("gguf", "transformers", "torch")},
        "files": [],
    }


def _one_file(
    aside: Path, kind: str, source: _Source, original: gguf_proof.Original, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write one file, and prove it."""
    file = aside / f"model-{kind}.gguf"
    say(f"writing {file.name}")
    _write(file, kind, source)
    say(f"comparing {file.name} with {source.folder}")
    proof = gguf_proof.prove(file, kind, original)
    return {"file": file.name, "type": kind, "bytes": file.stat().st_size, **proof}


def _write(file: Path, kind: str, source: _Source) -> None:
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf_layout.ARCHITECTURES[source.config.model_type]])
    try:
        gguf_layout.describe(writer, source.config, kind, source.title)
        gguf_tokens.write(writer, source.tokenizer, source.config.vocab_size, ends.of_template(source.tokenizer))
        gguf_layout.write_tensors(writer, source.folder, source.config, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _write_modelfile(aside: Path, source: _Source, wanted: Sequence[str], found: dict[str, Any]) -> None:
    kind = next(kind for kind in FOR_OLLAMA if kind in wanted)
    system = prompts.trained_system(source.folder)
    text = modelfile.write(f"model-{kind}.gguf", source.pieces, found["stops"], source.chats, system)
    (aside / "Modelfile").write_text(text, encoding="utf-8")
    found["modelfile"] = {"file": f"model-{kind}.gguf", "template": source.pieces is not None or not source.chats}
