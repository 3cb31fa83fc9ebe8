"""The samples: of the right card, in the right units, and never in the way of a run."""

import collections
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from cria_tricks.measure import monitor
from cria_tricks.measure.monitor import Monitor, ask, open_cards, read, summarise, table
from tests import helpers


class NVMLError(Exception):
    """The library's."""


class Nvml:
    """Stands in for the functions of pynvml that are called; its cards are known by UUID only.

    Args:
        cards: what each answers, by UUID; an exception is raised.
    """

    NVMLError, nvmlMemory_v2, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = NVMLError, 2, 0, 1

    def __init__(self, **cards):
        self.cards = {f"GPU-{name}": answers for name, answers in cards.items()}

    def nvmlInit(self):
        if not self.cards:
            raise NVMLError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.cards:
            raise NVMLError("not found")
        return uuid

    def _answer(self, card, name):
        value = self.cards[card][name]
        if callable(value):
            value = value()
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetMemoryInfo(self, card, version):
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(used=self._answer(card, "memory"))

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=self._answer(card, "gpu"), memory=1)

    def nvmlDeviceGetPowerUsage(self, card):
        return self._answer(card, "milliwatts")

    def nvmlDeviceGetTemperature(self, card, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer(card, "celsius")

    def nvmlDeviceGetClockInfo(self, card, kind):
        assert kind == self.NVML_CLOCK_SM
        return self._answer(card, "clock")


BUSY = {"memory": 3 * 2**30, "gpu": 97, "milliwatts": 69_500, "celsius": 71, "clock": 1590}
IDLE = {"memory": 2**20, "gpu": 0, "milliwatts": 9_000, "celsius": 30, "clock": 300}


@pytest.fixture
def card(monkeypatch):
    """Lets torch see one card, ``b``, where NVML knows others before it."""

    def lay_in(answers) -> Nvml:
        nvml = Nvml(a=IDLE, b=answers)
        monkeypatch.setattr(monitor, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="b"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda number: 1000)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 2000)
        return nvml

    return lay_in


def test_a_card_is_found_by_what_it_is_and_not_by_its_number(card):
    card(BUSY)
    found = open_cards([SimpleNamespace(uuid="b"), SimpleNamespace(uuid="elsewhere")])
    assert found == ["GPU-b", None]
    assert ask(found[0]) == {
        "memory_bytes": 3 * 2**30,
        "utilisation": 0.97,
        "watts": 69.5,
        "celsius": 71,
        "clock_mhz": 1590,
    }
    assert ask(None) == {}


def test_a_part_of_a_card_has_a_uuid_of_its_own(monkeypatch):
    nvml = Nvml()
    nvml.cards = {"MIG-b": BUSY}
    monkeypatch.setattr(monitor, "pynvml", nvml)
    assert open_cards([SimpleNamespace(uuid="b")]) == ["MIG-b"]


def test_without_a_driver_there_is_nobody_to_ask(monkeypatch):
    monkeypatch.setattr(monitor, "pynvml", Nvml())
    assert open_cards([SimpleNamespace(uuid="b")]) == [None]


def taken(path, *, until=3, cuda=True, **options) -> list[dict]:
    """Samples of a stretch in which so many were taken."""
    with Monitor(path, 0.01, cuda=cuda, **options) as watch:
        _wait(lambda: len(read(path)) >= until)
    return read(path) if watch.newest else []


def _wait(condition):
    deadline = time.monotonic() + 600
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_card_that_stops_answering_leaves_its_columns_out(card, tmp_path):
    answers = iter([50, 60])
    card({**BUSY, "gpu": lambda: next(answers, None) or NVMLError("lost"), "celsius": NVMLError("not supported")})
    samples = taken(tmp_path / "monitor.jsonl", until=5)
    shares = [sample["cards"][0].get("utilisation") for sample in samples]
    assert shares[:2] == [0.5, 0.6]
    assert set(shares[2:]) == {None}
    assert all(sample["cards"][0]["watts"] == 69.5 for sample in samples)
    assert all("celsius" not in sample["cards"][0] for sample in samples)
    assert [samples[0]["cards"][0][name] for name in ("allocated_bytes", "reserved_bytes")] == [1000, 2000]
    found = summarise(samples)
    assert found["cards"][0]["utilisation"]["peak"] == 0.6
    assert len(samples) == found["samples"] >= 5


def test_whatever_goes_wrong_is_said_and_ends_nothing(card, tmp_path):
    card({**BUSY, "gpu": RuntimeError("a driver's own idea")})
    said = []
    with Monitor(tmp_path / "monitor.jsonl", 0.01, cuda=True, say=said.append):
        _wait(lambda: said)
    assert said == ["warning: train.monitor_seconds: RuntimeError: a driver's own idea; the run goes on unwatched"]


def test_a_card_that_hangs_is_not_waited_for(card, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "PATIENCE", 0.05)
    asked, never = threading.Event(), threading.Event()
    card({**BUSY, "gpu": lambda: (asked.set(), never.wait(20))[0] or 1})
    with Monitor(tmp_path / "monitor.jsonl", 0.01, cuda=True) as watch:
        assert asked.wait(20)
    assert watch._thread.is_alive()
    never.set()
    watch._thread.join(20)


def test_a_resumed_run_goes_on_in_the_file_and_a_torn_line_is_passed_over(tmp_path):
    path = tmp_path / "run" / "monitor.jsonl"
    before = taken(path, cuda=False)
    with path.open("a") as file:
        file.write('{"time": 1795349')  # killed here
    both = taken(path, cuda=False, until=len(before) + 3)
    assert both[: len(before)] == before
    assert len(both) >= len(before) + 3
    assert '{"time": 1795349' in path.read_text().splitlines(), "a line of its own: the next sample is not lost with it"


def test_means_are_over_time_and_peaks_over_samples():
    samples = [
        {"seconds": 1, "rss_bytes": 100, "cpu_cores": 1.0, "cards": []},
        {"seconds": 3, "rss_bytes": 200, "cpu_cores": 2.0, "cards": [{"watts": 60.0}]},
    ]
    found = summarise(samples)
    assert found["seconds"] == 4
    assert found["rss_bytes"] == {"mean": 175, "peak": 200}
    assert found["cpu_cores"] == {"mean": 1.75, "peak": 2.0}
    assert found["cards"] == [{"watts": {"mean": 60.0, "peak": 60.0}}]
    assert table([found])[-1] == ("card, power", "60 W", "60 W")
    assert table([found, found])[-1] == ("card, power of process 1", "60 W", "60 W")
    assert summarise([]) is None


def test_a_run_is_watched_from_beginning_to_end(tiny_model, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "SHORTEST", 0)  # a last sample, however long ago the one before was
    settings = ("tricks.peft=lora", "train.max_steps=3")
    with Monitor(tmp_path / "monitor.jsonl", 0.02) as watch:
        helpers.train(tiny_model, rows, tmp_path / "checkpoints", *settings, callbacks=[watch])
    samples = read(watch.path)
    assert [sample["step"] for sample in samples] == sorted(sample["step"] for sample in samples)
    assert samples[-1]["step"] == 3
    assert all(sample["rss_bytes"] > 50 * 2**20 for sample in samples), "torch alone takes more"
    assert watch.summary()["cpu_cores"]["mean"] > 0, "the training took time of a CPU, on a busy machine too"
    assert not watch._thread.is_alive()


class Clock:
    """Stands in for the module ``time``, and for a process that uses three quarters of a core."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def time(self):
        return 1_795_000_000 + self.now

    def cpu_times(self):
        return SimpleNamespace(user=self.now / 2, system=self.now / 4)

    def memory_info(self):
        return SimpleNamespace(rss=123)


class Waits:
    """Stands in for the event that ends the watching: so many waits for it end with a sample, none of them lasts.

    Args:
        times: how many.
        clock: which goes on with every wait.
        more: seconds from the last sample to the end.
    """

    def __init__(self, times, clock=None, more=0.0):
        self.left, self.clock, self.more, self.asked = times, clock or Clock(), more, []

    def wait(self, seconds):
        self.asked.append(seconds)
        self.left -= 1
        self.clock.now += seconds if self.left >= 0 else self.more
        return self.left < 0

    def set(self):
        """The end comes by itself."""


@pytest.fixture
def clock(monkeypatch):
    """Time passes as a test says."""
    made = Clock()
    monkeypatch.setattr(monitor, "time", made)
    monkeypatch.setattr(monitor.psutil, "Process", lambda: made)
    return made


def watched(path, seconds, waits) -> list[dict]:
    """Samples of the waits."""
    watch = Monitor(path, seconds)
    watch._stop = waits
    with watch:
        watch._thread.join(20)
    return read(path)


def test_cores_are_cpu_time_over_time_since_the_sample_before(clock, tmp_path):
    samples = watched(tmp_path / "monitor.jsonl", 2.0, Waits(3, clock))
    assert [(sample["seconds"], sample["cpu_cores"], sample["rss_bytes"]) for sample in samples] == [(2, 0.75, 123)] * 3
    assert [sample["time"] for sample in samples] == [1_795_000_002, 1_795_000_004, 1_795_000_006]


@pytest.mark.parametrize(("more", "samples"), [(0.0, 3), (0.9, 3), (1.1, 4)])
def test_the_end_is_sampled_unless_it_follows_a_sample_closely(more, samples, clock, tmp_path):
    waits = Waits(3, clock, more * monitor.SHORTEST)
    assert len(watched(tmp_path / "monitor.jsonl", 2.0, waits)) == samples


def test_watching_costs_a_hundred_calls_a_sample_and_nothing_in_between(tmp_path):
    """Counted in calls, as seconds depend on what else runs (``make bench-monitor`` found 0.04 ms)."""
    found = {}
    for times in (10, 200):
        calls, waits = collections.Counter(), Waits(times)
        threading.setprofile(lambda frame, event, argument, calls=calls: calls.update([event]))
        samples = watched(tmp_path / f"{times}.jsonl", 1.0, waits)
        threading.setprofile(None)
        assert waits.asked == [1.0] * (times + 1), "it waits, and does not look again and again"
        assert times <= len(samples) <= times + 1
        found[times] = (calls["call"] + calls["c_call"]) / times
    print(found)
    assert found[200] < 100, "found 56"
    assert found[200] <= found[10], "a sample costs no more when there are many before it"


def test_zero_seconds_take_no_sample(tmp_path):
    with Monitor(tmp_path / "monitor.jsonl", 0) as watch:
        pass
    assert not watch.path.exists()
    assert watch.summary() is None


def test_the_report_has_what_was_sampled(trained):
    report = json.loads((trained / "report.json").read_text())
    [found] = report["monitor"]
    assert found == summarise(read(trained / "monitor.jsonl"))
    assert found["cards"] == []
    text = (trained / "report.md").read_text()
    assert f"{found['samples']} samples over {found['seconds']:,.0f} seconds, in `monitor.jsonl`." in text
    assert "| process, resident memory |" in text


def test_a_busy_processor_is_counted_in_the_program_and_in_the_kernel(tmp_path):
    monitor = Monitor(tmp_path / "monitor.jsonl", 0)
    times = SimpleNamespace(user=3.5, system=1.25)
    monitor._process = SimpleNamespace(cpu_times=lambda: times)
    assert monitor._busy() == 4.75
