"""The streams of a gateway that outlive their connections. PROTOCOL.md, "Resuming".

Each sends its events to the connection that has it now, and takes them in itself while there is none. The
rules are in `protocol.resume`; here are the timers, the tokens, and how many may be kept.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..protocol.errors import BusyError, ErrorCode
from ..protocol.frames import RequestId, ResumeFrame
from ..protocol.messages import CancelReason, Delta, End, Event, Progress
from ..protocol.replay import Replay
from ..protocol.resume import (
    Attachment,
    AttachmentEvent,
    ResumableStream,
    ResumeError,
    ResumeReason,
)
from ..protocol.stream import Stream, StreamState
from .config import ResumeConfig
from .tenants import Tenant

_TOKEN_BYTES = 24

Cancel = Callable[[RequestId, CancelReason], None]


class Owner(Protocol):
    """A connection that has streams."""

    def deliver(self, event: Event) -> None:
        """Take an event of a stream."""

    def release(self, stream: Stream, *, is_elsewhere: bool) -> None:
        """Let a stream go, to another connection or to be attached to this one again."""


@dataclass(frozen=True, slots=True)
class ResumeStatistics:
    """Resumable streams at one moment."""

    held: int
    """All that could be resumed, ended ones included."""
    detached: int
    """Those that run without a connection."""
    held_bytes: int
    """About what their sent frames take."""


class Resumable:
    """One stream: the sink of its events, its owner and its timer."""

    def __init__(self, registry: "ResumableStreams", owner: Owner, tenant: Tenant, token: str) -> None:
        self.token = token
        self.owner: Owner | None = owner
        self.rules: ResumableStream | None = None
        """There once the pool has taken the request."""
        self.timer: asyncio.TimerHandle | None = None
        self.tenant = tenant
        self._registry = registry

    def begin(self, stream: Stream) -> None:
        """Note that the pool has taken the request."""
        self.rules = ResumableStream(stream, self.token, self.tenant.name)

    def take(self, event: Event) -> None:
        """Give an event of the stream to whoever has it. The pool calls this, after `begin`."""
        if isinstance(event, End):
            self.tenant.end_request()
            self._registry.note_end(self)
        if self.owner is not None:
            self.owner.deliver(event)
        else:
            self._absorb(event)

    def set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Replace the timer."""
        self.stop_timer()
        self.timer = asyncio.get_running_loop().call_later(delay_s, callback)

    def stop_timer(self) -> None:
        """Forget the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _absorb(self, event: Event) -> None:
        """Take an event in while there is no connection."""
        assert self.rules is not None, "events come after begin"
        stream = self.rules.stream
        match event:
            case Delta():
                stream.push_delta(event)
                if self.rules.is_overfull:
                    self._registry.cancel(self, "slow_consumer")
            case Progress():
                stream.push_progress(event)
            case End():
                stream.end(event)


class ResumableStreams:
    """All resumable streams of a gateway, by token.

    Args:
        config: how long and how much is kept.
        cancel: tells the pool that a request should end.
        epoch: this server's; tokens begin with it, so that those of an earlier server are known as such.
    """

    def __init__(self, config: ResumeConfig, cancel: Cancel, epoch: str) -> None:
        self._config = config
        self._cancel = cancel
        self._epoch = epoch
        self._entries: dict[str, Resumable] = {}
        self._tenants: defaultdict[str, dict[str, Resumable]] = defaultdict(dict)
        """The same by tenant: running ones in the order of their start, then ended ones as they ended."""
        self._is_stopping = False

    def statistics(self) -> ResumeStatistics:
        """Return what there is to know at this moment."""
        rules = [entry.rules for entry in self._entries.values() if entry.rules is not None]
        detached = [r for r in rules if r.attachment is Attachment.DETACHED]
        return ResumeStatistics(
            held=len(self._entries),
            detached=sum(r.stream.state is not StreamState.DONE for r in detached),
            held_bytes=sum(r.stream.replay.size_bytes for r in rules if r.stream.replay is not None),
        )

    # --- a stream's way in ---

    def reserve(self, owner: Owner, tenant: Tenant) -> Resumable:
        """Return a place for a stream that is about to start; `begin` it, or `forget` it.

        Raises:
            BusyError: too many of this tenant's run already.
        """
        held = self._tenants[tenant.name]
        if len(held) >= self._config.max_streams_per_token and not self._forget_oldest_ended(held):
            raise BusyError(
                ErrorCode.TOO_MANY_IN_FLIGHT, f"{len(held)} resumable streams run, and no more may"
            )
        entry = Resumable(self, owner, tenant, f"{self._epoch}.{secrets.token_urlsafe(_TOKEN_BYTES)}")
        self._entries[entry.token] = held[entry.token] = entry
        return entry

    def new_replay(self) -> Replay:
        """Return the ring for a stream's frames."""
        return Replay(self._config.replay_bytes, self._config.replay_s)

    def forget(self, entry: Resumable) -> None:
        """Let a stream go: nobody can resume it any more."""
        entry.stop_timer()
        if self._entries.pop(entry.token, None) is None:
            return
        del self._tenants[entry.tenant.name][entry.token]
        if entry.rules is not None:
            entry.rules.apply(AttachmentEvent.EXPIRE)

    def _forget_oldest_ended(self, held: dict[str, Resumable]) -> bool:
        for entry in held.values():
            if entry.rules is not None and entry.rules.stream.state is StreamState.DONE:
                self.forget(entry)
                return True
        return False

    # --- from connection to connection ---

    def resume(self, frame: ResumeFrame, owner: Owner, tenant: Tenant) -> tuple[Stream, list[bytes]]:
        """Take a stream over; return it, and the frames that the client has missed.

        Raises:
            ResumeError: it stays where it is.
        """
        entry = self._entries.get(frame.token)
        if entry is None or entry.rules is None:
            was_ours = frame.token.startswith(f"{self._epoch}.")
            raise ResumeError(ResumeReason.EXPIRED if was_ours else ResumeReason.UNKNOWN_TOKEN)
        rules = entry.rules
        missed = rules.frames_for(frame, tenant.name, asyncio.get_running_loop().time())
        rules.apply(AttachmentEvent.RESUME)
        if entry.owner is not None:
            entry.owner.release(rules.stream, is_elsewhere=entry.owner is not owner)
        entry.owner = owner
        if rules.stream.state is not StreamState.DONE:
            entry.stop_timer()
        return rules.stream, missed

    def lose(self, owner: Owner) -> None:
        """Note that a connection is gone: its streams go on, for a while."""
        for entry in self._entries.values():
            if entry.owner is owner and entry.rules is not None:
                entry.owner = None
                entry.rules.apply(AttachmentEvent.LOSE)
                if entry.rules.stream.state is StreamState.DONE:
                    continue
                if self._is_stopping:
                    self.cancel(entry, "shutdown")
                else:
                    self._start_countdown(entry)

    def _start_countdown(self, entry: Resumable) -> None:
        entry.set_timer(self._config.detach_timeout_s, lambda: self.cancel(entry, "connection_lost"))

    def note_end(self, entry: Resumable) -> None:
        """Keep what an ended stream has sent for as long as the configuration says."""
        if entry.token in self._entries:
            held = self._tenants[entry.tenant.name]
            held[entry.token] = held.pop(entry.token)  # after those that have ended before
            entry.set_timer(self._config.replay_s, lambda: self.forget(entry))

    # --- the way out ---

    def cancel(self, entry: Resumable, reason: CancelReason) -> None:
        """Let a stream's request end; its last frame is kept."""
        if entry.rules is not None:
            self._cancel(entry.rules.stream.rid, reason)

    def begin_stop(self) -> None:
        """Let all streams end that have no connection, or lose it from now on: nobody can come back."""
        self._is_stopping = True
        for entry in self._entries.values():
            if entry.owner is None:
                self.cancel(entry, "shutdown")

    def close(self) -> None:
        """Let all streams end, and forget them."""
        for entry in list(self._entries.values()):
            self.cancel(entry, "shutdown")
            self.forget(entry)
