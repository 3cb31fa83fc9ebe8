"""Let peft work beside packages that it cannot use, and does not need here.

Whenever peft puts LoRA on a layer that is not quantised by bitsandbytes, it asks whether each other library for
quantised layers is there. For a version that is too old it raises an ImportError. Google Colab brings
such a torchao. So an adapter could be neither made nor opened there, although nothing of torchao was asked for.
"""

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

from cria_tricks.common.errors import in_one_line

PROBES = {"is_torchao_available": "torchao", "is_gptqmodel_available": "gptqmodel"}
"""The functions of ``peft.import_utils`` that may raise, and the package that each looks for."""


@functools.cache
def ignore_unusable() -> None:
    """Make peft take a package that it refuses for one that is not installed.

    It must be called before an adapter is made or opened. Beside packages that peft can use, or none, peft stays as it
    is.
    """
    for name, package in PROBES.items():
        if importlib.util.find_spec(package) and why_refused(name):
            _answer_no(name)


def why_refused(name: str) -> str:
    """Ask one of peft's functions for an installed package.

    Args:
        name: one of :data:`PROBES`.

    Returns:
        What peft said if it refuses the package, in one line; else an empty string.
    """
    try:
        vars(_probes())[name]()
    except ImportError as error:
        return in_one_line(error)
    return ""


def _answer_no(name: str) -> None:
    """Put a function that answers no in place of one of peft's, wherever a module of peft holds it."""
    asks = vars(_probes())[name]
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] == "peft" and vars(module).get(name) is asks:
            setattr(module, name, _no)


def _no() -> bool:
    return False


def _probes() -> ModuleType:
    # Imported late, because it takes seconds.
    return importlib.import_module("peft.import_utils")
