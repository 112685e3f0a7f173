"""How many connections may be open: in all, and from one address. PROTOCOL.md, "Access"."""

from collections import Counter
from enum import Enum, auto

_GRACE = 64
"""So many past the limit are told so; any more are dropped without a word."""


class Verdict(Enum):
    """What becomes of a new connection."""

    ADMIT = auto()
    REFUSE = auto()
    """Too many: answer its request with an error."""
    DROP = auto()
    """Far too many: not even that."""


class Doors:
    """Counts connections from the moment when they are made, their handshake included.

    Args:
        max_connections: in all.
        max_per_address: from one address; connections without one (Unix sockets) are not counted by it.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._total = 0
        self._by_address: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Connections that are open."""
        return self._total

    def enter(self, address: str | None) -> Verdict:
        """Count a connection in, whatever the verdict; `leave` must follow."""
        self._total += 1
        excess = self._total - self._max_connections
        if address is not None:
            self._by_address[address] += 1
            excess = max(excess, self._by_address[address] - self._max_per_address)
        if excess <= 0:
            return Verdict.ADMIT
        return Verdict.REFUSE if excess <= _GRACE else Verdict.DROP

    def leave(self, address: str | None) -> None:
        """Count a connection out."""
        self._total -= 1
        if address is not None:
            self._by_address[address] -= 1
            if self._by_address[address] <= 0:
                del self._by_address[address]
