"""Whom requests belong to: the holder of an access token, over all of its connections."""

from ..protocol.errors import BusyError, ErrorCode
from .config import TokenConfig


class Tenant:
    """One token's running requests and open connections, and the limits of both.

    Nothing is shared between tenants: no cached prompt, no stream.
    """

    def __init__(self, config: TokenConfig) -> None:
        self.name = config.name
        self._max_in_flight = config.max_in_flight
        self._max_connections = config.max_connections
        self._in_flight = 0
        self._num_connections = 0

    @property
    def in_flight(self) -> int:
        """Requests that have been taken and have not ended."""
        return self._in_flight

    @property
    def num_connections(self) -> int:
        """WebSockets that are open."""
        return self._num_connections

    @property
    def may_connect(self) -> bool:
        """Whether another connection is within the limit."""
        return self._max_connections is None or self._num_connections < self._max_connections

    def begin_request(self) -> None:
        """Count a request in; `end_request` must follow.

        Raises:
            BusyError: no more may run.
        """
        limit = self._max_in_flight
        if limit is not None and self._in_flight >= limit:
            message = f"{limit} requests run with this access token, and no more may"
            raise BusyError(ErrorCode.TOO_MANY_IN_FLIGHT, message)
        self._in_flight += 1

    def end_request(self) -> None:
        """Count a request out."""
        self._in_flight -= 1

    def begin_connection(self) -> None:
        """Count a connection in; `end_connection` must follow."""
        self._num_connections += 1

    def end_connection(self) -> None:
        """Count a connection out."""
        self._num_connections -= 1
