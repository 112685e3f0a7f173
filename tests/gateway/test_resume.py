"""Streams that outlive their connections, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from gateway_helpers import Client, assert_well_formed, make_gateway, scripted_pool_config, wait_until

from headrace.engine.scripted import scripted_token
from headrace.gateway.access import ANYONE
from headrace.gateway.config import AccessConfig, DeadlinesConfig, LimitsConfig, ResumeConfig, TokenConfig
from headrace.gateway.resumables import Resumable, ResumableStreams
from headrace.gateway.server import Gateway
from headrace.gateway.tenants import Tenant
from headrace.pool import Pool
from headrace.protocol.actions import StartRequest
from headrace.protocol.frames import ClientId, HelloFrame, RequestId, ResumeFrame
from headrace.protocol.messages import Delta, Event
from headrace.protocol.resume import ResumeError
from headrace.protocol.session import Session, SessionLimits
from headrace.protocol.stream import Stream, end_without_engine

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"model": "slow", "max_tokens": 100_000, "detach": True}


class RawClient(Client):
    """A client that keeps the bytes of every frame."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.raw: list[str] = []

    async def receive(self) -> dict[str, Any]:
        """Return the next frame, and keep its bytes."""
        async with asyncio.timeout(15):
            data = await self.socket.recv()
        assert isinstance(data, str)
        self.raw.append(data)
        frame: dict[str, Any] = json.loads(data)
        if isinstance(frame.get("id"), str):
            self.frames[frame["id"]].append(frame)
        return frame

    def numbered(self) -> list[str]:
        """Return the bytes of all frames that have a `seq`."""
        return [data for data in self.raw if "seq" in json.loads(data)]

    async def start(self, frame_id: str = "a", **options: Any) -> str:
        """Start a stream; return its token."""
        await self.complete(frame_id, **{"detach": True, **options})
        accepted = await self.receive_type("accepted")
        return str(accepted["resume_token"])

    async def resume(self, token: str, after_seq: int, frame_id: str = "a") -> dict[str, Any]:
        """Resume a stream; return the answer."""
        await self.send(type="resume", id=frame_id, token=token, after_seq=after_seq)
        while (frame := await self.receive())["type"] not in ("resumed", "error"):
            pass
        return frame

    def drop(self) -> None:
        """Lose the connection."""
        self.socket.transport.abort()


def config(**changes: Any) -> ResumeConfig:
    """Return a configuration."""
    return replace(ResumeConfig(), **changes)


@pytest_asyncio.fixture(loop_scope="session")
async def resuming(pool: Pool) -> AsyncIterator[Gateway]:
    """A gateway with default times."""
    gateway = make_gateway(pool)
    await gateway.start()
    yield gateway
    gateway.abort()
    await wait_until(lambda: pool.statistics().in_flight == 0)
    assert gateway.resumables.held == 0


async def test_resume_at_every_seq_gives_the_same_bytes(resuming: Gateway) -> None:
    """A stream of 200 frames that has ended, from before its first frame to its last."""
    async with RawClient(resuming.url) as client:
        token = await client.start(model="slow", seed=3, max_tokens=199, window=1)
        for _ in range(198):  # a token at a time, so that a busy machine merges none
            await client.receive_type("delta")
            await client.send(type="credit", id="a", tokens=1)
        await client.done("a")
        sent = client.numbered()
    assert len(sent) == 200
    async with RawClient(resuming.url) as client:
        for after_seq in range(-1, len(sent)):
            client.raw.clear()
            answer = await client.resume(token, after_seq)
            assert answer["next_seq"] == after_seq + 1
            for _ in sent[after_seq + 1 :]:
                await client.receive()
            assert client.numbered() == sent[after_seq + 1 :]
        await client.send(type="ping", nonce=1)
        assert (await client.receive())["type"] == "pong", "nothing came twice"


async def test_a_stream_cut_again_and_again_is_whole(resuming: Gateway) -> None:
    """Lost in mid-stream at every few frames, at whatever frame the client last saw."""
    num_tokens, frames, lost_after = 200, [], [0, 1, 1, 5, 13, 40]
    async with RawClient(resuming.url) as client:
        token = await client.start(model="slow", seed=3, max_tokens=num_tokens)
        client.drop()
    while not frames or frames[-1]["type"] != "done":
        async with RawClient(resuming.url) as client:
            answer = await client.resume(token, len(frames) - 1)
            assert answer["type"] == "resumed"
            wanted = lost_after.pop() if lost_after else 10**9
            while wanted and (not frames or frames[-1]["type"] != "done"):
                frame = await client.receive()
                if "seq" in frame:
                    frames.append(frame)
                    wanted -= 1
            client.drop()
    assert [frame["seq"] for frame in frames] == list(range(len(frames)))
    text = "".join(frame["text"] for frame in frames[:-1])
    assert text == "".join(scripted_token("one two", 3, index) for index in range(num_tokens))
    assert sum(frame["n"] for frame in frames[:-1]) == frames[-1]["usage"]["completion_tokens"] == num_tokens


async def test_resume_while_queued_and_in_prefill() -> None:
    """The connection is lost before there is any token."""
    pool_config = scripted_pool_config(max_in_flight=1, slow=5.0)
    spec = pool_config.models[0]
    engine = replace(spec.engine, scripted_prefill_tokens_per_s=400.0, min_chunk_tokens=8, max_chunk_tokens=8)
    async with Pool(replace(pool_config, models=(replace(spec, engine=engine),))) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool)
        await gateway.start()
        async with RawClient(gateway.url) as client:
            prefilling = await client.start("p", prompt="word " * 200, max_tokens=5, seed=1)
            assert (await client.receive_type("progress"))["phase"] == "prefill"
            queued = await client.start("q", max_tokens=5, seed=1)
            client.drop()
        await wait_until(lambda: gateway.resumables.detached == 2)
        assert pool.statistics().queued == {"slow": 1}
        async with RawClient(gateway.url) as client:
            for token, frame_id in ((queued, "q"), (prefilling, "p")):
                assert (await client.resume(token, -1, frame_id))["type"] == "resumed"
            for frame_id in "pq":
                assert (await client.done(frame_id))["status"] == "completed"
                assert_well_formed([{"type": "accepted"}, *client.frames[frame_id][1:]])
                assert client.frames[frame_id][0]["type"] == "resumed"
        gateway.abort()


async def test_a_whole_answer_is_kept(resuming: Gateway) -> None:
    """With `stream: false` the last frame is the answer, also when it came while nobody was there."""
    async with RawClient(resuming.url) as client:
        token = await client.start(model="slow", seed=3, max_tokens=20, stream=False)
        client.drop()
    await wait_until(lambda: resuming.resumables.detached == 0 and resuming.num_connections == 0)
    async with RawClient(resuming.url) as client:
        await client.resume(token, -1)
        done = await client.done("a")
        assert await client.resume(token, -1)
        assert await client.receive() == done
    assert done["text"] == "".join(scripted_token("one two", 3, index) for index in range(20))


async def test_a_detached_stream_is_cancelled_in_time(pool: Pool) -> None:
    """After `detach_timeout_s`; its last frame is kept, and says so; then the token is expired."""
    gateway = make_gateway(pool, resume=config(detach_timeout_s=0.1, replay_s=0.4))
    await gateway.start()
    async with RawClient(gateway.url) as client:
        token = await client.start(**LONG)
        await client.receive_type("delta")
        client.drop()
    await wait_until(lambda: pool.statistics().in_flight == 1)
    await wait_until(lambda: pool.statistics().in_flight == 0)
    async with RawClient(gateway.url) as client:
        assert (await client.resume(token, 0))["type"] == "resumed"
        done = await client.done("a")
        assert (done["status"], done["reason"], done["error"]) == ("cancelled", "connection_lost", None)
        await wait_until(lambda: gateway.resumables.held == 0)
        error = await client.resume(token, 0)
        assert (error["code"], error["reason"]) == ("resume_failed", "expired")
        error = await client.resume("other-epoch.token", 0)
        assert (error["code"], error["reason"], error["id"]) == ("resume_failed", "unknown_token", "a")
    gateway.abort()


async def test_a_stream_that_was_resumed_is_not_cancelled(pool: Pool) -> None:
    """The countdown of the first loss ends with the resume."""
    gateway = make_gateway(pool, resume=config(detach_timeout_s=0.15))
    await gateway.start()
    async with RawClient(gateway.url) as client:
        token = await client.start(model="slow", max_tokens=100, seed=1)
        client.drop()
    async with RawClient(gateway.url) as client:
        await client.resume(token, -1)
        assert (await client.done("a"))["status"] == "completed"
    gateway.abort()


async def test_the_ring_is_bounded(pool: Pool) -> None:
    """What has fallen out of it is a gap, by name, and the stream is not changed; the newest is there."""
    gateway = make_gateway(pool, resume=config(replay_bytes=2000))
    await gateway.start()
    async with RawClient(gateway.url) as client:
        token = await client.start(model="slow", max_tokens=50, seed=1)
        await client.done("a")
        sent = client.numbered()
    assert gateway.resumables.held_bytes <= 2000 + 1500, "the last frame alone may be larger"
    async with RawClient(gateway.url) as client:
        error = await client.resume(token, 0)
        assert (error["code"], error["reason"], error["param"]) == ("resume_failed", "gap", "after_seq")
        error = await client.resume(token, len(sent))
        assert error["reason"] == "ahead"
        await client.resume(token, len(sent) - 2)
        await client.receive()
        assert client.numbered() == sent[-1:]
    gateway.abort()


async def test_too_much_text_for_nobody_ends_a_stream(pool: Pool) -> None:
    """A detached stream is bounded in memory, too."""
    gateway = make_gateway(pool, resume=config(replay_bytes=20_000))
    await gateway.start()
    async with RawClient(gateway.url) as client:
        token = await client.start(model="fast", max_tokens=2**31 - 1)
        client.drop()
    await wait_until(lambda: pool.statistics().in_flight == 0)
    async with RawClient(gateway.url) as client:
        await client.resume(token, -1)
        done = await client.done("a")
        assert (done["status"], done["reason"]) == ("cancelled", "slow_consumer")
    gateway.abort()


async def test_the_newest_connection_has_the_stream(resuming: Gateway) -> None:
    """Two race for a stream that a third has: one gets it last, the others hear that they have lost it."""
    async with RawClient(resuming.url) as first, RawClient(resuming.url) as x, RawClient(resuming.url) as y:
        token = await first.start(model="slow", max_tokens=120, seed=1)
        await first.receive_type("delta")
        answers = await asyncio.gather(x.resume(token, -1), y.resume(token, -1))
        assert [answer["type"] for answer in answers] == ["resumed"] * 2
        assert (await first.receive_type("detached"))["reason"] == "resumed_elsewhere"

        async def finish(client: RawClient) -> str:
            while (frame := await client.receive())["type"] not in ("done", "detached"):
                pass
            return str(frame["type"])

        ends = await asyncio.gather(finish(x), finish(y))
        assert sorted(ends) == ["detached", "done"]
        winner, loser = (x, y) if ends[0] == "done" else (y, x)
        whole = winner.numbered()
        assert [json.loads(data)["seq"] for data in whole] == list(range(len(whole)))
        assert loser.numbered() == whole[: len(loser.numbered())]
        assert first.numbered() == whole[: len(first.numbered())]
        await first.complete("a", max_tokens=1)  # its id is free again
        assert (await first.receive_type("done"))["status"] == "completed"


async def test_cancel_works_on_a_resumed_stream(resuming: Gateway, pool: Pool) -> None:
    """And an id that is in use on a connection cannot be resumed there."""
    async with RawClient(resuming.url) as client:
        token = await client.start(**LONG)
        error = await client.resume(token, -1)
        assert (error["code"], error["param"]) == ("duplicate_id", "id")
        await client.receive_type("delta")
        client.drop()
    async with RawClient(resuming.url) as client:
        await client.resume(token, 0)
        await client.send(type="cancel", id="a")
        done = await client.done("a")
        assert (done["status"], done["reason"]) == ("cancelled", "client")
    assert pool.statistics().in_flight == 0


async def test_a_stream_belongs_to_its_access_token(pool: Pool) -> None:
    """Another one's holder cannot resume it, with the resume token in hand."""
    tokens = tuple(TokenConfig.of_secret(name, f"{name}-secret") for name in ("alice", "bob"))
    gateway = make_gateway(pool, access=AccessConfig(tokens=tokens))
    await gateway.start()

    def client_of(name: str) -> RawClient:
        return RawClient(gateway.url, additional_headers={"Authorization": f"Bearer {name}-secret"})

    async with client_of("alice") as alice, client_of("bob") as bob:
        token = await alice.start(**LONG)
        error = await bob.resume(token, -1)
        assert (error["code"], error["reason"]) == ("resume_failed", "wrong_credential")
        await alice.receive_type("delta")
        assert gateway.in_flight == {"": 0, "alice": 1, "bob": 0}
        await alice.send(type="cancel", id="a")
        await alice.done("a")
    assert gateway.in_flight == {"": 0, "alice": 0, "bob": 0}
    gateway.abort()


async def test_the_number_of_kept_streams_is_bounded(pool: Pool) -> None:
    """Ended ones make room; running ones don't, and the next is refused as retryable."""
    gateway = make_gateway(pool, resume=config(max_streams_per_token=2))
    await gateway.start()
    async with RawClient(gateway.url) as client:
        ended = await client.start("e", max_tokens=1)
        await client.done("e")
        for frame_id in "ab":
            await client.start(frame_id, **LONG)
        await client.complete("c", **LONG)
        error = await client.done("c")
        assert (error["code"], error["retryable"]) == ("too_many_in_flight", True)
        assert (await client.resume(ended, -1, "e"))["reason"] == "expired"
    gateway.abort()
    await wait_until(lambda: pool.statistics().in_flight == 0)


async def test_kept_streams_of_one_token_take_no_room_of_others(pool: Pool) -> None:
    """Who keeps as many as allowed is refused; another token's are neither refused nor forgotten."""
    access = AccessConfig(tokens=(TokenConfig.of_secret("alice", "a"), TokenConfig.of_secret("bob", "b")))
    gateway = make_gateway(pool, access=access, resume=config(max_streams_per_token=1))
    await gateway.start()

    def client_of(secret: str) -> RawClient:
        return RawClient(gateway.url, additional_headers={"Authorization": f"Bearer {secret}"})

    async with client_of("a") as alice, client_of("b") as bob:
        token = await bob.start("b", max_tokens=1)
        await bob.done("b")
        await alice.start("a", **LONG)
        await alice.complete("c", **LONG)
        assert (await alice.done("c"))["code"] == "too_many_in_flight"
        assert (await bob.resume(token, -1, "b"))["type"] == "resumed"
        await bob.start("d", **LONG)
    gateway.abort()
    await wait_until(lambda: pool.statistics().in_flight == 0)


async def test_coming_back_to_many_streams_at_once() -> None:
    """A client that reads as fast as it can is no slow consumer, whatever it has missed."""
    async with Pool(scripted_pool_config(fast=0.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool, limits=LimitsConfig(max_buffered_bytes=1 << 20))
        await gateway.start()
        ids = [f"s{number}" for number in range(40)]
        tokens = {}
        async with RawClient(gateway.url) as first:
            for each in ids:
                tokens[each] = await first.start(each, max_tokens=10_000, detach=True, flush_ms=20)
                await first.done(each)
        async with RawClient(gateway.url) as second:
            for each in ids:
                await second.send(type="resume", id=each, token=tokens[each], after_seq=-1)
            for each in ids:
                assert (await second.done(each))["type"] == "done"
                assert second.text(each) == first.text(each)
        gateway.abort()


async def test_stopping_cancels_detached_streams() -> None:
    """At once: nobody can come back for them."""
    async with Pool(scripted_pool_config(slow=5.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool)
        await gateway.start()
        async with RawClient(gateway.url) as client:
            await client.start(**LONG)
            client.drop()
        await wait_until(lambda: gateway.resumables.detached == 1)
        async with asyncio.timeout(2):
            await gateway.stop()
        assert pool.statistics().in_flight == 0


async def test_stopping_cancels_streams_that_lose_their_connection_meanwhile() -> None:
    """At once too: they would only hold up the stop."""
    async with Pool(scripted_pool_config(slow=5.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool, deadlines=replace(DeadlinesConfig(), drain_timeout_s=20))
        await gateway.start()
        async with RawClient(gateway.url) as client:
            await client.start(**LONG)
            stopping = asyncio.create_task(gateway.stop())
            await client.receive_type("goaway")
            client.drop()
        async with asyncio.timeout(3):
            await stopping
        assert pool.statistics().in_flight == 0


HELLO: HelloFrame = {
    "type": "hello",
    "protocol": "headrace.v1",
    "server": "headrace/0",
    "epoch": "e",
    "models": [],
    "limits": {
        "max_frame_bytes": 1,
        "max_in_flight": 2,
        "max_queue": 3,
        "max_tokens": 4,
        "detach_timeout_ms": 5,
        "replay_ms": 6,
        "replay_bytes": 7,
    },
    "heartbeat_s": 20.0,
    "features": [],
}


class SessionOwner:
    """A connection without a socket."""

    def __init__(self) -> None:
        self.session = Session(HELLO, SessionLimits(8, 8), list)
        assert self.read() == ["hello"]

    def deliver(self, event: Event) -> None:
        """Take an event of a stream."""
        self.session.deliver(event)

    def release(self, stream: Stream, *, is_elsewhere: bool) -> None:
        """Let a stream go."""
        self.session.release(stream, is_elsewhere=is_elsewhere)

    def read(self) -> list[str]:
        """Return the types of the frames that wait."""
        now_s, types = asyncio.get_running_loop().time(), []
        while (data := self.session.next_frame(now_s)) is not None:
            types.append(json.loads(data)["type"])
        return types


def begin(streams: ResumableStreams, owner: SessionOwner, frame_id: str) -> Resumable:
    """Start a stream, as a connection does."""
    resumable = streams.reserve(owner, Tenant(ANYONE))
    (action,) = owner.session.receive(
        json.dumps({"type": "completion", "id": frame_id, "prompt": "x", "detach": True})
    )
    assert isinstance(action, StartRequest)
    frame = action.frame
    rid = RequestId(f"r-{frame_id}")
    options = frame.options.resolve(model="m", max_tokens=9, temperature=0.0, seed=1)
    stream = owner.session.accept(
        frame, rid, options, 0, replay=streams.new_replay(), resume_token=resumable.token
    )
    resumable.begin(stream)
    return resumable


def end(resumable: Resumable) -> None:
    """Let the pool end a stream."""
    assert resumable.rules is not None
    stream = resumable.rules.stream
    resumable.take(Delta(stream.rid, "x", 1))
    resumable.take(end_without_engine(stream.rid, stream.options, status="completed", reason="", error=None))


async def test_resume_on_the_same_connection_before_the_last_frame() -> None:
    """The stream has ended and its id is free, but its last frames are not sent yet: it has not gone away."""
    streams, owner, other = ResumableStreams(config(), lambda *_: None, "e"), SessionOwner(), SessionOwner()
    resumable = begin(streams, owner, "a")
    end(resumable)
    frame = ResumeFrame(ClientId("a"), resumable.token, -1)
    owner.session.attach(*_swap(streams.resume(frame, owner, Tenant(ANYONE)), frame))
    assert owner.read() == ["accepted", "resumed", "delta", "done"]
    owner.session.attach(*_swap(streams.resume(frame, owner, Tenant(ANYONE)), frame))
    assert owner.read() == ["resumed", "delta", "done"]
    other.session.attach(*_swap(streams.resume(frame, other, Tenant(ANYONE)), frame))
    assert (owner.read(), other.read()) == ([], ["resumed", "delta", "done"])
    streams.close()


def _swap(found: tuple[Stream, list[bytes]], frame: ResumeFrame) -> tuple[Stream, ResumeFrame, list[bytes]]:
    return found[0], frame, found[1]


async def test_the_stream_that_ended_first_makes_room() -> None:
    """Not the one that began first, which may have ended this moment."""
    streams, owner = ResumableStreams(config(max_streams_per_token=3), lambda *_: None, "e"), SessionOwner()
    running, late, early = (begin(streams, owner, name) for name in "abc")
    end(early)
    end(late)
    begin(streams, owner, "d")
    assert streams.statistics().held == 3
    for entry, after_seq, answer in ((early, -1, "expired"), (late, 9, "ahead"), (running, 9, "ahead")):
        assert entry.rules is not None
        with pytest.raises(ResumeError) as caught:
            streams.resume(ResumeFrame(entry.rules.stream.id, entry.token, after_seq), owner, Tenant(ANYONE))
        assert caught.value.reason == answer
    streams.close()
