"""Switch LoRA on, and bill it; ``techniques/lora.py`` has the card and the code."""

from collections.abc import Iterable
from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Facts, Shape
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Lora
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

ALL_LINEAR = "all-linear"
"""peft's name for all linear layers but the head."""
AT_ROUNDING_ERROR = "load.starts.start_at_rounding_error"
AT_ADAPTER = "load.starts.start_at_adapter"
STARTS = (AT_ROUNDING_ERROR, AT_ADAPTER)
"""The edits that overwrite a new adapter. A resumed run leaves them out."""
TECHNIQUE = Technique(
    claim="reparametrised",
    lesson="lora",
    switches=("peft=lora",),
    # What trains is no value to try, because it changes what is learnt.
    fields={"peft": Field("Your run", "What trains (PEFT method)")},
)


def trained_weights(widths: Iterable[tuple[int, int]], r: int, dora: bool = False) -> int:
    """Count the weights that LoRA trains.

    Args:
        widths: (D_in, D_out) of every adapted matrix.
        r: the rank.
        dora: whether a magnitude per output feature is trained too.
    """
    return sum(r * (d_in + d_out) + d_out * dora for d_in, d_out in widths)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask peft for adapters on the named linears."""
    if recipe.tricks.peft != "lora":
        if recipe.lora.init != "default" or recipe.lora.continue_from:
            field = "continue_from" if recipe.lora.continue_from else "init"
            raise BadInput(f"lora.{field} with tricks.peft={recipe.tricks.peft}: it is for LoRA; set tricks.peft=lora")
        if recipe.lora != Lora():
            plan = plan.warn(f"the lora.* settings have no effect: tricks.peft is {recipe.tricks.peft}")
        return plan
    lora = recipe.lora
    if ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
        raise BadInput(
            f"lora.target_modules={','.join(lora.target_modules)}: {ALL_LINEAR} means every linear but the head; leave "
            "the other names out"
        )
    plan = plan.with_(
        "peft",
        kind="lora",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=list(dict.fromkeys(lora.target_modules)),
    ).then("load.adapters.add_lora")
    if lora.init == "default":
        start = lora.continue_from
        return plan.with_("peft", continue_from=start).then(AT_ADAPTER) if start else plan
    if lora.continue_from:
        raise BadInput("lora.init=loftq: lora.continue_from says where B A starts; set lora.init=default")
    if recipe.tricks.quantization == "none":
        raise BadInput(
            "lora.init=loftq with tricks.quantization=none: it starts at the rounding error of quantised weights, and "
            "there is none; set tricks.quantization=nf4 or lora.init=default"
        )
    if lora.dora:
        raise BadInput("lora.init=loftq with lora.dora=true: peft sets DoRA's magnitudes first; set lora.dora=false")
    return plan.then(AT_ROUNDING_ERROR)


def refuse_unestimated(recipe: Recipe, shape: Shape) -> None:
    """Refuse targets that peft can train, but whose bytes the formulas do not know.

    Raises:
        BadInput: naming the first one, and targets that have an estimate.
    """
    if recipe.tricks.peft != "lora":
        return
    known = ",".join(shape.packable)
    if ALL_LINEAR in recipe.lora.target_modules and shape.experts > 1:
        raise BadInput(
            f"lora.target_modules={ALL_LINEAR}: no estimate for {shape.name}, all of whose experts peft adapts in one "
            f"tensor; an estimate is there for lora.target_modules={known}"
        )
    for name in recipe.lora.target_modules:
        if name != ALL_LINEAR and name not in shape.packable:
            raise BadInput(f"lora.target_modules: no estimate for {name}; an estimate is there for {known}")


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model without a module of a target's name."""
    targets = plan.peft.get("target_modules", ())
    for target in targets:
        if target != ALL_LINEAR and not facts.has(target):
            way_out = f"set lora.target_modules={ALL_LINEAR} for every linear but the head"
            there = ",".join(each for each in targets if facts.has(each))
            if there:
                way_out += f", or {there}, which it has"
            raise BadInput(f"lora.target_modules: {facts.name} has no module named {target}; {way_out}")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill two thin fp32 matrices, and two thin products, for each adapted one; nothing else has a gradient.

    Without gradient checkpointing no gradient goes below the first adapter.
    """
    if recipe.tricks.peft != "lora":
        return step
    shape = step.shape
    lora = recipe.lora
    targets = tuple(shape.linears if ALL_LINEAR in lora.target_modules else dict.fromkeys(lora.target_modules))
    for name in targets:
        if name not in shape.linears:
            raise BadInput(f"lora.target_modules: no estimate for {name}; there are {', '.join(shape.linears)}")
    return replace(
        step,
        trains_all=False,
        trains_head=False,
        reaches_embedding=False,
        added=_trained_tensors(shape, lora, targets),
        adapted=targets,
        rank=lora.r,
        dora=lora.dora,
        dropout=lora.dropout > 0,
    )


def _trained_tensors(shape: Shape, lora: Lora, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """List the tensors that train beside matrices of a block: how many of each kind, and the elements of one."""
    found: list[tuple[int, int]] = []
    for name in names:
        d_in, d_out = shape.linears[name]
        many = shape.layers * shape.copies(name)
        found += [(many, lora.r * d_in), (many, lora.r * d_out)]  # A and B
        if lora.dora:
            found.append((many, d_out))  # the magnitudes
    return tuple(found)
