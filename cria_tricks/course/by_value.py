"""Send a function of a notebook to another process, with its code and the variables that the code uses.

A pickle stores a function only as its module and name, and another process has no copy of the notebook. So a function
that cannot be imported is sent by value: its code as bytes, and everything that it uses. Both processes must run the
same version of Python, because the bytes differ between versions. Loading a pickle can run any code, so these pickles
are read only from processes that we started ourselves.
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
"""Attributes to send besides a function's code, name and variables."""


def dumps(thing: Any) -> bytes:
    """Pickle a value; functions in it that cannot be imported are sent with their code.

    Raises:
        TypeError: for a class that a notebook defines: the other process would have to make a new, different class.
    """
    file = io.BytesIO()
    _ByValue(file).dump(thing)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Load what :func:`dumps` in another process of this run has written."""
    return pickle.loads(data)


class _ByValue(pickle.Pickler):
    """Pickle functions and their variables by value, if another process cannot import them.

    A function may call itself, so it is part of its own variables. Therefore a function, or a cell (which holds a
    variable of an enclosing function), is created empty first and filled afterwards. ``pickle`` takes six items for
    this: the function that creates it, its arguments, the contents, two unused items, and the function that fills it.
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
        return NotImplemented  # pickle it in the usual way


def _importable(function: FunctionType) -> bool:
    """Return whether another process can find a function by its module and name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _state(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global variables that a function uses, and its attributes."""
    used = set(_global_names(function.__code__))
    variables = {name: value for name, value in function.__globals__.items() if name in used}
    attributes = {name: getattr(function, name) for name in ATTRIBUTES}
    return variables, attributes | vars(function)


def _global_names(code: CodeType) -> Iterator[str]:
    """List the global variables that a function reads, those of the functions inside it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _global_names(inside)


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Return the value in a cell as a tuple of one item; an empty tuple if the variable has no value yet."""
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
