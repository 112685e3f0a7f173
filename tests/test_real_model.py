"""The whole way with a real model: `headrace serve` as a process, its engine in another, a real socket.

These are the promises of the README, one test each. They take their time: the model reads about 150 tokens/s
on two cores.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

pytestmark = pytest.mark.model

DEADLINE_S = 120.0
PARIS = "What is the capital of France?"
LONG = "The keeper wrote the wind, the tide and the names of the ships into the log of the day. " * 40


class Server:
    """A running `headrace serve`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._log = (folder / "serve.log").open("w")
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Headrace is ready: "), (folder / "serve.log").read_text()
        self.url = next(word for word in line.split() if word.startswith("ws://"))

    def http(self, path: str) -> int:
        """Return the status of a page."""
        url = self.url.replace("ws://", "http://").replace("/v1/stream", path)
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def engines(self) -> list[int]:
        """Return the ids of the processes that hold models."""
        listing = subprocess.run(
            ["ps", "-ww", "-o", "pid=,ppid=,args=", "-A"], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
        return [
            int(pid) for pid, parent, args in rows if int(parent) == self.process.pid and "spawn_main" in args
        ]

    def stop(self) -> int:
        """Stop it as a person would."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory, default_model_path) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    assert running.stop() == 0


@pytest.fixture
def ws(server) -> Iterator[ClientConnection]:
    with connect(server.url) as connection:
        assert json.loads(connection.recv(DEADLINE_S))["type"] == "hello"
        yield connection


@dataclass
class Answer:
    """All frames of a request."""

    frames: list[dict[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> dict[str, Any]:
        [last] = [frame for frame in self.frames if frame["type"] == "done"]
        assert self.frames[-1] is last
        return last

    @property
    def text(self) -> str:
        if self.deltas:
            return "".join(frame["text"] for frame in self.deltas)
        return self.done["text"] if "text" in self.done else self.done["message"]["content"]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] == "delta"]


def chat(question: str, **options: Any) -> dict[str, Any]:
    return {"type": "chat", "messages": [{"role": "user", "content": question}], "temperature": 0, **options}


def ask(ws: ClientConnection, *requests: dict[str, Any], until=lambda answers: False) -> list[Answer]:
    """Send requests at once; return their answers when all are done, or a condition holds."""
    answers = [Answer() for _ in requests]
    for number, request in enumerate(requests):
        ws.send(json.dumps({"id": f"q{number}", "max_tokens": 40, **request}))
    while not all(a.frames and a.frames[-1]["type"] in ("done", "error") for a in answers):
        if until(answers):
            break
        frame = json.loads(ws.recv(DEADLINE_S))
        answers[int(frame["id"][1:])].frames.append(frame)
    return answers


def rest(ws: ClientConnection, answer: Answer) -> list[dict[str, Any]]:
    """Read a single request's frames to its end; return the new ones."""
    start = len(answer.frames)
    while not answer.frames or answer.frames[-1]["type"] != "done":
        answer.frames.append(json.loads(ws.recv(DEADLINE_S)))
    return answer.frames[start:]


def test_it_knows_the_capital_of_france_in_all_four_ways(ws):
    """Chat and completion, streaming and not: the same text and the same usage."""
    for request in (
        chat(PARIS),
        {"type": "completion", "prompt": "The capital of France is", "temperature": 0},
    ):
        # The first one fills the prompt cache, so that usage is the same for the two that are compared.
        _, streamed, whole = (ask(ws, {**request, "stream": stream})[0] for stream in (True, True, False))
        assert "Paris" in streamed.text
        assert streamed.text == whole.text
        assert streamed.done["usage"] == whole.done["usage"]
        assert [frame["seq"] for frame in streamed.deltas] == list(range(len(streamed.deltas)))
        assert sum(frame["n"] for frame in streamed.deltas) == streamed.done["usage"]["completion_tokens"]
        assert not whole.deltas


def test_a_seed_gives_the_same_text_alone_and_among_five_others(ws):
    """And another seed another text."""
    story = chat("Tell me a story about a cat.", temperature=0.8, seed=5)
    [alone] = ask(ws, story)
    others = [chat(f"Tell me about the number {n}.", temperature=0.9, seed=n, top_p=0.9) for n in range(5)]
    together = ask(ws, story, *others, {**story, "seed": 6})
    assert together[0].text == alone.text
    assert together[-1].text != alone.text


def test_the_second_turn_reads_only_what_is_new(ws):
    """`cached_tokens` covers the first turn, and the first token comes sooner."""
    first = {"role": "user", "content": LONG[:2000] + "Who wrote the log?"}
    [one] = ask(ws, {"type": "chat", "messages": [first], "temperature": 0})
    history = [first, {"role": "assistant", "content": one.text}, {"role": "user", "content": "Why?"}]
    [two] = ask(ws, {"type": "chat", "messages": history, "temperature": 0})
    assert two.done["usage"]["cached_tokens"] >= one.done["usage"]["prompt_tokens"]
    assert two.done["timings"]["ttft_ms"] < one.done["timings"]["ttft_ms"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_cancel_stops_the_work_and_the_next_request_is_served(ws, phase):
    """Nothing but the last frame follows, after at most the step under way."""
    request = chat(LONG if phase == "prefill" else "Count to a thousand.", max_tokens=400, cache_prompt=False)
    wanted = {"prefill": "progress", "decode": "delta"}[phase]
    [answer] = ask(
        ws, request, until=lambda answers: sum(f["type"] == wanted for f in answers[0].frames) >= 2
    )
    ws.send(json.dumps({"type": "cancel", "id": "q0"}))
    began = time.monotonic()
    after = rest(ws, answer)
    assert time.monotonic() - began < 5
    assert len(after) <= 3, "what was on its way, and the last frame"
    assert (answer.done["status"], answer.done["reason"]) == ("cancelled", "client")
    assert answer.done["usage"]["completion_tokens"] == sum(frame["n"] for frame in answer.deltas)
    assert "Paris" in ask(ws, chat(PARIS))[0].text


def test_stop_strings_and_unicode(ws):
    """A stop string is cut exactly; multi-byte text arrives whole."""
    [whole] = ask(ws, chat("Count from one to ten with digits."))
    [stopped] = ask(ws, chat("Count from one to ten with digits.", stop=["4", "never"]))
    assert stopped.text == whole.text[: whole.text.index("4")]
    assert stopped.done["finish_reason"] == "stop"
    [echoed] = ask(ws, {"type": "completion", "prompt": "世界 🙂 é", "echo": True, "max_tokens": 5})
    assert echoed.text.startswith("世界 🙂 é")
    assert "\ufffd" not in echoed.text.removeprefix("世界 🙂 é")[:1]


def test_a_long_prompt_does_not_stop_the_others(ws):
    """While it is read, the other stream's tokens come, and progress does, at least once a second or so."""
    answers = ask(
        ws,
        chat("Write a very long story.", max_tokens=30, cache_prompt=False),
        chat(LONG, max_tokens=2, cache_prompt=False),
    )
    story, long = answers
    assert len(story.deltas) > 20
    phases = [frame for frame in long.frames if frame["type"] == "progress"]
    assert len(phases) >= 3
    processed = [frame["processed"] for frame in phases if frame["phase"] == "prefill"]
    assert processed == sorted(processed)


def test_a_killed_engine_costs_no_connection(tmp_path_factory, default_model_path):
    """`readyz` turns false and true again, the connection lives, and the next request is answered."""
    server = Server(tmp_path_factory.mktemp("killed"))
    try:
        with connect(server.url) as ws:
            ws.recv(DEADLINE_S)
            [answer] = ask(
                ws, chat("Count to a thousand.", max_tokens=40), until=lambda a: len(a[0].deltas) >= 3
            )
            [engine] = server.engines()
            os.kill(engine, signal.SIGKILL)
            deadline = time.monotonic() + DEADLINE_S
            while server.http("/readyz") == 200:
                assert time.monotonic() < deadline
            assert server.http("/healthz") == 200
            rest(ws, answer)
            assert answer.done["status"] in ("failed", "completed")
            assert answer.done["usage"]["completion_tokens"] == sum(f["n"] for f in answer.deltas)
            assert "Paris" in ask(ws, chat(PARIS))[0].text
            assert server.http("/readyz") == 200
    finally:
        assert server.stop() == 0
