"""The wire protocol as JSON Schema and as AsyncAPI 3, made from the types that the server itself reads with.

Two JSON Schemas, of the frames of either side, and an AsyncAPI document that has both. They are checked in
under docs/schema; `headrace schema` writes them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from . import __version__
from .protocol.client_frames import CLIENT_FRAME_FIELDS, PROTOCOL
from .protocol.options import GenerationOptions
from .protocol.server_frames import ServerFrame

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFS = "#/$defs/"
_ID = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_NONE: Mapping[str, Any] = {"type": "null"}

_BOUNDS: Mapping[str, str] = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
_ALSO_TAKEN: Mapping[str, Any] = {
    "stop": {"type": "string", "minLength": 1, "maxLength": 256},
    "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
}
"""Other forms of options that are read as the one in the type."""
_OPENAI_SPELLINGS: Mapping[str, Any] = {
    "n": {"enum": [1, None]},
    "stream_options": {"enum": [{"include_usage": True}, {}, None]},
    "max_completion_tokens": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, _NONE]},
}


def client_schema() -> dict[str, Any]:
    """Return the JSON Schema of a frame that a client sends.

    It cannot say everything: PROTOCOL.md is the specification.
    """
    defs: dict[str, Any] = {}
    frames = {}
    for kind, model in CLIENT_FRAME_FIELDS.items():
        schema = model.model_json_schema(ref_template=f"{_DEFS}{{model}}")
        defs |= schema.pop("$defs", {})
        frames[kind] = _client_frame(kind, schema)
    return _document("Frames that a client sends", frames, defs)


def _client_frame(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    id_schema: Mapping[str, Any] = {"anyOf": [_ID, _NONE]} if kind == "models" else _ID
    properties = {"type": {"const": kind}} | ({} if kind == "ping" else {"id": id_schema})
    properties |= schema.get("properties", {})
    required = ["type", *([] if kind in ("models", "ping") else ["id"]), *schema.get("required", [])]
    if "response_format" in properties:
        properties["response_format"] = {"enum": [{"type": "text"}, None]}
    if kind in ("completion", "chat"):
        properties |= _options(with_echo=kind == "completion")
    return {
        "type": "object",
        "properties": _keywords(properties),
        "required": required,
        "additionalProperties": False,
    }


def _keywords(schema: Any) -> Any:
    """Return a schema with bounds as JSON Schema calls them: behind a validator pydantic leaves its own."""
    if isinstance(schema, dict):
        return {_BOUNDS.get(key, key): _keywords(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_keywords(item) for item in schema]
    return schema


def _options(*, with_echo: bool) -> dict[str, Any]:
    """Return the options as properties: each may be null, which means the same as leaving it out."""
    options: dict[str, Any] = {}
    for name, schema in GenerationOptions.model_json_schema()["properties"].items():
        forms = schema.pop("anyOf", None) or [schema]
        forms = [form for form in forms if form != _NONE]
        if name in _ALSO_TAKEN:
            forms.append(_ALSO_TAKEN[name])
        default = {"default": schema.pop("default")} if schema.get("default") is not None else {}
        options[name] = {"anyOf": [*forms, _NONE], **default}
    if not with_echo:
        options["echo"] = {"enum": [False, None]}
    return options | dict(_OPENAI_SPELLINGS)


def server_schema() -> dict[str, Any]:
    """Return the JSON Schema of a frame that the server sends. More fields and frames may come."""
    adapter: TypeAdapter[Any] = TypeAdapter(ServerFrame)
    schema = adapter.json_schema(ref_template=f"{_DEFS}{{model}}")
    defs = schema["$defs"]
    names = {kind: ref.removeprefix(_DEFS) for kind, ref in schema["discriminator"]["mapping"].items()}
    frames = {kind: defs.pop(name) for kind, name in names.items()}
    return _document("Frames that the server sends", frames, defs)


def _document(title: str, frames: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    names = {kind: f"{kind}_frame" for kind in frames}
    return {
        "$schema": _DIALECT,
        "title": f"{PROTOCOL}: {title}",
        "oneOf": [{"$ref": _DEFS + name} for name in names.values()],
        "$defs": {names[kind]: frame for kind, frame in frames.items()} | dict(sorted(defs.items())),
    }


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI 3 document: one channel, and what goes over it in either direction."""
    sides = {"client": client_schema(), "server": server_schema()}
    messages, schemas, operations = {}, {}, {}
    for side, document in sides.items():
        names = [ref["$ref"].removeprefix(_DEFS) for ref in document["oneOf"]]
        for name, schema in document["$defs"].items():
            schemas[f"{side}.{name}"] = _moved(schema, side)
        for name in names:
            messages[f"{side}.{name}"] = {
                "name": name.removesuffix("_frame"),
                "contentType": "application/json",
                "payload": {"$ref": f"#/components/schemas/{side}.{name}"},
            }
        operations["receive" if side == "client" else "send"] = {
            "action": "receive" if side == "client" else "send",
            "channel": {"$ref": "#/channels/stream"},
            "messages": [{"$ref": f"#/channels/stream/messages/{side}.{name}"} for name in names],
        }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": f"The WebSocket protocol {PROTOCOL}, as the server sees it.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"local": {"host": "127.0.0.1:8765", "protocol": "ws"}},
        "channels": {
            "stream": {
                "address": "/v1/stream",
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
            }
        },
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }


def _moved(schema: Any, side: str) -> Any:
    """Return a schema whose references lead to where AsyncAPI keeps a side's schemas."""
    if isinstance(schema, dict):
        return {
            key: f"#/components/schemas/{side}.{value.removeprefix(_DEFS)}"
            if key == "$ref"
            else _moved(value, side)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(item, side) for item in schema]
    return schema


def documents() -> dict[str, str]:
    """Return all documents as text, by file name."""
    made = {
        "client-frames.schema.json": client_schema(),
        "server-frames.schema.json": server_schema(),
        "asyncapi.json": asyncapi(),
    }
    return {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in made.items()}


def write(folder: Path) -> list[Path]:
    """Write all documents into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in documents().items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    return paths
