"""Which processors ``make test-processors`` plays, and that it hears of a test that fails on one of them."""

import subprocess
import sys

import pytest

from tools import processors

XEON_WITH_AMX = {"avx2": True, "avx512_vl": True, "avx512_bf16": True, "amx_bf16": True}
ZEN_5 = XEON_WITH_AMX | {"amx_bf16": False}
HASWELL = {"avx2": True}
LEVELS = {
    "a Xeon with AMX": (
        XEON_WITH_AMX,
        [("AVX2", "default"), ("AVX512_CORE", "avx2"), ("AVX512_CORE_BF16", "avx512"), ("AVX512_CORE_AMX", "avx512")],
    ),
    "Zen 5": (ZEN_5, [("AVX2", "default"), ("AVX512_CORE", "avx2"), ("AVX512_CORE_BF16", "avx512")]),
    "Haswell": (HASWELL, [("AVX2", "default"), ("AVX2", "avx2")]),
    "not an x86": ({"arm_bf16": True}, [(None, None)]),
}


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_that_a_processor_has_is_played_with_one_thread_and_with_two(name):
    has, levels = LEVELS[name]
    found = processors.settings(has)
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS")
    expected = [(*pair, threads) for pair in levels for threads in ("1", "2")]
    assert [tuple(setting.get(name) for name in names) for setting in found] == expected


def test_one_in_some_is_drawn_by_name(tmp_path):
    (tmp_path / "test_many.py").write_text("".join(f"def test_{number}(): pass\n" for number in range(60)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.sampled", "--one-in", "3", "--collect-only", tmp_path]
    runs = [
        subprocess.run(command, capture_output=True, text=True, cwd=processors.ROOT, check=True).stdout
        for _ in range(2)
    ]
    found = [[line for line in run.splitlines() if "::test_" in line] for run in runs]
    assert found[0] == found[1]
    assert 10 < len(found[0]) < 30


PLAYED = """
import torch
def test_as_set(): assert (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()) == ("DEFAULT", 1)
def test_wrong(): assert not "everywhere"
"""


def test_a_setting_reaches_the_libraries_and_a_failure_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_played.py").write_text(PLAYED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    lowest = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(processors, "ROOT", tmp_path)
    monkeypatch.setattr(processors, "settings", lambda has: [lowest])
    monkeypatch.setattr(sys, "argv", ["processors", "test_played.py"])
    with pytest.raises(SystemExit) as left:
        processors.main()
    said, failed = capsys.readouterr().out.splitlines()
    assert said.startswith("ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1: 1 failed, 1 passed in ")
    assert failed.startswith("FAILED test_played.py::test_wrong")
    assert left.value.code == 1
