"""`headrace complete`, `models`, `chat` and `bench` against a scripted server."""

import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from headrace.engine.scripted import scripted_token

sys.path.insert(0, str(Path(__file__).parent))
cli = import_module("cli_helpers")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose tokens take 2 ms."""
    with cli.scripted_server("--scripted-token-delay-ms", "2") as url:
        yield url


def answer(prompt: str, count: int) -> str:
    """Return what the scripted engine says with seed 0."""
    return "".join(scripted_token(prompt, 0, index) for index in range(count))


def test_complete_prints_the_text_and_nothing_else(url: str) -> None:
    """From an argument, or from stdin; the rest goes to stderr."""
    options = ("--url", url, "--max-tokens", "5", "--seed", "0")
    result = cli.run("complete", "a b c", *options)
    assert (result.returncode, result.stdout) == (0, answer("a b c", 5))
    assert re.search(r"^\[3 prompt tokens, 5 tokens, first after .* tokens/s, length\]$", result.stderr, re.M)
    assert "[SpecPrefill: not applied (disabled)]" in result.stderr
    piped = cli.run("complete", "--json", *options, text="from stdin")
    found = json.loads(piped.stdout)
    assert (found["text"], found["usage"]["completion_tokens"]) == (answer("from stdin", 5), 5)


def test_complete_says_what_went_wrong(url: str) -> None:
    """In one line, with an exit code for each kind."""
    for arguments, code, said in (
        (("x", "--url", "ws://127.0.0.1:1"), 3, "cannot connect to ws://127.0.0.1:1: Connection refused"),
        (("x", "--url", url, "--temperature", "5"), 1, "temperature: "),
        (("x", "--url", url, "--model", "nobody"), 1, "model_not_found"),
        (("[[raise]]", "--url", url), 1, "engine"),
    ):
        result = cli.run("complete", *arguments)
        assert (result.returncode, result.stdout.count("\n")) == (code, 0), result
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    assert cli.run("complete", "--url", url, text="").returncode == 2


def test_ctrl_c_cancels_a_completion(url: str) -> None:
    """What had come stays; the exit code is that of an interrupt."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "complete", "x", "--url", url, "--max-tokens", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=cli.DEADLINE_S)
    assert process.returncode == 130
    assert "cancelled]" in stderr


def test_a_reader_that_leaves_ends_a_completion(url: str) -> None:
    """`| head` is no error worth a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "complete", "x", "--url", url, "--max-tokens", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(10)
    process.stdout.close()
    assert process.wait(cli.DEADLINE_S) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_models(url: str) -> None:
    """As a table, and as JSON."""
    table = cli.run("models", "--url", url)
    assert "scripted (default)" in table.stdout
    assert "no: unsupported_model" in table.stdout
    (model,) = json.loads(cli.run("models", "--json", HEADRACE_URL=url).stdout)
    assert (model["name"], model["state"]) == ("scripted", "ready")


def test_a_piped_chat(url: str) -> None:
    """Each line is a turn that sees the ones before; commands work."""
    text = "one two\nthree\n/clear\nfour\n/system be brief\nfive\\\nsix\n/bogus\n/exit\nnever\n"
    result = cli.run("chat", "--url", url, "--max-tokens", "3", "--seed", "0", text=text)
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert lines[0] == answer("one two", 3)
    assert lines[1] == answer(f"one two\n{lines[0]}\nthree", 3)
    assert lines[2] == answer("four", 3)
    assert lines[3] == answer(f"be brief\nfour\n{lines[2]}\nfive\nsix", 3)
    assert len(lines) == 4
    assert "there is no /bogus" in result.stderr


def test_bench(url: str, tmp_path: Path) -> None:
    """Figures that can be, as JSON and as a drawing; SpecPrefill is left out where the model can't."""
    plot = tmp_path / "out.svg"
    options = ("--streams", "1,4", "--prompt-tokens", "50", "--max-tokens", "20", "--plot", str(plot))
    result = cli.run("bench", "--json", "--url", url, *options)
    report = json.loads(result.stdout)
    assert [row["streams"] for row in report["rows"]] == [1, 4]
    for row in report["rows"]:
        assert row["prompt_tokens"] == 50
        assert row["completion_tokens"] == 20 * row["streams"]
        assert 0 < row["ttft_s"] <= row["ttft_worst_s"] < 5
        assert 0 < row["stream_tokens_per_s"] <= 600
        assert not row["applied"]
    assert report["rows"][1]["total_tokens_per_s"] > report["rows"][0]["total_tokens_per_s"]
    drawing = ElementTree.parse(plot).getroot()
    assert drawing.tag.endswith("svg")
    assert len(drawing.findall(".//{*}circle")) == 4
    assert cli.run("bench", "--streams", "none").returncode == 2


@pytest.mark.skipif(not Path("/usr/bin/tmux").exists(), reason="needs tmux")
def test_chat_in_a_terminal(tmp_path: Path) -> None:
    """A bar while the prompt is read, tokens as they come, a smaller window, Ctrl-C, Ctrl-D."""
    socket = str(tmp_path / "tmux")
    slow = ("--scripted-token-delay-ms", "20", "--scripted-prefill-tokens-per-s", "40")

    def tmux(*arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-S", socket, *arguments], capture_output=True, text=True, check=True
        ).stdout

    def wait_for(pattern: str) -> str:
        until_s = time.monotonic() + cli.DEADLINE_S
        while not re.search(pattern, screen := tmux("capture-pane", "-p", "-S", "-"), re.M):
            assert time.monotonic() < until_s, screen
            time.sleep(0.05)
        return screen

    with cli.scripted_server(*slow) as url:
        command = (
            f"{sys.executable} -m headrace chat --url {url} --max-tokens 2000 2>&1; echo left with $?; cat"
        )
        tmux("new-session", "-d", "-x", "100", "-y", "30", command)
        try:
            wait_for(r"^> $|^>$")
            tmux("send-keys", "word " * 60, "Enter")
            wait_for(r"reading the prompt .* of 60")
            wait_for(r"[0-9a-f]{4}-5 ")
            tmux("resize-window", "-x", "60", "-y", "20")
            wait_for(r"-30 ")
            tmux("send-keys", "C-c")
            screen = wait_for(r"cancelled\]")
            assert "reading the prompt" not in screen  # the bar is gone
            assert "60 prompt tokens" in screen
            tmux("send-keys", "again", "Enter")
            wait_for(r"[0-9a-f]{4}-5 [^$]*again|again\n(.*\n)*.*[0-9a-f]{4}-5 ")
            tmux("send-keys", "C-c")
            wait_for(r"cancelled\][^$]*cancelled\]")
            tmux("send-keys", "C-d")
            wait_for(r"left with 0")
        finally:
            tmux("kill-server")
