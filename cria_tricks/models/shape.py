"""Read the shape of a model from its ``config.json``: all that an estimate needs to know, without any weights.

A few fields of this file and simple arithmetic give the size of every matrix of a Llama, Mistral, Mixtral, Qwen, Gemma,
Granite, SmolLM3, Phi-3 or OLMo 2. Neither torch nor transformers is imported.

From the shape, too, come the facts that decide whether a plan can run on a model (:func:`facts_of`). Training and the
dry run take them from the model's modules instead (``load.model.built_empty``).
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.models import configs
from cria_tricks.models.catalogue import short_name
from cria_tricks.models.configs import KINDS, find_config, scaled_context

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder, with the letters that the formulas use.

    Attributes:
        name: the model's name.
        kind: ``model_type`` of its config.
        vocabulary: V, the vocabulary size.
        width: D, the width of the hidden states.
        layers: L, the number of blocks.
        heads: H, the number of query heads.
        kv_heads: K, the number of key heads, and of value heads; divides H.
        head_width: C, the width of one head.
        inner: F, the width of the hidden layer inside the gated MLP, or inside one expert.
        tied: whether the output head uses the embedding's weights.
        biased: the names of the matrices that have a bias.
        qk_norm: whether queries and keys are normalised.
        norms: how many RMS norms on hidden states a block has.
        experts: how many MLPs a block has; 1 for a dense model.
        experts_per_token: how many of them each token goes through.
        window: how many tokens a token attends to at most, itself included, perhaps only in some blocks; 0: no limit.
        caps_scores: whether a tanh caps the attention scores.
        caps_logits: whether a tanh caps the logits.
        beside_head: the config field that changes the logits after the head's product, e.g. by a cap; empty if none.
        norms_whole_queries: whether one norm covers the queries of all heads at once, and another all keys.
        norms_behind: whether a block normalises the outputs of attention and MLP instead of their inputs.
        scales_hidden: whether constants scale the embedding's result and what blocks add to hidden states (Granite).
        joined: whether one matrix makes queries, keys and values together, and another one gate and up.
        context: the context length, the longest row that the model was made for [tokens]; 0 if it is not known.
        stored_by: the settings that its weights are stored by already; none if they are not quantised.
    """

    name: str
    kind: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    tied: bool = False
    biased: tuple[str, ...] = ()
    qk_norm: bool = False
    norms: int = 2
    experts: int = 1
    experts_per_token: int = 1
    window: int = 0
    caps_scores: bool = False
    caps_logits: bool = False
    beside_head: str = ""
    norms_whole_queries: bool = False
    norms_behind: bool = False
    scales_hidden: bool = False
    joined: bool = False
    context: int = 0
    stored_by: tuple[str, ...] = ()

    @property
    def query_width(self) -> int:
        """H C, the width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """K C, the width of the keys of all heads; the values are as wide."""
        return self.kv_heads * self.head_width

    @property
    def ends_with_norm(self) -> bool:
        """Whether a norm follows down_proj: it does where the norms of a block stand behind, or on both sides."""
        return self.norms_behind or self.norms == 4

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(D_in, D_out) of each matrix of a block, by its name in LoRA's targets; with experts, of one expert."""
        width, inner = self.width, self.inner
        if self.joined:
            return {
                "qkv_proj": (width, self.query_width + 2 * self.kv_width),
                "o_proj": (self.query_width, width),
                "gate_up_proj": (width, 2 * inner),
                "down_proj": (inner, width),
            }
        return {
            "q_proj": (width, self.query_width),
            "k_proj": (width, self.kv_width),
            "v_proj": (width, self.kv_width),
            "o_proj": (self.query_width, width),
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        }

    @property
    def input_groups(self) -> tuple[tuple[str, ...], ...]:
        """The matrices of a block in the order in which they run; matrices with the same input are in one group."""
        if self.joined:
            return ("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)
        return ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)

    @property
    def modules(self) -> list[str]:
        """The paths of the model's modules in transformers, without those that hold no tensors, such as activations."""
        into_heads, out_of_heads = self.input_groups[:2]
        attention = [*into_heads, *out_of_heads]
        # transformers keeps the matrices of all experts in one module; the router beside it is called gate.
        mlp = [name for name in self.packable if name not in attention] or ["gate", "experts"]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.norms_behind:
            norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
        if self.norms == 4:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if self.qk_norm:
            attention += ["q_norm", "k_norm"]
        inside = ["self_attn", "mlp", *norms]
        inside += [f"self_attn.{name}" for name in attention]
        inside += [f"mlp.{name}" for name in mlp]
        paths = ["model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"]
        blocks = [f"model.layers.{number}" for number in range(self.layers)]
        paths += blocks
        for block in blocks:
            paths += [f"{block}.{name}" for name in inside]
        return paths

    def copies(self, linear: str) -> int:
        """Return how many copies of a matrix a block has: one, or for a matrix of the MLP one for each expert."""
        return self.experts if linear in ("gate_proj", "up_proj", "down_proj") else 1

    @property
    def packable(self) -> dict[str, tuple[int, int]]:
        """The ``linears`` that quantization packs. It skips experts: transformers joins theirs into one tensor."""
        return {name: widths for name, widths in self.linears.items() if self.copies(name) == 1}

    @property
    def block_linear_weights(self) -> int:
        """How many weights the matrices of a block have, with all experts, but without biases and the router."""
        return sum(self.copies(name) * d_in * d_out for name, (d_in, d_out) in self.linears.items())

    @property
    def block_other_weights(self) -> int:
        """How many weights the norms, biases and the router of a block have; they are never quantised."""
        # One norm for queries and one for keys, each as wide as all heads together or as a single head.
        of_queries = self.query_width + self.kv_width if self.norms_whole_queries else 2 * self.head_width
        norms = self.norms * self.width + of_queries * self.qk_norm
        biases = sum(self.linears[name][1] for name in self.biased)
        router = self.experts * self.width if self.experts > 1 else 0
        return norms + biases + router

    @property
    def embedding_weights(self) -> int:
        """V D, the weights of the embedding; a head that is not tied has as many again."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """How many parameters the whole model has."""
        blocks = self.layers * (self.block_linear_weights + self.block_other_weights)
        # The last term is the norm behind the last block.
        return blocks + self.embedding_weights * (1 if self.tied else 2) + self.width

    @property
    def tensors(self) -> tuple[tuple[int, int], ...]:
        """All parameters, as (number of tensors, elements of each); the small ones of a block count as one tensor."""
        matrices = [(self.layers * self.copies(name), d_in * d_out) for name, (d_in, d_out) in self.linears.items()]
        rest = [
            (self.layers, self.block_other_weights),
            (1 if self.tied else 2, self.embedding_weights),
            (1, self.width),
        ]
        return (*matrices, *rest)

    @property
    def active_weights(self) -> int:
        """How many weights multiply each token: blocks and head, without norms, biases, routers and skipped experts."""
        # An expert has three matrices of D x F: gate, up and down.
        idle = (self.experts - self.experts_per_token) * 3 * self.width * self.inner
        return self.layers * (self.block_linear_weights - idle) + self.embedding_weights


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """Read the shape of a model from its config.

    Args:
        config: the content of ``config.json``.
        name: the model's name, also for error messages.

    Raises:
        BadInput: if the model is not a decoder of a known type, or a field is missing or not a positive whole number.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadInput(f"model {name}: we cannot estimate model_type {kind!r}; supported: {', '.join(KINDS)}")
    _refuse_other_heads(config, name)
    stored_by = configs.settings_of(config, name)
    config = {**KINDS[kind], **config}  # transformers' defaults stand for missing fields
    number = functools.partial(_number, config, name)
    for field in REQUIRED:  # all of them first, so that a missing field is named before any other error
        number(field)
    heads = number("num_attention_heads")
    width = number("hidden_size")
    layers = number("num_hidden_layers")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadInput(
            f"model {name}: {heads} heads cannot share {kv_heads} key heads; correct num_attention_heads "
            "or num_key_value_heads in config.json"
        )
    return Shape(
        name=name,
        kind=kind,
        vocabulary=number("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=number("head_dim", width // heads),
        inner=number("intermediate_size"),
        tied=bool(config.get("tie_word_embeddings")),
        biased=_biased(kind, config),
        qk_norm=kind in ("qwen3", "gemma3_text", "olmo2"),
        norms_whole_queries=kind == "olmo2",
        norms_behind=kind == "olmo2",
        scales_hidden=kind == "granite",
        joined=kind == "phi3",
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
        experts=number("num_local_experts", 1),
        experts_per_token=number("num_experts_per_tok", 1),
        # Gemma 2 caps scores and logits even if its config does not mention them, because transformers' defaults do.
        caps_scores=bool(config.get("attn_logit_softcapping", kind == "gemma2")),
        caps_logits=bool(config.get("final_logit_softcapping", kind == "gemma2")),
        beside_head=_beside_head(kind, config),
        window=number("sliding_window") if _is_windowed(kind, config, layers) else 0,
        # The default once more, because a null in config.json has replaced it above.
        context=scaled_context(config, number("max_position_embeddings", KINDS[kind]["max_position_embeddings"])),
        stored_by=stored_by,
    )


def _number(config: Mapping[str, Any], name: str, field: str, default: int | None = None) -> int:
    """Read a field that must be a whole number above 0."""
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise BadInput(f"model {name}: its config.json has no {field}")
    if type(value) is not int or value < 1:
        raise BadInput(f"model {name}: {field} = {value!r} in its config.json must be a whole number above 0")
    return value


def _is_windowed(kind: str, config: Mapping[str, Any], layers: int) -> bool:
    """Tell whether some blocks attend only to a window of earlier tokens."""
    if config.get("sliding_window") is None:
        return False
    if "use_sliding_window" not in KINDS[kind]:
        return True
    # Qwen configs give a window even if they do not use it. Blocks from max_window_layers on use it.
    return bool(config["use_sliding_window"]) and config.get("max_window_layers", 0) < layers


GENERATES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    *("SmolLM3ForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM"),
)
"""Class names in a config's ``architectures`` that stand for one of these models with a head that generates text."""

BESIDE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields that change the logits after the head's product. The chunked loss multiplies by the head's weights
itself and would leave this out, so it is refused if one is set. ``load/model.py`` looks for them in every model."""


def _refuse_other_heads(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model with another head, such as a classifier: transformers would give it a random head for text."""
    meant = config.get("architectures") or ()
    if meant and not any(each in GENERATES for each in meant):
        raise BadInput(f"model {name}: is no causal language model but {meant[0]}; name one that generates text")


def _beside_head(kind: str, config: Mapping[str, Any]) -> str:
    """Return the first field of :data:`BESIDE_HEAD` that is set, by the config or by default; empty if none is."""
    default = {"gemma2": "final_logit_softcapping", "granite": "logits_scaling"}.get(kind)
    return next((field for field in BESIDE_HEAD if config.get(field, field == default)), "")


def _biased(kind: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the matrices with a bias: Qwen2 always q, k, v; Mistral, Mixtral and Phi-3 none; others by the config."""
    if kind == "qwen2":
        return ("q_proj", "k_proj", "v_proj")
    biased: tuple[str, ...] = ()
    if config.get("attention_bias") and kind not in ("mistral", "mixtral", "phi3"):
        biased += ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.get("mlp_bias") and kind in ("llama", "smollm3", "granite"):  # others ignore it
        biased += ("gate_proj", "up_proj", "down_proj")
    return biased


def find_shape(model: str) -> Shape:
    """Find a model's config by the model's name, and read its shape."""
    model = short_name(model)
    return shape_of(find_config(model), model)


def refuse_undivided(name: str, heads: int, kv_heads: int, inner: int, processes: int) -> None:
    """Refuse tensor parallelism over a number of processes that does not divide the model's heads and MLP evenly.

    Args:
        name: the model's name.
        heads: the number of query heads.
        kv_heads: the number of key and value heads.
        inner: the width of the hidden layer inside the MLP.
        processes: how many processes share the matrices of a block.

    Raises:
        BadInput: if one of them is not divisible; it suggests numbers of processes that are possible.
    """
    widths = {"heads": heads, "heads of keys and values": kv_heads, "columns in its MLP": inner}
    odd = [f"{width} {what}" for what, width in widths.items() if width % processes]
    if odd:
        largest = math.gcd(heads, kv_heads, inner)
        fitting = [str(number) for number in range(2, largest + 1) if largest % number == 0]
        cure = f"use {' or '.join(fitting)} processes" if fitting else "use parallel.strategy=ddp or fsdp"
        raise BadInput(
            f"tensor parallelism over {processes} processes: {name} has {' and '.join(odd)}, "
            f"which {processes} does not divide; {cure}"
        )


PLAIN_BLOCKS = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
                "smollm3")  # fmt: skip
"""Kinds of model whose blocks can be loaded one by one, and have a module ``mlp`` that maps each token by itself; a
test reads their code."""


@dataclass(frozen=True)
class Facts:
    """The facts about a model that decide whether a plan can run on it.

    Attributes:
        name: the model's name in error messages.
        kind: ``model_type`` of its config.
        has: tells whether some module's path ends in a given name; peft finds its target modules in the same way.
        is_head: tells whether a given name is the name of the output head.
        made_for_sdpa: whether torch's ``scaled_dot_product_attention`` computes the same as the model's own attention.
        beside_head: what the head computes besides its matrix product, in a word; empty if nothing.
        norms_whole_queries: whether one norm covers the queries of all heads at once, instead of each head's alone.
        blocks: the number of blocks; ``None`` if the model has no list of blocks.
        heads: the number of query heads.
        kv_heads: the number of key and value heads; ``load/refusals.py`` checks that it divides ``heads``.
        inner: the width of the hidden layer inside the MLP.
    """

    name: str
    kind: str
    has: Callable[[str], bool]
    is_head: Callable[[str], bool]
    made_for_sdpa: bool
    beside_head: str
    norms_whole_queries: bool
    blocks: int | None
    heads: int
    kv_heads: int
    inner: int


@functools.cache
def facts_of(shape: Shape) -> Facts:
    """Take the facts from a model's shape, without its modules."""
    # The dot lets a name match a whole path, too. Only whole components match: "proj" must not match "q_proj".
    paths = tuple(f".{path}" for path in shape.modules)

    def has(name: str) -> bool:
        return any(path.endswith(f".{name}") for path in paths)

    return Facts(
        name=shape.name,
        kind=shape.kind,
        has=has,
        # In transformers the head is called lm_head in every model type that cria plan can estimate.
        is_head=lambda name: ".lm_head".endswith(f".{name}"),
        made_for_sdpa=not shape.caps_scores,
        beside_head=shape.beside_head,
        norms_whole_queries=shape.norms_whole_queries,
        blocks=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        inner=shape.inner,
    )
