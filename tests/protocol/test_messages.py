"""Pipe messages: what goes in comes out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.frames import RequestId
from headrace.protocol.messages import (
    Cancel,
    Command,
    Credit,
    Delta,
    EngineInfo,
    EngineStats,
    LoadFailed,
    Loading,
    Progress,
    Ready,
    Report,
    Step,
    Stop,
    Submit,
    decode_command,
    decode_report,
    encode_command,
    encode_report,
)
from headrace.protocol.options import ChatInput, CompletionInput, GenerationOptions
from headrace.protocol.stream import end_without_engine

RID = RequestId("r1")
OPTIONS = GenerationOptions(stop=["x"], logit_bias={"5": 1.5}, seed=-(2**63), specprefill=False)
CHAT = ChatInput.model_validate(
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "é😀"}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, None]}}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
)
CALL: Any = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ABILITY: Any = {"supported": True, "reason": None, "draft": "self"}
LOGPROB: Any = {"token": "a", "token_id": 1, "logprob": -0.5, "top_logprobs": []}

COMMANDS: list[Command] = [
    Submit(RID, CHAT, OPTIONS, "tenant", 1.5),
    Submit(RID, CompletionInput(prompt=[1, 2]), OPTIONS, "", 0.0, max_tokens_is_default=True),
    Submit(RID, CHAT, OPTIONS, "", 0.0, generated=[3, 1, 2], credit=5),
    Cancel(RID, "client"),
    Credit(RID, 7),
    Stop(),
]
REPORTS: list[Report] = [
    Loading("fetch", 1, None, "bytes"),
    Ready(EngineInfo("m", 1, 2, True, ABILITY, "cpu", "float32", 3, 4, 5.0)),
    LoadFailed("no such folder", permanent=True),
    Step([], EngineStats(), 1.0),
    Step(
        [
            Progress(RID, "prefill", 1, None, 2, 3),
            Delta(RID, "é😀", 2, "r", [CALL], [LOGPROB], [1, 2]),
            end_without_engine(RID, OPTIONS, status="cancelled", reason="client", error=None),
        ],
        EngineStats(waiting=1, decoding=2, steps_total=3),
        2.5,
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_survive_the_pipe(command: Command) -> None:
    """Down: every field as it was."""
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize("report", REPORTS)
def test_reports_survive_the_pipe(report: Report) -> None:
    """Up: every field as it was."""
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("decode", [decode_command, decode_report])
def test_an_unknown_message_is_a_bug(decode: Any) -> None:
    """Both ends are one installation: there is nothing to tolerate."""
    with pytest.raises(ValueError, match="unknown"):
        decode(b'["nonsense", {}]')


DELTAS = st.builds(
    Delta,
    rid=st.just(RID),
    text=st.text(max_size=5),
    n=st.integers(0, 5),
    reasoning=st.text(max_size=3),
    tool_calls=st.lists(st.builds(lambda index: {**CALL, "index": index}, st.integers(0, 9)), max_size=2),
    logprobs=st.lists(st.builds(lambda token: {**LOGPROB, "token": token}, st.text(max_size=2)), max_size=2),
    tokens=st.lists(st.integers(0, 9), max_size=2),
)


@given(st.lists(DELTAS, min_size=1))
def test_merging_keeps_everything_in_order(deltas: list[Delta]) -> None:
    """A merged delta says what its parts said, and leaves the later parts alone."""
    expected = (
        "".join(delta.text for delta in deltas),
        sum(delta.n for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls],
        [logprob for delta in deltas for logprob in delta.logprobs],
        [token for delta in deltas for token in delta.tokens],
    )
    later = [(delta.text, delta.n, list(delta.tool_calls)) for delta in deltas[1:]]
    whole = deltas[0]
    for delta in deltas[1:]:
        whole.merge(delta)
    assert (
        whole.text,
        whole.n,
        whole.reasoning,
        whole.tool_calls,
        whole.logprobs,
        whole.tokens,
    ) == expected
    assert later == [(delta.text, delta.n, delta.tool_calls) for delta in deltas[1:]]


def test_in_flight_counts_every_phase() -> None:
    """Zero means that nothing runs."""
    assert EngineStats().in_flight == 0
    assert EngineStats(waiting=1, scoring=2, prefilling=3, decoding=4, paused=5).in_flight == 15
