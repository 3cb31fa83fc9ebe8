"""The estimate beside the measurement: it sums, and on a card it counts what the card's allocator counts."""

import pytest

from cria_tricks.memory.estimate import WORKSPACES
from cria_tricks.report import compare
from cria_tricks.trainer import Run
from tests.memory.cases import CPU, EVERYTHING, T4, bill


def run(*peaks: int | None) -> Run:
    """Of one step a peak; none where nobody watched."""
    history = [{"step": 1, "loss": 1.0} | ({} if peak is None else {"peak_bytes": peak}) for peak in peaks]
    return Run(history, len(peaks), 0, len(peaks), 1, "math")


@pytest.mark.parametrize("device", [T4, CPU])
def test_rows_sum_to_the_estimate_and_the_rest_is_unexplained(device):
    memory = bill("lora sdpa", 1, 512, device=device)
    report = compare(memory, run(2_000_000_000, 3_000_000_000, 1_000_000_000))
    found = report["estimate"]
    assert sum(row["bytes"] for row in found["rows"]) == report["estimated_peak_bytes"]
    assert found["measured_bytes"] == 3_000_000_000, "the largest step's"
    assert report["estimated_peak_bytes"] + found["unexplained_bytes"] == found["measured_bytes"]
    assert found["ratio"] == report["estimated_peak_bytes"] / 3_000_000_000


def test_on_a_card_the_workspaces_are_billed_and_the_context_is_not():
    memory = bill(EVERYTHING)
    assert compare(memory, run(1))["estimated_peak_bytes"] == memory.peak_bytes + WORKSPACES
    on_cpu = bill("lora", device=CPU)
    assert compare(on_cpu, run(1))["estimated_peak_bytes"] == on_cpu.peak_bytes


def test_nothing_is_compared_with_nothing():
    assert compare(None, run(1)) == {"estimated_peak_bytes": None, "estimate": None}
    found = compare(bill("lora", device=CPU), run(None))["estimate"]
    assert (found["measured_bytes"], found["unexplained_bytes"], found["ratio"]) == (None, None, None)
