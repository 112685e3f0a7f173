"""Engine processes: start them, talk to them, watch them, route requests to them."""

from .config import ModelSpec, PoolConfig
from .pool import ModelLoadFailed, Pool, PoolStatistics, WorkerStatistics
from .request import Sink, Ticket
from .states import WorkerState, WorkerStatus
from .stream import PoolStream

__all__ = [
    "ModelLoadFailed",
    "ModelSpec",
    "Pool",
    "PoolConfig",
    "PoolStatistics",
    "PoolStream",
    "Sink",
    "Ticket",
    "WorkerState",
    "WorkerStatistics",
    "WorkerStatus",
]
