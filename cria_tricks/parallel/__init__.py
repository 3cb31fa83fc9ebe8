"""How several processes share one run: a strategy per file, with its from-scratch reference."""

from cria_tricks.parallel.strategies import BESIDE, STRATEGIES, switch_on

__all__ = ["BESIDE", "STRATEGIES", "switch_on"]
