"""What the gateway listens on, and how many it lets in."""

import asyncio
import errno
import os
import socket
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_helpers import Client, make_gateway, wait_until
from websockets.asyncio.client import unix_connect
from websockets.exceptions import InvalidStatus

from headrace.gateway.config import AccessConfig, DeadlinesConfig, LimitsConfig, ListenConfig, TokenConfig
from headrace.gateway.doors import Doors, Verdict
from headrace.gateway.server import Gateway
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def listening(pool: Pool, **config: Any) -> AsyncIterator[Gateway]:
    """A gateway that is dropped at the end."""
    gateway = make_gateway(pool, **config)
    await gateway.start()
    try:
        yield gateway
    finally:
        gateway.abort()
        await wait_until(lambda: gateway.num_connections == 0)


# --- Unix socket ---


def mode_of(path: Path) -> int | None:
    """Return a file's permissions; None if it isn't there."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


def read(path: Path) -> str:
    """Return a file's text."""
    return path.read_text()


def write(path: Path, text: str) -> None:
    """Write a file."""
    path.write_text(text)


class UnixClient(Client):
    """A client of a Unix socket."""

    async def __aenter__(self) -> "UnixClient":
        self.socket = await unix_connect(self._url, "ws://localhost/v1/stream", compression=None)
        self.hello = await self.receive()
        return self


@pytest.fixture
def unix_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path short enough for a socket."""
    return tmp_path_factory.mktemp("u") / "s"


async def test_a_unix_socket_for_local_programs(pool: Pool, unix_path: Path) -> None:
    """The same protocol, for this user only, beside TCP; the file is gone afterwards."""
    async with listening(pool, listen=ListenConfig(port=0, unix_path=str(unix_path))) as gateway:
        assert mode_of(unix_path) == 0o600
        async with UnixClient(str(unix_path)) as local, Client(gateway.url) as remote:
            for client in (local, remote):
                await client.complete("a", max_tokens=3, seed=1)
                assert (await client.done("a"))["status"] == "completed"
            assert local.text("a") == remote.text("a")
    assert mode_of(unix_path) is None


async def test_without_tcp(pool: Pool, unix_path: Path) -> None:
    """Only the Unix socket listens."""
    listen = ListenConfig(port=0, tcp=False, unix_path=str(unix_path))
    async with listening(pool, listen=listen) as gateway:
        assert gateway.url == f"ws+unix://{unix_path}:/v1/stream"
        async with UnixClient(str(unix_path)) as client:
            assert client.hello["type"] == "hello"


async def test_a_stale_socket_is_replaced(pool: Pool, unix_path: Path) -> None:
    """One that nobody answers; one that a server answers is left to it, and so is any other file."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(unix_path))
    listen = ListenConfig(port=0, unix_path=str(unix_path))
    async with listening(pool, listen=listen):
        with pytest.raises(OSError) as caught:
            await make_gateway(pool, listen=listen).start()
        assert (caught.value.errno, caught.value.filename) == (errno.EADDRINUSE, str(unix_path))
        async with UnixClient(str(unix_path)) as client:
            assert client.hello["type"] == "hello"
    write(unix_path, "not a socket")
    with pytest.raises(OSError) as caught:
        await make_gateway(pool, listen=listen).start()
    assert caught.value.errno == errno.EEXIST
    assert read(unix_path) == "not a socket"


async def test_a_socket_that_another_server_has_taken_is_left(pool: Pool, unix_path: Path) -> None:
    """Stopping removes the file that was made here, and no other."""
    async with listening(pool, listen=ListenConfig(port=0, unix_path=str(unix_path))):
        os.unlink(unix_path)
        write(unix_path, "another's")
    assert read(unix_path) == "another's"


# --- TLS ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A throwaway certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout {key}"
    )
    command += f" -out {cert} -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl command")
    return cert, key


async def test_tls(pool: Pool, certificate: tuple[str, str]) -> None:
    """The same over wss, certificate checked; plain text gets nothing."""
    cert, key = certificate
    context = ssl.create_default_context(cafile=cert)
    async with listening(pool, listen=ListenConfig(port=0, tls_cert=cert, tls_key=key)) as gateway:
        assert gateway.url.startswith("wss://127.0.0.1:")
        async with Client(gateway.url, ssl=context) as client:
            await client.complete("a", max_tokens=300)
            assert (await client.done("a"))["status"] == "completed"
        with pytest.raises((OSError, EOFError, Exception)):
            async with Client(gateway.url.replace("wss", "ws")):
                pass


async def test_tls_connections_are_counted_out(pool: Pool, certificate: tuple[str, str]) -> None:
    """Per address too: who comes and goes is not refused in the end."""
    cert, key = certificate
    context = ssl.create_default_context(cafile=cert)
    gateway = make_gateway(
        pool,
        limits=LimitsConfig(max_connections_per_address=2),
        listen=ListenConfig(port=0, tls_cert=cert, tls_key=key),
    )
    await gateway.start()
    for _ in range(4):
        async with Client(gateway.url, ssl=context) as client:
            assert client.hello["type"] == "hello"
        await wait_until(lambda: gateway.num_connections == 0)
    gateway.abort()


async def test_a_broken_certificate_is_named(
    pool: Pool, certificate: tuple[str, str], tmp_path: Path
) -> None:
    """A file that isn't there, a key that isn't its own: before anything listens."""
    cert, _ = certificate
    missing, broken = str(tmp_path / "missing.pem"), tmp_path / "broken.pem"
    broken.write_text("-----BEGIN NONSENSE-----")
    for tls_cert, tls_key, named in ((missing, None, missing), (cert, str(broken), cert), (cert, None, cert)):
        listen = ListenConfig(port=0, tls_cert=tls_cert, tls_key=tls_key)
        with pytest.raises(OSError) as caught:
            await make_gateway(pool, listen=listen).start()
        assert caught.value.filename == named


# --- how many ---


async def test_the_doors_count() -> None:
    """In all and by address; what leaves makes room."""
    doors = Doors(max_connections=3, max_per_address=2)
    assert [doors.enter("a"), doors.enter("a"), doors.enter("a")] == [Verdict.ADMIT] * 2 + [Verdict.REFUSE]
    assert doors.enter(None) is Verdict.REFUSE, "four are open"
    for address in ("a", "a", None):
        doors.leave(address)
    assert [doors.enter("b"), doors.enter("a"), doors.enter(None)] == [Verdict.ADMIT] * 2 + [Verdict.REFUSE]
    assert [doors.enter("c") for _ in range(70)][-1] is Verdict.DROP
    assert doors.total == 74


async def test_connections_are_bounded(pool: Pool) -> None:
    """By address: 503, and room again when one has left."""
    limits = LimitsConfig(max_connections_per_address=2)
    async with listening(pool, limits=limits) as gateway:
        async with Client(gateway.url), Client(gateway.url):
            with pytest.raises(InvalidStatus) as caught:
                async with Client(gateway.url):
                    pass
            assert caught.value.response.status_code == 503
            assert b"too_many_connections" in (caught.value.response.body or b"")
        await wait_until(lambda: gateway.num_connections == 0)
        async with Client(gateway.url) as client:
            assert client.hello["type"] == "hello"


async def test_a_silent_handshake_is_dropped(pool: Pool) -> None:
    """Within its time, and it counts as a connection until then."""
    deadlines = replace(DeadlinesConfig(), open_timeout_s=0.2)
    limits = LimitsConfig(max_connections=1)
    async with listening(pool, limits=limits, deadlines=deadlines) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /v1/stream HTTP/1.1\r\nHost: loc")
        await asyncio.sleep(0.05)
        with pytest.raises(InvalidStatus):
            async with Client(gateway.url):
                pass
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        async with Client(gateway.url) as client:
            assert client.hello["type"] == "hello"


async def test_tokens_have_limits(pool: Pool) -> None:
    """Requests and connections of one token, over all of its connections; another token has its own."""
    one = replace(TokenConfig.of_secret("one", "first"), max_in_flight=2, max_connections=2)
    access = AccessConfig(tokens=(one, TokenConfig.of_secret("two", "second")))

    async with listening(pool, access=access) as gateway:

        def client_of(secret: str) -> Client:
            return Client(gateway.url, additional_headers={"Authorization": f"Bearer {secret}"})

        async with client_of("first") as a, client_of("first") as b, client_of("second") as other:
            with pytest.raises(InvalidStatus) as caught:
                async with client_of("first"):
                    pass
            assert caught.value.response.status_code == 429
            await a.complete("x", model="slow", max_tokens=100_000)
            await b.complete("x", model="slow", max_tokens=100_000)
            await a.receive_type("delta")
            await b.receive_type("delta")
            await a.complete("y", max_tokens=1)
            error = await a.done("y")
            assert (error["code"], error["retryable"]) == ("too_many_in_flight", True)
            await other.complete("y", max_tokens=1)
            assert (await other.done("y"))["status"] == "completed"
            await b.complete("z", model="nowhere")
            assert (await b.done("z"))["code"] == "too_many_in_flight"
            await b.send(type="cancel", id="x")
            await b.done("x")
            for frame_id in ("y", "w"):
                await a.complete(frame_id, "again", max_tokens=1)
                await a.receive_type("done")
            await a.complete("v", model="nowhere")
            assert (await a.done("v"))["code"] == "model_not_found", "a refusal gives its place back"
        await wait_until(lambda: set(gateway.in_flight.values()) == {0})


async def test_tenants_share_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is told whose request each is, and which connection's."""
    seen: list[tuple[str, str]] = []
    start = pool.start

    def note(*args: Any, **options: Any) -> Any:
        seen.append((options["tenant"], options["client"]))
        return start(*args, **options)

    monkeypatch.setattr(pool, "start", note)
    tokens = tuple(TokenConfig.of_secret(name, name) for name in ("alice", "bob"))
    async with listening(pool, access=AccessConfig(tokens=tokens)) as gateway:
        for name in ("alice", "alice", "bob"):
            headers = {"Authorization": f"Bearer {name}"}
            async with Client(gateway.url, additional_headers=headers) as client:
                await client.complete("a", max_tokens=1)
                await client.done("a")
    assert [tenant for tenant, _ in seen] == ["alice", "alice", "bob"]
    assert len({client for _, client in seen}) == 3
