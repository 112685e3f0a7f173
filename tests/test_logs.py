"""`headrace serve --log-format json`: a line for each ended request, with no prompt and no token in it."""

import json
import os
import subprocess
import sys
from typing import Any

from websockets.sync.client import connect

DEADLINE_S = 60.0


def serve_and_ask(*flags: str) -> tuple[list[dict[str, Any]], str]:
    """Run a server for two requests, one of which breaks its engine; return the frames and stderr."""
    command = [sys.executable, "-m", "headrace", "serve", "--engine", "scripted", "--port", "0", *flags]
    environment = {**os.environ, "HEADRACE_TOKEN": "hush-hush"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    url = next(word for word in process.stdout.readline().split() if word.startswith("ws://"))
    frames = []
    with connect(url, proxy=None, additional_headers={"Authorization": "Bearer hush-hush"}) as client:
        for name, prompt in (("mine", "a secret prompt"), ("broken", "another secret [[raise]]")):
            frame = {"type": "completion", "id": name, "prompt": prompt, "max_tokens": 4}
            client.send(json.dumps(frame))
            while not frames or frames[-1]["type"] != "done" or frames[-1]["id"] != name:
                frames.append(json.loads(client.recv(timeout=DEADLINE_S)))
    process.terminate()
    _, stderr = process.communicate(timeout=DEADLINE_S)
    return frames, stderr


def test_each_ended_request_is_one_json_line() -> None:
    """With its ids, its usage and its timings."""
    frames, stderr = serve_and_ask("--log-format", "json")
    assert "secret" not in stderr
    assert "hush" not in stderr
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    ended = {line["id"]: line for line in lines if line["logger"] == "headrace.requests"}
    done = {frame["id"]: frame for frame in frames if frame["type"] == "done"}
    rids = {frame["id"]: frame["rid"] for frame in frames if frame["type"] == "accepted"}
    assert ended.keys() == done.keys()
    for name, line in ended.items():
        assert (line["rid"], line["status"]) == (rids[name], done[name]["status"])
        assert (line["usage"], line["timings"]) == (done[name]["usage"], done[name]["timings"])
    assert ended["mine"]["level"] == "info"


def test_text_logs_have_no_line_for_a_request_that_went_well() -> None:
    """As text, only what went wrong is worth a line."""
    _, stderr = serve_and_ask()
    assert "mine" not in stderr
    assert "{" not in stderr
