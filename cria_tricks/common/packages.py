"""Find the package that an error is about, when a library is missing, broken or of the wrong version.

Libraries look for many packages that are not needed here, and import some of them when they are found. One that does
not fit, such as a torchvision for another torch, then raises an error in the middle of a command, of any type.
"""

import functools
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from cria_tricks.common.errors import FORESEEN, in_one_line, is_out_of_memory

OURS = "cria_tricks"


@dataclass(frozen=True)
class Fault:
    """A package that cannot be used, and why.

    Attributes:
        name: the name by which it is imported.
        reason: what Python, or a library, said.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        """Say it in one line, with what to do."""
        if not is_installed(self.name):
            return f"the package {self.name} is missing ({self.reason}); {_install(self.name)}"
        said = f"the package {_with_version(self.name)} cannot be used: {self.reason}"
        return f"{said}; {cure(self.name)}"


def fault(error: BaseException) -> Fault | None:
    """Find the package whose import, absence or version an error is about.

    Args:
        error: what a library raised, before or behind other errors that it caused.

    Returns:
        ``None`` if it is about something else, such as the input, memory or a mistake in this package.
    """
    while behind := _behind(error):
        error = behind  # what happened first says most
    if isinstance(error, FORESEEN) or not isinstance(error, Exception) or is_out_of_memory(error):
        return None
    reason = in_one_line(error)
    importing = _package_being_imported(error)
    if importing and not is_needed(importing):
        return Fault(importing, reason)
    blamed = ""
    if isinstance(error, ImportError):
        blamed = (error.name or "").split(".")[0] or _named_in(reason)
    elif importing:
        blamed = _asked_for(error) or importing
    if not blamed or blamed == OURS:
        return None
    return Fault(blamed, reason)


def pass_on(error: Exception) -> None:
    """Raise an error again if it is not the fault of the input: of a package, or because memory ran out.

    Call it where any error of a library is taken as one of the file or the setting that the library was given.
    """
    if is_out_of_memory(error) or fault(error):
        raise error


def is_installed(name: str) -> bool:
    """Tell whether a package is there, without importing it."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: a module that was made by hand, without a spec
        return False


def cure(name: str) -> str:
    """Say what to do about an installed package that cannot be used."""
    if is_needed(name):
        return f"{_install(name)} --force-reinstall"
    return f"{OURS} does not need it: pip uninstall -y {distribution(name)}"


def distribution(name: str) -> str:
    """Find the name under which pip knows a package."""
    return next(iter(_distributions().get(name, ())), name)


def is_needed(name: str) -> bool:
    """Tell whether this package, or one that it requires, requires a package; yes if that is not known."""
    return not _needed() or _canonical(distribution(name)) in _needed()


def _behind(error: BaseException) -> BaseException | None:
    """Return the error that caused an error, or that one of our sentences took for a fault of the input."""
    if isinstance(error, FORESEEN) and "pip install" not in str(error):
        return error.__context__
    return error.__cause__


def _asked_for(error: Exception) -> str:
    """Return a package that is not needed, and that the failing functions use: perhaps it lacks what they look for."""
    used = []
    module = getattr(error, "obj", None)  # what has no such attribute
    if isinstance(module, ModuleType):
        used.append(module.__name__)
    # The innermost function may be a library's __getattr__, so its callers count, too.
    for frame, _ in list(traceback.walk_tb(error.__traceback__))[:-4:-1]:
        code = frame.f_code
        used += [*code.co_names, *(each for each in code.co_consts if isinstance(each, str))]
    for name in used:
        package = name.split(".")[0]
        if package in _distributions() and not is_needed(package):
            return package
    return ""


def _package_being_imported(error: Exception) -> str:
    """Return the package of another author whose import raised an error; empty if none was being imported."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            package = str(frame.f_globals.get("__name__", "")).split(".")[0]
            if package not in (OURS, "__main__", "") and package not in sys.stdlib_module_names:
                found = package
    return found


def _named_in(sentence: str) -> str:
    """Return the first package that a library's sentence names: one to install, or an installed one."""
    told = re.search(r"pip install (?:-\S+ )*[`'\"]?([A-Za-z][\w.-]*\w)", sentence)
    if told:
        return told[1].replace("-", "_")
    for word in re.findall(r"[A-Za-z_]\w+", sentence):
        if word not in sys.stdlib_module_names and word in _distributions():
            return word
    return ""


def _install(name: str) -> str:
    """Return the command that installs a package in a version that this package allows."""
    wanted = distribution(name)
    for requirement in _requirements(OURS):
        if _canonical(_name_in(requirement)) == _canonical(wanted):
            wanted = requirement
    return f"pip install '{wanted}'"


def _with_version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(distribution(name))}"
    except importlib.metadata.PackageNotFoundError:
        return name


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # as PEP 503 compares names


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


@functools.cache
def _needed() -> frozenset[str]:
    """Collect the names of all distributions that this one requires, and that those require."""
    found: set[str] = set()
    waiting = [OURS]
    while waiting:
        for requirement in _requirements(waiting.pop()):
            name = _canonical(_name_in(requirement))
            if name not in found:
                found.add(name)
                waiting.append(name)
    return frozenset(found)


def _requirements(name: str) -> Iterator[str]:
    """Yield what a distribution requires, such as ``peft>=0.20``, without its extras; nothing if it is not there."""
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra" not in marker:
            yield requirement.strip()


def _name_in(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]
