"""Each exact toggle alone, and as many together as can be, keep the loss trajectory of 20 steps; ``-s`` prints them."""

from cria_tricks.load import overlapped_offload
from tests.tolerances import TRAJECTORY
from tests.trajectories import measure


def test_exact_toggles_keep_the_trajectory(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(overlapped_offload, "SMALL", overlapped_offload.SMALL)  # measure changes it
    found = measure(tiny_model, tmp_path)
    assert found["plain"][-1] < found["plain"][0] - 1, "it learns"
    apart = {name: case["largest"] for name, case in found["cases"].items()}
    for name, most in apart.items():
        assert most <= TRAJECTORY, name
    bits = ("gradient_checkpointing=true", "activation_offload=true", "activation_offload=overlapped")
    for name in (*bits, "paged_optimizer=true"):
        assert apart[name] == 0, f"{name} claims every bit"
    assert {"gradient_accumulation=8", "packing=true", "chunked_loss=true", "compile=true"} <= apart.keys()
