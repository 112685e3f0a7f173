"""Who may go on with a stream, and from where. PROTOCOL.md, "Resuming".

A stream that asked for it (`detach`) is attached to at most one connection. It outlives that connection, and
another may take it over. `TRANSITIONS` is the rule; an event that it does not allow raises
`IllegalTransition` and changes nothing.
"""

import hmac
from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from types import MappingProxyType

from .client_frames import ResumeFrame
from .errors import ErrorBody, ErrorCode, IllegalTransition, RequestError
from .replay import Replay
from .stream import Stream


class ResumeReason(StrEnum):
    """Why a stream could not be resumed: `reason` of a `resume_failed` error."""

    UNKNOWN_TOKEN = "unknown_token"
    """This server has never given it out, or not for this id."""
    EXPIRED = "expired"
    """There is none any more, or the token is wrong: what has long ended is forgotten, its token too."""
    WRONG_CREDENTIAL = "wrong_credential"
    """The stream belongs to another access token."""
    GAP = "gap"
    """A frame after `after_seq` is not held any more. The stream is not changed."""
    AHEAD = "ahead"
    """`after_seq` has not been sent yet."""


_MESSAGES: Mapping[ResumeReason, tuple[str, str]] = MappingProxyType(
    {
        ResumeReason.UNKNOWN_TOKEN: ("token", "this server knows no stream with this id and token"),
        ResumeReason.EXPIRED: (
            "token",
            "there is no such stream any more: it is forgotten some time after its end",
        ),
        ResumeReason.WRONG_CREDENTIAL: ("token", "the stream was started with another access token"),
        ResumeReason.GAP: ("after_seq", "frames after this one are not kept any more"),
        ResumeReason.AHEAD: ("after_seq", "no frame with this seq has been sent"),
    }
)


class ResumeError(RequestError):
    """A `resume` that failed: nothing was changed."""

    def __init__(self, reason: ResumeReason) -> None:
        param, message = _MESSAGES[reason]
        super().__init__(ErrorCode.RESUME_FAILED, f"{param}: {message}", param=param)
        self.reason = reason

    def body(self) -> ErrorBody:
        """Return the error as the wire shows it, with its reason."""
        return {**super().body(), "reason": self.reason.value}


class Attachment(Enum):
    """Whether a resumable stream has a connection."""

    ATTACHED = auto()
    DETACHED = auto()
    """Its connection is lost; it goes on for a while."""
    EXPIRED = auto()
    """Nobody can resume it any more."""


class AttachmentEvent(Enum):
    """What can happen to it."""

    RESUME = auto()
    LOSE = auto()
    EXPIRE = auto()


_A, _E = Attachment, AttachmentEvent

TRANSITIONS: Mapping[tuple[Attachment, AttachmentEvent], Attachment] = MappingProxyType(
    {
        # The server may not have noticed the loss: the newest connection has it.
        (_A.ATTACHED, _E.RESUME): _A.ATTACHED,
        (_A.ATTACHED, _E.LOSE): _A.DETACHED,
        (_A.ATTACHED, _E.EXPIRE): _A.EXPIRED,
        (_A.DETACHED, _E.RESUME): _A.ATTACHED,
        (_A.DETACHED, _E.EXPIRE): _A.EXPIRED,
    }
)


class ResumableStream:
    """A stream that outlives its connection, and whom it belongs to.

    Args:
        stream: the stream, with a `Replay`.
        token: what a client must show.
        tenant: the name of the credential that the request came with.
    """

    def __init__(self, stream: Stream, token: str, tenant: str) -> None:
        assert stream.replay is not None, "only a stream that keeps its frames can be resumed"
        self.stream = stream
        self.tenant = tenant
        self._token = token
        self._replay: Replay = stream.replay
        self._attachment = Attachment.ATTACHED

    @property
    def attachment(self) -> Attachment:
        """Whether it has a connection."""
        return self._attachment

    @property
    def is_overfull(self) -> bool:
        """Whether more waits for a client to come back than is kept for one."""
        return self.stream.pending_bytes > self._replay.max_bytes

    def apply(self, event: AttachmentEvent) -> None:
        """Change the state as the table says."""
        try:
            self._attachment = TRANSITIONS[self._attachment, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} in {self._attachment.name}") from None

    def frames_for(self, frame: ResumeFrame, tenant: str, now_s: float) -> list[bytes]:
        """Return the frames that a client has missed.

        Raises:
            ResumeError: it may not have them, or they are not there.
        """
        if frame.id != self.stream.id or not hmac.compare_digest(frame.token, self._token):
            raise ResumeError(ResumeReason.UNKNOWN_TOKEN)
        if tenant != self.tenant:
            raise ResumeError(ResumeReason.WRONG_CREDENTIAL)
        if frame.after_seq >= self._replay.next_seq:
            raise ResumeError(ResumeReason.AHEAD)
        frames = self._replay.after(frame.after_seq, now_s)
        if frames is None:
            raise ResumeError(ResumeReason.GAP)
        return frames
