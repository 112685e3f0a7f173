"""Access as a real browser meets it: another site's page, a rebound name, tokens. Skipped without one."""

import asyncio
import base64
import http.server
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_helpers import make_gateway

from headrace.gateway.config import AccessConfig, TokenConfig
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "evil.example"
"""A name that its owner has pointed at this machine: the browser resolves it so."""
DEADLINE_S = 60.0
PAGE = """<!doctype html><script>
const attempt = ([name, url, protocols]) => new Promise(resolve => {
  const socket = new WebSocket(url, protocols);
  let first = null;
  socket.onmessage = event => {
    first ??= JSON.parse(event.data);
    if (first.type === "hello") socket.close();
  };
  socket.onclose = event => resolve([name, { first: first && first.type, code: event.code }]);
});
Promise.all(ATTEMPTS.map(attempt)).then(results =>
  fetch("/results", { method: "POST", body: JSON.stringify(Object.fromEntries(results)) }));
</script>"""


class Site(http.server.ThreadingHTTPServer):
    """Somebody else's web site, on a port of its own."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.attempts: list[Any] = []
        self.results: queue.Queue[dict[str, Any]] = queue.Queue()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.replace("ATTEMPTS", json.dumps(self.server.attempts)).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.results.put(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[Site]:
    """A site that listens."""
    site = Site()
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield site
    site.shutdown()
    site.server_close()


def visit(url: str, profile: Path, results: "queue.Queue[dict[str, Any]]") -> dict[str, Any]:
    """Open a page in a browser; return what it found out."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += [f"--host-resolver-rules=MAP {EVIL} 127.0.0.1", url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return results.get(timeout=DEADLINE_S)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bearer(token: str) -> list[str]:
    """Return the subprotocols of a browser that has a token."""
    encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return ["headrace.v1", f"headrace.bearer.{encoded}"]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
async def test_what_a_page_of_another_site_can_do(pool: Pool, site: Site, tmp_path: Path) -> None:
    """Nothing, under whatever name, unless its origin is allowed; a token is shown by subprotocol."""
    origin = f"http://{EVIL}:{site.server_address[1]}"
    tokens = (TokenConfig.of_secret("a", "right"),)
    closed = make_gateway(pool)
    allowed = make_gateway(pool, access=AccessConfig(allowed_origins=(origin,)))
    locked = make_gateway(pool, access=AccessConfig(allowed_origins=(origin,), tokens=tokens))
    for gateway in (closed, allowed, locked):
        await gateway.start()
    site.attempts = [
        ["cross-origin", closed.url, ["headrace.v1"]],
        ["rebinding", closed.url.replace("127.0.0.1", EVIL), []],
        ["allowed", allowed.url, []],
        ["rebinding, allowed origin", allowed.url.replace("127.0.0.1", EVIL), []],
        ["no token", locked.url, []],
        ["wrong token", locked.url, bearer("wrong")],
        ["right token", locked.url, bearer("right")],
    ]
    found = await asyncio.to_thread(visit, origin, tmp_path, site.results)
    refused = {"first": None, "code": 1006}
    assert found["cross-origin"] == found["rebinding"] == found["rebinding, allowed origin"] == refused
    assert found["no token"] == found["wrong token"] == {"first": "error", "code": 4401}
    assert found["allowed"]["first"] == found["right token"]["first"] == "hello"
    for gateway in (closed, allowed, locked):
        gateway.abort()
