"""Choose the engine process for a request: a pure function of what each has to do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router knows of a worker."""

    name: str
    is_ready: bool
    num_requests: int
    """Requests in flight."""
    num_tokens: int
    """Tokens that those may still cost, as estimated when they came."""


def choose_worker(workers: Sequence[WorkerLoad], *, max_in_flight: int) -> str | None:
    """Return the name of the worker that should take the next request; None: none can take any.

    The one with the fewest tokens in flight, then with the fewest requests, then the first. (A worker that
    has the request's prefix cached will be worth a detour: issue 4.)
    """
    able = [worker for worker in workers if worker.is_ready and worker.num_requests < max_in_flight]
    if not able:
        return None
    return min(able, key=lambda worker: (worker.num_tokens, worker.num_requests)).name
