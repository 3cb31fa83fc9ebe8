"""Load configs, tokenizers, models and adapters, and refuse weights that do not fit their config.

No other module but ``blockwise.py`` calls ``from_pretrained``. When weights do not fit a model's config, transformers
loads the model all the same: it fills missing tensors with random numbers, ignores unknown ones, and only logs a
report. Here each of these is an error that names the tensor. A NaN among the weights makes the loss NaN, and only then
:func:`refuse_nonfinite` reads all weights and names the tensor; on a GPU, before it quantises them.

Three differences are no errors, and transformers does not report them: the head may be missing from the file if it is
tied to the embedding; position buffers (``rotary_emb.inv_freq``, ``position_ids``) are computed again; and a model's
class may list old tensors that its newer code ignores.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from cria_tricks.common import packages
from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.models import peft_probes, weight_files

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes in which a model may be stored, by their names in a safetensors header."""
SHOWN = 3
"""How many tensors an error names at most."""
ADAPTER = "adapter_model.safetensors"
"""The file of an adapter's numbers, as peft names it."""
ADAPTER_AGAIN = "copy or download the adapter's folder again, or name its own base with --base"


def config(folder: str | Path, name: str) -> Any:
    """Load a model's config.

    Args:
        folder: the model's folder; :func:`cria_tricks.models.fetch` downloads one from the hub.
        name: what errors call the model.

    Returns:
        transformers' config object.

    Raises:
        BadInput: if it cannot be read, or transformers does not know this kind of model.
    """
    found = loaded(AutoConfig.from_pretrained, folder, name)
    attention = str(getattr(found, "_attn_implementation", ""))
    if "/" in attention:
        raise BadInput(f"model {name}: its config asks for the kernel {attention} of the hub, whose code is never run")
    return found


def tokenizer(folder: str | Path, name: str) -> Any:
    """Load a tokenizer.

    Args:
        folder: the folder of a model or an adapter.
        name: what errors call the model.

    Returns:
        transformers' tokenizer.

    Raises:
        BadInput: if the folder has no tokenizer, or it cannot be read.
    """
    if not any((Path(folder) / file).is_file() for file in weight_files.TOKENIZER):
        raise BadInput(f"model {name}: the folder has no tokenizer; copy the tokenizer's files into it")
    return loaded(AutoTokenizer.from_pretrained, folder, name)


def refuse_unknown_tokens(model: Any, highest_id: int, what: str) -> None:
    """Refuse a tokenizer that produces token ids for which the model has no embedding.

    Args:
        model: the loaded model.
        highest_id: the largest token id that the model would get.
        what: what the error calls the model.

    Raises:
        BadInput: if that id is not below the model's vocabulary size.
    """
    words = vocabulary(model)
    if highest_id >= words:
        raise BadInput(
            f"{what}: its tokenizer gives token {highest_id}, and its vocabulary has {words}; the two do not "
            "belong together: put the model's own tokenizer into the folder"
        )


def vocabulary(model: Any) -> int:
    """Return how many tokens have an embedding, which an adapter may have wrapped."""
    return model.get_input_embeddings().weight.shape[0]


def positions(model: Any) -> int:
    """Return how many positions a model has a vector for, if they are a table; else more than any row has."""
    for path, module in model.named_modules():
        name = path.removesuffix(".base_layer").rpartition(".")[2]  # below an adapter
        if isinstance(module, torch.nn.Embedding) and (name == "wpe" or "position" in name):
            return module.num_embeddings - getattr(module, "offset", 0)
    # GPT-J's family keeps sines in a buffer of each block.
    tables = [buffer for path, buffer in model.named_buffers() if path.endswith("embed_positions")]
    return len(tables[0]) if tables else sys.maxsize


def room(model: Any, prompt: int, wanted: int) -> int:
    """Return how many tokens may follow a prompt: as many as wanted, or as the model has positions left.

    Raises:
        BadInput: if no position is left.
    """
    learnt = getattr(model, "active_peft_config", None)
    known = positions(model) - (learnt.num_virtual_tokens if learnt and learnt.is_prompt_learning else 0)
    if prompt >= known:
        raise BadInput(f"the prompt has {prompt} tokens, and the model {known} positions; ask something shorter")
    return min(wanted, known - prompt)


def causal_lm(folder: str | Path, name: str, **options: Any) -> Any:
    """Load a causal language model; each of its tensors must be in the folder, and no others.

    Args:
        folder: the model's folder.
        name: what errors call the model.
        **options: for ``from_pretrained``: dtype, quantization, device map, attention.

    Returns:
        transformers' model.

    Raises:
        BadInput: if a tensor is missing, unknown, of another shape or dtype; if the file holds another head although
            the config ties it to the embedding; or if the folder cannot be read.
    """
    described = config(folder, name)
    _headers(Path(folder), name, described)
    packed = options.get("quantization_config")
    if packed and getattr(described, "quantization_config", None):
        del options["quantization_config"]  # the folder has its own; which must be the same is checked before
    model, info = loaded(
        AutoModelForCausalLM.from_pretrained,
        folder,
        name,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # transformers reports them in many lines; they are in the info, too
        output_loading_info=True,
        **options,
    )
    if packed:
        for module in model.modules():
            if hasattr(module, "compute_type_is_set"):  # a 4-bit layer; the folder's own config may name another dtype
                module.compute_dtype = packed.bnb_4bit_compute_dtype
    _refuse(info, name)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not embedding.weight:
        raise BadInput(
            f"model {name}: config.json says that the output head is the embedding (tie_word_embeddings), but the file "
            "holds a different head; set tie_word_embeddings to false in config.json to use that head"
        )
    return model


def gguf(file: Path, name: str) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a GGUF file; its weights are unpacked to fp32.

    Raises:
        BadInput: if transformers cannot read the file.
    """
    options = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers hides
        model = loaded(AutoModelForCausalLM.from_pretrained, file.parent, name, dtype=torch.float32, **options)
        return model.eval(), loaded(AutoTokenizer.from_pretrained, file.parent, name, **options)


def refuse_misfit(folder: Path, name: str) -> None:
    """Compare the headers of the weight files with the model that the config describes, without reading a weight.

    A quantised model is not compared, and neither is one of a kind that transformers does not know.

    Args:
        folder: the model's folder.
        name: what errors call the model.

    Raises:
        BadInput: naming the tensors that are missing, unknown, of another shape, or stored in an unknown dtype.
    """
    described = config(folder, name)
    headers = _headers(folder, name, described)
    kind = AutoModelForCausalLM._model_mapping.get(type(described), None)
    if kind is None or getattr(described, "quantization_config", None):
        return  # of an unknown kind loading raises the error; a quantizer names packed tensors in its own way
    # Load "weights" on the meta device, which have shapes and no data; transformers compares them as in a real load.
    with torch.device("meta"):
        state = {key: torch.empty(tensor.shape, dtype=FLOATS[tensor.dtype]) for key, tensor in headers.items()}
    _, info = loaded(
        kind.from_pretrained,
        None,
        name,
        config=described,
        state_dict=state,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _refuse(info, name)


def _headers(folder: Path, name: str, described: Any) -> dict[str, weight_files.Tensor]:
    """Read the headers of a model's weight files, and refuse a dtype that only quantised weights may have."""
    headers = weight_files.tensors(folder, name)
    if getattr(described, "quantization_config", None):
        return headers
    for key, tensor in headers.items():
        if tensor.dtype not in FLOATS:
            raise BadInput(
                f"model {name}: {tensor.file.name} stores {key} as {tensor.dtype}, but weights are stored as "
                f"{', '.join(FLOATS)}; {weight_files.AGAIN}"
            )
    return headers


def refuse_nonfinite(folder: Path, name: str) -> None:
    """Look for NaN and infinity in every tensor of a model's files; a large file without any is read only once.

    Args:
        folder: the model's folder.
        name: what errors call the model.

    Raises:
        BadInput: naming the first tensor that holds NaN or infinity.
    """
    for file in weight_files.find(folder, name):
        finite = f"finite: {weight_files.sha256(file)}"
        if weight_files.remembered(finite):
            continue
        found = _first_nonfinite(file)
        if found:
            raise BadInput(f"model {name}: {found} in {file.name} holds NaN or infinity; {weight_files.AGAIN}")
        if file.stat().st_size >= weight_files.LARGE:
            weight_files.remember({finite: True})


def _first_nonfinite(file: Path) -> str:
    """Find the first tensor that holds NaN or infinity, and return its name; empty if all numbers are finite."""
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 (the file is not a dictionary)
            if not opened.get_tensor(key).isfinite().all():
                return key
    return ""


def adapter(model: Any, folder: Path) -> Any:
    """Load a peft adapter on top of a model; each of its tensors must be in its file, and no others.

    Args:
        model: the base model.
        folder: the adapter's folder.

    Returns:
        peft's model.

    Raises:
        BadInput: if a tensor is missing, unknown, NaN or infinite.
    """
    # Imported here, because it takes seconds and only an adapter needs it.
    from peft import PeftModel, get_peft_model_state_dict

    peft_probes.ignore_unusable()
    file = folder / ADAPTER
    with safe_open(file, framework="np") as opened:
        stored = set(opened.keys())
        # If words were added, or embedding or head are adapted, peft saves these two whole, too.
        saved = stored & _ends(model)
        rows = {opened.get_slice(key).get_shape()[0] for key in saved if key.endswith(".weight")}
    if len(rows) == 1 and rows != {vocabulary(model)}:
        model.resize_token_embeddings(*rows, mean_resizing=False)  # their numbers come from the file
    _refuse_unsaved_words(folder, vocabulary(model))
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except RuntimeError as error:
        raise _misfit(folder, error) from None
    # peft lists what it would write for this adapter, so the names are those of the file. Without False it would guess
    # whether to add the base's embeddings.
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    missing = sorted(wanted - stored)
    unknown = sorted(stored - wanted - saved)
    if missing:
        raise BadInput(f"adapter {folder}: {_some(missing)} missing in {file.name}; {ADAPTER_AGAIN}")
    if unknown:
        raise BadInput(
            f"adapter {folder}: {_some(unknown)} in {file.name}, but adapter_config.json puts no adapter there in this "
            f"base; {ADAPTER_AGAIN}"
        )
    refuse_nonfinite_adapter(folder)
    return adapted


def _misfit(folder: Path, error: RuntimeError) -> Exception:
    """Return an error of one line for weights of another shape than the base wants; any other error as it is."""
    found = re.search(r"size mismatch for (\S+): .*?Size\((.*?)\).*?Size\((.*?)\)", str(error), re.DOTALL)
    if not found:
        return error
    name, stored, wanted = found.groups()
    return BadInput(
        f"adapter {folder}: {name} has the shape {stored}, and over this base {wanted}: the base is of another "
        "size, or lacks added tokens that were not saved with the adapter; name the base of its training with --base"
    )


def refuse_nonfinite_adapter(folder: Path) -> None:
    """Refuse an adapter that holds NaN or infinity.

    Raises:
        BadInput: naming the first such tensor.
    """
    broken = _first_nonfinite(folder / ADAPTER)
    if broken:
        raise BadInput(f"adapter {folder}: {broken} in {ADAPTER} holds NaN or infinity; train the adapter again")


def changes_nothing(folder: Path) -> bool:
    """Tell whether every B of a LoRA adapter is zero, as before training, so that it changes nothing."""
    with safe_open(folder / ADAPTER, framework="pt") as opened:
        thin = [name for name in opened.keys() if ".lora_B." in name or ".lora_embedding_B" in name]  # noqa: SIM118
        return bool(thin) and not any(opened.get_tensor(name).any() for name in thin)


def _ends(model: Any) -> set[str]:
    """Return the names under which peft may save the weights of embedding and head whole."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    within = ("", "base_layer.", "modules_to_save.", "original_module.", "token_adapter.base_layer.")
    inner = [f"{place}{kind}" for place in within for kind in ("weight", "bias")]
    inner.append("token_adapter.trainable_tokens_delta")  # of the head, too, if the two are tied
    paths = [path for path, module in model.named_modules() if module in ends]
    return {f"base_model.model.{path}.{name}" for path in paths for name in inner}


def _refuse_unsaved_words(folder: Path, words: int) -> None:
    """Refuse an adapter that trains added words, if neither its file nor the base has them."""
    trained = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("trainable_token_indices")
    listed = trained.values() if isinstance(trained, dict) else [trained or []]
    highest = max((number for numbers in listed for number in numbers), default=0)
    if highest >= words:
        raise BadInput(
            f"adapter {folder}: trains token {highest}, and the base has {words}: its added tokens were not saved with "
            "it (save_embedding_layers=False in peft); save it with them, or name the base that has them with --base"
        )


def _refuse(info: Mapping[str, Collection[Any]], name: str) -> None:
    """Raise an error if transformers' report of a load names a tensor that does not fit.

    Args:
        info: the report, ``output_loading_info``.
        name: what errors call the model.
    """
    missing = sorted(info["missing_keys"])
    unknown = sorted(info["unexpected_keys"])
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise BadInput(
            f"model {name}: {key} has the shape {list(stored)} in its file, but config.json describes {list(wanted)}; "
            f"{weight_files.AGAIN}"
        )
    wrong = []
    if missing:
        wrong.append(f"{_some(missing)} missing in its files, so the model would begin with random numbers there")
    if unknown:
        wrong.append(f"{_some(unknown)} in its files, but not in the model that config.json describes")
    if wrong:
        raise BadInput(f"model {name}: {'; '.join(wrong)}; {weight_files.AGAIN}{_blocks(missing, unknown)}")


def _some(keys: list[str]) -> str:
    """Say how many tensors there are, and name the first ones: ``2 tensors (a, b) are``."""
    if len(keys) == 1:
        return f"1 tensor ({keys[0]}) is"
    named = keys[:SHOWN]
    if len(keys) > SHOWN:
        named.append("...")
    return f"{len(keys)} tensors ({', '.join(named)}) are"


def _blocks(missing: list[str], unknown: list[str]) -> str:
    """Suggest another number of blocks if nothing but tensors of blocks is missing, or too much."""
    block = re.compile(r"\blayers\.\d+\.")
    if not (missing and unknown) and all(map(block.search, missing + unknown)):
        return ", or correct num_hidden_layers in config.json"
    return ""


def loaded(from_pretrained: Callable[..., Any], folder: str | Path | None, name: str, **options: Any) -> Any:
    """Call a library's loader without running code from the folder, and turn its errors into one line.

    Too little memory or a broken package is not the folder's fault, so such an error is passed on as it is.
    """
    try:
        # Without this argument transformers would ask on the terminal whether to run the folder's code.
        return from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # a damaged folder may raise any exception of the libraries that read it
        packages.pass_on(error)
        if "trust_remote_code" in str(error):
            said = "it asks for code of its own (auto_map in config.json), which is never run here; name another model"
        elif "model type" in str(error):
            said = f"transformers {transformers.__version__} does not know its kind (model_type in config.json)"
        else:
            said = f"{first_line(error)}; is the folder whole?"
        raise BadInput(f"model {name}: cannot be loaded: {said}") from None


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the blocks of a transformers model, which it marks itself by their base class."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
