"""The page in a real Chromium, in front of a scripted engine: what a user does, sees and hears."""

import json
import re
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest
from cut_proxy import cut_proxy
from page_helpers import NARROW, WIDE, Page, serve, wait_for
from selenium.webdriver import ActionChains, Chrome, Keys

TRY_TO_CONNECT = """
const [url, finished] = arguments;
const socket = new WebSocket(url, ["headrace.v1"]);
socket.onmessage = () => finished("connected");
socket.onclose = ({code}) => finished(`closed ${code}`);
"""


def metric(url: str, name: str) -> float:
    """Return the sum of a metric of the server's."""
    text = urllib.request.urlopen(f"{url}metrics", timeout=10).read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def test_an_answer_comes_token_by_token(page: Page) -> None:
    """Its text grows, then the facts stand below it; the announcement comes once, at the end."""
    page.ask("one two three", max_tokens=40)
    lengths = set()
    while page.states() != ["done"]:
        lengths.add(len(page.answer_text()))
    assert len(lengths) > 8
    assert re.search(r"40 tokens · [\d.]+ tokens/s · first after", page.get(".answer .stats").text)
    assert page.get("#announcements").get_property("textContent").startswith("The answer: done.")
    assert not page.get("#cancel").is_enabled()


def test_progress_is_shown_while_a_prompt_is_read(page: Page) -> None:
    """In words and as a bar, until the first token."""
    page.ask("word " * 1500, max_tokens=2)
    phase = wait_for(lambda: re.search(r"Reading the prompt: [\d,]+ of ([\d,]+)", page.get(".waiting").text))
    assert int(phase[1].replace(",", "")) > 1000
    assert float(page.get(".answer progress").get_property("max")) > 1000
    page.wait_ended()
    assert not page.get(".waiting").is_displayed()


@pytest.mark.parametrize("way", ["button", "escape", "card"])
def test_cancel(page: Page, way: str) -> None:
    """By the button, by Esc, and for one answer alone; the server lets go."""
    page.ask("one two three", max_tokens=100_000, variants="one")
    wait_for(lambda: page.states() == ["streaming"])
    if way == "escape":
        page.get("body").send_keys(Keys.ESCAPE)
    else:
        page.get("#cancel" if way == "button" else ".answer button").click()
    page.wait_ended()
    assert page.states() == ["cancelled"]
    assert page.answer_text()
    assert metric(page.url, "headrace_requests_in_flight") == 0


def test_several_streams_side_by_side(page: Page) -> None:
    """All run at once; one is cancelled, the others go on; the chosen one is the history."""
    page.ask("one two three", max_tokens=60, variants="seeds")
    wait_for(lambda: page.states() == ["streaming"] * 3)
    left = {card.rect["x"] for card in page.all(".answer")}
    assert len(left) == 3, "they stand beside each other"
    page.all(".answer button")[0].click()
    page.wait_ended()
    assert page.states() == ["cancelled", "done", "done"]
    page.all(".choose input")[1].click()
    chosen = page.answer_text(1)
    page.ask("and now?", variants="one", max_tokens=3).wait_ended()
    page.all(".answer > details > summary")[-1].click()
    wait_for(lambda: page.all(".answer pre")[-1].text.count("\n") > 0)
    sent = json.loads(page.all(".answer pre")[-1].text.splitlines()[0].removeprefix("→ "))
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"] == chosen


def test_raw_frames_on_demand(page: Page) -> None:
    """Those of the answer, both ways, from the first to the last, also those that come while it is open."""
    page.ask("one two", max_tokens=30, temperature=0.5, seed=7, stop="zebra")
    wait_for(lambda: page.states() == ["streaming"])
    page.get(".answer > details:last-child > summary").click()
    page.wait_ended()
    wait_for(lambda: '"done"' in page.get(".answer pre").text)
    lines = page.get(".answer pre").text.splitlines()
    frames = [json.loads(line[2:]) for line in lines]
    assert [frame["type"] for frame in frames[:2]] == ["chat", "accepted"]
    assert frames[-1]["type"] == "done"
    assert {name: frames[0][name] for name in ("temperature", "seed", "stop", "max_tokens")} == {
        "temperature": 0.5,
        "seed": 7,
        "stop": ["zebra"],
        "max_tokens": 30,
    }


def test_a_value_that_makes_no_sense_is_named(page: Page) -> None:
    """Before anything is sent; a refusal of the server's is shown as well."""
    page.ask("one", temperature=9)
    assert page.get("#composer-error").text.startswith("Temperature: ")
    assert page.all(".answer") == []
    page.set(temperature="").ask("one", stop="x" * 300).wait_ended()
    assert page.states() == ["refused"]
    assert page.get(".problem").text.endswith("(invalid_param)")


def test_a_token_is_asked_for_and_kept_in_this_tab(browser: Chrome) -> None:
    """In sessionStorage and nowhere else; a wrong one is said to be wrong."""
    with serve("--engine", "scripted", HEADRACE_TOKEN="hüsh-hush") as url:
        page = Page(browser, url).open()
        wait_for(lambda: page.get("#token-form").is_displayed())
        for token, works in (("wrong", False), ("hüsh-hush", True)):
            page.get("#token").send_keys(token, Keys.ENTER)
            if not works:
                wait_for(lambda: "not valid" in page.get("#token-error").text)
        page.wait_connected()
        assert page.ask("one", max_tokens=2).wait_ended().states() == ["done"]
        script = "return [{...sessionStorage}, {...localStorage}, document.cookie, location.href]"
        assert browser.execute_script(script) == [{"headrace.token": "hüsh-hush"}, {}, "", url]
        page.open().wait_connected()
        assert not page.get("#token-form").is_displayed()


def test_it_comes_back_when_the_connection_is_lost(browser: Chrome, scripted_url: str) -> None:
    """And goes on with what was running: no token is missing, and none comes twice."""
    whole = Page(browser, scripted_url).open().wait_connected()
    whole.ask("one two three", max_tokens=150, seed=1).wait_ended()
    expected = whole.answer_text()
    server = urlsplit(scripted_url)
    assert server.port is not None
    with cut_proxy(server.port) as proxy:
        page = Page(browser, f"http://127.0.0.1:{proxy.port}/").open().wait_connected()
        page.ask("one two three", max_tokens=150, seed=1)
        wait_for(lambda: page.states() == ["streaming"] and len(page.answer_text()) > 20)
        proxy.cut()
        wait_for(lambda: page.get("#connection-text").text.startswith("not connected"))
        page.wait_ended()
        assert page.states() == ["done"]
        assert page.answer_text() == expected
        browser.get("about:blank")


def test_another_origin_is_refused(page: Page, browser: Chrome) -> None:
    """A page of another server in the same browser; the same script works from our own page."""

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_: object) -> None:
            pass

    stream_url = page.url.replace("http://", "ws://") + "v1/stream"
    assert browser.execute_async_script(TRY_TO_CONNECT, stream_url) == "connected"
    elsewhere = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    Thread(target=elsewhere.serve_forever, daemon=True).start()
    try:
        browser.get(f"http://127.0.0.1:{elsewhere.server_port}/")
        assert browser.execute_async_script(TRY_TO_CONNECT, stream_url) == "closed 1006"
    finally:
        elsewhere.shutdown()
        elsewhere.server_close()
    assert metric(page.url, "headrace_refused_total") >= 1


def test_a_rebound_name_is_refused(browser: Chrome, scripted_url: str) -> None:
    """A name of somebody else's that leads to this machine: neither page nor WebSocket."""
    browser.get(scripted_url.replace("127.0.0.1", "rebound.example"))
    assert "forbidden_host" in browser.page_source
    stream_url = scripted_url.replace("http://127.0.0.1", "ws://rebound.example") + "v1/stream"
    assert browser.execute_async_script(TRY_TO_CONNECT, stream_url) == "closed 1006"


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_nothing_is_cut_off(page: Page, size: tuple[int, int], scheme: str) -> None:
    """The page is as wide as its window, settings open or not, also on a phone."""
    page.open(size, scheme).wait_connected()
    page.ask("x" * 300, max_tokens=4, variants="compare").wait_ended()
    if not page.get("#options").is_displayed():
        page.get("#settings summary").click()
    script = (
        "const d = document.documentElement; return [d.scrollWidth, innerWidth, d.scrollHeight, innerHeight]"
    )
    assert page.browser.execute_script(script) == [size[0], size[0], size[1], size[1]]
    for button in ("#send", "#cancel", "#new"):
        rect = page.get(button).rect
        assert rect["x"] >= 0
        assert rect["x"] + rect["width"] <= size[0]


def test_everything_has_a_name_and_can_be_reached(page: Page) -> None:
    """Fields have labels and buttons names, by the browser's own accessibility tree; Tab goes round."""
    page.ask("one", max_tokens=2).wait_ended()
    nodes = page.command("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "combobox", "slider", "checkbox", "radio", "progressbar"}
    seen = set()
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in roles and not node.get("ignored"):
            assert node.get("name", {}).get("value"), node
            seen.add(role)
    assert seen >= {"button", "textbox", "spinbutton", "combobox", "slider", "checkbox", "radio"}
    page.get("#prompt").click()
    visited = []
    for _ in range(40):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        visited.append(page.browser.execute_script("return document.activeElement.id"))
    assert {"new", "model", "system", "temperature", "seed", "file", "variants", "send"} <= set(visited)


def test_nothing_is_asked_of_anybody_else(page: Page) -> None:
    """Each request that the browser makes for the page goes to the server; its console stays empty."""
    page.browser.get_log("performance")
    page.open().wait_connected()
    page.ask("one", max_tokens=2).wait_ended()
    events = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    sent = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert len(sent) >= 8
    assert all(url.startswith(page.url) for url in sent), sent
    complaints = [entry for entry in page.browser.get_log("browser") if page.url in entry["message"]]
    assert complaints == []
