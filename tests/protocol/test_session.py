"""One connection without its socket: all that a client can observe."""

import json
import time
from typing import Any

import pytest

from headrace.protocol.actions import CancelRequest, CloseConnection, StartRequest
from headrace.protocol.errors import BusyError, CloseCode, ErrorCode
from headrace.protocol.frames import HelloFrame, RequestFrame, RequestId
from headrace.protocol.messages import Delta, Progress
from headrace.protocol.session import Session, SessionLimits, SessionState
from headrace.protocol.stream import end_without_engine

HELLO: HelloFrame = {
    "type": "hello",
    "protocol": "headrace.v1",
    "server": "headrace/0",
    "epoch": "e",
    "models": [],
    "limits": {
        "max_frame_bytes": 1,
        "max_in_flight": 2,
        "max_queue": 3,
        "max_tokens": 4,
        "detach_timeout_ms": 5,
        "replay_ms": 6,
        "replay_bytes": 7,
    },
    "heartbeat_s": 20.0,
    "features": [],
}


class Peer:
    """A session with a client and a pool on either side, both played by the test."""

    def __init__(self, *, max_in_flight: int = 3, max_bad_frames: int = 3) -> None:
        self.session = Session(HELLO, SessionLimits(max_in_flight, max_bad_frames), list)
        self.frames: dict[str, RequestFrame] = {}
        self.read()

    def send(self, **fields: Any) -> list[Any]:
        """Receive a frame from the client."""
        return list(self.session.receive(json.dumps(fields)))

    def start(self, frame_id: str, **options: Any) -> RequestId:
        """Let a completion be accepted by the pool."""
        (action,) = self.send(type="completion", id=frame_id, prompt="x", **options)
        assert isinstance(action, StartRequest)
        rid = RequestId(f"rid-{frame_id}")
        self.session.accept(action.frame, rid, action.frame.options, 0)
        self.frames[rid] = action.frame
        return rid

    def end(self, rid: RequestId, reason: str = "stop") -> None:
        """Let the engine end a request."""
        options = self.frames[rid].options
        self.session.deliver(end_without_engine(rid, options, status="completed", reason=reason, error=None))

    def read(self) -> list[dict[str, Any]]:
        """Return all frames that the client has not seen."""
        frames = []
        while (data := self.session.next_frame()) is not None:
            frames.append(json.loads(data))
        return frames

    def read_types(self) -> list[str]:
        """Return the types of all frames that the client has not seen."""
        return [frame["type"] for frame in self.read()]


def test_hello_is_first() -> None:
    """Before anything is asked."""
    session = Session(HELLO, SessionLimits(1, 1), list)
    assert json.loads(session.next_frame() or b"") == HELLO
    assert session.next_frame() is None


def test_a_request_from_frame_to_done() -> None:
    """Accepted, progress, deltas, done, in order."""
    peer = Peer()
    rid = peer.start("a")
    peer.session.deliver(Progress(rid, "prefill", 1, 2))
    assert peer.read_types() == ["accepted", "progress"]
    peer.session.deliver(Delta(rid, "x", 1))
    peer.session.deliver(Delta(rid, "y", 1))
    (delta,) = peer.read()
    assert (delta["text"], delta["n"], delta["seq"]) == ("xy", 2, 0)
    peer.session.deliver(Delta(rid, "z", 1))
    peer.end(rid)
    assert peer.session.in_flight == 0
    assert [(frame["type"], frame["seq"]) for frame in peer.read()] == [("delta", 1), ("done", 2)]
    assert not peer.session.has_outgoing


def test_a_refused_request_has_an_error_and_frees_its_id() -> None:
    """Nothing was started."""
    peer = Peer()
    (action,) = peer.send(type="completion", id="a", prompt="x")
    peer.session.refuse(action.frame, BusyError(ErrorCode.QUEUE_FULL, "full", retry_after_ms=5))
    (error,) = peer.read()
    assert (error["type"], error["id"], error["code"]) == ("error", "a", "queue_full")
    assert (error["retryable"], error["retry_after_ms"]) == (True, 5)
    assert peer.session.in_flight == 0
    peer.start("a")


def test_a_duplicate_id_leaves_the_first_alone() -> None:
    """Refused by name; free again after done."""
    peer = Peer()
    rid = peer.start("a")
    peer.read()
    assert peer.send(type="completion", id="a", prompt="y") == []
    (error,) = peer.read()
    assert (error["code"], error["param"], error["id"]) == ("duplicate_id", "id", "a")
    peer.session.deliver(Delta(rid, "x", 1))
    peer.end(rid)
    assert peer.read_types() == ["delta", "done"]
    peer.start("a")


def test_a_duplicate_id_before_the_pool_has_answered() -> None:
    """An id is taken as soon as its frame is."""
    peer = Peer()
    assert peer.send(type="completion", id="a", prompt="x")
    assert peer.send(type="completion", id="a", prompt="x") == []
    assert peer.read()[0]["code"] == "duplicate_id"


def test_cancel_reaches_the_pool_by_the_inner_id() -> None:
    """And the last frame comes with the engine's end only."""
    peer = Peer()
    rid = peer.start("a")
    peer.read()
    assert peer.send(type="cancel", id="a") == [CancelRequest(rid, "client")]
    assert peer.send(type="cancel", id="a") == [CancelRequest(rid, "client")]
    assert peer.read() == []
    peer.end(rid)
    assert peer.read_types() == ["done"]


def test_cancel_of_an_unknown_id_is_no_error() -> None:
    """Idempotent: it may have ended a moment ago."""
    peer = Peer()
    assert peer.send(type="cancel", id="never") == []
    rid = peer.start("a")
    peer.end(rid)
    peer.read()
    assert peer.send(type="cancel", id="a") == []
    assert peer.read() == []


def test_flush_ms_holds_tokens_together() -> None:
    """The shell is told once for how long; the end does not wait for it."""
    peer = Peer()
    rid = peer.start("a", flush_ms=50)
    peer.read()
    assert peer.session.deliver(Delta(rid, "x", 1)) == 50
    assert peer.session.deliver(Delta(rid, "y", 1)) == 0
    assert peer.read() == []
    peer.session.flush(rid)
    (delta,) = peer.read()
    assert (delta["text"], delta["n"]) == ("xy", 2)
    assert peer.session.deliver(Delta(rid, "z", 1)) == 50
    peer.end(rid)
    assert peer.read_types() == ["delta", "done"]
    peer.session.flush(rid)
    assert peer.read() == []


@pytest.mark.parametrize("data", ["{", "[]", '{"type":"x"}', '{"type":"cancel"}', b"{}"])
def test_a_bad_frame_is_an_error_and_no_more(data: str | bytes) -> None:
    """The connection and its requests live on."""
    peer = Peer()
    rid = peer.start("a")
    peer.read()
    assert peer.session.receive(data) == []
    assert peer.read_types() == ["error"]
    peer.end(rid)
    assert peer.read_types() == ["done"]


def test_too_many_bad_frames_in_a_row_close_the_connection() -> None:
    """A good frame in between starts the count again."""
    peer = Peer(max_bad_frames=3)
    assert peer.session.receive("{") == []
    assert peer.session.receive("{") == []
    assert peer.send(type="ping") == []
    assert peer.session.receive("{") == []
    assert peer.session.receive("{") == []
    (action,) = peer.session.receive("{")
    assert isinstance(action, CloseConnection)
    assert action.code is CloseCode.TOO_MANY_BAD_FRAMES
    assert peer.read_types() == ["error", "error", "pong", "error", "error", "error"]


def test_too_many_requests_at_a_time() -> None:
    """Refused as retryable; those that run are unaffected."""
    peer = Peer(max_in_flight=2)
    rid = peer.start("a")
    peer.start("b")
    peer.read()
    assert peer.send(type="completion", id="c", prompt="x") == []
    (error,) = peer.read()
    assert (error["code"], error["retryable"]) == ("too_many_in_flight", True)
    peer.end(rid)
    peer.start("c")


def test_ping_and_models_are_answered_in_order() -> None:
    """The nonce comes back as it was."""
    peer = Peer()
    for nonce in ("n", 7, None):
        peer.send(type="ping", nonce=nonce)
    peer.send(type="models", id="m")
    assert peer.read() == [
        {"type": "pong", "nonce": "n"},
        {"type": "pong", "nonce": 7},
        {"type": "pong", "nonce": None},
        {"type": "models", "id": "m", "models": []},
    ]


def test_goaway_refuses_new_requests_and_keeps_running_ones() -> None:
    """Said once."""
    peer = Peer()
    rid = peer.start("a")
    peer.read()
    peer.session.goaway("shutdown", 500)
    peer.session.goaway("shutdown", 500)
    assert peer.session.state is SessionState.DRAINING
    assert peer.read() == [{"type": "goaway", "reason": "shutdown", "deadline_ms": 500}]
    assert peer.send(type="completion", id="b", prompt="x") == []
    assert peer.read()[0]["code"] == "shutting_down"
    peer.session.deliver(Delta(rid, "x", 1))
    peer.end(rid)
    assert peer.read_types() == ["delta", "done"]


def test_cancel_all_keeps_the_last_frames() -> None:
    """They come when the engine has let go."""
    peer = Peer()
    rids = [peer.start("a"), peer.start("b")]
    peer.send(type="cancel", id="b")
    peer.read()
    assert peer.session.cancel_all("shutdown") == [CancelRequest(rid, "shutdown") for rid in rids]
    for rid in rids:
        peer.end(rid)
    assert peer.read_types() == ["done", "done"]


def test_end_all_needs_no_engine() -> None:
    """Each request gets its last frame, with its tokens counted; a late end of the engine's is dropped."""
    peer = Peer()
    rid = peer.start("a")
    peer.start("b", stream=False)
    peer.session.deliver(Delta(rid, "xy", 2))
    peer.read()
    peer.session.end_all("shutdown")
    done = peer.read()
    assert [frame["status"] for frame in done] == ["cancelled", "cancelled"]
    assert [frame["reason"] for frame in done] == ["shutdown", "shutdown"]
    assert [frame["error"]["code"] for frame in done] == ["shutting_down", "shutting_down"]
    assert done[0]["usage"]["completion_tokens"] == 2
    assert peer.session.in_flight == 0
    peer.end(rid)
    assert peer.read() == []


def test_a_lost_connection_cancels_everything_once() -> None:
    """Nothing is sent any more, and late events are dropped."""
    peer = Peer()
    rid = peer.start("a")
    assert peer.session.lost() == [CancelRequest(rid, "connection_lost")]
    assert peer.session.lost() == []
    assert peer.session.state is SessionState.CLOSED
    assert peer.read() == []
    assert peer.send(type="ping") == []
    peer.session.deliver(Delta(rid, "x", 1))
    peer.end(rid)
    assert peer.read() == []
    assert peer.session.in_flight == 0


def test_buffered_bytes_count_frames_and_text() -> None:
    """And return to zero when all is taken."""
    peer = Peer()
    rid = peer.start("a")
    before = peer.session.buffered_bytes
    peer.session.deliver(Delta(rid, "x" * 100, 1))
    assert peer.session.buffered_bytes >= before + 100
    peer.session.deliver(Delta(rid, "x" * 100, 1))
    assert peer.session.buffered_bytes >= before + 200
    peer.read()
    assert peer.session.buffered_bytes == 0


def test_tokens_count_once_also_when_their_stream_has_ended() -> None:
    """Its end adds a place for what is left; what is left is there once."""
    peer = Peer()
    rid = peer.start("a")
    peer.session.deliver(Delta(rid, "x" * 1000, 1))
    before = peer.session.buffered_bytes
    peer.end(rid)
    assert peer.session.buffered_bytes < before + 1000


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_stream_that_goes_on_elsewhere_takes_its_bytes_along(is_stream: bool) -> None:
    """Its whole answer or its tokens, and its last frame."""
    peer = Peer()
    rid = peer.start("a", stream=is_stream)
    stream = peer.session._streams[rid]
    peer.read()
    peer.session.deliver(Delta(rid, "x" * 1000, 1))
    peer.end(rid)
    assert peer.session.buffered_bytes >= 1000
    peer.session.release(stream)
    peer.read()
    assert peer.session.buffered_bytes == 0


def test_buffered_bytes_are_counted_quickly_however_many_frames_wait() -> None:
    """They are asked for again and again while a client doesn't read: its frames must not be looked at."""
    peer = Peer()
    rid = peer.start("a")
    peer.session.deliver(Delta(rid, "x", 1))
    for _ in range(20_000):
        peer.send(type="ping")
    started_s = time.process_time()
    for _ in range(1000):
        assert peer.session.buffered_bytes > 20_000
    assert time.process_time() - started_s < 0.3, "it would be 1 s and more"
