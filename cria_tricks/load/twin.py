"""Try a technique on a tiny twin of a model, and refuse the families of models in which it is not exact.

Packing is exact only if a model keeps documents apart by their positions, checkpointing only if a block may run twice,
and the loss only if the head returns the sum over the trained tokens. transformers has more than a hundred families,
and no list of names would outlive its next version. So a twin of the model is built: its class and its config, with
fewer heads, fewer words, narrower matrices, a window of a few tokens, and only so many blocks that each kind of block
is there. On it both ways are computed, with random weights in fp32. For loss, packing, checkpointing and chunked loss
this took 0.07 s for Llama and 0.7 s for Gemma 3 (two EPYC cores, 2026-11-29), once for each class, version and kind of
config: what was exact is noted in the cache folder.
"""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers.pytorch_utils import Conv1D

import cria_tricks.load.attention  # noqa: F401 (names our attention functions to transformers)
from cria_tricks.common import packages
from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.adapters import with_lora
from cria_tricks.load.fused import fuse, fuse_blocks
from cria_tricks.load.losses import chunked_loss_sum, full_loss_sum
from cria_tricks.models import weight_files
from cria_tricks.step_plan import Plan
from cria_tricks.switches import fused_blocks, fused_lora
from cria_tricks.switches.packing import IMPLEMENTATION
from cria_tricks.techniques.packing import PackedRows

WORDS = 96
WINDOW = 8
HEADS = 2
LENGTHS = (14, 19)
"""Tokens of the two rows: more than the twin's window."""
LARGEST = 200_000_000
"""A twin with more weights is not built [weights]."""
EQUAL = 1e-3
"""Largest difference, as a share of the logits' standard deviation, or of the gradients' length.

In 16 families that are exact, rounding in fp32 gave 3e-6 at most (two EPYC cores, 2026-11-29).
"""
SHORT = 1e-2
"""A gradient that is shorter, as a share of the longest, counts as so long: where it should be zero, it is rounding."""
EQUAL_SUMS = 1e-5
"""Largest difference of two losses, as a share of the loss. There rounding gave 7e-8, and Mixtral's extra loss for its
router 2e-5."""
LEFT_OUT = ("quantization_config", "model_type", "transformers_version", "architectures", "_name_or_path", "dtype")
"""Fields of a config that a twin does not take."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Fields of a config that bound the length of a row."""
UNTRIED = "a tiny one cannot be built"
"""How the words begin that say of a technique that it could not be tried."""
LINEAR = (torch.nn.Linear, Conv1D)
"""Layers that LoRA adapts in most families."""
_COUNTED = re.compile(r"(^|_)(n_head|heads|heads_kv|n_groups|num_query_groups)$")
"""Fields of a config that count heads or groups of heads."""
_WIDE = re.compile(
    r"^(hidden_size|d_model|n_embd|dim|n_inner|d_ff|dff|lru_width|d_inner|hidden_dim|embedding_size|mamba_d_ssm"
    r"|word_embed_proj_dim|attention_hidden_size|ffn_hidden_size|feed_forward_hidden_size|.*ffn_dim"
    r"|.*intermediate_(size|dim).*|moe_.*_size)$"
)
"""Fields that are a width of the whole model, that is, a multiple of the number of heads."""


class Unequal(Exception):
    """A twin has shown that two ways, which should be equal, are not; the message says it."""


def refuse(plan: Plan, model: Any, name: str) -> None:
    """Refuse a plan with a technique that is not exact in a model's family.

    Args:
        plan: what would run.
        model: the model, built without its weights.
        name: what errors call it.

    Raises:
        BadInput: names the family, what was found, and what to set instead.
    """
    wanted = {"loss": "take a model of another family"}
    if plan.collator:
        wanted["packing"] = "set tricks.packing=false"
    if plan.checkpointing.get("blocks"):
        wanted["checkpointing"] = "set tricks.gradient_checkpointing=false"
    if plan.loss["kind"] == "chunked":
        wanted["chunked loss"] = "set tricks.chunked_loss=false"
    if fused_lora.FUSE in plan.after_load:
        wanted["fused adapters"] = "set tricks.fused_lora=false"
    if {fused_blocks.FUSE, fused_blocks.BY_TRITON} & {*plan.after_load}:
        wanted["fused blocks"] = "set tricks.fused_blocks=false"
    family = f"models of kind {model.config.model_type}"
    for technique, said in tried(model, plan.model.get("attn_implementation", ""), list(wanted)).items():
        if said.startswith(UNTRIED):
            raise BadInput(f"model {name}: {technique} cannot be tried for {family}: {said}; {wanted[technique]}")
        if said:
            raise BadInput(
                f"model {name}: {technique} is not exact in {family}: on a tiny one {said}; {wanted[technique]}"
            )


def tried(model: Any, attention: str, techniques: Sequence[str]) -> dict[str, str]:
    """Try techniques on a twin of a model, or look up what an earlier twin has shown.

    Args:
        model: a causal language model, which may be on the meta device.
        attention: the attention function that would run.
        techniques: keys of :data:`TRIALS`.

    Returns:
        For each technique what is wrong with it, in words; empty if it is right.
    """
    if attention == "flash_attention_2":  # it needs a GPU; it is told of documents in the same way as these two
        attention = IMPLEMENTATION if model._supports_sdpa else "eager"
    # Sizes do not matter, because a twin has its own.
    kind = {field: value for field, value in _fields(model.config).items() if type(value) is not int or value < HEADS}
    about = json.dumps([attention, kind], sort_keys=True, default=str)
    versions = " ".join(map(importlib.metadata.version, ("cria_tricks", "peft", "torch", "transformers")))
    key = f"exact in {type(model).__name__} {versions} {hashlib.sha256(about.encode()).hexdigest()[:16]}"
    exact = set(weight_files.remembered(key) or ())
    found = dict.fromkeys(techniques, "")
    missing = [technique for technique in techniques if technique not in exact]
    if missing:
        # Outside of what may count or replace the operations of the model itself, on the CPU whatever is chosen. The
        # caller's random state is put back.
        with _disable_current_modes(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            twin, why = _twin(model, attention)
            for technique in missing:
                found[technique] = f"{UNTRIED} ({why})" if why else _said(TRIALS[technique], twin)
        # What is wrong is tried again each time: it may be a library that somebody has changed in this process.
        right = {technique for technique in missing if not found[technique]}
        if right:
            weight_files.remember({key: sorted(exact | right)})
    return found


def _said(trial: Callable[[Any], None], twin: Any) -> str:
    """Carry out a trial, and return what it has found; empty if all was equal."""
    try:
        trial(twin)
    except Unequal as error:
        return str(error)
    except Exception as error:  # of a family's own code, which may refuse what it is given in any way
        packages.pass_on(error)
        return f"it ends in {type(error).__name__}: {first_line(error).rstrip('.')}"
    return ""


def _twin(model: Any, attention: str) -> tuple[Any, str]:
    """Build a twin with drawn weights; or ``None``, and why there is none."""
    why = "it would be too large"
    blocks = _blocks_needed(model)
    for narrower in _divisors(model.config):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the generators of GPUs, too
        try:
            config = shrunk(model.config, blocks, narrower)
            with torch.device("meta"):
                empty = type(model)._from_config(config, dtype=torch.float32)
            if sum(weight.numel() for weight in empty.parameters()) > LARGEST:
                continue
            chosen = {"attn_implementation": attention} if attention else {}
            twin = type(model)._from_config(config, dtype=torch.float32, **chosen).eval()
            twin.config.use_cache = False
            for weight in twin.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            _logits(twin, _rows()[:1])
            return twin, ""
        except Exception as error:  # of a family's own code, which may refuse a small config in any way
            packages.pass_on(error)
            why = f"{type(error).__name__}: {first_line(error)}"
    return None, why


def shrunk(config: Any, blocks: int, narrower: int) -> Any:
    """Return a config like this one, but of a small model.

    Args:
        config: transformers' config of a model.
        blocks: the number of blocks that are left, from the first on.
        narrower: heads and widths are divided by it.
    """
    names = type(config).attribute_map or {}
    layers = names.get("num_hidden_layers", "num_hidden_layers")
    made: dict[str, Any] = {}
    for field, value in _fields(config).items():
        if field == layers:
            value = blocks
        elif isinstance(value, list) and (field == "layer_types" or len(value) == config.num_hidden_layers):
            value = [_narrowed(one, narrower) if _WIDE.match(field) else one for one in value[:blocks]]
        elif field == "per_layer_config" and isinstance(value, dict):
            value = {block: one for block, one in value.items() if int(block) < blocks}
        elif type(value) is int and value > 1 and _COUNTED.search(field):
            value = max(1, value // narrower)
        elif _WIDE.match(field):
            value = _narrowed(value, narrower)
        made[field] = value
    return type(config)(**made)


def _narrowed(width: Any, by: int) -> Any:
    """Divide a width; one that leaves a rest becomes a multiple of 16, which the kernels of experts need."""
    if type(width) is not int or width < 2:
        return width
    return width // by if width % by == 0 else -(-width // by // 16) * 16


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config, with few words, a short window and no dropout, and without names of files."""
    found = {}
    words = (type(config).attribute_map or {}).get("vocab_size", "vocab_size")
    for field, value in config.to_dict().items():
        if field in LEFT_OUT:
            continue
        if field == words or field.startswith("vocab_size"):
            value = WORDS
        elif field.endswith("_token_id"):
            value = None if value is None else {"pad": 0, "bos": 1, "eos": 2}.get(field[:3], 3)
        elif "window" in field and type(value) is int:
            value = min(value, WINDOW)
        elif field in _POSITIONS and type(value) is int:
            value = max(value, sum(LENGTHS))
        elif re.search("drop|jitter|noise", field) and isinstance(value, float):
            value = 0.0
        found[field] = value
    return found


def _divisors(config: Any) -> list[int]:
    """Return by what to divide heads and widths, in the order of the tries: two heads are left, four, one, all."""
    heads = _fields(config).get((type(config).attribute_map or {}).get("num_attention_heads", "num_attention_heads"))
    if type(heads) is not int:  # a model without attention, or with other numbers in each block
        heads = getattr(config, "num_heads", 0) or 1
    divisors = [by for by in range(2, heads) if heads % by == 0]
    few = [max((by for by in divisors if heads // by >= left), default=heads) for left in (HEADS, 4)]
    return list(dict.fromkeys((*few, heads, 1)))


def _blocks_needed(model: Any) -> int:
    """Return how many of the first blocks have each kind of block among them; two at least, if there are two."""
    config = model.config
    layers = getattr(config, "num_hidden_layers", 0)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == layers]
    if not lists:
        return 2
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [""] * layers
    kinds = [
        (named[number], *sorted(f"{path} {type(part).__name__}" for path, part in block.named_modules()))
        for number, block in enumerate(lists[0])
    ]
    return min(layers, max(2, *(kinds.index(kind) + 1 for kind in kinds)))


def _rows() -> list[dict[str, list[int]]]:
    """Draw two rows; the first five tokens of each are no labels."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(4, WORDS, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": ids, "labels": [IGNORED] * 5 + ids[5:]} for ids in drawn]


@torch.no_grad()
def _logits(twin: Any, rows: Sequence[dict[str, list[int]]]) -> torch.Tensor:
    """Compute the logits of a batch of rows, shape (B, T, V)."""
    batch = PadToLongest(0)(rows)
    del batch["labels"]
    return twin(**batch, use_cache=False).logits


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise an error if two tensors of one shape differ by more than rounding."""
    difference = ((found - expected).abs().max() / expected.std()).item()
    if not difference <= EQUAL:
        raise Unequal(f"{what} differ by {difference:.2g} standard deviations")


def _loss(twin: Any) -> None:
    """Compare the head's loss with the sum over the trained tokens, and look whether a token sees later ones."""
    one, other = _rows()
    later = {**other, "input_ids": [*other["input_ids"][:-1], 4 + (other["input_ids"][-1] + 1) % (WORDS - 4)]}
    before = slice(None, -1)
    _compare(_logits(twin, [later])[:, before], _logits(twin, [other])[:, before], "logits before a token that changes")
    batch = PadToLongest(0)([one, other])
    expected = _expected_loss(twin, [one, other], batch)
    with torch.no_grad():
        _compare_losses(full_loss_sum(twin, batch).item(), expected)


def _expected_loss(twin: Any, rows: Sequence[dict[str, list[int]]], batch: dict[str, torch.Tensor]) -> float:
    """Sum the losses of all trained tokens, by hand."""
    logits = _logits(twin, rows)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum").item()


def _compare_losses(found: float, expected: float) -> None:
    if not abs(found / expected - 1) <= EQUAL_SUMS:
        raise Unequal(f"the loss is {found:.4g} and not {expected:.4g}, the sum over the trained tokens")


def _packing(twin: Any) -> None:
    """Compare the logits of packed rows with those of each row alone."""
    rows = _rows()
    (packed,) = PackedRows(rows, sum(LENGTHS))
    first, second = sorted(rows, key=lambda row: packed["input_ids"][: len(row["input_ids"])] != row["input_ids"])
    alone = torch.cat([_logits(twin, [first]), _logits(twin, [second])], dim=1)
    # Only if a row sees its neighbour where nothing keeps them apart can the comparison show anything.
    joined = {name: packed[name] for name in ("input_ids", "labels")}
    begin = len(first["input_ids"])
    if ((_logits(twin, [joined]) - alone)[:, begin:].abs().max() / alone.std()).item() < 10 * EQUAL:
        raise Unequal("it does not show whether a row sees its neighbour")
    _compare(_logits(twin, [packed]), alone, "logits of packed rows and of each row alone")


def _gradients(twin: Any, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a loss, one for each trained tensor that it depends on."""
    weights = [weight for weight in twin.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss(), weights, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _compare_gradients(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raise an error if the gradient of a tensor differs by more than rounding."""
    least = SHORT * max(gradient.norm().item() for gradient in expected)
    difference = max(
        (one - other).norm().item() / max(other.norm().item(), least)
        for one, other in zip(found, expected, strict=True)
    )
    if not difference <= EQUAL:
        raise Unequal(f"gradients with and without it differ by {difference:.2g} of their length")


def _checkpointing(twin: Any) -> None:
    """Compare the gradients with and without checkpointed blocks."""
    batch = PadToLongest(0)(_rows())
    twin.train()
    try:
        expected = _gradients(twin, lambda: full_loss_sum(twin, batch))
        enable = getattr(twin, "activation_checkpointing_enable", None) or twin.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        found = _gradients(twin, lambda: full_loss_sum(twin, batch))
    finally:
        twin.eval()
        disable = getattr(twin, "activation_checkpointing_disable", None) or twin.gradient_checkpointing_disable
        disable()
    _compare_gradients(found, expected)


def _chunked(twin: Any) -> None:
    """Compare the chunked loss with the sum over the trained tokens."""
    rows = _rows()
    batch = PadToLongest(0)(rows)
    expected = _expected_loss(twin, rows, batch)
    head = twin.get_output_embeddings()
    head.requires_grad_(False)  # the chunked loss is for a frozen head
    try:
        with torch.no_grad():
            _compare_losses(chunked_loss_sum(twin, batch, 8).item(), expected)
    finally:
        head.requires_grad_(True)


def _fused(fuse: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return the trial of a function that replaces forward passes: the same gradients of adapters on all matrices."""

    def trial(twin: Any) -> None:
        batch = PadToLongest(0)(_rows())
        # No deep copy, because models with a state of their own do not allow one.
        chosen = {"attn_implementation": twin.config._attn_implementation}
        copied = type(twin)._from_config(twin.config, dtype=torch.float32, **chosen).eval()
        copied.load_state_dict(twin.state_dict())
        head = twin.get_output_embeddings()
        if not any(isinstance(module, torch.nn.Linear) and module is not head for module in twin.modules()):
            raise Unequal("no matrix but the head is a linear layer")
        linear = [path for path, module in twin.named_modules() if isinstance(module, LINEAR) and module is not head]
        plain = {"r": 2, "lora_alpha": 4, "target_modules": linear, "init_lora_weights": False}
        torch.default_generator.manual_seed(0)
        adapted = with_lora(copied, **plain)  # B is drawn, too, because gradients of A are zero where it is
        expected = _gradients(adapted, lambda: full_loss_sum(adapted, batch))
        fuse(adapted)
        _compare_gradients(_gradients(adapted, lambda: full_loss_sum(adapted, batch)), expected)

    return trial


TRIALS: dict[str, Callable[[Any], None]] = {
    "loss": _loss,
    "packing": _packing,
    "checkpointing": _checkpointing,
    "chunked loss": _chunked,
    "fused adapters": _fused(fuse),
    "fused blocks": _fused(fuse_blocks),
}
"""For each technique what is tried; it raises :class:`Unequal`, or any error of the family's own code."""
