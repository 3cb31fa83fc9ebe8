"""Recipe -> Report + adapter: the whole way, in one function."""

import itertools
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks.data import sources
from cria_tricks.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.tricks import resolve


def train(
    recipe: Recipe, out: str | Path | None = None, *, resume: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train one recipe and write its adapter and report.

    Everything that can be wrong with the recipe or the data is found before any model is loaded.

    Args:
        recipe: what to train.
        out: folder to write; ``runs/NAME`` (or the next free ``runs/NAME-2``, ...) when left out.
        resume: go on from the newest checkpoint in ``out``; from the beginning when there is none.
        console: where progress is shown; standard error when left out.

    Returns:
        The report, as written to ``report.json``.

    Raises:
        BadInput: naming what is wrong and what would be right.
        Diverged: if the loss is not finite.
        Interrupted: if Ctrl-C came; ``resume=True`` goes on.
    """
    began = time.perf_counter()
    console = console or Console(stderr=True, soft_wrap=True)
    plan = resolve(recipe)
    found = {
        "train": sources.find(recipe.data.train, "train"),
        "eval": sources.find(recipe.data.eval, "eval"),
    }
    folder = _choose_folder(recipe, Path(out) if out else None, resume)
    _say(console, plan.warnings)

    # Only now the heavy libraries: what was wrong so far took a second to say.
    from transformers import set_seed

    from cria_tricks import artifact, models, report
    from cria_tricks.data.tokens import tokenize
    from cria_tricks.load import load, load_tokenizer
    from cria_tricks.measure import Meter
    from cria_tricks.progress import ShowProgress
    from cria_tricks.trainer import fit

    weights = models.find(recipe.model)
    tokenizer = load_tokenizer(weights)
    rows = {part: tokenize(source.rows, tokenizer, recipe.data.max_length) for part, source in found.items()}
    _say(console, report.data_warnings(rows, recipe))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be made: {error.strerror}; name another folder") from None

    console.print(f"loading {weights.name} on {plan.device.name}, writing to {folder}", highlight=False)
    set_seed(recipe.train.seed)
    meter = Meter(plan.device.kind)
    with meter.phase("load"):
        loaded = load(plan, weights)
        meter.track(loaded.model)
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    counts = count_parameters(loaded.model)
    checkpoints = folder / "checkpoints"
    if resume and not any(checkpoints.glob("checkpoint-*")):
        console.print(f"no checkpoint in {folder} yet: starting from the beginning", highlight=False)
    progress = ShowProgress(console, eval_batches=math.ceil(len(rows["eval"].rows) / recipe.train.batch_size))
    with progress.bar:
        run = fit(
            loaded,
            plan,
            recipe.train,
            rows["train"].rows,
            rows["eval"].rows,
            checkpoints,
            pad_id=tokenizer.pad_token_id,
            meter=meter,
            resume=resume,
            callbacks=[progress],
        )
    _say(console, report.step_warnings(run))
    trained = folder / ("model" if recipe.tricks.peft == "none" else "adapter")
    summary = report.summarise(
        recipe,
        plan,
        run,
        meter,
        rows,
        {part: source.description for part, source in found.items()},
        counts,
        seconds=time.perf_counter() - began,
    )
    summary |= {"adapter": str(trained), "model": weights.name}
    card = artifact.model_card(summary, weights.name, weights.note, recipe)
    artifact.save(trained, loaded.model, tokenizer, weights.name, card, recipe)
    report.write(folder, summary)
    return summary


def _say(console: Console, warnings: Iterable[str]) -> None:
    for sentence in warnings:
        console.print(f"warning: {sentence}", highlight=False)


def _choose_folder(recipe: Recipe, out: Path | None, resume: bool) -> Path:
    if out is None:
        return _numbered_folder(Path("runs") / recipe.name, resume)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    if not resume and _holds_a_run(out):
        raise BadInput(f"--out {out}: holds another run; name a new folder, or go on with it: --resume")
    return out


def _numbered_folder(first: Path, resume: bool) -> Path:
    """The next free one of NAME, NAME-2, ...; to resume, the last taken one."""
    folder = newest = first
    for number in itertools.count(2):
        if not _holds_a_run(folder):
            break
        newest, folder = folder, first.with_name(f"{first.name}-{number}")
    return newest if resume else folder


def _holds_a_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("adapter", "model", "checkpoints", "report.json"))


def count_parameters(model: Any) -> dict[str, int]:
    """Trainable and total parameters; packed 4-bit weights count unpacked."""
    if hasattr(model, "get_nb_trainable_parameters"):  # peft's, which knows that 4-bit weights are packed
        trainable, total = model.get_nb_trainable_parameters()
        return {"trainable": trainable, "total": total}
    return {
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "total": sum(p.numel() for p in model.parameters()),
    }
