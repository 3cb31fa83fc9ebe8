"""Draw settings, and record what this tree makes of them: adapters, plans, bills, seconds. ``tools/same.py`` compares.

    python tools/same_record.py draw FILE
    python tools/same_record.py record DRAWN FOLDER FILE [PART ...]

Each tree records with its own copy of this file, so that it may use names that another commit has moved.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cria_tricks
from benchmarks.estimate_error import DEVICES, FAMILIES, TOGGLES, TOGGLES_LATER, Setting, by_hand, setting
from cria_tricks import recipes
from cria_tricks.bill.moments import moments
from cria_tricks.hardware.cards import CARDS
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.models.catalogue import CATALOGUE
from cria_tricks.models.shape import shape_of
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds

SEED = "same"
BILLS = {"first": 1600, "later": 800, "toggles": 1000}
"""Settings of each family whose bills are recorded."""
SIZES = {"tiny": (), "paged": ("lora.r=512",)}
"""Each recipe's runs. With ``lora.r=512`` a trained matrix of ``random:tiny`` has 131,072 numbers or more: states of
fewer than 100,000 numbers are never paged."""
UNASKED = ("front", "longest", "longest_on_host", "run", "prices", "host")
"""What is null in a plan that was not asked for it."""
SHORT = ("model=random:tiny", "data.max_length=512", "train.max_steps=2", "train.save_steps=1", "train.eval_steps=2")


def draw() -> dict[str, dict[str, Any]]:
    """Draw the cases of each part, by their names."""
    billed = [setting(SEED, n, FAMILIES[family]) for family, many in BILLS.items() for n in range(many)]
    timed = [one for one in billed if one.device != "cpu"][:: len(billed) // 400][:300]
    return {
        "adapters": {f"{name} {size}": [name, list(sets)] for name in recipes.NAMED for size, sets in SIZES.items()},
        "plans": {f"plan {n}": _plan(random.Random(f"{SEED} plan {n}")) for n in range(200)},
        "bills": {str(one): vars(one) for one in billed},
        "seconds": {str(one): vars(one) for one in timed},
    }


def _plan(draw: random.Random) -> dict[str, Any]:
    """Draw what ``cria plan`` is asked: most switches of a recipe stay as they are."""
    batch, tokens = draw.choice((1, 1, 2, 4)), draw.choice((77, 512, 2048, 8192))
    settings = [f"train.batch_size={batch}", f"data.max_length={tokens}"]
    for name, values in {**TOGGLES, **TOGGLES_LATER}.items():
        if draw.random() < 1 / 12:
            settings.append(f"tricks.{name}={draw.choice(values)}")
    asked = {"gpu": draw.choice((*GPUS, "t4x2", "8GiB:8.6")), "settings": settings, "as_is": draw.random() < 0.5}
    if draw.random() < 0.7:
        asked["model"] = draw.choice(list(CATALOGUE))
    if draw.random() < 0.3:
        asked |= {"rows": 1000, "longest": True}
    if draw.random() < 0.1:
        asked |= {"as_is": False, "fit": draw.choice(("fastest", "smallest", "longest"))}
    return {"recipe": draw.choice(list(recipes.NAMED)), **asked}


def adapter(case: list[Any], rows: Path) -> dict[str, Any]:
    """Train a recipe as a whole, and once more killed after its first step and resumed; return hashes and losses."""
    recipe, settings = case
    settings = [*SHORT, f"data.train={rows / 'train.jsonl'}", f"data.eval={rows / 'eval.jsonl'}", *settings]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        found = {"whole": _in_a_fork(lambda: _trained(recipe, whole, settings))}
        if "refused" in found["whole"]:
            return found["whole"]
        _in_a_fork(lambda: _trained(recipe, killed, settings), until=killed / "checkpoints" / "checkpoint-1")
        if (killed / "report.json").exists():
            raise RuntimeError("it ended before it was killed")
        found["resumed"] = _in_a_fork(lambda: _trained(recipe, killed, settings, resume=True))
    return found


def _trained(recipe: str, out: Path, settings: list[str], resume: bool = False) -> dict[str, Any]:
    report = cria_tricks.train(recipe, out, settings=settings, resume=resume)
    files = sorted(file for folder in ("adapter", "model") for file in out.glob(f"{folder}/*.safetensors"))
    weights = {f"sha256 of {file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {**weights, **{name: report[name] for name in ("eval_loss_before", "eval_loss_after")}}


def _in_a_fork(work: Callable[[], dict[str, Any]], until: Path | None = None) -> dict[str, Any]:
    """Return what ``work`` returns in a process of its own, or nothing if that is killed because ``until`` exists.

    A fork has the libraries imported already.
    """
    with tempfile.NamedTemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if until is not None:
                threading.Thread(target=_kill_at, args=(until,), daemon=True).start()
            Path(answer.name).write_text(json.dumps(_or_refused(work)))
            os._exit(0)
        os.waitpid(child, 0)
        text = Path(answer.name).read_text()
    if until is None and not text:
        raise RuntimeError("the process that trained died")
    return json.loads(text or "{}")


def _kill_at(file: Path) -> None:
    while not file.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def plan(case: dict[str, Any], _: Path) -> dict[str, Any]:
    """Return the whole answer of ``cria plan --json``, without what was not asked for."""
    found = cria_tricks.plan(**case).to_dict()
    return {key: value for key, value in found.items() if value is not None or key not in UNASKED}


def _setting(case: dict[str, Any]) -> Setting:
    return Setting(**{**case, "sets": tuple(case["sets"])})


def bill(case: dict[str, Any], _: Path) -> dict[str, Any]:
    """Return the bytes of each row at each moment of a step, and what the card needs [KiB]."""
    memory = by_hand(_setting(case))
    found: dict[str, Any] = {"needed": memory.needed_bytes >> 10, "fits": memory.fits}
    for moment in moments(memory.step, every_point=True):
        for line in moment.lines:
            found.setdefault(f"{moment.name}, {line.name}", []).append(line.bytes)
    return found


def seconds(case: dict[str, Any], _: Path) -> dict[str, Any]:
    """Return the operations, bytes and seconds of each part of a step."""
    one = _setting(case)
    card = next(card for card in CARDS.values() if card.device == DEVICES[one.device])
    found = folds.time_of(with_settings(Recipe(), one.sets), shape_of(one.config, one.model), card)
    parts = {part.name: [part.flops, part.bytes, part.link_bytes, part.seconds, part.why] for part in found.parts}
    return {"tokens": found.tokens, "flops": found.flops, "seconds": found.seconds, **parts}


PARTS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "adapters": adapter,
    "plans": plan,
    "bills": bill,
    "seconds": seconds,
}


def _or_refused(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # whatever it is, it is what this tree makes of the case
        return {"refused": f"{type(error).__name__}: {error}"}


def record(drawn: dict[str, dict[str, Any]], rows: Path, parts: list[str]) -> dict[str, dict[str, Any]]:
    """Return what this tree makes of each case."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        began = time.monotonic()
        found[part] = {name: _or_refused(lambda: PARTS[part](case, rows)) for name, case in drawn[part].items()}  # noqa: B023
        print(f"{Path.cwd().name}: {part}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return found


def main(arguments: list[str]) -> None:
    """Write the drawn cases, or what is recorded of them, to a file."""
    if arguments[0] == "draw":
        found = draw()
    else:
        found = record(json.loads(Path(arguments[1]).read_text()), Path(arguments[2]), arguments[4:] or list(PARTS))
        arguments = arguments[2:]
    Path(arguments[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
