"""Each exact toggle alone, and as many together as can be, keep the loss trajectory of 20 steps; ``-s`` prints them.

``CRIA_ALL=1`` trains each of them. Otherwise a seeded sample is trained alone, and all that go together in one run.
"""

from cria_tricks.load import overlapped_offload
from tests.sweeps import sample
from tests.tolerances import TRAJECTORY
from tests.trajectories import every_run, measure

TOGETHER = "all but compile"
BITS = {
    "gradient_checkpointing=true",
    "activation_offload=true",
    "activation_offload=overlapped",
    "paged_optimizer=true",
}  # fmt: skip
"""What claims every bit."""


def test_exact_toggles_keep_the_trajectory(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(overlapped_offload, "SMALL", overlapped_offload.SMALL)  # measure changes it
    runs = every_run()
    chosen = {name: runs[name] for name in [*sample((name for name in runs if name != TOGETHER), 6), TOGETHER]}
    found = measure(tiny_model, tmp_path, chosen)
    assert found["plain"][-1] < found["plain"][0] - 1, "it learns"
    apart = {name: case["largest"] for name, case in found["cases"].items()}
    assert apart.keys() == chosen.keys()
    for name, most in apart.items():
        assert most <= TRAJECTORY, name
    for name in BITS & apart.keys():
        assert apart[name] == 0, f"{name} claims every bit"


def test_every_exact_toggle_has_a_run():
    assert BITS | {"gradient_accumulation=8", "packing=true", "chunked_loss=true", "compile=true"} <= every_run().keys()
