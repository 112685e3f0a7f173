"""The examples of README.md and docs/clients.md run, against the fake server."""

import re
from pathlib import Path

import pytest

from headrace.client.dialing import DEFAULT_URL
from headrace.client.testing import Reply, fake_server

ROOT = Path(__file__).parent.parent.parent
_EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def examples() -> list[str]:
    """Return the examples that name the default URL, and so can be sent elsewhere."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/clients.md")]
    blocks = [block for page in pages for block in _EXAMPLE.findall(page)]
    return [block for block in blocks if "headrace.client" in block and DEFAULT_URL in block]


@pytest.mark.parametrize("code", examples())
def test_an_example_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints what the server says."""
    with fake_server([Reply("The capital of France is Paris.")]) as server:
        local = code.replace("connect_blocking()", f"connect_blocking({server.url!r})")
        exec(compile(local.replace(DEFAULT_URL, server.url), "example", "exec"), {"__name__": "example"})
    assert "The capital of France is Paris." in capsys.readouterr().out


def test_there_are_examples() -> None:
    """That the test above finds them."""
    assert len(examples()) >= 3
