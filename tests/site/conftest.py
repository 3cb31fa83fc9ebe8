"""The built site, served, and a browser to look at it with."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-ipc-flooding-protection --hide-scrollbars"
)


def missing(what: str) -> None:
    """Skip, or fail where nothing may be missing: CI sets CRIA_SITE=required."""
    (pytest.fail if os.environ.get("CRIA_SITE") == "required" else pytest.skip)(what)


def pages() -> list[str]:
    """Addresses of all pages of the site, but for 404 and the lessons' old addresses, which begin with a digit."""
    return sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if not path.name[0].isdigit())


def wrong_with(built: Path) -> str:
    """Why a built site cannot be tested; empty when it was made of the sources as they are now."""
    from tools import pages  # takes seconds, and most runs of tests need none of it

    if not (built / pages.STAMP).is_file():
        return "no site, or none that was built to its end; run: make site"
    now = pages.sources()
    return "" if (built / pages.STAMP).read_text(encoding="utf-8") == now else "the site is stale; run: make site"


@pytest.fixture(scope="session")
def site() -> Path:
    """The built site's folder."""
    if wrong := wrong_with(SITE):
        missing(wrong)
    return SITE


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that says nothing."""

    def log_message(self, *args):
        """Nothing."""


@pytest.fixture(scope="session")
def host(site) -> Iterator[str]:
    """The site's address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[object]:
    """Debian's Chromium."""
    if not shutil.which("chromedriver"):
        missing("no browser; install chromium and chromium-driver")
    if not AXE.exists():
        missing("no axe-core; run: npm ci --prefix tests/site")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    # A window without a screen may lack the focus, and then no element of its page has it.
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    driver.set_script_timeout(180)  # axe reads the longest page in 23 s on a quiet machine; selenium gives it 30
    yield driver
    driver.quit()
