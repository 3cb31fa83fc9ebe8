"""The state of torch's generators, from which dropout draws: read, put back, and kept for every process."""

from collections.abc import Mapping, Sequence

import torch

State = Mapping[str, torch.Tensor]
"""By device: ``cpu``, and ``cuda`` where there is a card."""


def read() -> dict[str, torch.Tensor]:
    """Read this process's state."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(state: State) -> None:
    """Let torch draw again what it drew after this state."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def by_rank(states: Sequence[State]) -> dict[str, torch.Tensor]:
    """Name the states of all processes but the first, whose own transformers keeps: ``{"1.cpu": ...}``."""
    named = {}
    for rank, state in enumerate(states[1:], 1):
        for device, tensor in state.items():
            named[f"{rank}.{device}"] = tensor
    return named


def of_rank(named: State, rank: int) -> dict[str, torch.Tensor]:
    """Find one process's state among those of :func:`by_rank`; empty where there is none."""
    return {name.partition(".")[2]: tensor for name, tensor in named.items() if name.startswith(f"{rank}.")}
