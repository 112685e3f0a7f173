"""Engine processes: start them, talk to them, watch them, route requests to them."""

from .config import ModelSpec, PoolConfig
from .pool import ModelLoadFailed, Pool, PoolStatistics, WorkerStatistics
from .request import Sink, Ticket
from .stream import PoolStream
from .supervisor import WorkerState, WorkerStatus

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
