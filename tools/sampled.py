"""A plugin of pytest: run one test in N, drawn by the hash of its name: ``pytest -p tools.sampled --one-in 3``."""

import zlib
from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Take the share."""
    parser.addoption("--one-in", type=int, default=1, help="run one test in so many; which ones, their names decide")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out the others. A name's hash is the same in every process and on every machine."""
    share = config.getoption("--one-in")
    out = [item for item in items if zlib.crc32(item.nodeid.encode()) % share]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
