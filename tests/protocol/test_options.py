"""Options: each one's range, on both kinds of request frame, and what stands for the server's defaults."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from headrace.protocol.codec import decode_client_frame
from headrace.protocol.errors import ErrorCode, FrameError
from headrace.protocol.frames import RequestFrame, RequestId
from headrace.protocol.messages import Submit, decode_command, encode_command
from headrace.protocol.options import MAX_DEPTH, OPENAI_SPELLINGS, OPTION_NAMES, GenerationOptions

INPUTS: dict[str, dict[str, Any]] = {
    "completion": {"type": "completion", "id": "a", "prompt": "x"},
    "chat": {"type": "chat", "id": "a", "messages": [{"role": "user", "content": "x"}]},
}
NAN, INFINITY = float("nan"), float("inf")
WRONG_NUMBERS: list[Any] = [True, "1", [], {}, NAN, INFINITY, -INFINITY]
WRONG_INTEGERS: list[Any] = [*WRONG_NUMBERS, 1.5, 1.0, 2**64, 2**70, -(2**70)]
WRONG_BOOLEANS: list[Any] = [0, 1, "true", NAN, [], 2**70]
WRONG_TEXTS: list[Any] = [1, True, NAN, {}, "\ud800", "a\udfffb", 2**70]

REFUSED: dict[str, list[Any]] = {
    "model": [*WRONG_TEXTS, [], "", "x" * 513],
    "stream": WRONG_BOOLEANS,
    "max_tokens": [*WRONG_INTEGERS, 0, -1, 2**31],
    "temperature": [*WRONG_NUMBERS, -0.1, 2.1, 2**70],
    "top_p": [*WRONG_NUMBERS, 0, 1.1, -1, 2**70],
    "top_k": [*WRONG_INTEGERS, -1, 2**31],
    "min_p": [*WRONG_NUMBERS, -0.1, 1.1],
    "repetition_penalty": [*WRONG_NUMBERS, 0, -1, 10.1],
    "presence_penalty": [*WRONG_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*WRONG_NUMBERS, -2.1, 2.1],
    "logit_bias": [
        1, True, "x", [], NAN, {"a": 1}, {"-1": 1}, {"٣": 1}, {"1" * 11: 1}, {"1": True}, {"1": "1"},
        {"1": NAN}, {"1": 101}, {"1": -101}, {"\ud800": 1}, {str(n): 1 for n in range(1025)},
    ],
    "stop": [*WRONG_TEXTS, "", [""], ["a", 1], ["a", "\ud800"], ["x" * 257], ["x"] * 17],
    "seed": [*WRONG_INTEGERS, 2**63, -(2**63) - 1],
    "logprobs": ["true", NAN, [], {}, 21, -1, 1.5, 2**70],
    "top_logprobs": [*WRONG_INTEGERS, -1, 21, 1],
    "echo": WRONG_BOOLEANS,
    "specprefill": WRONG_BOOLEANS,
    "specprefill_keep_pct": [*WRONG_NUMBERS, 0, -0.1, 1.1, 2**70],
    "specprefill_debug": WRONG_BOOLEANS,
    "cache_prompt": WRONG_BOOLEANS,
    "timeout_ms": [*WRONG_INTEGERS, 0, -1, 86_400_001],
    "flush_ms": [*WRONG_INTEGERS, -1, 1001],
    "window": [*WRONG_INTEGERS, 0, -1, 2**31],
    "detach": WRONG_BOOLEANS,
    "n": [0, 2, True, "1", NAN, 2**70],
    "stream_options": [1, "x", {"include_usage": False}, {"x": 1}, [1]],
    "max_completion_tokens": [*WRONG_INTEGERS, 0, -1],
}  # fmt: skip

ACCEPTED: dict[str, list[Any]] = {
    "model": ["m", "org/name", None],
    "stream": [True, False, None],
    "max_tokens": [1, 2**31 - 1, None],
    "temperature": [0, 0.7, 2, None],
    "top_p": [0.001, 1, None],
    "top_k": [0, 1, 2**31 - 1, None],
    "min_p": [0, 1, None],
    "repetition_penalty": [0.1, 10, None],
    "presence_penalty": [-2, 2, None],
    "frequency_penalty": [-2, 2, None],
    "logit_bias": [{}, {"0": -100, "4294967295": 100}, None],
    "stop": ["x", [], ["x"] * 16, "😀" * 256, None],
    "seed": [0, -(2**63), 2**63 - 1, None],
    "logprobs": [True, False, 0, 20, None],
    "top_logprobs": [0, None],
    "echo": [False, None],
    "specprefill": [True, False, None],
    "specprefill_keep_pct": [0.001, 1, None],
    "specprefill_debug": [True, False, None],
    "cache_prompt": [True, False, None],
    "timeout_ms": [1, 86_400_000, None],
    "flush_ms": [0, 1000, None],
    "window": [1, 2**31 - 1, None],
    "detach": [True, False, None],
    "n": [1, None],
    "stream_options": [{"include_usage": True}, {}, None],
    "max_completion_tokens": [1, None],
}


def parse(kind: str, **options: Any) -> RequestFrame:
    """Send options through the bytes of a frame, as a client would."""
    frame = decode_client_frame(json.dumps({**INPUTS[kind], **options}))
    assert isinstance(frame, RequestFrame)
    return frame


def test_the_tables_cover_every_option() -> None:
    """A new option needs its rows here."""
    assert set(REFUSED) == set(ACCEPTED) == OPTION_NAMES


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]])
def test_out_of_range_is_refused_with_the_field_name(kind: str, name: str, value: Any) -> None:
    """A value outside its range is an error that names the field, and carries the id."""
    with pytest.raises(FrameError) as caught:
        parse(kind, **{name: value})
    error = caught.value
    assert error.code in (ErrorCode.INVALID_PARAM, ErrorCode.NOT_SERVED)
    assert error.frame_id == "a"
    assert error.param is not None
    named = {name, {"max_completion_tokens": "max_tokens"}.get(name, name)}
    assert error.param.partition(".")[0].partition("[")[0] in named
    assert error.param in error.message


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ACCEPTED for value in ACCEPTED[name]])
def test_the_ends_of_each_range_are_accepted(kind: str, name: str, value: Any) -> None:
    """The limits themselves are inside; null says no more than leaving the field out."""
    options = parse(kind, **{name: value}).options
    if value is None:
        assert options == GenerationOptions()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["", "Temperature", "best_of", "user", "images", "id2"])
def test_an_unknown_field_is_refused_by_name(kind: str, name: str) -> None:
    """Nothing is ignored."""
    with pytest.raises(FrameError) as caught:
        parse(kind, **{name: 1})
    assert caught.value.code is ErrorCode.INVALID_PARAM
    assert (caught.value.param or "") == name


def test_both_frames_carry_the_same_options() -> None:
    """No path loses an option."""
    options = {"temperature": 0.5, "seed": 3, "stop": "x", "specprefill": True, "stream": False, "top_k": 4}
    assert parse("completion", **options).options == parse("chat", **options).options


def test_what_is_not_served_says_so() -> None:
    """A known field that is not served has a code of its own."""
    with pytest.raises(FrameError) as caught:
        parse("chat", n=2)
    assert (caught.value.code, caught.value.param) == (ErrorCode.NOT_SERVED, "n")


@pytest.mark.parametrize("param", ["chat_template_kwargs", "tools[0].function.parameters"])
@pytest.mark.parametrize("nest", [lambda value: {"a": value}, lambda value: [value, 1]])
def test_what_is_nested_too_deep_never_reaches_an_engine(param: str, nest: Callable[[Any], Any]) -> None:
    """It could be read here and not be written to the pipe, which would end the engine process."""

    def fields(depth: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(depth - 1):
            value = nest(value)
        value = {"a": value}
        if param == "chat_template_kwargs":
            return {param: value}
        return {"tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]}

    frame = parse("chat", **fields(MAX_DEPTH))
    options = frame.options.resolve(model="m", max_tokens=1, temperature=0.0, seed=1)
    submit = Submit(RequestId("r1"), frame.input, options, "", 0.0)
    assert decode_command(encode_command(submit)) == submit
    for depth in (MAX_DEPTH + 1, 300, 900):
        with pytest.raises(FrameError) as caught:
            parse("chat", **fields(depth))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_PARAM, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [-1] * 50_000}, "prompt[0]"),
        ({"prompt": "x", "stop": [1] * 50_000}, "stop[0]"),
        ({"type": "chat", "messages": [{}] * 50_000}, "messages[0].role"),
        ({"type": "chat", "messages": [{"role": "user", "content": [{}] * 50_000}]}, "messages[0].content"),
        ({"prompt": "x", **{f"field_{index}": 1 for index in range(50_000)}}, None),
        ({"prompt": "x", "logit_bias": {str(index): 101 for index in range(50_000)}}, None),
    ],
)
def test_a_frame_full_of_errors_costs_no_more_than_one(fields: dict[str, Any], param: str | None) -> None:
    """Told one by one, those of a frame of some megabytes would take minutes and gigabytes."""
    data = json.dumps({"type": "completion", "id": "a", **fields})
    tracemalloc.start()
    try:
        with pytest.raises(FrameError) as caught:
            decode_client_frame(data)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(data)
    finally:
        tracemalloc.stop()
    error = caught.value
    assert (error.code, error.frame_id) == (ErrorCode.INVALID_PARAM, "a")
    assert (error.param or "").startswith(param or "")
    assert (error.param is None) == (param is None)


def test_echo_is_for_completions() -> None:
    """Chat has no prompt to echo."""
    assert parse("completion", echo=True).options.echo
    with pytest.raises(FrameError) as caught:
        parse("chat", echo=True)
    assert (caught.value.code, caught.value.param) == (ErrorCode.NOT_SERVED, "echo")


def test_openai_spellings_become_the_same_options() -> None:
    """A body of OpenAI's API needs no change."""
    assert parse("chat", max_completion_tokens=7).options.max_tokens == 7
    assert parse("chat", max_completion_tokens=7, max_tokens=7).options.max_tokens == 7
    assert parse("completion", logprobs=3).options.top_logprobs == 3
    assert parse("completion", stop="x").options.stop == ["x"]
    assert set(GenerationOptions.model_fields).isdisjoint(OPENAI_SPELLINGS)


def test_null_is_the_same_as_left_out_beside_a_number_of_logprobs() -> None:
    """Of the older completions API."""
    request = parse("completion", logprobs=5, top_logprobs=None)
    assert (request.options.logprobs, request.options.top_logprobs) == (True, 5)


def test_two_spellings_that_disagree_are_refused() -> None:
    """Neither wins silently."""
    with pytest.raises(FrameError) as caught:
        parse("chat", max_completion_tokens=7, max_tokens=8)
    assert caught.value.param == "max_completion_tokens"


def test_top_logprobs_needs_logprobs() -> None:
    """As in OpenAI's API."""
    with pytest.raises(FrameError) as caught:
        parse("chat", top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    assert parse("chat", top_logprobs=2, logprobs=True).options.top_logprobs == 2


def test_resolve_fills_in_only_what_the_client_left_out() -> None:
    """The server's defaults never replace the client's choice, 0 included."""
    resolved = GenerationOptions().resolve(model="m", max_tokens=5, temperature=0.5, seed=9)
    assert (resolved.model, resolved.max_tokens, resolved.temperature, resolved.seed) == ("m", 5, 0.5, 9)
    chosen = GenerationOptions(model="n", max_tokens=1, temperature=0, seed=0)
    kept = chosen.resolve(model="m", max_tokens=5, temperature=0.5, seed=9)
    assert (kept.max_tokens, kept.temperature, kept.seed) == (1, 0, 0)
    assert kept.model == "m", "an alias becomes the model's name"
