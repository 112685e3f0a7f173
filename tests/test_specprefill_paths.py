"""SpecPrefill's fields on every path, with the default model: real servers, engine processes and sockets.

The meaning table of PROTOCOL.md, "SpecPrefill", row by row, and what a second turn sees. Dense requests have
short prompts where their length says nothing: the model reads about 150 tokens/s on two cores.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

pytestmark = pytest.mark.model

DEADLINE_S = 120.0
CHUNK_TOKENS = 8
KEY = "71934"
FACT = f"The pass key is {KEY}. Remember it: {KEY} is the pass key. "
FILLER = (
    "The keeper wrote the wind, the tide and the names of the ships into the log. ",
    "A farmer sold the old mill on market day because the road was closed. ",
    "After the rain the children painted a red bicycle and thought of the sea. ",
    "The nurse waited near the north gate at noon and nobody asked for a reason. ",
)
LONG = "There is a pass key hidden in this text. " + "".join(FILLER) * 3 + FACT + "".join(FILLER) * 3
MIDDLE = "".join(FILLER) + FACT + "".join(FILLER) * 2
SHORT = FILLER[0] + FACT + "".join(FILLER[1:])
PATHS = [(kind, stream) for kind in ("completion", "chat") for stream in (True, False)]
by_path = pytest.mark.parametrize(("kind", "stream"), PATHS)


class Server:
    """A running `headrace serve` with the default model, and one connection to it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._log = (folder / "serve.log").open("w")
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Headrace is ready: "), (folder / "serve.log").read_text()
        url = next(word for word in line.split() if word.startswith("ws://"))
        self._open = ExitStack()
        self.client = self._open.enter_context(connect(url, proxy=None, ping_interval=None))
        self.hello = json.loads(self.client.recv(timeout=DEADLINE_S))

    def stop(self) -> None:
        """Leave nothing behind."""
        self._open.close()
        self.process.terminate()
        self.process.communicate(timeout=DEADLINE_S)
        self._log.close()


@dataclass(frozen=True)
class Answer:
    """What a client got: the text, by deltas or at once, and the last frame."""

    text: str
    done: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        """Return `done.specprefill`."""
        return dict(self.done["specprefill"])


def serving(factory: pytest.TempPathFactory, *flags: str) -> Iterator[Server]:
    """Run a server for the tests of this module."""
    server = Server(factory.mktemp("server"), *flags)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As a server is without any flag."""
    yield from serving(tmp_path_factory)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Switched on above 150 tokens, at 40 %."""
    flags = ("--specprefill", "--specprefill-threshold", "150", "--specprefill-keep-pct", "0.4")
    yield from serving(tmp_path_factory, *flags)


@pytest.fixture(scope="module")
def without_draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Switched on, but nothing scores."""
    yield from serving(tmp_path_factory, "--specprefill", "--specprefill-draft-model", "none")


def frame(kind: str, text: str) -> dict[str, Any]:
    """Return a request that asks for the pass key in a text."""
    if kind == "completion":
        asked = f"{text}\nQuestion: What is the pass key?\nAnswer: The pass key is"
        return {"type": kind, "prompt": asked, "max_tokens": 7}
    turn = {"role": "user", "content": f"{text}\nWhat is the pass key?"}
    return {"type": kind, "messages": [turn], "max_tokens": 11}


def ask(server: Server, request: dict[str, Any], **options: Any) -> Answer:
    """Run one request."""
    defaults = {"id": "1", "temperature": 0, "cache_prompt": False}
    server.client.send(json.dumps({**defaults, **request, **options}))
    parts: list[str] = []
    while True:
        got = json.loads(server.client.recv(timeout=DEADLINE_S))
        if got["type"] == "delta":
            parts.append(got.get("text", ""))
        if got["type"] in ("done", "error"):
            break
    assert got["type"] == "done", got
    assert got["status"] == "completed"
    if options.get("stream", True):
        assert "text" not in got
        assert "message" not in got
        return Answer("".join(parts), got)
    assert parts == []
    return Answer(got["text"] if "text" in got else got["message"]["content"], got)


def assert_sparse(answer: Answer, keep_pct: float) -> None:
    """The rate was kept, within a chunk, and the whole report is there."""
    report = answer.report
    assert (report["applied"], report["reason"], report["draft"]) == (True, None, "self")
    assert report["keep_pct"] == keep_pct
    assert report["prompt_tokens"] == report["uncached_tokens"] == answer.done["usage"]["prompt_tokens"]
    assert abs(report["kept_tokens"] - keep_pct * report["uncached_tokens"]) <= CHUNK_TOKENS
    assert report["score_ms"] > 0
    assert report["prefill_ms"] > 0


def assert_dense(answer: Answer, requested: bool | None, reason: str) -> None:
    """Every token was read, at no rate, and the report says why."""
    report = answer.report
    assert (report["requested"], report["applied"], report["reason"]) == (requested, False, reason)
    assert (report["keep_pct"], report["score_ms"], report["draft"]) == (None, None, None)
    assert report["kept_tokens"] == report["uncached_tokens"] == answer.done["usage"]["prompt_tokens"]


@by_path
def test_each_path_honours_the_field(off: Server, kind: str, stream: bool) -> None:
    """No field and false: as before; true: applied at the server's rate; 0.2: 20 %; the key is found."""
    assert off.hello["models"][0]["specprefill"] == {"supported": True, "reason": None, "draft": "self"}
    silent = ask(off, frame(kind, SHORT), stream=stream)
    assert_dense(silent, None, "disabled")
    refused = ask(off, frame(kind, SHORT), stream=stream, specprefill=False, specprefill_keep_pct=0.2)
    assert_dense(refused, False, "off_by_request")
    assert silent.text == refused.text
    assert KEY in silent.text
    for keep_pct, options in ((0.3, {}), (0.2, {"specprefill_keep_pct": 0.2})):
        sparse = ask(off, frame(kind, LONG), stream=stream, specprefill=True, **options)
        assert sparse.report["requested"] is True
        assert_sparse(sparse, keep_pct)
        assert KEY in sparse.text


@by_path
def test_each_path_honours_the_servers_default(on: Server, kind: str, stream: bool) -> None:
    """With nothing said, above the threshold: the server's rate; below it, densely."""
    sparse = ask(on, frame(kind, MIDDLE), stream=stream)
    assert sparse.report["requested"] is None
    assert_sparse(sparse, 0.4)
    assert KEY in sparse.text
    below = ask(on, frame(kind, SHORT), stream=stream, max_tokens=1)
    assert_dense(below, None, "below_threshold")


def test_the_other_rows_where_a_draft_is_there(on: Server, off: Server) -> None:
    """Null, true below the threshold, false above it, and a rate alone: no switch."""
    long = frame("completion", MIDDLE) | {"max_tokens": 1}
    short = frame("completion", SHORT) | {"max_tokens": 1}
    assert_sparse(ask(on, long, specprefill=None, specprefill_keep_pct=0.2), 0.2)
    assert_sparse(ask(on, long, specprefill_keep_pct=0.5), 0.5)
    below = ask(on, short, specprefill=True, specprefill_keep_pct=0.6)
    assert below.report["requested"] is True
    assert_sparse(below, 0.6)
    assert_dense(ask(on, long, specprefill=False), False, "off_by_request")
    assert_dense(ask(on, short, specprefill_keep_pct=0.2), None, "below_threshold")
    assert_dense(ask(off, short, specprefill_keep_pct=0.2), None, "disabled")


@by_path
def test_the_rows_without_a_draft(without_draft: Server, kind: str, stream: bool) -> None:
    """Dense whatever the frame and the server's switch say; asked for or not, the reason is there."""
    ability = without_draft.hello["models"][0]["specprefill"]
    assert (ability["supported"], ability["draft"]) == (False, None)
    for options, reason in (
        ({"specprefill": True}, "no_draft_model"),
        ({"specprefill": True, "specprefill_keep_pct": 0.2}, "no_draft_model"),
        ({}, "no_draft_model"),
        ({"specprefill": False}, "off_by_request"),
    ):
        answer = ask(without_draft, frame(kind, FACT), stream=stream, max_tokens=1, **options)
        assert_dense(answer, options.get("specprefill"), reason)


def test_a_second_turn_after_a_sparse_first_one(on: Server, off: Server) -> None:
    """It is what a dense server gives for the same history, and nothing of it came from a cache."""
    first = frame("chat", MIDDLE)
    answer = ask(on, first, cache_prompt=True)
    assert_sparse(answer, 0.4)
    history = [
        *first["messages"],
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "Repeat the pass key, then say who sold the old mill."},
    ]
    second = {"type": "chat", "messages": history, "max_tokens": 12}
    here = ask(on, second, specprefill=False, cache_prompt=True)
    there = ask(off, second, cache_prompt=True)
    assert here.text == there.text != ""
    assert here.done["usage"] == there.done["usage"]
    assert here.done["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize("value", ["0", "-0.1", "1.01", "true", '"0.3"', "NaN", "1e400"])
def test_keep_rates_out_of_range_are_refused_by_name(off: Server, value: str) -> None:
    """Numbers in (0, 1] only."""
    off.client.send(f'{{"type": "completion", "id": "x", "prompt": "x", "specprefill_keep_pct": {value}}}')
    got = json.loads(off.client.recv(timeout=DEADLINE_S))
    assert (got["type"], got["code"], got["param"]) == ("error", "invalid_param", "specprefill_keep_pct")
