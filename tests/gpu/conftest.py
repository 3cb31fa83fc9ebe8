"""What the tests on a card need to run from the wheel, which has this folder and no ``tests/conftest.py``."""

from tests.fixtures import rows, tiny_model  # noqa: F401 (tests ask for them by name)


def pytest_configure(config):
    """Name the marker, because the wheel has no pyproject.toml."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
