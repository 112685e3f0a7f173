"""Where logs go: stderr, as text or as JSON."""

import logging
import sys
from typing import Literal

from .gateway.request_watch import REQUEST_LOG
from .pool.json_logs import JsonFormatter

LogFormat = Literal["text", "json"]


def set_up_logging(log_format: LogFormat) -> None:
    """Send logs to stderr. As JSON, each ended request has a line too; as text, only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger(REQUEST_LOG).setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("headrace: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
