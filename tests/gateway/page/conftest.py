"""A real Chromium for the tests of this folder, and a page in it for each."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page_helpers import Page, find_browser, open_browser, serve
from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """One browser for all tests; without one they are skipped, except where one can be had."""
    paths = find_browser()
    if paths is None:
        what = "no Chromium with chromedriver: scripts/setup-chromium.sh installs them on Debian"
        may_install = os.environ.get("CI") and os.getuid() == 0 and shutil.which("apt-get")
        (pytest.fail if may_install else pytest.skip)(what)
    # A name of an attacker's that resolves to this machine, as in DNS rebinding.
    with open_browser(paths, "--host-resolver-rules=MAP rebound.example 127.0.0.1") as chrome:
        yield chrome


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[str]:
    """A server without a model: 20 ms a token, and 1,000 prompt tokens a second."""
    with serve("--engine", "scripted", "--scripted-token-delay-ms", "20",
               "--scripted-prefill-tokens-per-s", "1000") as url:  # fmt: skip
        yield url


@pytest.fixture
def page(browser: Chrome, scripted_url: str) -> Page:
    """The scripted server's page, connected."""
    return Page(browser, scripted_url).open().wait_connected()
