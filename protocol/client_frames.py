"""Frames that a client sends, as validated objects. PROTOCOL.md, "Client frames".

They are read here, whole: `parse_client_frame` returns an object or raises one documented error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from .errors import ErrorCode, FrameError
from .options import OPTION_NAMES, ChatInput, CompletionInput, GenerationOptions

PROTOCOL = "headrace.v1"
"""Name of this version of the protocol, also as a WebSocket subprotocol."""

ClientId = NewType("ClientId", str)
"""A request's id as the client chose it: unique among the running requests of its connection."""
RequestId = NewType("RequestId", str)
"""A request's id inside the server: unique in the life of a server."""

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_ERRORS = 100
"""With more errors in a frame nobody looks for the one to name: each costs memory and time to be told."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """A `completion` or `chat` frame: the two differ in their input and in nothing else."""

    id: ClientId
    input: CompletionInput | ChatInput
    options: GenerationOptions

    @property
    def kind(self) -> Literal["completion", "chat"]:
        """The frame's type."""
        return "chat" if isinstance(self.input, ChatInput) else "completion"


@dataclass(frozen=True, slots=True)
class CancelFrame:
    """End a request. Unknown and finished ids are no error."""

    id: ClientId


@dataclass(frozen=True, slots=True)
class ModelsFrame:
    """Ask for the models."""

    id: ClientId | None


@dataclass(frozen=True, slots=True)
class PingFrame:
    """Ask for a `pong` that carries the same nonce."""

    nonce: str | int | None


@dataclass(frozen=True, slots=True)
class CreditFrame:
    """Allow a request that was sent with `window` so many more tokens. Unknown ids are no error."""

    id: ClientId
    tokens: int


@dataclass(frozen=True, slots=True)
class ResumeFrame:
    """Go on with a stream after the frame with `seq` `after_seq`; -1: none has come yet."""

    id: ClientId
    token: str
    after_seq: int


ClientFrame = RequestFrame | CancelFrame | CreditFrame | ResumeFrame | ModelsFrame | PingFrame


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _NoFields(_Fields):
    pass


class _PingFields(_Fields):
    nonce: Annotated[str, StringConstraints(max_length=128)] | int | None = None


class _CreditFields(_Fields):
    tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]


class _ResumeFields(_Fields):
    token: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
    after_seq: Annotated[int, Field(ge=-1, le=2**53)]


REQUEST_INPUTS: Mapping[str, type[CompletionInput] | type[ChatInput]] = {
    "completion": CompletionInput,
    "chat": ChatInput,
}
CLIENT_FRAME_FIELDS: Mapping[str, type[BaseModel]] = {
    **REQUEST_INPUTS,
    "cancel": _NoFields,
    "credit": _CreditFields,
    "resume": _ResumeFields,
    "models": _NoFields,
    "ping": _PingFields,
}
"""What each frame has beside its type, its id and, for the requests, its options."""
CLIENT_FRAME_TYPES = tuple(CLIENT_FRAME_FIELDS)


def parse_client_frame(fields: Mapping[str, Any]) -> ClientFrame:
    """Return the frame that a JSON object is.

    Raises:
        FrameError: the object is no frame; the error names the field and, where it could be read, the id.
    """
    kind = fields.get("type")
    frame_id = read_id(fields)
    if not isinstance(kind, str):
        raise FrameError(ErrorCode.INVALID_FRAME, "type must be a string", param="type", frame_id=frame_id)
    if kind not in CLIENT_FRAME_TYPES:
        known = ", ".join(CLIENT_FRAME_TYPES)
        raise FrameError(
            ErrorCode.UNKNOWN_TYPE, f"unknown frame type; known are {known}", param="type", frame_id=frame_id
        )
    rest = {name: value for name, value in fields.items() if name not in ("type", "id")}
    if kind == "ping":
        return PingFrame(_validate(_PingFields, rest, frame_id).nonce)
    if frame_id is None and not (kind == "models" and fields.get("id") is None):
        raise FrameError(
            ErrorCode.INVALID_FRAME, "id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", param="id"
        )
    if kind == "models":
        _validate(_NoFields, rest, frame_id)
        return ModelsFrame(frame_id)
    assert frame_id is not None  # checked above; tells the type checker
    match kind:
        case "cancel":
            _validate(_NoFields, rest, frame_id)
            return CancelFrame(frame_id)
        case "credit":
            return CreditFrame(frame_id, _validate(_CreditFields, rest, frame_id).tokens)
        case "resume":
            fields_of = _validate(_ResumeFields, rest, frame_id)
            return ResumeFrame(frame_id, fields_of.token, fields_of.after_seq)
    return _request(kind, frame_id, rest)


def read_id(fields: Mapping[str, Any]) -> ClientId | None:
    """Return the id of a frame that may otherwise be broken; None if it has no usable one."""
    value = fields.get("id")
    return ClientId(value) if isinstance(value, str) and _ID.match(value) else None


def _request(kind: str, frame_id: ClientId, rest: dict[str, Any]) -> RequestFrame:
    options = {name: value for name, value in rest.items() if name in OPTION_NAMES}
    others = {name: value for name, value in rest.items() if name not in OPTION_NAMES}
    frame = RequestFrame(
        frame_id,
        _validate(REQUEST_INPUTS[kind], others, frame_id),
        _validate(GenerationOptions, options, frame_id),
    )
    if frame.options.echo and kind == "chat":
        raise FrameError(
            ErrorCode.NOT_SERVED,
            "echo is not served: only for completion frames",
            param="echo",
            frame_id=frame_id,
        )
    return frame


def _validate(model: type[_Model], data: Any, frame_id: ClientId | None) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _frame_error(error, frame_id) from None


def _frame_error(error: ValidationError, frame_id: ClientId | None) -> FrameError:
    """Turn the most telling of pydantic's errors into the one that the client gets."""
    if (num_errors := error.error_count()) > _MAX_ERRORS:
        message = f"{num_errors} fields are missing, unknown or out of their ranges"
        return FrameError(ErrorCode.INVALID_PARAM, message, frame_id=frame_id)
    # Of a union's errors those of the branch that got furthest tell the most; a wrong type got nowhere.
    first = max(
        error.errors(include_url=False, include_input=False),
        key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")),
    )
    param = (first.get("ctx") or {}).get("param") or _path(first["loc"])
    match first["type"]:
        case "extra_forbidden":
            code, message = ErrorCode.INVALID_PARAM, "is not a field of this frame"
        case "missing":
            code, message = ErrorCode.INVALID_PARAM, "is missing"
        case "not_served":
            code, message = ErrorCode.NOT_SERVED, first["msg"]
        case _:
            code, message = ErrorCode.INVALID_PARAM, first["msg"]
    return FrameError(code, f"{param}: {message}" if param else message, param=param, frame_id=frame_id)


_UNION_BRANCH = re.compile(r"(function-|constrained-|list\[|TextPart|json-|nullable|str$|int$|float$|bool$)")


def _path(loc: tuple[int | str, ...]) -> str | None:
    """Write pydantic's location as a client would: ``messages[1].content``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "[key]":
            continue
        elif path and _UNION_BRANCH.match(part):
            continue  # the name of a union's branch, not of a field
        else:
            path += f".{part}" if path else part
    return path[:256] or None
