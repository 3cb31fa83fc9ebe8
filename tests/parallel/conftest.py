"""Two and four joined processes, for the whole session."""

import pytest

from cria_tricks.course.processes import Ranks


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
