"""Run one lesson as a plain script, then its exercises: as they stand, with wrong answers, with its own solutions.

python tests/lesson.py LESSON ANSWERS.json OUT.json
"""

import json
import re
import runpy
import socket
import sys
from pathlib import Path

import jupytext

from cria_tricks import course

lesson, answers, out = sys.argv[1:]


def refuse(self, address):
    """No connection, to anywhere."""
    raise AssertionError(f"a lesson went to {address}")


socket.socket.connect = socket.socket.connect_ex = refuse
measured, on_a_gpu = [], course.on_a_gpu


def noted(bench, off, on, shorter=1):
    """What the lesson would measure on a card."""
    measured.append([bench, off, on])
    on_a_gpu(bench, off, on, shorter)


course.on_a_gpu = noted
names = runpy.run_path(lesson, run_name="__main__")
found = {"as it stands": list(course.CHECKS), "on a GPU": measured}

cells = jupytext.read(lesson).cells
checks = [cell.source for cell in cells if cell.cell_type == "code" and "course.check(" in cell.source]
solutions = [block for cell in cells if "<summary>Solution" in cell.source
             for block in re.findall(r"```python\n(.*?)```", cell.source, re.S)]  # fmt: skip
for name, code in {**json.loads(Path(answers).read_text()), "solutions": "\n".join(solutions)}.items():
    course.CHECKS.clear()
    exec(code, names)
    for cell in checks:
        exec(cell, names)
    found[name] = list(course.CHECKS)
Path(out).write_text(json.dumps(found))
