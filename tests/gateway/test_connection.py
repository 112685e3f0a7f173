"""Requests over real sockets, with real engine processes (scripted, without a model)."""

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from gateway_helpers import Client, assert_well_formed, make_gateway, scripted_pool_config, wait_until

from headrace.engine.scripted import scripted_token
from headrace.gateway.config import LimitsConfig
from headrace.gateway.server import Gateway
from headrace.pool import Pool
from headrace.protocol.actions import Action
from headrace.protocol.session import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"model": "slow", "max_tokens": 100_000}
"""A request that does not end by itself."""


def expected_text(prompt: str, seed: int, num_tokens: int) -> str:
    """Return what the scripted engine answers."""
    return "".join(scripted_token(prompt, seed, index) for index in range(num_tokens))


async def test_hello_is_first(gateway: Gateway) -> None:
    """With the models, the limits and the protocol's name."""
    async with Client(gateway.url) as client:
        hello = client.hello
    assert (hello["type"], hello["protocol"]) == ("hello", "headrace.v1")
    assert [model["name"] for model in hello["models"]] == ["fast", "slow"]
    assert hello["limits"]["max_in_flight"] == LimitsConfig().max_in_flight_per_connection


@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_streaming_and_not_give_the_same(gateway: Gateway, kind: str) -> None:
    """Same text and same usage; both as the engine made them."""
    body = (
        {"prompt": "a b c"} if kind == "completion" else {"messages": [{"role": "user", "content": "a b c"}]}
    )
    async with Client(gateway.url) as client:
        await client.send(type=kind, id="s", seed=7, max_tokens=20, **body)
        await client.send(type=kind, id="w", seed=7, max_tokens=20, stream=False, **body)
        streamed, whole = await client.done("s"), await client.done("w")
        text = client.text("s")
    assert text == expected_text("a b c", 7, 20)
    assert (whole["text"] if kind == "completion" else whole["message"]["content"]) == text
    assert whole["usage"] == streamed["usage"]
    assert (streamed["status"], streamed["finish_reason"], whole["seq"]) == ("completed", "length", 0)
    assert_well_formed(client.frames["s"])
    assert_well_formed(client.frames["w"], stream=False)


async def test_accepted_echoes_the_options_in_force(gateway: Gateway) -> None:
    """The server's defaults filled in, the client's choice kept."""
    async with Client(gateway.url) as client:
        await client.complete("a", temperature=0.5, stop="zz", max_tokens=1)
        await client.complete("b", max_tokens=1, seed=3, timeout_ms=10_000)
        await client.done("a")
        await client.done("b")
    options = client.frames["a"][0]["options"]
    assert (options["model"], options["temperature"], options["stop"]) == ("fast", 0.5, ["zz"])
    assert isinstance(options["seed"], int)
    assert client.frames["b"][0]["options"]["seed"] == 3
    assert client.frames["a"][0]["rid"] != client.frames["b"][0]["rid"]


async def test_cancel_ends_a_stream(gateway: Gateway, pool: Pool) -> None:
    """Nothing but `done` after it; the next request is served."""
    async with Client(gateway.url) as client:
        await client.complete("a", **LONG)
        await client.receive_type("delta")
        await client.send(type="cancel", id="a")
        done = await client.done("a")
        assert (done["status"], done["reason"], done["error"]) == ("cancelled", "client", None)
        assert_well_formed(client.frames["a"])
        assert pool.statistics().in_flight == 0
        await client.complete("a", max_tokens=2)
        await client.receive_type("done")
    assert client.frames["a"][-1]["status"] == "completed"


async def test_a_duplicate_id_leaves_the_first_alone(gateway: Gateway) -> None:
    """Refused by name, and the stream goes on to its end."""
    async with Client(gateway.url) as client:
        await client.complete("a", model="slow", seed=1, max_tokens=30)
        await client.receive_type("delta")
        await client.complete("a")
        error = await client.receive_type("error")
        client.frames["a"].remove(error)
        done = await client.done("a")
    assert (error["code"], error["param"]) == ("duplicate_id", "id")
    assert done["status"] == "completed"
    assert client.text("a") == expected_text("one two", 1, 30)
    assert_well_formed(client.frames["a"])


async def test_two_connections_may_use_the_same_id(gateway: Gateway) -> None:
    """Each gets its own text; a cancel on one is nothing to the other."""
    async with Client(gateway.url) as one, Client(gateway.url) as two:
        await one.complete("a", "first", model="slow", seed=1, max_tokens=30)
        await two.complete("a", "second", seed=1, **LONG)
        await two.receive_type("delta")
        await two.send(type="cancel", id="a")
        assert (await two.done("a"))["status"] == "cancelled"
        assert (await one.done("a"))["status"] == "completed"
    assert one.text("a") == expected_text("first", 1, 30)


async def test_bad_frames_keep_the_connection(gateway: Gateway) -> None:
    """Invalid JSON, a binary message, an unknown type: an error each, and the stream goes on."""
    async with Client(gateway.url) as client:
        await client.complete("a", model="slow", seed=1, max_tokens=20)
        for data in ("{", b"{}", '{"type": "nonsense", "id": "n"}', '{"type": "video", "id": "n"}'):
            await client.socket.send(data)
        codes = [(await client.receive_type("error"))["code"] for _ in range(4)]
        assert codes == ["invalid_json", "invalid_frame", "unknown_type", "unknown_type"]
        assert (await client.done("a"))["status"] == "completed"
    assert client.text("a") == expected_text("one two", 1, 20)


async def test_cancel_of_an_unknown_id_is_no_error(gateway: Gateway) -> None:
    """It has no answer at all."""
    async with Client(gateway.url) as client:
        await client.send(type="cancel", id="never")
        await client.send(type="ping", nonce=5)
        assert await client.receive() == {"type": "pong", "nonce": 5}


async def test_models_are_listed(gateway: Gateway) -> None:
    """As in `hello`."""
    async with Client(gateway.url) as client:
        await client.send(type="models", id="m")
        answer = await client.receive()
    assert answer == {"type": "models", "id": "m", "models": client.hello["models"]}


async def test_many_messages_at_once_leave_others_their_turns(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends as fast as it can does not keep the event loop."""
    counts, receive = [0], Session.receive

    def counted(session: Session, data: str | bytes) -> list[Action]:
        counts[-1] += 1
        return receive(session, data)

    async def count_turns() -> None:
        while True:
            counts.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(Session, "receive", counted)
    async with Client(gateway.url) as client:
        counting = asyncio.create_task(count_turns())
        payload = b'{"type": "ping", "nonce": 1}'
        message = bytes([0x81, 0x80 | len(payload), 0, 0, 0, 0]) + payload
        client.socket.transport.write(message * 2000)
        for _ in range(2000):
            assert (await client.receive())["type"] == "pong"
        counting.cancel()
    assert sum(counts) == 2000
    assert max(counts) <= 100


async def test_refusals_name_what_is_wrong(gateway: Gateway) -> None:
    """A model that isn't there; an option out of range. Nothing is started."""
    async with Client(gateway.url) as client:
        await client.complete("a", model="other")
        await client.complete("b", temperature=3)
        model, option = await client.done("a"), await client.done("b")
    assert (model["code"], model["param"], model["retryable"]) == ("model_not_found", "model", False)
    assert (option["code"], option["param"]) == ("invalid_param", "temperature")


async def test_too_many_bad_frames_close_with_4400(pool: Pool) -> None:
    """After the errors have been sent; the connection's requests are cancelled."""
    gateway = make_gateway(pool, limits=LimitsConfig(max_bad_frames=3))
    await gateway.start()
    async with Client(gateway.url) as client:
        await client.complete("a", **LONG)
        await client.receive_type("accepted")
        for _ in range(3):
            await client.socket.send("{")
        for _ in range(3):
            assert (await client.receive_type("error"))["code"] == "invalid_json"
        assert await client.closed() == 4400
    await wait_until(lambda: pool.statistics().in_flight == 0)
    gateway.abort()


async def test_a_frame_too_large_closes_with_1009(pool: Pool) -> None:
    """And only that connection."""
    gateway = make_gateway(pool, limits=LimitsConfig(max_frame_bytes=1000))
    await gateway.start()
    async with Client(gateway.url) as large, Client(gateway.url) as other:
        await large.complete("a", "x" * 2000)
        assert await large.closed() == 1009
        await other.complete("a", max_tokens=1)
        assert (await other.done("a"))["status"] == "completed"
    gateway.abort()


async def test_timeout_ms_ends_a_request(gateway: Gateway) -> None:
    """As cancelled by its deadline, with what was generated counted."""
    async with Client(gateway.url) as client:
        await client.complete("a", timeout_ms=60, **LONG)
        done = await client.done("a")
    assert (done["status"], done["reason"]) == ("cancelled", "deadline")
    assert done["error"]["code"] == "deadline_exceeded"
    assert_well_formed(client.frames["a"])


async def test_flush_ms_merges_tokens(gateway: Gateway) -> None:
    """Fewer frames, the same text."""
    async with Client(gateway.url) as client:
        await client.complete("a", model="slow", seed=1, max_tokens=40, flush_ms=50)
        await client.complete("b", model="slow", seed=1, max_tokens=40)
        await client.done("a")
        await client.done("b")
    assert client.text("a") == client.text("b") == expected_text("one two", 1, 40)
    assert len(client.deltas("a")) < len(client.deltas("b")) / 2
    assert_well_formed(client.frames["a"])


async def test_too_many_in_flight_on_a_connection(pool: Pool) -> None:
    """Refused as retryable."""
    gateway = make_gateway(pool, limits=LimitsConfig(max_in_flight_per_connection=2))
    await gateway.start()
    async with Client(gateway.url) as client:
        for frame_id in "abc":
            await client.complete(frame_id, **LONG)
        error = await client.done("c")
        assert (error["code"], error["retryable"]) == ("too_many_in_flight", True)
    gateway.abort()


async def test_a_full_queue_refuses_with_a_hint() -> None:
    """One runs, one waits and hears that it does, the third is refused; cancelling frees the way."""
    async with Pool(scripted_pool_config(max_in_flight=1, max_queue=1, slow=5.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool)
        await gateway.start()
        async with Client(gateway.url) as client:
            await client.complete("a", **LONG)
            await client.receive_type("delta")
            for frame_id in "bc":
                await client.complete(frame_id, model="slow", max_tokens=1)
            error = await client.done("c")
            assert (error["code"], error["retryable"]) == ("queue_full", True)
            assert error["retry_after_ms"] > 0
            assert (await client.receive_type("progress"))["phase"] == "queue"
            await client.send(type="cancel", id="a")
            assert (await client.done("b"))["status"] == "completed"
        gateway.abort()


@pytest.mark.parametrize("way", ["close", "abort"])
async def test_a_lost_connection_frees_everything(gateway: Gateway, pool: Pool, way: str) -> None:
    """In mid-stream, politely or not: the engine lets go, and the counters return to zero."""
    async with Client(gateway.url) as client:
        for number in range(5):
            await client.complete(str(number), **LONG)
        await client.receive_type("delta")
        assert pool.statistics().in_flight == 5
        if way == "abort":
            client.socket.transport.abort()
    await wait_until(lambda: pool.statistics().in_flight == 0)
    await wait_until(lambda: gateway.num_connections == 0)
    await wait_until(lambda: all(w.status.stats.in_flight == 0 for w in pool.statistics().workers))


# --- many at once ---

NUM_REQUESTS = 1_000
NUM_CLIENTS = 5


async def _play(client: Client, requests: Iterator[int], rng: random.Random) -> list[str]:
    """Send requests, cancel some of them at some time, and collect every last frame."""
    running: set[str] = set()
    ids = []
    for number in requests:
        frame_id = f"r{number}"
        ids.append(frame_id)
        options = {"max_tokens": rng.choice([1, 5, 40]), "stream": rng.random() < 0.7, "seed": number}
        options["model"] = rng.choice(["fast", "fast", "slow", "nowhere" if rng.random() < 0.1 else "fast"])
        await client.complete(frame_id, f"prompt {number}", **options)
        running.add(frame_id)
        if rng.random() < 0.4:
            await client.send(type="cancel", id=rng.choice(sorted(running)))
        while len(running) > 30:
            frame = await client.receive()
            if frame["type"] in ("done", "error"):
                running.discard(frame["id"])
    for frame_id in ids:
        await client.done(frame_id)
    return ids


async def test_a_thousand_requests_with_random_cancels(gateway: Gateway, pool: Pool) -> None:
    """Exactly one last frame each, no gaps, all tokens counted; what completed has its whole text."""
    async with asyncio.TaskGroup() as group:
        clients, tasks = [], []
        for index in range(NUM_CLIENTS):
            client = await Client(gateway.url).__aenter__()
            clients.append(client)
            numbers = iter(range(index, NUM_REQUESTS, NUM_CLIENTS))
            tasks.append(group.create_task(_play(client, numbers, random.Random(index))))
    statuses: dict[str, int] = {}
    for client, task in zip(clients, tasks, strict=True):
        for frame_id in task.result():
            frames = client.frames[frame_id]
            if frames[-1]["type"] == "error":
                assert [frame["code"] for frame in frames] == ["model_not_found"]
                continue
            options, done = frames[0]["options"], frames[-1]
            assert_well_formed(frames, stream=options["stream"])
            text = client.text(frame_id) if options["stream"] else done["text"]
            num_tokens = done["usage"]["completion_tokens"]
            assert text == expected_text(f"prompt {frame_id[1:]}", options["seed"], num_tokens)
            if done["status"] == "completed":
                assert num_tokens == options["max_tokens"]
            statuses[done["status"]] = statuses.get(done["status"], 0) + 1
        await client.send(type="ping", nonce=json.dumps(statuses)[:100])
        assert (await client.receive())["type"] == "pong", "nothing comes after the last frames"
        await client.socket.close()
    assert set(statuses) == {"completed", "cancelled"}
    assert pool.statistics().in_flight == 0
