"""What was found, planned or looked up is never changed in place: dataclasses are frozen, but for a few that add up."""

import ast
from pathlib import Path

import cria_tricks

PACKAGE = Path(cria_tricks.__file__).parent
CHANGED = {
    "adapter/chat.py: Conversation",
    "store/checkpoints.py: Checkpoints",
    "bill/products.py: Blocks",
    "bill/products.py: Products",
    "data/stream.py: Position",
    "load/model.py: Loaded",
    "run/job.py: Job",
    "trainer/training.py: Training",
    "techniques/nf4.py: Quantized",
}
"""Those that are filled bit by bit, or whose tensors move."""


def test_dataclasses_are_frozen():
    changed, frozen = set(), 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if "dataclass" not in ast.unparse(decorator):
                    continue
                if ast.unparse(decorator) == "dataclass(frozen=True)":
                    frozen += 1
                else:
                    changed.add(f"{path.relative_to(PACKAGE).as_posix()}: {node.name}")
    assert changed == CHANGED
    assert frozen > 40
