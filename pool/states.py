"""The states of an engine process, and what is known of one at a moment.

The table `TRANSITIONS` is the rule; `Supervisor` applies it. An event that the table does not allow raises
`IllegalTransition` and changes nothing.

    STOPPED -> STARTING -> LOADING -> READY -> DRAINING     it is to be replaced
                  |           |         |         |
                  +-----------+---------+---------+--> BACKOFF -> STARTING     it has gone
                  +-----------+---------+---------+--> FAILED                  it is given up
                  any of them --> STOPPING -> STOPPED
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Literal

from ..protocol.frames import ModelInfo, SpecPrefillAbility
from ..protocol.messages import EngineInfo, EngineStats, Loading


class WorkerState(Enum):
    """Where an engine process stands."""

    STOPPED = auto()
    """Not started yet, or stopped on purpose."""
    STARTING = auto()
    """Started; nothing heard of it yet."""
    LOADING = auto()
    READY = auto()
    """It can answer."""
    DRAINING = auto()
    """It goes on with what it has, gets nothing new, and is then replaced."""
    BACKOFF = auto()
    """It has gone and is started again after a while."""
    FAILED = auto()
    """Its model cannot be loaded, or it died too often; it is not started again."""
    STOPPING = auto()
    """Told to stop; still there."""

    @property
    def has_requests(self) -> bool:
        """Whether requests may be running in it."""
        return self in (WorkerState.READY, WorkerState.DRAINING)


class WorkerEvent(Enum):
    """What can happen to an engine process."""

    START = auto()
    LOADING = auto()
    LOADED = auto()
    LOAD_FAILED = auto()
    """For good."""
    DRAIN = auto()
    DIED = auto()
    DIED_TOO_OFTEN = auto()
    STOP = auto()


_S, _E = WorkerState, WorkerEvent

TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = MappingProxyType(
    {
        (_S.STOPPED, _E.START): _S.STARTING,
        (_S.STOPPED, _E.STOP): _S.STOPPED,
        (_S.STARTING, _E.LOADING): _S.LOADING,
        (_S.STARTING, _E.LOADED): _S.READY,
        (_S.STARTING, _E.LOAD_FAILED): _S.FAILED,
        (_S.STARTING, _E.DIED): _S.BACKOFF,
        (_S.STARTING, _E.DIED_TOO_OFTEN): _S.FAILED,
        (_S.STARTING, _E.STOP): _S.STOPPING,
        (_S.LOADING, _E.LOADING): _S.LOADING,
        (_S.LOADING, _E.LOADED): _S.READY,
        (_S.LOADING, _E.LOAD_FAILED): _S.FAILED,
        (_S.LOADING, _E.DIED): _S.BACKOFF,
        (_S.LOADING, _E.DIED_TOO_OFTEN): _S.FAILED,
        (_S.LOADING, _E.STOP): _S.STOPPING,
        (_S.READY, _E.DRAIN): _S.DRAINING,
        (_S.READY, _E.DIED): _S.BACKOFF,
        (_S.READY, _E.DIED_TOO_OFTEN): _S.FAILED,
        (_S.READY, _E.STOP): _S.STOPPING,
        (_S.DRAINING, _E.DIED): _S.BACKOFF,
        (_S.DRAINING, _E.DIED_TOO_OFTEN): _S.FAILED,
        (_S.DRAINING, _E.STOP): _S.STOPPING,
        (_S.BACKOFF, _E.START): _S.STARTING,
        (_S.BACKOFF, _E.STOP): _S.STOPPED,
        # The process exits by itself after it has said that it failed.
        (_S.FAILED, _E.DIED): _S.FAILED,
        (_S.FAILED, _E.STOP): _S.STOPPED,
        # Its last reports may still be on the way.
        (_S.STOPPING, _E.LOADING): _S.STOPPING,
        (_S.STOPPING, _E.LOADED): _S.STOPPING,
        (_S.STOPPING, _E.LOAD_FAILED): _S.STOPPING,
        (_S.STOPPING, _E.STOP): _S.STOPPING,
        (_S.STOPPING, _E.DIED): _S.STOPPED,
        (_S.STOPPED, _E.DIED): _S.STOPPED,
    }
)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What is known of an engine process, at one moment."""

    name: str
    """The model's name and a number: `qwen/0`."""
    model: str
    state: WorkerState
    pid: int | None
    restarts: int
    """How often the process was started again."""
    stats: EngineStats
    """As of the last report; all zero when the process is gone."""
    info: EngineInfo | None
    """As of the last successful load, also while the process is being restarted."""
    loading: Loading | None
    """The stage of loading; None unless LOADING."""
    last_failure: str | None
    """Why the process last died, was replaced or failed to load, for the operator."""
    last_report_s: float | None
    """`time.monotonic()` at the end of the last step that was reported; None before the first."""
    memory_bytes: int
    """What the engine says that it holds, or what the system says, whichever is more; 0: unknown."""


def model_info(name: str, workers: Sequence[WorkerStatus], *, default: bool) -> ModelInfo:
    """Return a model as clients see it: ready if one of its workers is, failed if all of them are."""
    info = next((worker.info for worker in workers if worker.info is not None), None)
    not_loaded: SpecPrefillAbility = {"supported": False, "reason": "not_loaded", "draft": None}
    states = [worker.state for worker in workers]
    state: Literal["loading", "ready", "restarting", "failed"]
    if WorkerState.READY in states:
        state = "ready"
    elif all(worker is WorkerState.FAILED for worker in states):
        state = "failed"
    else:
        state = "loading" if info is None else "restarting"
    return {
        "name": name,
        "state": state,
        "context_length": info.context_length if info else None,
        "chat": info.chat if info else None,
        "specprefill": info.specprefill if info else not_loaded,
        "default": default,
    }
