"""Stand in for the libraries that no plan needs, where they cannot be had: in a browser.

The package imports torch and others at the top of files from which a plan takes arithmetic only. In the browser an
import of one of them gives an empty module, of which each attribute is again an empty class.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = (
    "torch",
    "numpy",
    "psutil",
    "pynvml",
    "safetensors",
    "tqdm",
    "dill",
    "transformers",
    "tokenizers",
    "rich",
    "typer",
)


class _Empty(type):
    """A class whose attributes are empty classes; called as a decorator, it gives back what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {"__module__": __name__})

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if cls.__module__ != __name__:  # a class of the package that inherits from one of torch
            return type.__call__(cls, *given, **named)
        return given[0] if len(given) == 1 and callable(given[0]) else cls

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


class _Module(types.ModuleType):
    """A module whose attributes are empty classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name, (), {"__module__": __name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find these libraries, and nothing in them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Take over these imports."""
    sys.meta_path.insert(0, _Finder())
    import torch

    torch.cuda.is_available = lambda: False
