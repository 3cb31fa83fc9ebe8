"""Processes that stay, shared by the tests of this folder: the fixtures ``two`` and ``four`` of conftest.py."""

from cria_tricks.parallel.ranks import Ranks

__all__ = ["Ranks"]
