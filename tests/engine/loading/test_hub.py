"""engine/hub.py: the real hub client, against a hub on this machine that speaks what it needs."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TinyModelDir = Callable[..., Path]

REPOSITORY = "some-org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# In a process of its own: the hub client reads its settings once.
CODE = """
import json, sys
from headrace.engine.loading.loader import ModelLoadError, load_model
reports = []
try:
    loaded = load_model(sys.argv[1], on_progress=reports.append)
except ModelLoadError as error:
    print(json.dumps({"error": str(error)}))
else:
    downloaded = [[report.done, report.total] for report in reports if report.stage == "download"]
    print(json.dumps({"name": loaded.name, "vocab_size": loaded.vocab_size, "downloaded": downloaded}))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one repository from ``server.folder``."""

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid(file)}
                for file in folder.iterdir()
            ]
            self.send(200, json.dumps(files).encode(), {}, with_body)
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            information = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(information).encode(), {}, with_body)
        elif path.startswith(f"/{REPOSITORY}/resolve/"):
            file = folder / path.rsplit("/", 1)[1]
            self.send(200, file.read_bytes(), {"ETag": f'"{oid(file)}"', "X-Repo-Commit": COMMIT}, with_body)
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def endpoint(tiny_model_dir: TinyModelDir) -> Iterator[str]:
    """The address of a hub that has one tiny model."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder = tiny_model_dir()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def load(name: str, cache: Path, **settings: str) -> dict[str, object]:
    environment = {**os.environ, "HF_HOME": str(cache), **settings}
    environment.pop("HF_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, name], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Fetching" not in done.stderr
    return dict(json.loads(done.stdout))


def test_a_repository_is_fetched_once_with_progress(endpoint: str, tmp_path: Path) -> None:
    """Named as given; the bytes go up to the total; without a network the cache serves."""
    fetched = load(REPOSITORY, tmp_path, HF_ENDPOINT=endpoint)
    assert fetched["name"] == REPOSITORY, fetched
    downloaded = fetched["downloaded"]
    assert isinstance(downloaded, list)
    assert downloaded == sorted(downloaded)
    assert downloaded[-1][0] == downloaded[-1][1] > 100_000
    offline = load(REPOSITORY, tmp_path, HF_HUB_OFFLINE="1")
    assert offline == {**fetched, "downloaded": []}


def test_a_repository_that_is_not_there(endpoint: str, tmp_path: Path) -> None:
    """May be a slip or a private one."""
    error = load("some-org/other", tmp_path, HF_ENDPOINT=endpoint)["error"]
    assert "'some-org/other' is neither a folder here nor a repository" in str(error)


def test_no_network_and_nothing_in_the_cache(tmp_path: Path) -> None:
    """The message says what could be done."""
    error = load(REPOSITORY, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert "can't be reached" in str(error)
