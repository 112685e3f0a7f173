"""The Python client: asyncio here, its blocking twin in `headrace.client.blocking`. No mlx.

async with connect("ws://127.0.0.1:8765/v1/stream") as hr:
    stream = hr.chat("What is the capital of France?", max_tokens=64)
    async for text in stream.text():
        print(text, end="")
    result = await stream.result()
"""

from .aio import Client, ClientConfig, connect
from .aio_stream import Stream
from .blocking import BlockingClient, BlockingStream, connect_blocking
from .core import FlowConfig
from .dialing import DEFAULT_URL
from .errors import (
    ClientError,
    ConnectError,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolError,
    RequestFailed,
    RequestRefused,
    ResumeFailed,
    ServerBusy,
    Unauthorized,
)
from .events import Accepted, Done, Event, Progress, ReasoningDelta, Result, TextDelta, ToolCall

__all__ = [
    "DEFAULT_URL",
    "Accepted",
    "BlockingClient",
    "BlockingStream",
    "Client",
    "ClientConfig",
    "ClientError",
    "ConnectError",
    "ConnectionLost",
    "DeadlineExceeded",
    "Done",
    "Event",
    "FlowConfig",
    "InvalidRequest",
    "Progress",
    "ProtocolError",
    "ReasoningDelta",
    "RequestFailed",
    "RequestRefused",
    "Result",
    "ResumeFailed",
    "ServerBusy",
    "Stream",
    "TextDelta",
    "ToolCall",
    "Unauthorized",
    "connect",
    "connect_blocking",
]
