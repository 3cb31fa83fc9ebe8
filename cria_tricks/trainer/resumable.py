"""transformers.Trainer with checkpoints that can be trusted, and a clear error when memory runs out.

transformers itself writes a checkpoint file by file under its final name, so a killed run may leave half of one. When
it resumes, it trusts the files that it finds and ignores those that are missing. And if the run was finished already,
and had ended inside an epoch, it takes one more step.
"""

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainerState

from cria_tricks.common.errors import BadInput, OutOfMemory, Unwritten, first_line, is_out_of_memory
from cria_tricks.data.stream import Stream
from cria_tricks.load.adapter_files import SIDE_NETWORK, load_side_network, save_weights
from cria_tricks.parallel import dtensor
from cria_tricks.processes.world import World
from cria_tricks.store.checkpoints import Checkpoint, Checkpoints
from cria_tricks.trainer import random_state, what_ran
from cria_tricks.tricks.optimizer_in_backward import StepInBackward

POSITION = "stream.json"
"""File with the position of each process in a stream (``data/stream.py``), if training rows are streamed."""
RANDOM = "random.safetensors"
"""File with the random states of all processes but the first, if there are several."""


class ResumableTrainer(Trainer):
    """A Trainer whose runs can be stopped at any moment, and resumed.

    Args:
        checkpoints: writes and finds the checkpoints of the run.
        spent: returns what the run took so far (seconds and peak bytes), for the next checkpoint.
        stream: where training rows come from, if they are streamed; its position goes into each checkpoint.
        world: the processes of the run. A checkpoint holds whole tensors, put together from shards and stages, so that
            any other number of processes can resume from it. Only the random states are saved by process.

    Attributes:
        moment: what the trainer is doing now, for the error about memory; the subclass sets it.
        random_state: the random state after the last whole step of this process.
        position: the stream's position after that step.
        in_backward: what lets weights take their steps in the backward pass, if the plan asks for it. It is made with
            the optimizer.
    """

    in_backward: StepInBackward | None = None

    def __init__(
        self,
        *,
        checkpoints: Checkpoints,
        spent: Callable[[], Mapping[str, Any]],
        world: World,
        stream: Stream | None = None,
        **arguments: Any,
    ):
        self.checkpoints = checkpoints
        self.spent = spent
        self.world = world
        self.stream = stream
        self.position: dict[str, Any] = {}
        self.moment = "forward pass"
        self.random_state: dict[str, torch.Tensor] = {}
        super().__init__(**arguments)
        self.add_callback(KeepRandomState(self))

    @contextlib.contextmanager
    def rescue(self) -> Iterator[None]:
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
            self.model.zero_grad()
            step = self.state.global_step
            where = f"after step {step}" if self.moment == "evaluation" else f"of step {step + 1}"
            raise OutOfMemory(f"out of memory in the {self.moment} {where}; {self._saved_after_all()}") from None

    def _run_epoch(self, **arguments: Any) -> None:
        # transformers checks whether a run is finished only after it has taken another step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(**arguments)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # All processes must take part in gathering what they hold; then rank 0 alone writes.
        weights = dtensor.weights(self.model, self.world)
        optimizer = dtensor.states(self.optimizer, self.model, self.world)
        states = self.world.gather(random_state.read())
        positions: dict[str, Any] = {}
        for part in self.world.gather(self.position):
            positions |= part

        def write() -> None:
            # These are the steps of transformers, but in a temporary folder, in which a resume does not look.
            with self.checkpoints.new(self.state.global_step, self.spent()) as aside:
                save_weights(self.model, aside, weights)
                torch.save(optimizer, aside / "optimizer.pt")
                torch.save(self.lr_scheduler.state_dict(), aside / "scheduler.pt")
                self._save_scaler(str(aside))
                self._save_rng_state(str(aside))
                if self.world.size > 1:
                    save_file(random_state.by_rank(states), aside / RANDOM)
                if self.stream:
                    (aside / POSITION).write_text(json.dumps(positions) + "\n", encoding="utf-8")
                self.state.save_to_json(str(aside / "trainer_state.json"))

        self.world.on_rank_zero(write)

    def _saved_after_all(self) -> str:
        """Save the state after the last whole step, if the weights have not changed since, and say what is saved."""
        step = self.state.global_step
        touched = self.moment == "optimizer step" or (self.in_backward and self.in_backward.steps)
        # With several processes, perhaps only this one has run out of memory. A checkpoint takes all of them, so it
        # would wait for ever.
        if not touched and self.random_state and self.world.size == 1:
            random_state.put_back(self.random_state)
            try:
                self._save_checkpoint(self.model, None)
                return f"the state after step {step} is in {self.checkpoints.folder}"
            except (Unwritten, RuntimeError, MemoryError):
                pass  # there is no memory, or no disk space, even for that
        newest = self.checkpoints.newest()
        return f"the newest checkpoint is {newest.path}" if newest else "there was nothing to save yet"

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with loading(resume_from_checkpoint):
            if (Path(resume_from_checkpoint) / SIDE_NETWORK).is_file():
                load_side_network(self.model, Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None:
            return
        saved = {name: Path(checkpoint) / f"{name}.pt" for name in ("optimizer", "scheduler")}
        with loading(checkpoint):
            found = {name: torch.load(path, map_location="cpu", weights_only=True) for name, path in saved.items()}
            # With steps in the backward pass, fp16's first overflow may come before the first step of some weights.
            some_without = self.in_backward is not None and self.accelerator.scaler is not None
            dtensor.put_back(found["optimizer"], self.optimizer, self.model, self.world, some_without=some_without)
            # With another number of processes the run may have had other groups of parameters. What the scheduler knows
            # of a group follows from the settings, so this run's own is right. The rest comes from the checkpoint.
            by_group = {name: self.lr_scheduler.state_dict()[name] for name in ("base_lrs", "lr_lambdas", "_last_lr")}
            self.lr_scheduler.load_state_dict({**found["scheduler"], **by_group})
            self._page_again()
            planned = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json")).max_steps
        self._follow_the_schedule(planned)

    def _follow_the_schedule(self, planned: int) -> None:
        """Take the next learning rate from this run's schedule, and note it if earlier steps followed another one.

        A run may be resumed with more steps than it was planned with. Its schedule is another one then.

        Args:
            planned: steps that the run was to have when the checkpoint was written.
        """
        scheduler = self.lr_scheduler
        # For each group of parameters: the highest learning rate, and the function from a step's number to the fraction
        # of that rate which the step uses.
        rates = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
        for group, (highest, share) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = highest * share(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]  # for the history
        if planned == self.state.max_steps:
            return
        highest, share = rates[0]
        # Skipped steps do not count, because they do not advance the schedule.
        steps = [entry for entry in self.state.log_history if "loss" in entry and not entry.get("skipped")]
        # A step's entry has the rate that the step used. The scheduler computed it with this same product, so under the
        # same schedule both numbers are equal bit for bit.
        if any(entry["learning_rate"] != highest * share(number) for number, entry in enumerate(steps)):
            self.state.log_history.append({"step": self.state.global_step, "lengthened_from": planned})
            self.checkpoints.say(f"warning: {what_ran.lengthened(self.state.log_history[-1])}")

    def _page_again(self) -> None:
        """Move paged optimizer states back into paged memory: bitsandbytes loads them into the GPU's own memory."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        if not getattr(optimizer, "is_paged", False):
            return
        for parameter, state in optimizer.state.items():
            for name in ("state1", "state2"):
                if name in state:
                    paged = optimizer.get_state_buffer(parameter, dtype=state[name].dtype)
                    state[name] = paged.copy_(state[name])

    def _load_scaler(self, checkpoint):
        with loading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint):
        with loading(checkpoint):
            super()._load_rng_state(checkpoint)
            if self.world.draw and checkpoint:  # draw 0 keeps the state of rank 0, which is restored above
                self._load_own_random_state(Path(checkpoint) / RANDOM)

    def _load_own_random_state(self, file: Path) -> None:
        """Restore the random state of this process, or seed it anew if the run had fewer processes before.

        Processes that share a block's matrices (tensor parallelism) must draw the same numbers, so all of them take the
        state of the first of them.
        """
        states = load_file(file) if file.is_file() else {}
        mine = random_state.of_rank(states, self.world.draw * self.world.tensor)
        if mine:
            random_state.put_back(mine)
        else:  # the step is part of the seed, so that the numbers of the run's beginning are not drawn again
            torch.manual_seed(self.args.seed + self.world.draw + self.state.global_step)


class KeepRandomState(TrainerCallback):
    """Keep the random state and a stream's position after each whole step.

    The next step changes both. If that step runs out of memory, a checkpoint of the last whole step needs the old ones.
    """

    def __init__(self, trainer: ResumableTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.random_state = random_state.read()
        self.trainer.position = self.trainer.stream.state() if self.trainer.stream else {}


def position(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the positions in a stream from a checkpoint, by process.

    Raises:
        BadInput: if the checkpoint does not hold it.
    """
    with loading(str(checkpoint.path)):
        return json.loads((checkpoint.path / POSITION).read_text(encoding="utf-8"))


@contextlib.contextmanager
def loading(checkpoint: str | None) -> Iterator[None]:
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
            f"--resume: {checkpoint} cannot be loaded: {first_line(error)}; start again in a new folder"
        ) from None
