"""Bytes to JSON objects and back.

orjson reads and writes. What it refuses is read a second time with the standard library, only to find out
which field is at fault: orjson has no word for a NaN or a lone surrogate in a frame that is otherwise well
formed.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

from .errors import ErrorCode, FrameError
from .frames import ClientFrame, parse_client_frame, read_id

MAX_DIAGNOSED_BYTES = 64 << 10
"""A broken frame longer than this is called invalid without a search for the field at fault."""

MAX_PATH_CHARS = 256
"""What an error says of where it is."""


def encode(value: Any) -> bytes:
    """Return a value as JSON bytes in UTF-8."""
    return orjson.dumps(value)


def decode_client_frame(data: str | bytes) -> ClientFrame:
    """Return the frame that a WebSocket text message holds.

    Raises:
        FrameError: no JSON, no object, no frame, or a field out of its range.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise _diagnose(data) from None
    if not isinstance(value, dict):
        raise FrameError(ErrorCode.INVALID_FRAME, "a frame must be a JSON object")
    return parse_client_frame(value)


def _diagnose(data: str | bytes) -> FrameError:
    """Return the error for a message that orjson could not read."""
    invalid = FrameError(ErrorCode.INVALID_JSON, "not a valid JSON text in UTF-8")
    if len(data) > MAX_DIAGNOSED_BYTES:
        return invalid
    try:
        value = json.loads(data)
        culprit = _find_unusable(value, "")
    except (ValueError, RecursionError):
        return invalid
    if culprit is None or not isinstance(value, dict):
        return invalid
    param, message = culprit
    return FrameError(
        ErrorCode.INVALID_PARAM, f"{param}: {message}", param=param[:MAX_PATH_CHARS], frame_id=read_id(value)
    )


def _find_unusable(value: Any, path: str) -> tuple[str, str] | None:
    """Return the path of the first value that is no text or no number, and what is wrong with it."""
    path = path[:MAX_PATH_CHARS]  # Every item below has a copy.
    if isinstance(value, str):
        return (path, "has a lone surrogate, which is not text") if _is_broken(value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, "must be a finite number")
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        if any(_is_broken(name) for name in value):
            return path or "frame", "has a field whose name is not text"
        items = [(f"{path}.{name}" if path else name, item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    for item_path, item in items:
        if (found := _find_unusable(item, item_path)) is not None:
            return found
    return None


def _is_broken(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
