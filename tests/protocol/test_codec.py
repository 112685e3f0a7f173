"""Bytes: whatever comes in ends as a frame or as one documented error."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.protocol.codec import MAX_DIAGNOSED_BYTES, MAX_DIAGNOSED_VALUES, decode_client_frame, encode
from headrace.protocol.errors import ErrorCode, FrameError
from headrace.protocol.frames import CancelFrame, ModelsFrame, PingFrame, RequestFrame

FRAME_KINDS = (RequestFrame, CancelFrame, ModelsFrame, PingFrame)
NAMES = st.sampled_from(
    ["type", "id", "prompt", "messages", "temperature", "stop", "stream", "seed", "logit_bias", "n", "role"]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
    st.sampled_from(["completion", "chat", "cancel", "ping", "models", "resume", "a", "user", "\ud800"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def assert_frame_or_error(data: str | bytes) -> None:
    """Decode, and check that an error is fit to be sent."""
    try:
        frame = decode_client_frame(data)
    except FrameError as error:
        json.dumps(error.body())
        encode(error.body())
    else:
        assert isinstance(frame, FRAME_KINDS)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff")
@example(b'{"type": "ping", "nonce": "\xed\xa0\x80"}')
def test_random_bytes(data: bytes) -> None:
    """Noise is an error and nothing worse."""
    assert_frame_or_error(data)


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_random_objects(fields: dict[str, Any]) -> None:
    """So are objects that look like frames."""
    assert_frame_or_error(json.dumps(fields))


@given(st.text(max_size=100))
def test_random_text(text: str) -> None:
    """And text."""
    assert_frame_or_error(text)


@pytest.mark.parametrize("data", ["", "{", "nul", '{"type":}', "[" * 100_000, '{"a":' * 100_000, "{'a': 1}"])
def test_invalid_json(data: str) -> None:
    """Broken and bottomless texts have one code."""
    with pytest.raises(FrameError) as caught:
        decode_client_frame(data)
    assert caught.value.code is ErrorCode.INVALID_JSON


@pytest.mark.parametrize("data", ["1", "null", "[]", '"x"', "true"])
def test_json_that_is_no_object(data: str) -> None:
    """A frame is an object."""
    with pytest.raises(FrameError) as caught:
        decode_client_frame(data)
    assert caught.value.code is ErrorCode.INVALID_FRAME


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ('{"type":"completion","id":"a","prompt":"\\ud800"}', "prompt"),
        ('{"type":"chat","id":"a","messages":[{"role":"user","content":"\\udfff"}]}', "messages[0].content"),
        ('{"type":"completion","id":"a","prompt":"x","temperature":NaN}', "temperature"),
        ('{"type":"completion","id":"a","prompt":"x","logit_bias":{"1":-Infinity}}', "logit_bias.1"),
        ('{"type":"completion","id":"a","prompt":"x","\\ud800":1}', "frame"),
    ],
)
def test_what_json_cannot_say_names_the_field(data: str, param: str) -> None:
    """NaN and lone surrogates are refused with the field's name and the frame's id."""
    with pytest.raises(FrameError) as caught:
        decode_client_frame(data)
    error = caught.value
    assert (error.code, error.param, error.frame_id) == (ErrorCode.INVALID_PARAM, param, "a")


def test_a_huge_broken_frame_is_not_searched() -> None:
    """Naming the field has a bound."""
    data = '{"type":"completion","id":"a","prompt":"%s\\ud800"}' % ("x" * MAX_DIAGNOSED_BYTES)
    with pytest.raises(FrameError) as caught:
        decode_client_frame(data)
    assert caught.value.code is ErrorCode.INVALID_JSON


def test_the_search_ends_after_so_many_values() -> None:
    """However many there are; the frame's id is told all the same."""
    data = '{"type":"completion","id":"a","prompt":[%s NaN]}' % ("[0]," * MAX_DIAGNOSED_VALUES)
    with pytest.raises(FrameError) as caught:
        decode_client_frame(data)
    assert (caught.value.code, caught.value.param, caught.value.frame_id) == (
        ErrorCode.INVALID_JSON,
        None,
        "a",
    )


def test_the_search_for_the_field_at_fault_costs_no_more_than_the_frame() -> None:
    """A long name is not repeated for every item below it."""
    data = '{"type": "ping", "' + "k" * 20_000 + '": [' + "1," * 2000 + "NaN]}"
    tracemalloc.start()
    try:
        with pytest.raises(FrameError) as caught:
            decode_client_frame(data)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20, "it would be 40 MB"
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.INVALID_PARAM
    assert (caught.value.param or "").startswith("kkk")


def test_surrogate_pairs_are_text() -> None:
    """An escaped emoji is one character."""
    frame = decode_client_frame('{"type":"completion","id":"a","prompt":"\\ud83d\\ude00"}')
    assert isinstance(frame, RequestFrame)
    assert frame.input.model_dump() == {"prompt": "😀"}
