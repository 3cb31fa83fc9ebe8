"""Define a plan: what will run, as plain data. ``resolve.py`` makes it from a recipe.

``resolve.py`` passes an empty plan from trick to trick. Each trick writes keyword arguments and names into it, but does
not call the libraries; only ``load/`` and ``trainer/`` do. So every switch can be read, compared and tested as data, on
a machine without a GPU, for a machine that has one.

The names that a plan may use are listed here, in :data:`NAMES`. A plan refuses any other name when it is made.
Otherwise a wrong name would raise a ``KeyError`` only after the weights are loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import flat
from cria_tricks.hardware import Device

NAMES: Mapping[str, tuple[Any, ...]] = {
    # Edits of the loaded model, implemented in load/model.py
    "after_load": (
        "cast_without_cache",
        "prepare_for_kbit_training",
        "add_adapter",
        "start_at_rounding_error",
        "continue_from_adapter",
        "adapter_inputs_uncast",
        "fuse_adapters",
        "fuse_blocks",
        "fuse_blocks_by_triton",
        "tile_mlps",
        "checkpoint_blocks",
        "compile_blocks",
    ),
    # Where frozen blocks wait: load/streaming.py
    "streaming.source": ("memory", "file"),
    # How micro-batches go through them: techniques/layer_by_layer.py, in trainer/one_pass.py
    "streaming.layer_by_layer": (True,),
    # Contexts around a forward pass: trainer/forward.py
    "step_context": ("activation_offload", "overlapped_offload"),
    # Losses: load/losses.py
    "loss.kind": ("full", "chunked"),
    # What trains over a frozen model: load/adapters.py
    "peft.kind": ("lora", "head", "prompt_tuning", "side_network"),
    # Attention functions: three of transformers, and ours in load/attention.py
    "model.attn_implementation": ("eager", "sdpa", "flash_attention_2", "sdpa_expanded", "sdpa_by_document"),
    # Optimizers: trainer/optimizer.py
    "optimizer.bits": (32, 8),
    "optimizer.paged": (False, True),
    # Its steps as gradients arrive: techniques/optimizer_in_backward.py, made in trainer/optimizer.py
    "optimizer.in_backward": (True, "clip"),
    # When gradients are reduced: parallel/fsdp.py, in trainer/strategy.py
    "parallel.reduce": ("micro_batch", "step"),
    # Whether the residual stream is in pieces: parallel/sequence.py, in parallel/tensor.py
    "parallel.sequence": (True,),
    # How rows become batches: trainer/fit.py
    "collator": ("packed_length",),
}
"""The names with which a plan may ask something of ``load/`` and ``trainer/``, by slot or by field of a slot."""


@dataclass(frozen=True)
class Plan:
    """What will run: keyword arguments for the libraries, and names for what no keyword argument can express.

    Every attribute but ``device`` and ``warnings`` is called a slot.

    Attributes:
        device: the machine for which the plan is made.
        model: arguments of ``AutoModelForCausalLM.from_pretrained``; dtypes by name.
        quantization: arguments of ``BitsAndBytesConfig``; empty if nothing is quantised.
        peft: the ``kind`` of what trains over the frozen model, and its arguments, such as those of ``LoraConfig``;
            empty for full fine-tuning.
        collator: how rows become batches: ``packed_length`` in tokens if they are packed, else empty.
        checkpointing: how many of the first ``blocks`` are checkpointed (``"all"`` or a number), whether they
            ``keep_attention``, and then whether several rows have a mask (``masked``); the tokens of an MLP's tile
            (``mlp_tile``, or True for as many as the model is wide); the tokens of a micro-batch from which inputs of
            blocks travel to the host and back (``travels_from``); empty if nothing is recomputed.
        streaming: from which ``source`` frozen blocks come when they run, and whether a window's micro-batches go
            through them ``layer_by_layer``; empty if the blocks stay on the device.
        training: the ``gradient_accumulation_steps`` of a process, and ``fp16`` or ``bf16``.
        optimizer: the ``bits`` of an element of its states, and whether the states are ``paged``; whether it takes its
            steps ``in_backward``, if it does.
        loss: the ``kind`` of the loss (``"full"`` or ``"chunked"``) and its settings.
        after_load: the names of the edits of the loaded model, in order.
        parallel: the ``strategy`` by which processes share the run, and the number of shares of the rows (``data``);
            for fsdp also when gradients are reduced (``reduce``); for tensor and ddp_tensor whether the residual stream
            is in pieces (``sequence``), if it is.
        step_context: the names of the contexts around each forward pass of training, the outermost first.
        warnings: the settings that have no effect here, each in one sentence.

    Raises:
        BadInput: if it asks for a name that is not in :data:`NAMES`.
    """

    device: Device
    model: Mapping[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    quantization: Mapping[str, Any] = field(default_factory=dict)
    peft: Mapping[str, Any] = field(default_factory=dict)
    collator: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: Mapping[str, Any] = field(default_factory=dict)
    streaming: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"bits": 32, "paged": False})
    loss: Mapping[str, Any] = field(default_factory=lambda: {"kind": "full"})
    parallel: Mapping[str, Any] = field(default_factory=lambda: {"strategy": "none", "data": 1})
    after_load: tuple[str, ...] = ()
    step_context: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    _trick: str = ""
    _set_by: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Every change of a plan makes a new plan, so every name is checked here.
        for where in NAMES:
            for name in self._asked_for(where):
                self._refuse_unknown(where, name)

    def with_(self, slot: str, **fields: Any) -> "Plan":
        """Return a plan with some fields of one slot set.

        Raises:
            BadInput: if another trick has set a field to a different value. The message names both tricks.
        """
        values = dict(getattr(self, slot))
        set_by = dict(self._set_by)
        for name, value in fields.items():
            key = f"{slot}.{name}"
            if key in set_by and values[name] != value:
                raise BadInput(
                    f"tricks {set_by[key]} and {self._trick} cannot be combined: {key} would have to be both "
                    f"{values[name]!r} and {value!r}"
                )
            values[name] = value
            set_by[key] = self._trick
        changed: dict[str, Any] = {slot: values, "_set_by": set_by}
        return replace(self, **changed)

    def refine(self, slot: str, **fields: Any) -> "Plan":
        """Return a plan with some fields of one slot replaced, whatever an earlier trick has set there.

        It is for a trick that knows the earlier value and makes a narrower choice of the same kind, so that this is no
        conflict: ``sdpa_expanded`` instead of ``sdpa``.
        """
        refined = {f"{slot}.{name}" for name in fields}
        free = {key: trick for key, trick in self._set_by.items() if key not in refined}
        return replace(self, _set_by=free).with_(slot, **fields)

    def then(self, edit: str) -> "Plan":
        """Return a plan with one more edit of the loaded model, after the others."""
        return replace(self, after_load=(*self.after_load, edit))

    def without(self, *edits: str) -> "Plan":
        """Return a plan without some edits of the loaded model."""
        for edit in edits:
            self._refuse_unknown("after_load", edit)  # otherwise a wrong name would drop nothing, silently
        return replace(self, after_load=tuple(name for name in self.after_load if name not in edits))

    def around(self, context: str) -> "Plan":
        """Return a plan with one more context around each forward pass of training, inside the others."""
        return replace(self, step_context=(*self.step_context, context))

    def warn(self, sentence: str) -> "Plan":
        """Return a plan with one more warning: a setting has no effect here, or not the expected one."""
        return replace(self, warnings=(*self.warnings, sentence))

    @property
    def compiled(self) -> bool:
        """Whether parts of the model are compiled; operations and memory inside compiled kernels cannot be observed."""
        return "compile_blocks" in self.after_load

    @property
    def steps_by_torch(self) -> bool:
        """Whether the optimizer is torch's own AdamW, and not one of bitsandbytes."""
        return self.optimizer["bits"] == 32 and not self.optimizer["paged"]

    def _asked_for(self, where: str) -> Iterable[Any]:
        """Return the names that the plan asks for in a slot, or in a field of a slot.

        Args:
            where: a key of :data:`NAMES`: ``slot`` or ``slot.field``.
        """
        slot, _, name = where.partition(".")
        fields = getattr(self, slot)
        if not name:
            return fields
        return [value for field, value in fields.items() if field == name]

    def _refuse_unknown(self, where: str, name: Any) -> None:
        if name not in NAMES[where]:
            known = ", ".join(map(str, NAMES[where]))
            raise BadInput(f"trick {self._trick or '?'} asks for {where}={name}, which is none of {known}")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data that can be written as JSON, for the report."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def diff(before: Plan, after: Plan) -> str:
    """Return what differs between two plans, one line each: ``checkpointing.blocks: not set -> all``."""
    old = _flat(before)
    new = _flat(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "\n".join(f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}" for name in names)


def _flat(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan by their full names; without the device, which is where it runs, not what runs."""
    return flat({slot: value for slot, value in plan.to_dict().items() if slot != "device"})
