"""PROTOCOL.md says what the code does: every example on it is read, and nothing is left out."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from headrace.gateway.server import FEATURES
from headrace.protocol.codec import decode_client_frame
from headrace.protocol.errors import RETRYABLE, CloseCode, ErrorCode, FrameError
from headrace.protocol.frames import CLIENT_FRAME_TYPES, ServerFrame
from headrace.protocol.options import OPTION_NAMES, GenerationOptions
from headrace.protocol.resume import ResumeReason

PAGE = (Path(__file__).parent.parent / "PROTOCOL.md").read_text(encoding="utf-8")
CLIENT_EXAMPLES = re.findall(r"^```json client\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SERVER_EXAMPLES = re.findall(r"^```json server\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
REFUSED_EXAMPLES = re.findall(r"^\| `([\[{].*)` \| `(\w+)` \| (\S+) \|$", PAGE, re.MULTILINE)
SERVER_FRAME: TypeAdapter[Any] = TypeAdapter(ServerFrame)


def section(title: str) -> str:
    """Return the text under a heading, down to the next heading of its level or above."""
    heading = re.search(rf"^(#+) {re.escape(title)}\n", PAGE, re.MULTILINE)
    assert heading is not None, title
    rest = PAGE[heading.end() :]
    return re.split(rf"^#{{1,{len(heading[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("example", CLIENT_EXAMPLES)
def test_client_examples_are_frames(example: str) -> None:
    """Each is accepted."""
    decode_client_frame(example)


@pytest.mark.parametrize(("example", "code", "param"), REFUSED_EXAMPLES)
def test_refused_examples_are_refused_as_stated(example: str, code: str, param: str) -> None:
    """With the code and the field that the table states."""
    with pytest.raises(FrameError) as caught:
        decode_client_frame(example)
    assert caught.value.code == code
    assert caught.value.param == (None if param == "–" else param.strip("`"))


@pytest.mark.parametrize("example", SERVER_EXAMPLES)
def test_server_examples_are_frames(example: str) -> None:
    """Each has the fields of its type, no more and no less."""
    value = orjson.loads(example)
    assert SERVER_FRAME.validate_python(value, strict=True, extra="forbid") == value


def test_every_frame_has_an_example() -> None:
    """Of both sides."""
    client_types = {orjson.loads(example)["type"] for example in CLIENT_EXAMPLES}
    assert client_types == set(CLIENT_FRAME_TYPES)
    schema = SERVER_FRAME.json_schema()
    server_types = {orjson.loads(example)["type"] for example in SERVER_EXAMPLES}
    assert server_types == set(schema["discriminator"]["mapping"])


def test_every_option_has_its_row() -> None:
    """And OpenAI's other spellings are named."""
    rows = set(re.findall(r"^\| `(\w+)` \|", section("Options"), re.MULTILINE))
    assert set(GenerationOptions.model_fields) == rows
    assert all(f"`{name}`" in section("Options") for name in OPTION_NAMES)


def test_every_error_code_has_its_row() -> None:
    """With whether trying again makes sense."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \|", section("Errors"), re.MULTILINE)
    assert {code for code, _ in rows} == set(ErrorCode)
    assert {code for code, retryable in rows if retryable == "yes"} == RETRYABLE


def test_every_resume_reason_has_its_row() -> None:
    """And no other is listed."""
    rows = re.findall(r"^\| `(\w+)` \|", section("Resuming"), re.MULTILINE)
    assert rows == ["reason", *ResumeReason]


def test_every_close_code_has_its_row() -> None:
    """And no other is listed."""
    rows = re.findall(r"^\| (\d{4}) \|", section("Closing"), re.MULTILINE)
    assert [int(code) for code in rows] == sorted(CloseCode)


def test_features_are_those_of_the_server() -> None:
    """The page and `hello` name the same ones."""
    assert all(f"`{feature}`" in section("hello") for feature in FEATURES)
    (hello,) = [value for value in map(orjson.loads, SERVER_EXAMPLES) if value["type"] == "hello"]
    assert hello["features"] == list(FEATURES)
