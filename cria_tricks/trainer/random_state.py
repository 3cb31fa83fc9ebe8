"""Read and restore the random state (RNG state) of torch, from which dropout draws its masks.

A checkpoint keeps the random states of all processes. Those of Python and numpy are not among them: nothing in a run
draws from them.
"""

from collections.abc import Mapping, Sequence

import torch

State = Mapping[str, torch.Tensor]
"""The state of the generator of each device: ``cpu``, and ``cuda`` if there is a GPU."""


def read() -> dict[str, torch.Tensor]:
    """Read the random state of this process."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(state: State) -> None:
    """Restore a random state, so that torch draws the same numbers again."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def by_rank(states: Sequence[State]) -> dict[str, torch.Tensor]:
    """Name the states of all processes by rank, for one file: ``{"0.cpu": ...}``."""
    return {f"{rank}.{device}": tensor for rank, state in enumerate(states) for device, tensor in state.items()}


def of_rank(named: State, rank: int) -> dict[str, torch.Tensor]:
    """Find the state of one rank among those of :func:`by_rank`; empty if there is none."""
    return {name.partition(".")[2]: tensor for name, tensor in named.items() if name.startswith(f"{rank}.")}
