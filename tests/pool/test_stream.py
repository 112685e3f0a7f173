"""Tests for pool/stream.py: the iterator alone, events pushed by hand."""

import asyncio

import pytest
from pool_helpers import frame

from headrace.pool import PoolStream, Ticket
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import Delta, End, Progress
from headrace.protocol.stream import end_without_engine

RID = RequestId("r1")


class Source:
    """Stands in for a pool."""

    def __init__(self) -> None:
        self.cancels: list[str] = []
        self.stream = PoolStream(self._start, lambda ticket, reason: self.cancels.append(reason))

    def _start(self, sink) -> Ticket:
        self.push = sink
        return Ticket(RID, frame().options, 0)


def make_end() -> End:
    return end_without_engine(RID, frame().options, status="completed", reason="", error=None)


async def test_what_waits_is_merged():
    """Of progress the newest is left, of deltas one with all their text, and the end comes last."""
    source = Source()
    for processed in (1, 2):
        source.push(Progress(RID, "prefill", processed, 2))
        source.push(Delta(RID, f"text{processed} ", 3))
    source.push(make_end())
    events = [event async for event in source.stream]
    assert events == [Progress(RID, "prefill", 2, 2), Delta(RID, "text1 text2 ", 6), make_end()]
    assert source.cancels == []


async def test_a_reader_that_waits_is_woken():
    """Events that come one by one are given one by one."""
    source = Source()
    for text in "abc":
        waiting = asyncio.create_task(anext(source.stream))
        await asyncio.sleep(0)
        source.push(Delta(RID, text, 1))
        assert await waiting == Delta(RID, text, 1)


async def test_closing_cancels_once_and_wakes_the_reader():
    """`aclose` cancels, drops what is left, and ends the iteration; again it does nothing."""
    source = Source()
    source.push(Delta(RID, "a", 1))
    await source.stream.aclose()
    await source.stream.aclose()
    source.push(make_end())
    assert [event async for event in source.stream] == []
    assert source.cancels == ["client"]

    source = Source()
    waiting = asyncio.create_task(anext(source.stream, None))
    await asyncio.sleep(0)
    await source.stream.aclose()
    assert await waiting is None


async def test_closing_after_the_end_cancels_nothing():
    """A stream that was read to its end has nothing to cancel."""
    source = Source()
    source.push(make_end())
    async with source.stream as stream:
        assert [event async for event in stream] == [make_end()]
    assert source.cancels == []


async def test_a_cancelled_reader_loses_nothing():
    """A reader that gives up waiting leaves the next event to the next one."""
    source = Source()
    waiting = asyncio.create_task(anext(source.stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    source.push(Delta(RID, "a", 1))
    assert await anext(source.stream) == Delta(RID, "a", 1)


async def test_one_consumer_only():
    """A second reader beside a first is a mistake of the program."""
    source = Source()
    waiting = asyncio.create_task(anext(source.stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        await anext(source.stream)
    source.push(make_end())
    await waiting
