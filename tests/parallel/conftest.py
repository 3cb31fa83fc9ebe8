"""Two and four joined processes, for the whole session."""

import pytest

from cria_tricks.course.processes import Ranks
from tests.sweeps import ALL


@pytest.fixture(autouse=True, scope="session")
def ranks_are_forked(warm):
    """From one process that has imported the libraries; ``tests/test_notebook_functions.py`` starts its own."""
    from tests.warm import ranks

    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            patch.setattr(Ranks, "_begin", ranks)
        yield


@pytest.fixture(scope="session")
def two(ranks_are_forked):
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four(ranks_are_forked):
    ranks = Ranks(4)
    yield ranks
    ranks.close()
