"""Two and four joined processes for the tests in this folder; others start their own, as a notebook does."""

import pytest

from cria_tricks.course.processes import Ranks
from tests.sweeps import ALL


@pytest.fixture(autouse=True, scope="package")
def ranks_are_forked(warm):
    """From one process that has imported the libraries."""
    from tests.warm import ranks

    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            patch.setattr(Ranks, "_begin", ranks)
        yield


@pytest.fixture(scope="package")
def two(ranks_are_forked):
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def four(ranks_are_forked):
    ranks = Ranks(4)
    yield ranks
    ranks.close()
