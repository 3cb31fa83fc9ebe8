"""What many tests share: a two-layer Llama on disk, fixed rows, SmolLM2's tokenizer, the real data if it is there."""

import collections
import gc
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.fixtures import rows, tiny_model  # noqa: F401 (tests ask for them by name)
from tests.leftovers import Leftovers
from tests.tiers import Tiers
from tools import processors

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser):
    """Take a part of the tests, instead of all."""
    parser.addoption("--tier", choices=("core", "rest"), help="core: `make test`; rest: what it leaves to test-all")


def pytest_ignore_collect(config):
    """Not even read the tests when only benchmarks are wanted."""
    return config.option.benchmark_only or None


def pytest_configure(config):
    """Tests run on the CPU, on a machine with a card too, but for ``-m gpu``; side by side with a core each."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The few tests with two threads: one that waits for the other would burn the core that another test needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "gpu" not in (config.option.markexpr or "") and not config.option.benchmark_only:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any test imports torch
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        # Inductor keeps what it compiled and does not note for which capability, so another one cannot compile it.
        kept = Path(tempfile.gettempdir(), f"cria-inductor-{os.getuid()}-{capability}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    if tier := config.getoption("tier", None):
        config.pluginmanager.register(Tiers(tier))
    config.pluginmanager.register(Leftovers(Path(__file__).parents[1]))
    gc.disable()  # until all tests are imported: the libraries make a million objects, and all of them stay


def pytest_collection_finish():
    """Look for garbage again."""
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Say why tests were skipped: a line for each reason, with how many."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"{tests} skipped: {reason}")


@pytest.fixture(autouse=True, scope="module")
def less_to_look_through():
    """Leave the libraries' million objects to themselves: a run collects garbage before it begins."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def the_processor_that_onednn_is_held_to():
    """Products of int8 numbers are those of the processor that ``ONEDNN_MAX_CPU_ISA`` names."""
    processors.multiply_as_held_to()


@pytest.fixture(autouse=True, scope="session")
def a_report_is_drawn_once():
    """A drawing takes 0.4 s of each run [CPU]. ``test_report_page.py`` calls the real function."""
    from cria_tricks.report import page

    drawn: list[bytes] = []
    draw = page.draw

    def first(report):
        if not drawn:
            drawn.append(draw(report))
        return drawn[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw", first)
        yield


@pytest.fixture
def online(monkeypatch):
    """Let the package believe that the network may be asked; what it then asks is played by the test."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(autouse=True, scope="session")
def every_processor_is_slow_in_fp16():
    """What a test says must not depend on how long a product took on this machine; those of the measure hand it in."""
    from cria_tricks.hardware import device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_fp16_is_slow", lambda: True)
        yield


@pytest.fixture
def no_twin(monkeypatch):
    """Try no technique on a twin of the model, for tests that count calls; it is tried once on a machine."""
    from cria_tricks.load import twin

    monkeypatch.setattr(twin, "refuse", lambda plan, model, name: None)


@pytest.fixture(scope="session")
def tokenizer():
    """SmolLM2's tokenizer, whose padding token is its end token."""
    from cria_tricks import models
    from cria_tricks.load.model import load_tokenizer

    return load_tokenizer(models.find("smollm2"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a real, short run: ``adapter/``, ``report.json`` and the rest. Copy it before you change it."""
    from cria_tricks.recipe import Recipe, with_settings
    from cria_tricks.run.train import train

    ours = Path(__file__).parents[1] / "cria_tricks" / "data" / "nguzo_saba_eval.jsonl"
    few = tmp_path_factory.mktemp("rows") / "few.jsonl"
    few.write_text("".join(ours.read_text().splitlines(keepends=True)[:3]))
    settings = [
        "model=random:tiny", "train.max_steps=2", "train.learning_rate=0.01", "tricks.peft=lora", "lora.r=2",
        "data.max_length=320", f"data.train={few}", f"data.eval={few}",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(with_settings(Recipe(name="short"), settings), folder)
    return folder


@pytest.fixture
def run_cria(monkeypatch, capfd):
    """Run a command in this process, through the same entry; its exit code, stdout and stderr."""
    from cria_tricks.cli import main

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cria", *map(str, arguments)])
        code = 0
        try:
            main.main()
        except SystemExit as left:
            code = int(left.code or 0)
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Our package, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    root = Path(__file__).parents[1]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, root]
    subprocess.run(pip, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel) -> Path:
    """The files of the wheel, with no repository beside them."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(wheel.parent / "package")
    return wheel.parent / "package"


@pytest.fixture(scope="session")
def warm():
    """A process that has imported the libraries, for the tests that fork processes from it (``tests/warm.py``)."""
    from tests.warm import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The real Kwanzaa files, which are not ours to ship; tests of them run where a copy lies beside the checkout."""
    folder = Path(os.environ.get("CRIA_KWANZAA", Path(__file__).parents[2] / "shared" / "data" / "kwanzaa"))
    if not (folder / "kwanzaa_train.jsonl").is_file():
        pytest.skip(f"no copy of the real data in {folder}; set CRIA_KWANZAA")
    return folder


@pytest.fixture
def hub():
    """A stand-in of the hub."""
    from tests.hub import Hub

    with Hub() as stand_in:
        yield stand_in
