"""Plain HTTP pages beside the WebSocket: health, readiness, models. PROTOCOL.md, "HTTP".

websockets hands every request here before the upgrade. A page is a function from the facts to a status and a
JSON value; `PAGES` is the whole list.
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What pages show."""

    is_ready: bool
    is_draining: bool
    models: list[ModelInfo]


@dataclass(frozen=True, slots=True)
class Page:
    """One path: what it answers, and whether anybody may see it without a token."""

    render: Callable[[Facts], tuple[HTTPStatus, Any]]
    is_public: bool = False


def _health(facts: Facts) -> tuple[HTTPStatus, Any]:
    return HTTPStatus.OK, {"status": "ok"}


def _readiness(facts: Facts) -> tuple[HTTPStatus, Any]:
    if facts.is_draining:
        return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "draining"}
    if not facts.is_ready:
        return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not_ready"}
    return HTTPStatus.OK, {"status": "ready"}


def _models(facts: Facts) -> tuple[HTTPStatus, Any]:
    data = [
        {"id": model["name"], "object": "model", "owned_by": "headrace", **model} for model in facts.models
    ]
    return HTTPStatus.OK, {"object": "list", "data": data}


PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "/healthz": Page(_health, is_public=True),
        "/readyz": Page(_readiness, is_public=True),
        "/v1/models": Page(_models),
    }
)


def json_response(status: HTTPStatus, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON value as an HTTP response; the connection is closed after it."""
    body = orjson.dumps(value)
    fields = Headers(
        {
            "Date": formatdate(usegmt=True),
            "Connection": "close",
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **(headers or {}),
        }
    )
    return Response(status.value, status.phrase, fields, body)


def error_response(
    status: HTTPStatus, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as an HTTP response."""
    return json_response(status, {"error": {"code": code, "message": message}}, headers)
