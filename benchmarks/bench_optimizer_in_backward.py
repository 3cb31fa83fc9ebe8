"""All weights trained: every gradient kept until the optimizer's step, and each weight's step as its gradient arrives.

Clipping by weight is another limit than clipping by the norm of all, so the losses of the two are not the same run's.
"""

import pytest

BASE = "attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "optimizer_in_backward=clip",
    "off_8bit": "optimizer=adamw_8bit",
    "on_8bit": "optimizer=adamw_8bit optimizer_in_backward=clip",
}


@pytest.mark.parametrize("name", CASES)
def test_optimizer_in_backward(step, name):
    step(name, f"{BASE} {CASES[name]}")
