"""Who may resume a stream, and what a session does with it."""

import json
from typing import Any

import pytest

from headrace.protocol.errors import ErrorCode, IllegalTransition
from headrace.protocol.frames import ClientId, RequestFrame, RequestId, ResumeFrame
from headrace.protocol.messages import Delta, Progress
from headrace.protocol.options import CompletionInput, GenerationOptions
from headrace.protocol.replay import Replay
from headrace.protocol.resume import (
    TRANSITIONS,
    Attachment,
    AttachmentEvent,
    ResumableStream,
    ResumeError,
    ResumeReason,
)
from headrace.protocol.session import Session, SessionLimits
from headrace.protocol.stream import Stream, StreamState, end_without_engine

RID = RequestId("r1")
TOKEN = "epoch.secret"


def new_session() -> Session:
    """Return a session whose `hello` is gone."""
    session = Session({}, SessionLimits(4, 4), list)  # type: ignore[typeddict-item]
    session.next_frame()
    return session


def begin(session: Session, *, max_bytes: int = 1 << 20, **options: Any) -> Stream:
    """Let a session have a resumable stream."""
    chosen = GenerationOptions(detach=True, **options)
    frame = RequestFrame(ClientId("a"), CompletionInput(prompt="x"), chosen)
    stream = session.accept(frame, RID, chosen, 0, replay=Replay(max_bytes, 60.0), resume_token=TOKEN)
    assert json.loads(session.next_frame() or b"")["resume_token"] == TOKEN
    return stream


def read(session: Session) -> list[bytes]:
    """Return all frames that wait."""
    frames = []
    while (data := session.next_frame()) is not None:
        frames.append(data)
    return frames


def types(frames: list[bytes]) -> list[str]:
    """Return the frames' types."""
    return [json.loads(data)["type"] for data in frames]


def resume_frame(after_seq: int, *, frame_id: str = "a", token: str = TOKEN) -> ResumeFrame:
    """Return a resume."""
    return ResumeFrame(ClientId(frame_id), token, after_seq)


def finish(target: Session | Stream) -> None:
    """End the request."""
    end = end_without_engine(
        RID, GenerationOptions(), status="completed", reason="x", error=None, completion_tokens=3
    )
    if isinstance(target, Session):
        target.deliver(end)
    else:
        target.end(end)


def hand_over(stream: Stream, old: Session, after_seq: int) -> tuple[Session, list[bytes]]:
    """Resume a stream on a new session; return it with what it sends."""
    new = new_session()
    missed = ResumableStream(stream, TOKEN, "").frames_for(resume_frame(after_seq), "", 0.0)
    old.release(stream)
    new.attach(stream, resume_frame(after_seq), missed)
    return new, read(new)


def test_the_attachment_table() -> None:
    """What it doesn't list raises and changes nothing."""
    stream = ResumableStream(begin(new_session()), TOKEN, "")
    assert stream.attachment is Attachment.ATTACHED
    for event, state in (
        (AttachmentEvent.RESUME, Attachment.ATTACHED),
        (AttachmentEvent.LOSE, Attachment.DETACHED),
        (AttachmentEvent.RESUME, Attachment.ATTACHED),
        (AttachmentEvent.EXPIRE, Attachment.EXPIRED),
    ):
        stream.apply(event)
        assert stream.attachment is state
    for event in AttachmentEvent:
        assert (Attachment.EXPIRED, event) not in TRANSITIONS
        with pytest.raises(IllegalTransition):
            stream.apply(event)
        assert stream.attachment is Attachment.EXPIRED


@pytest.mark.parametrize(
    ("frame", "tenant", "reason"),
    [
        (resume_frame(0, token="epoch.guess"), "alice", ResumeReason.UNKNOWN_TOKEN),
        (resume_frame(0, frame_id="b"), "alice", ResumeReason.UNKNOWN_TOKEN),
        (resume_frame(0), "bob", ResumeReason.WRONG_CREDENTIAL),
        (resume_frame(0), "", ResumeReason.WRONG_CREDENTIAL),
        (resume_frame(3), "alice", ResumeReason.AHEAD),
        (resume_frame(-1), "alice", ResumeReason.GAP),
    ],
)
def test_each_refusal_has_its_reason(frame: ResumeFrame, tenant: str, reason: ResumeReason) -> None:
    """And its parameter, and is not worth another try."""
    session = new_session()
    stream = begin(session, max_bytes=500)
    for number in range(3):
        session.deliver(Delta(RID, f"token {number}" * 10, 1))
        read(session)
    resumable = ResumableStream(stream, TOKEN, "alice")
    with pytest.raises(ResumeError) as caught:
        resumable.frames_for(frame, tenant, 0.0)
    body = caught.value.body()
    assert (body["code"], body["reason"], body["retryable"]) == (ErrorCode.RESUME_FAILED, reason, False)
    assert body["param"] == ("after_seq" if reason in ("ahead", "gap") else "token")
    assert len(resumable.frames_for(resume_frame(1), "alice", 0.0)) == 1


def test_a_resumed_stream_goes_on_byte_for_byte() -> None:
    """What was sent comes again as it was; what was not sent yet comes once."""
    old = new_session()
    stream = begin(old)
    old.deliver(Delta(RID, "one", 1))
    sent = read(old)
    old.deliver(Delta(RID, "two", 1))  # not sent any more
    new, frames = hand_over(stream, old, -1)
    assert types(frames) == ["resumed", "delta", "delta"]
    assert json.loads(frames[0]) == {"type": "resumed", "id": "a", "rid": "r1", "next_seq": 0}
    assert frames[1] == sent[0]
    assert json.loads(frames[2])["text"] == "two"
    assert types(read(old)) == ["detached"]
    old.deliver(Delta(RID, "late", 1))
    assert (old.in_flight, read(old)) == (0, [])
    new.deliver(Delta(RID, "three", 1))
    finish(new)
    assert [json.loads(data)["seq"] for data in read(new)] == [2, 3]


def test_progress_comes_again_as_the_newest() -> None:
    """It has no `seq`, and is worth nothing once it is old."""
    old = new_session()
    stream = begin(old)
    for processed in range(3):
        old.deliver(Progress(RID, "prefill", processed, 9))
    _, frames = hand_over(stream, old, -1)
    assert types(frames) == ["resumed", "progress"]
    assert json.loads(frames[1])["processed"] == 2


@pytest.mark.parametrize("stream_option", [True, False])
def test_an_end_that_was_not_sent_is_not_lost(stream_option: bool) -> None:
    """Neither when the connection was there, nor when none was."""
    for lost_first in (True, False):
        old = new_session()
        stream = begin(old, stream=stream_option)
        old.deliver(Delta(RID, "all", 3))
        if lost_first:
            assert old.lost() == [], "a resumable stream is not cancelled"
            finish(stream)
        else:
            finish(old)
        new, frames = hand_over(stream, old, -1)
        assert types(frames) == (["resumed", "delta", "done"] if stream_option else ["resumed", "done"])
        assert json.loads(frames[-1]).get("text", "all") == "all"
        assert new.in_flight == 0
        again = hand_over(stream, new, -1)[1]
        assert again[1:] == frames[1:], "as often as wanted"
        assert read(new) == [], "and a connection that has had all hears nothing of it"
        assert stream.state is StreamState.DONE
