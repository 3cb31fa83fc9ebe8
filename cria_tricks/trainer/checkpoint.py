"""Save a run's state after a whole step, and go on from it bit for bit; save it, too, when memory runs out.

A checkpoint holds whole tensors, put together from shards and stages, so that any other number of processes can go on
from it. Only the random states are those of single processes.
"""

import contextlib
import json
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerState

from cria_tricks.common.errors import BadInput, OutOfMemory, Unwritten, first_line, is_out_of_memory
from cria_tricks.load.adapter_files import SIDE_NETWORK, load_side_network, save_weights
from cria_tricks.parallel import dtensor
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer import random_state, what_ran
from cria_tricks.trainer.training import Training

STATE = "trainer_state.json"
"""File with the number of the step and the history; transformers' ``TrainerState``."""
POSITION = "stream.json"
"""File with the position of each process in a stream (``data/stream.py``), if training rows are streamed."""
RANDOM = "random.safetensors"
"""File with the random states of all processes."""


def save(run: Training) -> None:
    """Write a checkpoint of the state after the last whole step. All processes must call this."""
    # All processes must take part in gathering what they hold; then rank 0 alone writes.
    world = run.world
    weights = dtensor.weights(run.model, world)
    optimizer = dtensor.states(run.optimizer, run.model, world)
    states = world.gather(random_state.read())
    positions: dict[str, Any] = {}
    for part in world.gather(run.position):
        positions |= part

    def write() -> None:
        with run.checkpoints.new(run.state.global_step, run.meter.spent()) as aside:
            save_weights(run.model, aside, weights)
            torch.save(optimizer, aside / "optimizer.pt")
            torch.save(run.scheduler.state_dict(), aside / "scheduler.pt")
            if run.scaler.is_enabled():
                torch.save(run.scaler.state_dict(), aside / "scaler.pt")
            save_file(random_state.by_rank(states), aside / RANDOM)
            if run.stream:
                (aside / POSITION).write_text(json.dumps(positions) + "\n", encoding="utf-8")
            state = json.dumps(asdict(run.state), indent=2, sort_keys=True)
            (aside / STATE).write_text(state + "\n", encoding="utf-8")

    world.on_rank_zero(write)


def load_state(checkpoint: Checkpoint, total: int) -> TrainerState:
    """Read the step and the history of a checkpoint; ``total`` are the steps that the run is to have now.

    Raises:
        BadInput: if it cannot be read.
    """
    with loading(checkpoint):
        state = TrainerState.load_from_json(str(checkpoint.path / STATE))
    state.max_steps = total
    return state


def load_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Load the trained weights of a checkpoint into a whole model, before a strategy divides it.

    Raises:
        BadInput: if they are of another model.
    """
    folder = checkpoint.path
    with loading(checkpoint):
        if (folder / SIDE_NETWORK).is_file():
            load_side_network(model, folder)
        elif hasattr(model, "peft_config"):
            model.load_adapter(str(folder), model.active_adapters[0], is_trainable=True)
        else:
            missing = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            for file in sorted(folder.glob("model*.safetensors")):
                saved = load_file(file)
                model.load_state_dict(saved, strict=False)  # one file of several, and without a tied head
                missing -= saved.keys()
                del saved
            if missing:
                raise ValueError(f"it does not hold {min(missing)}")


def load_optimizer(run: Training, checkpoint: Checkpoint) -> None:
    """Load the states of the optimizer, the schedule and the loss scaler, and divide them as this run is divided.

    Raises:
        BadInput: if they are of another run.
    """
    folder = checkpoint.path
    with loading(checkpoint):
        names = ["optimizer", "scheduler", *["scaler"] * run.scaler.is_enabled()]
        found = {name: torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True) for name in names}
        # With steps in the backward pass, fp16's first overflow may come before the first step of some weights.
        some_without = run.in_backward is not None and run.scaler.is_enabled()
        dtensor.put_back(found["optimizer"], run.optimizer, run.model, run.world, some_without=some_without)
        page_again(run.optimizer)
        # With another number of processes the run may have had other groups of parameters. What the scheduler knows
        # of a group follows from the settings, so this run's own is right. The rest comes from the checkpoint.
        by_group = {name: run.scheduler.state_dict()[name] for name in ("base_lrs", "lr_lambdas", "_last_lr")}
        run.scheduler.load_state_dict({**found["scheduler"], **by_group})
        if run.scaler.is_enabled():
            run.scaler.load_state_dict(found["scaler"])
        planned = json.loads((folder / STATE).read_text(encoding="utf-8"))["max_steps"]
    _follow_the_schedule(run, planned)


def load_random_state(run: Training, checkpoint: Checkpoint) -> None:
    """Restore the random state of this process, or seed it anew if the run had fewer processes before.

    Processes that share a block's matrices (tensor parallelism) must draw the same numbers, so all of them take the
    state of the first of them.
    """
    world = run.world
    with loading(checkpoint):
        states = load_file(checkpoint.path / RANDOM)
        if not random_state.of_rank(states, 0):
            raise ValueError("it holds no random state of the first process")
    mine = random_state.of_rank(states, world.draw * world.tensor)
    if mine:
        random_state.put_back(mine)
    else:  # the step is part of the seed, so that the numbers of the run's beginning are not drawn again
        torch.manual_seed(run.settings.seed + world.draw + run.state.global_step)


def position(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the positions in a stream from a checkpoint, by process.

    Raises:
        BadInput: if the checkpoint does not hold it.
    """
    with loading(checkpoint):
        return json.loads((checkpoint.path / POSITION).read_text(encoding="utf-8"))


def page_again(optimizer: Any) -> None:
    """Move paged optimizer states back into paged memory: bitsandbytes loads them into the GPU's own memory."""
    if not getattr(optimizer, "is_paged", False):
        return
    for parameter, state in optimizer.state.items():
        for name in ("state1", "state2"):
            if name in state:
                paged = optimizer.get_state_buffer(parameter, dtype=state[name].dtype)
                state[name] = paged.copy_(state[name])


def _follow_the_schedule(run: Training, planned: int) -> None:
    """Take the next learning rate from this run's schedule, and note it if earlier steps followed another one.

    A run may be resumed with more steps than it was planned with. Its schedule is another one then.

    Args:
        run: the run.
        planned: steps that the run was to have when the checkpoint was written.
    """
    scheduler: Any = run.scheduler
    # For each group of parameters: the highest learning rate, and the function from a step's number to the fraction
    # of that rate which the step uses.
    rates = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    for group, (highest, share) in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = highest * share(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in run.optimizer.param_groups]  # for the history
    if planned == run.state.max_steps:
        return
    highest, share = rates[0]
    # Skipped steps do not count, because they do not advance the schedule.
    steps = [entry for entry in run.state.log_history if "loss" in entry and not entry.get("skipped")]
    # A step's entry has the rate that the step used. The scheduler computed it with this same product, so under the
    # same schedule both numbers are equal bit for bit.
    if any(entry["learning_rate"] != highest * share(number) for number, entry in enumerate(steps)):
        run.state.log_history.append({"step": run.state.global_step, "lengthened_from": planned})
        run.checkpoints.say(f"warning: {what_ran.lengthened(run.state.log_history[-1])}")


@contextlib.contextmanager
def rescue(run: Training) -> Iterator[None]:
    """Save what can be saved if memory runs out inside, and raise one clear error.

    Raises:
        OutOfMemory: with one sentence: where memory ran out, and what is saved.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the step's activations, which they hold
        run.model.zero_grad()
        step = run.state.global_step
        where = f"after step {step}" if run.moment == "evaluation" else f"of step {step + 1}"
        raise OutOfMemory(f"out of memory in the {run.moment} {where}; {_saved_after_all(run)}") from None


def _saved_after_all(run: Training) -> str:
    """Save the state after the last whole step, if the weights have not changed since, and say what is saved."""
    step = run.state.global_step
    touched = run.moment == "optimizer step" or (run.in_backward and run.in_backward.steps)
    # With several processes, perhaps only this one has run out of memory. A checkpoint takes all of them, so it would
    # wait for ever.
    if not touched and run.random_state and run.world.size == 1:
        random_state.put_back(run.random_state)
        try:
            save(run)
            return f"the state after step {step} is in {run.checkpoints.folder}"
        except (Unwritten, RuntimeError, MemoryError):
            pass  # there is no memory, or no disk space, even for that
    newest = run.checkpoints.newest()
    return f"the newest checkpoint is {newest.path}" if newest else "there was nothing to save yet"


@contextlib.contextmanager
def loading(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors in loading a checkpoint into one sentence, except for a lack of memory.

    ``Checkpoints.newest`` has compared the files with their manifest. So a checkpoint that cannot be loaded is not
    damaged: another version wrote it, or somebody made it by hand.

    Raises:
        BadInput: with this sentence.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BadInput(
            f"--resume: {checkpoint.path} cannot be loaded: {first_line(error)}; start again in a new folder"
        ) from None
