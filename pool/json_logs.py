"""Logs as JSON, one object a line, in the gateway's process and in those of the engines."""

import logging
from datetime import UTC, datetime
from typing import Any

import orjson


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON.

    Fields: `time`, `level`, `logger`, `process`, `message`, and where they apply `rid`, `exception`, and
    those of an ended request (`extra={"request": {...}}`).
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.processName,
            "message": record.getMessage(),
        }
        extra = vars(record)
        if "rid" in extra:
            fields["rid"] = extra["rid"]
        fields |= extra.get("request", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=str).decode()
