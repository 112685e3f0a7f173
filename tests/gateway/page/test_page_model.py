"""The page in a real Chromium, in front of the real default model."""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from page_helpers import NARROW, WIDE, Page, serve, wait_for
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

pytestmark = pytest.mark.model

STORY = (
    "The mill stands by the river, and the miller opens the gate each morning. "
    "Water runs down the headrace to the wheel, and the wheel turns the stones. "
)
PROMPT = f"{STORY * 9}\n\nThe weir was built in 1873.\n\n{STORY * 9}\n\nWhen was the weir built?"


@pytest.fixture(scope="module")
def model_url(default_model_path: Path) -> Iterator[str]:
    """A server with the default model, loaded."""
    with serve("--model", str(default_model_path)) as url:
        yield url


def screenshot(page: Page, name: str) -> None:
    """Write a picture for docs/images, where HEADRACE_SCREENSHOTS names a folder for them."""
    if folder := os.environ.get("HEADRACE_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")


def test_ask_watch_and_cancel(browser: Chrome, model_url: str) -> None:
    """Progress while the prompt is read, tokens one by one, and Cancel ends it."""
    page = Page(browser, model_url).open().wait_connected()
    page.ask(PROMPT, max_tokens=500)
    wait_for(lambda: re.search(r"Reading the prompt: [\d,]+ of [\d,]+ tokens", page.get(".waiting").text))
    texts = []
    while len(texts) < 5:
        wait_for(lambda: page.answer_text() != (texts[-1] if texts else ""))
        texts.append(page.answer_text())
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(texts[0]) < 25, "the first token came alone"
    page.get("#cancel").click()
    page.wait_ended()
    assert page.states() == ["cancelled"]
    page.ask("What is the capital of France?", max_tokens=20).wait_ended()
    assert "Paris" in page.answer_text()
    page.open(NARROW).wait_connected()
    page.ask("What is the capital of France?", max_tokens=20).wait_ended()
    screenshot(page, "page-narrow")


def test_dense_beside_sparse(browser: Chrome, model_url: str) -> None:
    """The sparse one is scored first, and shows which of the prompt's tokens were kept."""
    page = Page(browser, model_url).open(WIDE, "dark").wait_connected()
    page.choose_specprefill("default", keep=30)
    page.ask(PROMPT, variants="compare", max_tokens=16)
    dense, sparse = page.all(".answer")
    wait_for(lambda: "Scoring the prompt" in sparse.text)
    screenshot(page, "page-dark")
    page.wait_ended()
    assert page.states() == ["done", "done"]
    assert "SpecPrefill not used: off by request" in dense.text
    kept, new = re.findall(r"SpecPrefill kept ([\d,]+) of ([\d,]+) tokens", sparse.text)[0]
    assert int(kept.replace(",", "")) / int(new.replace(",", "")) == pytest.approx(0.3, abs=0.1)
    page.open(WIDE, "light")
    page.wait_connected()
    page.choose_specprefill("on", keep=40)
    page.get("input[name=cache_prompt]").click()
    page.ask(PROMPT, variants="one", max_tokens=16).wait_ended()
    page.get(".answer details:not([hidden]) summary").click()
    runs = page.all(".runs > *")
    whole = "".join(str(run.get_property("textContent")) for run in runs)
    assert "The weir was built in 1873." in whole
    assert whole.rstrip().endswith("assistant")
    assert {run.tag_name for run in runs} >= {"mark", "del"}
    assert sum(len(run.text) for run in page.get(".runs").find_elements(By.TAG_NAME, "mark")) < len(whole)
    page.browser.execute_script("document.querySelector('.answers').scrollIntoView()")
    screenshot(page, "page-light")
