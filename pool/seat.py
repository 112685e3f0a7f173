"""A worker's place in its group: the requests that it has been given, and what it has read before."""

from collections import Counter

from ..protocol.frames import RequestId
from .prefix import PrefixIndex
from .quarantine import may_join
from .request import Request, RequestState
from .router import WorkerLoad
from .states import WorkerState
from .supervisor import Supervisor


class Seat:
    """Counts what the router asks for. Requests come and go through `add` and `remove` alone."""

    def __init__(self, worker: Supervisor, max_paused: int) -> None:
        self.worker = worker
        self.requests: dict[RequestId, Request] = {}
        self._max_paused = max_paused
        self._num_tokens = 0
        self._paused: dict[RequestId, Request] = {}
        """In the order in which they were paused."""
        self._prefixes = PrefixIndex()

    @property
    def num_active(self) -> int:
        """Requests in flight, but for those that wait for credit, of which so many are free."""
        return len(self.requests) - min(len(self._paused), self._max_paused)

    @property
    def running(self) -> list[Request]:
        """Its requests, but for those that are paused: an engine does nothing for them."""
        return [request for request in self.requests.values() if request.rid not in self._paused]

    def load(self, request: Request) -> WorkerLoad:
        """Return what the router must know to place a request; suspects are kept apart."""
        is_ready = self.worker.state is WorkerState.READY
        if is_ready and request.record.num_deaths:
            is_ready = may_join(request.record, [other.record for other in self.running])
        cached = self._prefixes.num_tokens(request.fingerprint)
        return WorkerLoad(self.worker.name, is_ready, self.num_active, self._num_tokens, cached)

    def add(self, request: Request) -> None:
        """Take a request that is about to be sent to the worker."""
        self.requests[request.rid] = request
        self._num_tokens += request.estimated_tokens

    def remove(self, request: Request) -> None:
        """Let a request go that the worker does not have any more."""
        del self.requests[request.rid]
        self._num_tokens -= request.estimated_tokens
        self._paused.pop(request.rid, None)

    def note_read(self, request: Request) -> None:
        """Note that the worker has read a request's prompt, and may have it in its cache."""
        self._prefixes.add(request.fingerprint)

    def note_pause(self, request: Request) -> bool:
        """Note whether a request waits for credit; return whether that makes room for another."""
        if request.is_paused == (request.rid in self._paused):
            return False
        if request.is_paused:
            self._paused[request.rid] = request
            return True
        self._paused.pop(request.rid, None)
        return False

    def paused_in_excess(self) -> list[Request]:
        """Return the paused requests beyond those that may be: one by one of whoever has the most of them.

        The longest paused first; those that are being cancelled already are no more in the way.
        """
        running = [request for request in self._paused.values() if request.state is RequestState.RUNNING]
        counts = Counter(request.client_key for request in running)
        excess: list[Request] = []
        while len(running) > self._max_paused:
            client, _ = counts.most_common(1)[0]
            surplus = next(request for request in running if request.client_key == client)
            running.remove(surplus)
            counts[client] -= 1
            excess.append(surplus)
        return excess

    def forget(self) -> None:
        """Note that the process has gone."""
        self._prefixes.clear()
