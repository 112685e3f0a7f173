"""What a worker needs from an engine. `mlx_engine` and `scripted` implement it; neither knows of pipes.

An engine belongs to one thread: build it, step it and close it there.
"""

from collections.abc import Callable
from typing import Protocol

from ..protocol.frames import RequestId
from ..protocol.messages import CancelReason, EngineInfo, EngineStats, Event, Loading, Submit

OnLoading = Callable[[Loading], None]
"""Told of every step of loading; called often, so it must be quick."""


class EngineLoadError(Exception):
    """The model cannot be loaded; the message is for the operator and says what to do.

    `permanent`: trying again will not help.
    """

    def __init__(self, message: str, *, permanent: bool = True) -> None:
        super().__init__(message)
        self.permanent = permanent


class Engine(Protocol):
    """Continuous batching over one model.

    Every submitted request gets exactly one `End`, from a later `step`; one that cannot be served gets an
    `End` that says why. No method but `step` takes longer than a few milliseconds, and a step takes no longer
    than one decode step plus one prefill chunk.
    """

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters as they stand now."""

    def submit(self, message: Submit) -> None:
        """Take a request."""

    def cancel(self, rid: RequestId, reason: CancelReason) -> None:
        """Let a request go at the next step; an unknown one is no error."""

    def credit(self, rid: RequestId, tokens: int) -> None:
        """Allow a request with a `window` so many more tokens; an unknown one is no error."""

    def step(self) -> list[Event]:
        """Do the next piece of work; return what happened, in order (possibly nothing)."""

    def close(self) -> None:
        """Give everything back."""
