"""A bare websockets server that pushes frames from a file: what the wire alone costs.

    python benchmarks/bare_server.py PORT

A client sends the name of a file, whose lines are the frames, and gets them all as fast as the server can.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from websockets.asyncio.server import ServerConnection, serve


def read_frames(path: Path) -> list[bytes]:
    """Return the frames of a file."""
    return path.read_bytes().splitlines()


async def push(socket: ServerConnection) -> None:
    """Send what each file that is asked for has."""
    async for name in socket:
        for frame in read_frames(Path(str(name))):
            await socket.send(frame, text=True)


async def main(port: int) -> None:
    """Serve until killed."""
    async with serve(push, "127.0.0.1", port, compression=None) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
