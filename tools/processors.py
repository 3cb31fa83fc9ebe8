"""Run the tests that compare numbers as other processors would compute them: ``make test-processors``.

oneDNN multiplies bf16, fp16 and int8 matrices with the widest instructions that a processor has, and PyTorch's own
loops choose theirs likewise, so sums run in another order on another processor. Two environment variables hold the
libraries to what an older processor has. Each setting is a process of its own, because both are read once.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tools.notebooks import ROOT

TESTS = [
    "tests/techniques",
    *(f"tests/test_{name}.py" for name in ("trajectories", "trainer", "as_trained", "merge", "load", "selftest")),
    *(f"tests/kwanzaa/test_{name}.py" for name in ("generate", "eval_cli")),
]
"""The tests that compare numbers; the rest of the suite compares bytes, words and refusals."""
ONEDNN = {
    "AVX2": "avx2",
    "AVX512_CORE": "avx512_vl",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_AMX": "amx_bf16",
}
"""oneDNN's levels from the lowest up, each with the name of what a processor must have for it."""
WITHOUT_VNNI = ("AVX2", "AVX512_CORE")
ATEN = {"default": "", "avx2": "avx2", "avx512": "avx512_vl"}
"""The same for PyTorch's own loops."""
THREADS = (1, 2)


def settings(has: Mapping[str, Any]) -> list[dict[str, str]]:
    """List the environments to run under: all levels of both libraries that a processor has, with one and two threads.

    The levels of both go up together, as they would from one processor to the next. The library with fewer levels then
    stays at its highest.

    Args:
        has: ``torch.cpu.get_capabilities()``.

    Returns:
        The lowest first.
    """
    onednn = [name for name, needs in ONEDNN.items() if has.get(needs)]
    aten = [name for name, needs in ATEN.items() if not needs or has.get(needs)]
    if not onednn:  # not an x86
        return [{"OMP_NUM_THREADS": str(threads)} for threads in THREADS]
    longer = max(len(onednn), len(aten))
    onednn, aten = (names + names[-1:] * (longer - len(names)) for names in (onednn, aten))
    return [
        {"ONEDNN_MAX_CPU_ISA": one, "ATEN_CPU_CAPABILITY": other, "OMP_NUM_THREADS": str(threads)}
        for (one, other), threads in itertools.product(zip(onednn, aten, strict=True), THREADS)
    ]


def multiply_as_held_to() -> None:
    """Let torch multiply int8 matrices as on the processor that ``ONEDNN_MAX_CPU_ISA`` names, in this process.

    A processor without VNNI multiplies them in a loop of torch's own, because oneDNN's sums overflow 16 bits there.
    torch asks the processor. On a newer one it calls the oneDNN that is held back, and nearly all products are wrong.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA") in WITHOUT_VNNI:
        import torch

        def _int_mm(input: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
            assert out is None
            return input.int() @ mat2.int()

        torch._int_mm = _int_mm


def run(setting: Mapping[str, str], tests: list[str], one_in: int = 1) -> bool:
    """Run tests under one setting, or one in so many, and print one line and the tests that failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    workers = max(1, 2 // int(setting.get("OMP_NUM_THREADS", 1)))  # two threads each on two cores wait for one another
    side_by_side = ["--numprocesses", str(workers), "--dist", "worksteal"]
    sample = ["-p", "tools.sampled", "--one-in", str(one_in)] if one_in > 1 else []
    command = [sys.executable, "-m", "pytest", *sample, *side_by_side, "-rfE", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment | dict(setting), capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    print(f"{' '.join(f'{name}={value}' for name, value in setting.items())}: {lines[-1].strip('= ')}", flush=True)
    failed = [line for line in lines if re.match("FAILED|ERROR", line)]
    if done.returncode:
        print("\n".join(failed or lines[-30:]), flush=True)
    return done.returncode == 0


def main() -> None:
    """Run under all settings, or the lowest."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lowest", action="store_true", help="as the oldest processor only")
    parser.add_argument("--one-in", type=int, default=1, help="run one test in so many")
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest is to run; the tests that compare numbers")
    chosen = parser.parse_args()
    found = settings(torch.cpu.get_capabilities())
    good = [run(setting, chosen.tests, chosen.one_in) for setting in (found[:1] if chosen.lowest else found)]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
