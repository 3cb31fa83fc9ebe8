"""Send a function of a notebook to another process: its code, and the variables that the code names.

A pickle holds a function only by its module and name, and another process has no copy of the notebook. So a function
that cannot be imported travels whole: its code as bytes, then what it uses. Both ends must be the same Python. Reading
a pickle can run any code, so these are read from our own processes only.
"""

import builtins
import dis
import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

ATTRIBUTES = ("__qualname__", "__module__", "__defaults__", "__kwdefaults__")
"""What a function is besides its code, its name and its variables."""


def dumps(thing: Any) -> bytes:
    """Pickle a value; functions that cannot be imported travel with their code.

    Raises:
        TypeError: for a class of a notebook, which would be another class there.
    """
    file = io.BytesIO()
    _ByValue(file).dump(thing)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Read what :func:`dumps` of another process has written."""
    return pickle.loads(data)


class _ByValue(pickle.Pickler):
    """Pickles by value what it cannot name.

    A function may call itself. So a function, and a cell (a variable of an enclosing function), is first made empty and
    noted, then filled: the last of the six items is the function that fills it.
    """

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, ModuleType):
            return importlib.import_module, (thing.__name__,)
        if isinstance(thing, CodeType):
            return marshal.loads, (marshal.dumps(thing),)
        if isinstance(thing, FunctionType) and not _importable(thing):
            empty = thing.__code__, {"__builtins__": builtins}, thing.__name__, None, thing.__closure__
            return _new_function, empty, _state(thing), None, None, _fill_function
        if isinstance(thing, CellType):
            return _new_cell, (), _contents(thing), None, None, _fill_cell
        if isinstance(thing, type) and thing.__module__ == "__main__":
            raise TypeError(f"the class {thing.__name__} cannot be sent to another process; define it in the function")
        return NotImplemented  # as every other pickle


def _importable(function: FunctionType) -> bool:
    """Whether another process finds a function by its module and name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _state(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables outside of a function that it uses, and its attributes."""
    used = set(_global_names(function.__code__))
    variables = {name: value for name, value in function.__globals__.items() if name in used}
    attributes = {name: getattr(function, name) for name in ATTRIBUTES}
    return variables, attributes | vars(function)


def _global_names(code: CodeType) -> Iterator[str]:
    """The variables outside of it that a function reads, and those that the functions inside it read."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _global_names(inside)


def _contents(cell: CellType) -> tuple[Any, ...]:
    """The value of a variable of an enclosing function; nothing while it has none."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _new_function(*parts: Any) -> FunctionType:
    return FunctionType(*parts)


def _new_cell() -> CellType:
    return CellType()


def _fill_function(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    variables, attributes = state
    function.__globals__.update(variables)
    for name, value in attributes.items():
        setattr(function, name, value)


def _fill_cell(cell: CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value
