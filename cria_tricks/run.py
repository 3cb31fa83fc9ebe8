"""Recipe -> Report + adapter: the whole way, in one function."""

import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import durable
from cria_tricks.checkpoints import KEPT, Checkpoint, Checkpoints, describe, other_versions, refuse_another_run
from cria_tricks.data import sources
from cria_tricks.errors import BadInput, OutOfMemory, Unwritten, is_out_of_memory
from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe, from_toml
from cria_tricks.tricks import resolve, still_off
from cria_tricks.units import human

RESULTS = ("adapter", "model", "report.json", "report.md", "report.png")
"""What a finished run leaves in its folder, beside its recipe and its checkpoints."""


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
        Interrupted: if Ctrl-C or SIGTERM came; ``resume=True`` goes on.
        OutOfMemory: naming what it was doing and the toggles that are still off.
    """
    began = time.perf_counter()
    console = console or Console(stderr=True, soft_wrap=True)
    plan = resolve(recipe)
    found = {
        "train": sources.find(recipe.data.train, "train"),
        "eval": sources.find(recipe.data.eval, "eval"),
    }
    folder = _choose_folder(recipe, Path(out) if out else None, resume)
    checkpoints, start = _find_start(recipe, found, folder, resume, console)
    _say(console, plan.warnings)

    # Only now the heavy libraries: what was wrong so far took a second to say.
    from transformers import set_seed

    from cria_tricks import artifact, models, report
    from cria_tricks.data.tokens import tokenize
    from cria_tricks.load import count_trainable, load, load_tokenizer, quiet_libraries
    from cria_tricks.measure import Meter, every_tensor
    from cria_tricks.progress import ShowProgress
    from cria_tricks.trainer import fit

    quiet_libraries()
    weights = models.find(recipe.model)
    tokenizer = load_tokenizer(weights)
    rows = {
        part: tokenize(source.rows, tokenizer, recipe.data.max_length, recipe.data.overflow)
        for part, source in found.items()
    }
    _say(console, report.data_warnings(rows, recipe))
    needed = _bytes_to_write(count_trainable(plan, weights), plan.optimizer["bits"])
    _make_room("--out", folder, needed)
    if recipe.train.mirror:
        _make_room("train.mirror", Path(recipe.train.mirror), needed)
    if start:
        checkpoints.put_aside_after(start)
    durable.write_file(folder / "recipe.toml", recipe.to_toml())

    console.print(f"loading {weights.name} on {plan.device.name}, writing to {folder}", highlight=False)
    set_seed(recipe.train.seed)
    meter = Meter(plan.device.kind, began, start.spent if start else None)
    with _name_open_toggles(recipe, plan):
        with _out_of_memory_while_loading(weights.name), meter.phase("load"):
            loaded = load(plan, weights)
            meter.track(every_tensor(loaded.model))
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
                start=start,
                callbacks=[progress],
            )
    _say(console, report.step_warnings(run))
    trained = folder / ("model" if recipe.tricks.peft == "none" else "adapter")
    descriptions = {part: source.description for part, source in found.items()}
    summary = report.summarise(recipe, plan, run, meter, rows, descriptions, count_parameters(loaded.model))
    summary |= {"adapter": str(trained), "model": weights.name}
    card = artifact.model_card(summary, weights.name, weights.note, recipe)
    artifact.save(trained, loaded.model, tokenizer, weights.name, card, recipe)
    report.write(folder, summary)
    if recipe.train.mirror:
        _mirror(folder, Path(recipe.train.mirror), console)
    return summary


def _say(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(f"warning: {sentence}", highlight=False)


def _choose_folder(recipe: Recipe, out: Path | None, resume: bool) -> Path:
    if out is None:
        return _numbered_folder(Path("runs") / recipe.name, resume)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    if not resume and (taken := _taken(out)):
        raise BadInput(f"--out {out}: holds another run ({taken}); name a new folder, or go on with it: --resume")
    return out


def _numbered_folder(first: Path, resume: bool) -> Path:
    """The next free one of NAME, NAME-2, ...; to resume, the last taken one."""
    folder = newest = first
    for number in itertools.count(2):
        if not _taken(folder):
            break
        newest, folder = folder, first.with_name(f"{first.name}-{number}")
    return newest if resume else folder


def _taken(folder: Path) -> str:
    """The first name a run would write that is there already."""
    names = ("checkpoints", *RESULTS, "recipe.toml")
    return next((name for name in names if (folder / name).exists()), "")


def _find_start(
    recipe: Recipe, found: Mapping[str, sources.Source], folder: Path, resume: bool, console: Console
) -> tuple[Checkpoints, Checkpoint | None]:
    """The run's checkpoints, and the one to go on from; refuses to write over another run."""
    about = describe(recipe, found)
    mirror = Path(recipe.train.mirror) if recipe.train.mirror else None
    checkpoints = Checkpoints(
        folder / "checkpoints",
        mirror / "checkpoints" if mirror else None,
        about,
        lambda sentence: console.print(sentence, highlight=False),
    )
    if mirror:
        if mirror.resolve() == folder.resolve():
            raise BadInput(f"train.mirror={mirror}: is the run's own folder; name a second one")
        if not resume and (taken := _taken(mirror)):
            raise BadInput(
                f"train.mirror={mirror}: holds another run ({taken}); name a new folder, or go on with it: --resume"
            )
    if not resume:
        return checkpoints, None
    start = checkpoints.newest()
    if start:
        refuse_another_run(start.about, about, start.path)
        _say(console, other_versions(start.about, about))
        console.print(f"going on from {start.path}", highlight=False)
        return checkpoints, start
    for name in RESULTS:
        if (folder / name).exists():
            raise BadInput(f"--resume: {folder} holds {name} but no checkpoint to go on from; name a new folder")
    earlier = folder / "recipe.toml"
    if earlier.exists():
        refuse_another_run({"recipe": from_toml(earlier).model_dump(mode="json")}, about, earlier)
    console.print(f"no checkpoint in {folder} yet: starting from the beginning", highlight=False)
    return checkpoints, None


def _bytes_to_write(trainable: int, bits: int) -> int:
    """About what a run writes: the checkpoints it keeps, the next one, and the result."""
    checkpoint = trainable * (4 + 2 * bits // 8)  # fp32 weights, and two moments of `bits` each
    return (KEPT + 1) * checkpoint + trainable * 4 + 2**20


def _make_room(option: str, folder: Path, needed: int) -> None:
    """Make a folder; refuse a disk that cannot hold what the run will write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadInput(f"{option} {folder}: cannot be made: {error.strerror}; name another folder") from None
    if free < needed:
        raise BadInput(
            f"{option} {folder}: {human(free)} are free, and the checkpoints and the result take about "
            f"{human(needed)}; make room, or name a folder on another disk"
        )


@contextlib.contextmanager
def _out_of_memory_while_loading(name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory while loading {name}") from None


@contextlib.contextmanager
def _name_open_toggles(recipe: Recipe, plan: Plan) -> Iterator[None]:
    try:
        yield
    except OutOfMemory as error:
        off = ", ".join(still_off(recipe, plan.device))
        raise OutOfMemory(f"{error}; still off: {off or 'no toggle that works here'}") from None


def _mirror(folder: Path, mirror: Path, console: Console) -> None:
    """Copy the results beside the copied checkpoints."""
    try:
        for name in RESULTS:
            if (folder / name).is_dir():
                durable.copy_folder(folder / name, mirror / name)
            elif (folder / name).exists():
                durable.write_file(mirror / name, (folder / name).read_bytes())
    except Unwritten as error:
        _say(console, [f"train.mirror: {str(error).partition(';')[0]}; the results are in {folder} alone"])


def count_parameters(model: Any) -> dict[str, int]:
    """Trainable and total parameters; packed 4-bit weights count unpacked."""
    if hasattr(model, "get_nb_trainable_parameters"):  # peft's, which knows that 4-bit weights are packed
        trainable, total = model.get_nb_trainable_parameters()
        return {"trainable": trainable, "total": total}
    return {
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "total": sum(p.numel() for p in model.parameters()),
    }
