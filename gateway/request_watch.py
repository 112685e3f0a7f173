"""Sees each request from the pool's acceptance to its end: for metrics, and for one log line.

The line goes to the logger `headrace.requests` and has no text of prompts or answers, and no secret.
"""

import asyncio
import logging
from typing import Any

from prometheus_client import Histogram

from ..pool.request import Sink, Ticket
from ..protocol.frames import RequestFrame
from ..protocol.messages import Delta, End, Event
from .metrics import Metrics

REQUEST_LOG = "headrace.requests"
"""Name of the logger of ended requests: one record each, its fields in `record.request`."""

_REPORT_FIELDS = ("requested", "applied", "reason", "keep_pct", "uncached_tokens", "kept_tokens", "draft")

_log = logging.getLogger(REQUEST_LOG)


class RequestWatch:
    """Stands between the pool and the sink of a request. Call `begin` once the pool has taken it.

    Args:
        connection: the server's name for the connection that the request came with.
        tenant: the name of its access token.
    """

    def __init__(
        self, metrics: Metrics, frame: RequestFrame, sink: Sink, *, connection: str, tenant: str
    ) -> None:
        self._metrics = metrics
        self._sink = sink
        self._id = frame.id
        self._kind = frame.kind
        self._connection = connection
        self._tenant = tenant
        self._model = ""
        self._gaps: Histogram | None = None
        self._last_token_s: float | None = None

    def begin(self, ticket: Ticket) -> None:
        """Note what the pool has made of the request."""
        self._model = ticket.options.model or ""
        self._gaps = self._metrics.token_gaps(self._model)

    def take(self, event: Event) -> None:
        """Take an event on its way to the sink."""
        match event:
            case Delta():
                now_s = asyncio.get_running_loop().time()
                if self._last_token_s is not None and event.n and self._gaps is not None:
                    self._gaps.observe((now_s - self._last_token_s) / event.n)
                self._last_token_s = now_s
            case End():
                self._metrics.observe_end(self._model, self._kind, event)
                if _log.isEnabledFor(logging.INFO):
                    _log.info("request ended", extra={"request": self._fields(event)})
        self._sink(event)

    def _fields(self, end: End) -> dict[str, Any]:
        return {
            "rid": end.rid,
            "id": self._id,
            "connection": self._connection,
            "token_name": self._tenant,
            "kind": self._kind,
            "model": self._model,
            "status": end.status,
            "finish_reason": end.finish_reason,
            "reason": end.reason,
            "error": None if end.error is None else end.error["code"],
            "usage": end.usage,
            "timings": end.timings,
            "specprefill": {name: end.specprefill.get(name) for name in _REPORT_FIELDS},
        }
