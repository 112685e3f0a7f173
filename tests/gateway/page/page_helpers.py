"""What the page's tests share: a server as a process, a real Chromium, and the page as its user sees it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

DEADLINE_S = 120.0
"""For anything that a test waits for: a browser and a model share two cores here."""
WIDE, NARROW = (1280, 900), (360, 740)

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)

_T = TypeVar("_T")


def find_browser() -> tuple[str, str] | None:
    """Return the paths of a Chromium and of its driver, or None."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextlib.contextmanager
def open_browser(paths: tuple[str, str], *flags: str) -> Iterator[Chrome]:
    """A Chromium with a profile of its own."""
    browser, driver = paths
    with tempfile.TemporaryDirectory(prefix="headrace-browser-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = browser
        for flag in (*_FLAGS, f"--user-data-dir={profile}", *flags):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        chrome = Chrome(options=options, service=Service(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


@contextlib.contextmanager
def serve(*flags: str, **environment: str) -> Iterator[str]:
    """A running `headrace serve` on a free port; yields the URL of its page."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--drain-timeout", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        ready_line = process.stdout.readline()
        (url,) = (word for word in ready_line.split() if word.startswith("ws://"))
        yield url.replace("ws://", "http://").removesuffix("v1/stream")
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def wait_for(condition: Callable[[], _T], what: str = "the condition") -> _T:
    """Return what a condition returns once that is true; fail when it isn't in time."""
    until_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < until_s, f"{what} has not come true in time"
        time.sleep(0.02)
    return value


class Page:
    """The page in a browser, through what its user sees and does."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, size: tuple[int, int] = WIDE, scheme: str = "light") -> "Page":
        """Load the page anew, in a window whose page has this size, in light or dark."""
        self.command("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1],
                     deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.command(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        self.browser.get(self.url)
        return self

    def wait_connected(self) -> "Page":
        """Wait until the page can send."""
        wait_for(lambda: self.get("#connection-text").text == "connected", "connected")
        return self

    def command(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self.browser.execute_cdp_cmd(method, params)

    def get(self, selector: str) -> WebElement:
        """Return the element that a CSS selector finds first."""
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Return all elements that a CSS selector finds."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def set(self, **values: str | int | float) -> "Page":
        """Fill in fields of the settings by their ids, as if typed."""
        for name, value in values.items():
            self.browser.execute_script(
                "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
                "for (const kind of ['input', 'change'])"
                "  field.dispatchEvent(new Event(kind, {bubbles: true}))",
                name,
                str(value),
            )
        return self

    def choose_specprefill(self, value: str, keep: int | None = None) -> "Page":
        """Set the SpecPrefill switch, and a keep rate in percent."""
        self.get(f"input[name=specprefill][value={value}]").click()
        if keep is not None:
            if not self.get("#keep-own").is_selected():
                self.get("#keep-own").click()
            self.set(keep=keep)
        return self

    def ask(self, prompt: str, **settings: str | int | float) -> "Page":
        """Send a prompt."""
        self.set(**settings)
        self.set(prompt=prompt)
        self.get("#send").click()
        return self

    def states(self) -> list[str]:
        """Return the states of all answers."""
        script = "return [...document.querySelectorAll('.answer')].map((card) => card.dataset.state ?? '')"
        return list(self.browser.execute_script(script))

    def wait_ended(self) -> "Page":
        """Wait until no answer runs."""
        ended = {"done", "cancelled", "failed", "refused", "lost"}
        wait_for(lambda: (states := self.states()) and set(states) <= ended, "the end of all answers")
        return self

    def answer_text(self, index: int = -1) -> str:
        """Return the text of an answer."""
        return self.all(".answer > .text")[index].get_property("textContent")  # type: ignore[return-value]

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(self.browser.get_screenshot_as_png())
