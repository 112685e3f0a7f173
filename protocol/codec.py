"""Bytes to JSON objects and back.

orjson reads and writes. What it refuses is read a second time with the standard library, only to find out
which field is at fault: orjson has no word for a NaN or a lone surrogate in a frame that is otherwise well
formed.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import orjson

from .errors import ErrorCode, FrameError
from .frames import ClientFrame, parse_client_frame, read_id

MAX_DIAGNOSED_BYTES = 1 << 20
"""A broken frame longer than this is called invalid without a search for the field at fault."""

MAX_DIAGNOSED_VALUES = 10_000
"""So many of its values are looked at."""

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
    message = "not a valid JSON text in UTF-8"
    if len(data) > MAX_DIAGNOSED_BYTES:
        return FrameError(ErrorCode.INVALID_JSON, message)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return FrameError(ErrorCode.INVALID_JSON, message)
    frame_id = read_id(value) if isinstance(value, dict) else None
    culprit = _find_unusable(value)
    if culprit is None or not isinstance(value, dict):
        return FrameError(ErrorCode.INVALID_JSON, message, frame_id=frame_id)
    param, message = culprit
    return FrameError(
        ErrorCode.INVALID_PARAM, f"{param}: {message}", param=param[:MAX_PATH_CHARS], frame_id=frame_id
    )


def _find_unusable(value: Any) -> tuple[str, str] | None:
    """Return the path of the first value that is no text or no number, and what is wrong with it."""
    levels: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    for _ in range(MAX_DIAGNOSED_VALUES):
        while levels and (found := next(levels[-1], None)) is None:
            levels.pop()
        if not levels or found is None:
            return None
        path, item = found
        if isinstance(item, str) and _is_broken(item):
            return path, "has a lone surrogate, which is not text"
        if isinstance(item, float) and not math.isfinite(item):
            return path, "must be a finite number"
        if isinstance(item, dict) and any(map(_is_broken, item)):
            return path or "frame", "has a field whose name is not text"
        levels.append(_children(path[:MAX_PATH_CHARS], item))
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{path}.{name}" if path else name, item
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
