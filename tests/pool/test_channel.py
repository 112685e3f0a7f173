"""Tests for pool/channel.py with real pipes; the test plays the engine process."""

import asyncio
import contextlib
import multiprocessing
import os
import struct
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import pytest
from pool_helpers import LIMIT_S, MS, eventually

from headrace.pool.channel import MAX_BACKLOG_REPORTS, Channel, ChannelFull
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import (
    Cancel,
    Delta,
    EngineStats,
    Report,
    Step,
    decode_command,
    encode_report,
)


@dataclass
class Peer:
    """A channel, and the other ends of its pipes."""

    channel: Channel
    commands: Connection
    reports: Connection
    received: list[Report] = field(default_factory=list)
    num_closed: int = 0


@contextlib.asynccontextmanager
async def open_channel(max_commands: int = 64):
    report_read, report_write = multiprocessing.Pipe(duplex=False)
    command_read, command_write = multiprocessing.Pipe(duplex=False)

    def closed() -> None:
        peer.num_closed += 1

    channel = Channel(
        "test",
        report_read,
        command_write,
        on_reports=lambda reports: peer.received.extend(reports),
        on_closed=closed,
        max_commands=max_commands,
    )
    peer = Peer(channel, command_read, report_write)
    channel.start()
    try:
        yield peer
    finally:
        channel.close()
        report_write.close()
        command_read.close()
        await eventually(lambda: not channel.has_threads)


def step(text: str) -> Step:
    return Step([Delta(RequestId("r1"), text, 1)], EngineStats(), 1.5)


async def test_reports_come_in_order():
    """What the process sends arrives in order, in the event loop."""
    async with open_channel() as peer:
        for index in range(500):
            peer.reports.send_bytes(encode_report(step(str(index))))
            if index % 100 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: len(peer.received) == 500)
        assert peer.received == [step(str(index)) for index in range(500)]


async def test_commands_go_out_in_order():
    """What is sent arrives at the process, in order."""
    async with open_channel() as peer:
        sent = [Cancel(RequestId(f"r{index}"), "client") for index in range(20)]
        for command in sent:
            peer.channel.send(command)
        assert [decode_command(peer.commands.recv_bytes()) for _ in sent] == sent


@pytest.mark.parametrize("torn", [b"", b"\0\0", struct.pack("!i", 1000) + b'["step",{"ev'])
async def test_a_process_that_dies_in_the_middle_of_a_message(torn: bytes):
    """All whole messages arrive, then the end, once; the torn one is nothing."""
    async with open_channel() as peer:
        peer.reports.send_bytes(encode_report(step("whole")))
        os.write(peer.reports.fileno(), torn)
        peer.reports.close()
        await eventually(lambda: peer.num_closed == 1)
        assert peer.received == [step("whole")]


@pytest.mark.parametrize("data", [b"\xff\xff", b"[]", b'["what",{}]', b'["step",{}]'])
async def test_a_message_that_is_no_report_ends_the_channel(data: bytes, caplog: pytest.LogCaptureFixture):
    """Nonsense is logged and treated as the end: the process can't be trusted any more."""
    async with open_channel() as peer:
        peer.reports.send_bytes(data)
        await eventually(lambda: peer.num_closed == 1)
        assert peer.received == []
        assert "no report" in caplog.text


async def test_a_busy_event_loop_holds_the_process_back():
    """The backlog is bounded: with the event loop busy, the pipe fills and the process waits."""
    async with open_channel() as peer:
        os.set_blocking(peer.reports.fileno(), False)
        data = encode_report(step("x" * 1000))
        num_sent, deadline_s = 0, time.monotonic() + LIMIT_S
        full_since_s: float | None = None
        # No await: the event loop is busy all the while.
        while full_since_s is None or time.monotonic() - full_since_s < 0.1:
            assert time.monotonic() < deadline_s
            try:
                peer.reports.send_bytes(data)
                num_sent, full_since_s = num_sent + 1, None
            except BlockingIOError:
                full_since_s = full_since_s or time.monotonic()
        assert MAX_BACKLOG_REPORTS <= num_sent < MAX_BACKLOG_REPORTS + 200
        await eventually(lambda: len(peer.received) == num_sent)


async def test_commands_that_nobody_takes():
    """`send` never blocks; past the bound it raises."""
    async with open_channel(max_commands=10) as peer:
        big = Cancel(RequestId("r" * 1_000_000), "client")
        started_s = time.monotonic()
        for _ in range(10):
            peer.channel.send(big)
        with pytest.raises(ChannelFull):
            # The writer may have taken one more, which the pipe does not take.
            peer.channel.send(big) or peer.channel.send(big)
        assert time.monotonic() - started_s < 100 * MS
        peer.commands.close()


async def test_sending_to_a_dead_process_is_no_error():
    """The death is reported elsewhere; a command that comes too late is dropped."""
    async with open_channel() as peer:
        peer.commands.close()
        peer.reports.close()
        await eventually(lambda: peer.num_closed == 1)
        for _ in range(3):
            peer.channel.send(Cancel(RequestId("r1"), "client"))
