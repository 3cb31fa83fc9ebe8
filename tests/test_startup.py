"""Garbage is left alone where there is none, and nowhere else."""

import gc
import importlib
import subprocess
import sys

import pytest

from cria_tricks.common.startup import importing


def test_collections_go_on_after_an_import_that_failed():
    with importing():
        assert not gc.isenabled()
    with pytest.raises(ImportError), importing():
        importlib.import_module("no_such_module_of_ours")
    assert gc.isenabled()


def test_who_has_switched_them_off_keeps_them_off():
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("binding", "fewest", "most"), [("pybind11", 0, 100), ("nanobind", 1000, 10**6)])
def test_at_the_end_nothing_is_left_to_collect(binding, fewest, most):
    """But with a triton that would report what is left, all is as usual."""
    script = f"""
import atexit, gc, sys, types
kind = type("kind", (type,), {{"__module__": {binding!r}}})
sys.modules["triton._C.libtriton.ir"] = types.SimpleNamespace(attribute=kind("attribute", (), {{}}))
from cria_tricks.common.startup import end_at_once
atexit.register(lambda: print(len(gc.get_objects())))  # called last
end_at_once()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert fewest <= int(done.stdout) < most
