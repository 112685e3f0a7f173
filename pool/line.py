"""The requests that wait for an engine process of one model, in the order in which they are served.

First those whose engine was lost, in the order in which they came back. Then the others, one of each client
in turn, each client's own first come first served: who sends a hundred waits for a hundred, and nobody else
does.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain, zip_longest

from .request import Request


class Line:
    """Requests that wait. Bounded by its owner, who asks `num_fresh` first."""

    def __init__(self) -> None:
        self._recovering: dict[str, Request] = {}
        self._clients: dict[tuple[str, str], deque[Request]] = {}  # in the order of their turns
        self._num_fresh = 0

    def __len__(self) -> int:
        return len(self._recovering) + self._num_fresh

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which they would be served if no more came."""
        rounds = zip_longest(*self._clients.values())
        fresh = (request for turn in rounds for request in turn if request is not None)
        return chain(self._recovering.values(), fresh)

    @property
    def recovering(self) -> list[Request]:
        """Those whose engine was lost."""
        return list(self._recovering.values())

    @property
    def num_recovering(self) -> int:
        """How many of them there are."""
        return len(self._recovering)

    @property
    def num_fresh(self) -> int:
        """How many others there are."""
        return self._num_fresh

    @property
    def first_fresh(self) -> Request | None:
        """The one of the others whose turn it is."""
        return next(iter(self._clients.values()))[0] if self._clients else None

    def num_of(self, client_key: tuple[str, str]) -> int:
        """Return how many of the others a client has."""
        return len(self._clients.get(client_key, ()))

    def push(self, request: Request) -> int:
        """Take a request at the end of its client's line; return how many are served before it."""
        if request.is_recovering:
            self._recovering[request.rid] = request
            return len(self._recovering) - 1
        own = self._clients.setdefault(request.client_key, deque())
        num_ahead, turn = len(self._recovering), len(own)
        is_before = True
        for line in self._clients.values():
            if line is own:
                is_before = False
            num_ahead += min(len(line), turn + is_before)
        own.append(request)
        self._num_fresh += 1
        return num_ahead

    def serve(self, request: Request) -> None:
        """Take a request out whose turn it was; its client's next turn is after all others'."""
        if self.remove(request) and (own := self._clients.pop(request.client_key, None)) is not None:
            self._clients[request.client_key] = own

    def remove(self, request: Request) -> bool:
        """Take a request out that need not wait any more; return whether it was a fresh one."""
        if self._recovering.pop(request.rid, None) is not None:
            return False
        own = self._clients[request.client_key]
        own.remove(request)
        self._num_fresh -= 1
        if not own:
            del self._clients[request.client_key]
        return True
