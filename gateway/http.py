"""Plain HTTP beside the WebSocket: health, readiness, models, metrics. PROTOCOL.md, "HTTP".

websockets hands every request here before the upgrade. A page is a function from the facts to a response;
`PAGES` lists those that answer in JSON or text, and `page_files` adds those of the page for people.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import orjson
from websockets.datastructures import Headers
from websockets.http11 import Response

from ..protocol.frames import ModelInfo

STREAM_PATH = "/v1/stream"
"""Path of the WebSocket."""
METRICS_CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
"""Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What pages show."""

    is_ready: bool
    is_draining: bool
    models: list[ModelInfo]
    metrics: Callable[[], bytes]
    """Writes the metrics in Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class Page:
    """One path: what it answers, and whether anybody may see it without a token."""

    render: Callable[[Facts], Response]
    is_public: bool = False


def _health(facts: Facts) -> Response:
    return json_response(HTTPStatus.OK, {"status": "ok"})


def _readiness(facts: Facts) -> Response:
    if facts.is_draining:
        return json_response(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "draining"})
    if not facts.is_ready:
        return json_response(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not_ready"})
    return json_response(HTTPStatus.OK, {"status": "ready"})


def _models(facts: Facts) -> Response:
    data = [
        {"id": model["name"], "object": "model", "owned_by": "headrace", **model} for model in facts.models
    ]
    return json_response(HTTPStatus.OK, {"object": "list", "data": data})


def _metrics(facts: Facts) -> Response:
    return response(HTTPStatus.OK, facts.metrics(), METRICS_CONTENT_TYPE)


PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "/healthz": Page(_health, is_public=True),
        "/readyz": Page(_readiness, is_public=True),
        "/v1/models": Page(_models),
        "/metrics": Page(_metrics),
    }
)


def response(
    status: HTTPStatus, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an HTTP response; the connection is closed after it."""
    fields = Headers(
        {
            "Date": formatdate(usegmt=True),
            "Connection": "close",
            "Content-Length": str(len(body)),
            "Content-Type": content_type,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **(headers or {}),
        }
    )
    return Response(status.value, status.phrase, fields, body)


def json_response(status: HTTPStatus, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON value as an HTTP response."""
    return response(status, orjson.dumps(value), "application/json", headers)


def error_response(
    status: HTTPStatus, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as an HTTP response."""
    return json_response(status, {"error": {"code": code, "message": message}}, headers)
