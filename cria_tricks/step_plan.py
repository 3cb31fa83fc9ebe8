"""What will run, as plain data: a recipe folded over the tricks.

``resolve.py`` hands an empty plan from trick to trick. Each writes its keyword arguments into it and imports
nothing; only ``load/`` and ``trainer/`` turn the names into calls. So every toggle can be read, compared and tested as
data, on a machine with no GPU, for a machine that has one.

The names are declared here (:data:`NAMES`), below both sides. A plan refuses any other name when it is made. Otherwise
a wrong one would be a ``KeyError`` after the weights were loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import flat
from cria_tricks.hardware import Device

NAMES: Mapping[str, tuple[Any, ...]] = {
    # Edits of the loaded model: load/model.py
    "after_load": ("prepare_for_kbit_training", "add_adapter", "adapter_inputs_uncast", "compile_blocks"),
    # Contexts around a forward pass: trainer/shared.py
    "step_context": ("activation_offload",),
    # Losses: load/losses.py
    "loss.kind": ("full", "chunked"),
    # What trains over a frozen model: load/adapters.py
    "peft.kind": ("lora", "head", "prompt_tuning", "side_network"),
    # Attention functions: three of transformers, and ours in load/attention.py
    "model.attn_implementation": ("eager", "sdpa", "flash_attention_2", "sdpa_expanded", "sdpa_by_document"),
    # Optimizers: trainer/arguments.py
    "optimizer.bits": (32, 8),
    "optimizer.paged": (False, True),
    # How rows become batches: trainer/fit.py
    "collator": ("packed_length",),
}
"""What a plan may ask of ``load/`` and ``trainer/``, by slot or by field of a slot."""


@dataclass(frozen=True)
class Plan:
    """Keyword arguments for the libraries, and three slots for what no keyword can say.

    Attributes:
        device: the machine it is meant for.
        model: for ``AutoModelForCausalLM.from_pretrained``; dtypes by name.
        quantization: for ``BitsAndBytesConfig``; empty when nothing is quantised.
        peft: ``kind`` of what trains, and its arguments, such as those of ``LoraConfig``.
        collator: how rows become batches: ``packed_length`` in tokens, when they are packed.
        training: for ``TrainingArguments``.
        optimizer: ``bits`` of its states and whether they are ``paged``.
        loss: ``kind`` of the loss (``"full"`` or ``"chunked"``) and its settings.
        after_load: edits of the loaded model, in order, by their names.
        parallel: the ``strategy`` by which processes share the run, and the number of shares of the rows (``data``).
        step_context: contexts around each forward pass, the outermost first, by their names.
        warnings: settings that have no effect here, each in one sentence.

    Raises:
        BadInput: if it asks for a name that :data:`NAMES` does not have.
    """

    device: Device
    model: Mapping[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    quantization: Mapping[str, Any] = field(default_factory=dict)
    peft: Mapping[str, Any] = field(default_factory=dict)
    collator: Mapping[str, Any] = field(default_factory=dict)
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
        # Every change of a plan makes a new one, so no name gets past this.
        for where in NAMES:
            for name in self._asked_for(where):
                self._refuse_unknown(where, name)

    def with_(self, slot: str, **fields: Any) -> "Plan":
        """Set fields of one slot.

        Raises:
            BadInput: if another trick has set a field to a different value; both are named.
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
        """Set fields of one slot over what an earlier trick has set, knowing it: a narrower choice of the same."""
        refined = {f"{slot}.{name}" for name in fields}
        free = {key: trick for key, trick in self._set_by.items() if key not in refined}
        return replace(self, _set_by=free).with_(slot, **fields)

    def then(self, edit: str) -> "Plan":
        """Append an edit of the loaded model."""
        return replace(self, after_load=(*self.after_load, edit))

    def without(self, edit: str) -> "Plan":
        """Drop an edit of the loaded model."""
        self._refuse_unknown("after_load", edit)  # or a wrong name would drop nothing, in silence
        return replace(self, after_load=tuple(name for name in self.after_load if name != edit))

    def around(self, context: str) -> "Plan":
        """Append a context around each forward pass, inside those before."""
        return replace(self, step_context=(*self.step_context, context))

    def warn(self, sentence: str) -> "Plan":
        """Say that a setting has no effect here, or not the expected one."""
        return replace(self, warnings=(*self.warnings, sentence))

    @property
    def compiled(self) -> bool:
        """Whether parts of the model run as compiled kernels, whose insides nobody can watch."""
        return "compile_blocks" in self.after_load

    def _asked_for(self, where: str) -> Iterable[Any]:
        """The names that the plan asks for in a slot, or in a field of a slot."""
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
        """Plain JSON data, for the report."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


def diff(before: Plan, after: Plan) -> str:
    """What differs between two plans, a line each: ``training.gradient_checkpointing: not set -> True``."""
    old = _flat(before)
    new = _flat(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "\n".join(f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}" for name in names)


def _flat(plan: Plan) -> dict[str, Any]:
    """The fields of a plan, those of its slots by their full names; the device is where it runs, not what."""
    return flat({slot: value for slot, value in plan.to_dict().items() if slot != "device"})
