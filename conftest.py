"""Options of the benchmarks. Here, because pytest must know them before it knows which folders it is about."""

from pathlib import Path

from cria_tricks.models.catalogue import CONFIGS


def pytest_addoption(parser):
    """Five choices of our own, beside those of pytest-benchmark."""
    group = parser.getgroup("cria_tricks' benchmarks")
    group.addoption("--shape", choices=CONFIGS, help="of the model; tiny on a CPU, llama-3.2-1b on a card")
    group.addoption("--tokens", type=int, help="of a row; 128 on a CPU, 2048 on a card")
    group.addoption("--rounds", type=int, help="timed steps of a case; 5, or 3 when they take long")
    group.addoption("--profile", choices=["t4"], help="hold a CUDA card to what this one can do")
    group.addoption("--results", type=Path, metavar="FOLDER", help="with =: write FOLDER/DEVICE/BENCH.CASE.json")
