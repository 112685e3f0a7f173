"""Choose the engine process for a request: a pure function of what each has to do, and has read before."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router knows of a worker."""

    name: str
    is_ready: bool
    num_requests: int
    """Requests in flight, but for those that are paused."""
    num_tokens: int
    """Tokens that those may still cost, as estimated when they came."""
    num_cached_tokens: int = 0
    """Tokens of the request's prompt that the worker has read before."""


def choose_worker(workers: Sequence[WorkerLoad], *, max_in_flight: int) -> str | None:
    """Return the name of the worker that should take the next request; None: none can take any.

    The one with the fewest tokens in flight, where those of the prompt that it need not read again are taken
    off: a conversation goes back to its worker unless that has more to do than another, by more than the
    detour is worth. Then the one with the fewest requests, then the first.
    """
    able = [worker for worker in workers if worker.is_ready and worker.num_requests < max_in_flight]
    if not able:
        return None
    return min(
        able, key=lambda worker: (worker.num_tokens - worker.num_cached_tokens, worker.num_requests)
    ).name
