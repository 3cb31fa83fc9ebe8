"""The lessons on a CUDA card, their cells for a GPU included. ``pytest -m gpu`` on a machine that has one."""

import os
import subprocess
import sys

import pytest
import torch

notebooks = pytest.importorskip("tools.notebooks", reason="the lessons are in a checkout of the repository")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("lesson", notebooks.lessons(), ids=lambda path: path.stem)
def test_a_lesson_runs_beside_a_card(lesson, tmp_path):
    paths = [str(notebooks.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, lesson], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "no GPU here" not in done.stdout
