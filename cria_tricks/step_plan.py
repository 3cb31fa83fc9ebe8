"""Define a plan: what will run, as plain data. ``resolve.py`` makes it from a recipe.

``resolve.py`` passes an empty plan from technique to technique. Each writes keyword arguments into it, but does not
call the libraries; only ``load/`` and ``trainer/`` do. So every switch can be read, compared and tested as data, on a
machine without a GPU, for a machine that has one.

What no keyword argument can express is the address of a function in this package, such as
``techniques.compile.compile_blocks``; :func:`function_at` finds it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import flat
from cria_tricks.hardware import Device

COMPILE = "techniques.compile.compile_blocks"
"""The edit that compiles parts of the model."""


@dataclass(frozen=True)
class Plan:
    """What will run: keyword arguments for the libraries, and addresses of functions for the rest.

    Every attribute but ``device`` and ``warnings`` is called a slot.

    Attributes:
        device: the machine for which the plan is made.
        model: arguments of ``AutoModelForCausalLM.from_pretrained``; dtypes by name.
        quantization: arguments of ``BitsAndBytesConfig``; empty if nothing is quantised.
        peft: the ``kind`` of what trains over the frozen model, and its arguments, such as those of ``LoraConfig``;
            empty for full fine-tuning.
        collator: how rows become batches: ``packed_length`` in tokens if they are packed, else empty.
        checkpointing: how many of the first ``blocks`` are checkpointed (``"all"`` or a number); the address of what
            makes their contexts, if they ``keep_attention``, and whether several rows have a mask (``masked``); the
            tokens of an MLP's tile (``mlp_tile``, or True for as many as the model is wide); the tokens of a
            micro-batch from which inputs of blocks travel to the host and back (``travels_from``); empty if nothing is
            recomputed.
        streaming: from which ``source`` frozen blocks come when they run, and whether a window's micro-batches go
            through them ``layer_by_layer``; empty if the blocks stay on the device.
        training: the ``gradient_accumulation_steps`` of a process, and ``fp16`` or ``bf16``.
        optimizer: the ``bits`` of an element of its states, and whether the states are ``paged``; whether it takes its
            steps ``in_backward``, if it does.
        loss: the ``kind`` of the loss (``"full"`` or ``"chunked"``) and its settings.
        after_load: the edits of the loaded model, in order: addresses of functions that get the model and this plan,
            and return the edited model.
        parallel: the ``strategy`` by which processes share the run, and the number of shares of the rows (``data``);
            for fsdp also when gradients are reduced (``reduce``); for tensor and ddp_tensor whether the residual stream
            is in pieces (``sequence``), if it is.
        step_context: the contexts around each forward pass of training, the outermost first: addresses of functions
            that get the model and this plan, and make the context.
        warnings: the settings that have no effect here, each in one sentence.
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
    _technique: str = ""
    _set_by: Mapping[str, str] = field(default_factory=dict)

    def with_(self, slot: str, **fields: Any) -> "Plan":
        """Return a plan with some fields of one slot set.

        Raises:
            BadInput: if another technique has set a field to a different value. The message names both techniques.
        """
        values = dict(getattr(self, slot))
        set_by = dict(self._set_by)
        for name, value in fields.items():
            key = f"{slot}.{name}"
            if key in set_by and values[name] != value:
                raise BadInput(
                    f"techniques {set_by[key]} and {self._technique} cannot be combined: {key} would have to be both "
                    f"{values[name]!r} and {value!r}"
                )
            values[name] = value
            set_by[key] = self._technique
        changed: dict[str, Any] = {slot: values, "_set_by": set_by}
        return replace(self, **changed)

    def refine(self, slot: str, **fields: Any) -> "Plan":
        """Return a plan with some fields of one slot replaced, whatever an earlier technique has set there.

        It is for a technique that knows the earlier value and makes a narrower choice of the same kind, so that this
        is no conflict: ``sdpa_expanded`` instead of ``sdpa``.
        """
        refined = {f"{slot}.{name}" for name in fields}
        free = {key: technique for key, technique in self._set_by.items() if key not in refined}
        return replace(self, _set_by=free).with_(slot, **fields)

    def then(self, edit: str) -> "Plan":
        """Return a plan with one more edit of the loaded model, the address of a function, after the others."""
        return replace(self, after_load=(*self.after_load, edit))

    def without(self, *edits: str) -> "Plan":
        """Return a plan without some edits of the loaded model."""
        return replace(self, after_load=tuple(edit for edit in self.after_load if edit not in edits))

    def around(self, context: str) -> "Plan":
        """Return a plan with one more context, the address of a function, around each forward pass of training."""
        return replace(self, step_context=(*self.step_context, context))

    def warn(self, sentence: str) -> "Plan":
        """Return a plan with one more warning: a setting has no effect here, or not the expected one."""
        return replace(self, warnings=(*self.warnings, sentence))

    @property
    def compiled(self) -> bool:
        """Whether parts of the model are compiled; operations and memory inside compiled kernels cannot be observed."""
        return COMPILE in self.after_load

    @property
    def steps_by_torch(self) -> bool:
        """Whether the optimizer is torch's own AdamW, and not one of bitsandbytes."""
        return self.optimizer["bits"] == 32 and not self.optimizer["paged"]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data that can be written as JSON, for the report."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def function_at(address: str) -> Callable[..., Any]:
    """Return the function at an address in this package, such as ``techniques.compile.compile_blocks``."""
    module, _, name = address.rpartition(".")
    return getattr(import_module(f"cria_tricks.{module}"), name)


def diff(before: Plan, after: Plan) -> str:
    """Return what differs between two plans, one line each: ``checkpointing.blocks: not set -> all``."""
    old = _flat(before)
    new = _flat(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "\n".join(f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}" for name in names)


def _flat(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan by their full names; without the device, which is where it runs, not what runs."""
    return flat({slot: value for slot, value in plan.to_dict().items() if slot != "device"})
