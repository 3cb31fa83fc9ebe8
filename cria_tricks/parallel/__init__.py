"""How several processes share one run: a strategy per file, with its from-scratch reference."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cria_tricks.parallel.strategies import BESIDE, STRATEGIES, switch_on

__all__ = ["BESIDE", "STRATEGIES", "switch_on"]


def __getattr__(name: str) -> Any:
    """Import the strategies only when they are used, so that other files of this folder load without torch."""
    if name in __all__:
        # The strategies import torch, which takes seconds.
        from cria_tricks.parallel import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
