"""The schemas say what the code does: checked in as generated, and in agreement with PROTOCOL.md."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from headrace.cli import app
from headrace.protocol.client_frames import CLIENT_FRAME_TYPES
from headrace.protocol.options import OPTION_NAMES
from headrace.schema import asyncapi, client_schema, documents, server_schema

ROOT = Path(__file__).parent.parent
PROTOCOL_PAGE = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")
EXAMPLES = {
    side: [
        json.loads(text)
        for text in re.findall(rf"^```json {side}\n(.*?)^```", PROTOCOL_PAGE, re.MULTILINE | re.DOTALL)
    ]
    for side in ("client", "server")
}
REFUSED = re.findall(r"^\| `([\[{].*)` \| `(\w+)` \| \S+ \|$", PROTOCOL_PAGE, re.MULTILINE)
CLIENT, SERVER = Draft202012Validator(client_schema()), Draft202012Validator(server_schema())


@pytest.mark.parametrize("name", documents())
def test_the_schemas_checked_in_are_those_of_the_code(name: str) -> None:
    """`headrace schema docs/schema` writes them anew."""
    assert (ROOT / "docs/schema" / name).read_text(encoding="utf-8") == documents()[name]


def test_they_are_json_schemas() -> None:
    """By the dialect that they name."""
    for validator in (CLIENT, SERVER):
        Draft202012Validator.check_schema(validator.schema)


@pytest.mark.parametrize("example", EXAMPLES["client"], ids=lambda frame: frame["type"])
def test_client_examples_are_valid(example: dict[str, Any]) -> None:
    """Each of PROTOCOL.md's; with a field that nobody knows it is not."""
    CLIENT.validate(example)
    assert not CLIENT.is_valid({**example, "nonsense": 1})


@pytest.mark.parametrize("example", EXAMPLES["server"], ids=lambda frame: frame["type"])
def test_server_examples_are_valid(example: dict[str, Any]) -> None:
    """Each of PROTOCOL.md's, also with a field that a later server may add."""
    SERVER.validate(example)
    SERVER.validate({**example, "added_later": 1})


def test_refused_examples_are_invalid() -> None:
    """All but those that a JSON Schema cannot tell: no JSON, surrogates, what depends on another field."""
    taken = []
    for text, code in REFUSED:
        try:
            frame = json.loads(text, parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            continue
        if CLIENT.is_valid(frame):
            taken.append((text, code))
    assert len(REFUSED) > 10
    beyond = ("top_logprobs", "ud800", '{"role": "user"}')
    assert not [text for text, _ in taken if not any(part in text for part in beyond)], taken


@pytest.mark.parametrize(
    "options",
    [
        {"stop": "x"}, {"stop": ["x", "y"]}, {"stop": None}, {"logprobs": 3}, {"temperature": None},
        {"n": 1}, {"stream_options": {"include_usage": True}}, {"max_completion_tokens": 5},
    ],
)  # fmt: skip
def test_other_spellings_are_valid(options: dict[str, Any]) -> None:
    """What the server takes, the schema takes."""
    CLIENT.validate({"type": "completion", "id": "a", "prompt": "x", **options})


def test_every_frame_and_option_is_there() -> None:
    """Of both sides, in the AsyncAPI document too, whose references all lead somewhere."""
    document = asyncapi()
    messages = set(document["components"]["messages"])
    assert {f"client.{kind}_frame" for kind in CLIENT_FRAME_TYPES} <= messages
    assert {f"server.{frame['type']}_frame" for frame in EXAMPLES["server"]} <= messages
    assert client_schema()["$defs"]["chat_frame"]["properties"].keys() >= OPTION_NAMES
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        target: Any = document
        for part in reference.split("/"):
            target = target[part]


def test_the_command_writes_them(tmp_path: Path) -> None:
    """Into a folder, or one of them to the terminal."""
    result = CliRunner().invoke(app, ["schema", str(tmp_path / "schema")])
    assert result.exit_code == 0, result.output
    assert {path.name: path.read_text() for path in (tmp_path / "schema").iterdir()} == documents()
    result = CliRunner().invoke(app, ["schema"])
    assert json.loads(result.output)["asyncapi"] == "3.0.0"
