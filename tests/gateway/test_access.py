"""Who is let in: the rules by themselves, and as a client meets them."""

import base64
import hmac
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_helpers import Client, make_gateway
from websockets.asyncio.client import connect
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus

from headrace.gateway.access import ANYONE, AccessRules, is_loopback
from headrace.gateway.config import AccessConfig, ListenConfig, TokenConfig
from headrace.gateway.server import Gateway
from headrace.pool import Pool

TOKEN = "s3cret-töken"
OTHER = TokenConfig.of_secret("bob", "another")
BEARER = "headrace.bearer." + base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")


def rules(host: str = "127.0.0.1", **config: Any) -> AccessRules:
    """Return the rules of a gateway that listens on a host."""
    return AccessRules(AccessConfig(**config), ListenConfig(host=host))


def headers(*pairs: tuple[str, str]) -> Headers:
    """Return request headers."""
    return Headers(list(pairs))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:8765", True),
        ("LOCALHOST", True),
        ("127.0.0.1:1", True),
        ("[::1]:8765", True),
        ("rebound.example:8765", False),
        ("localhost.example", False),
        ("192.168.1.5", False),
        ("", False),
        ("[", False),
    ],
)
def test_hosts_of_a_loopback_gateway(host: str, allowed: bool) -> None:
    """Only loopback's names: a rebound name is somebody else's."""
    assert rules().allows_host(headers(("Host", host))) is allowed


def test_hosts_beyond_loopback() -> None:
    """Its own name, addresses in digits, and what is allowed; names otherwise not."""
    open_rules = rules("0.0.0.0", allowed_hosts=("Gate.Example",))
    for host in ("192.168.1.5:8765", "[fe80::1]:8765", "gate.example:1", "localhost"):
        assert open_rules.allows_host(headers(("Host", host)))
    assert not open_rules.allows_host(headers(("Host", "rebound.example")))
    assert rules("box.lan").allows_host(headers(("Host", "box.lan:8765")))
    assert rules(allowed_hosts=("*",)).allows_host(headers(("Host", "any.example")))


def test_a_host_is_needed_once() -> None:
    """None, or two, is no browser's doing."""
    assert not rules().allows_host(headers())
    assert not rules().allows_host(headers(("Host", "localhost"), ("Host", "localhost")))


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:8765", True),
        ("https://localhost:8765", True),
        ("http://localhost:3000", False),
        ("http://localhost", False),
        ("http://localhost:8765.evil.example", False),
        ("https://chat.example.org", True),
        ("https://CHAT.example.org", True),
        ("https://chat.example.org:444", False),
        ("http://chat.example.org", False),
        ("https://evil.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins(origin: str, allowed: bool) -> None:
    """The gateway's own host and port, and the list."""
    listed = rules(allowed_origins=("https://chat.example.org/",))
    assert listed.allows_origin(headers(("Host", "localhost:8765"), ("Origin", origin))) is allowed


def test_programs_have_no_origin() -> None:
    """And are let in; two origins are not."""
    assert rules().allows_origin(headers(("Host", "localhost")))
    twice = headers(("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "http://localhost"))
    assert not rules().allows_origin(twice)
    everyone = rules(allowed_origins=("*",))
    assert everyone.allows_origin(headers(("Host", "localhost"), ("Origin", "https://any.example")))


@pytest.mark.parametrize(
    ("pairs", "allowed"),
    [
        ([("Authorization", f"Bearer {TOKEN}")], True),
        ([("Authorization", f"bearer  {TOKEN} ")], True),
        ([("Sec-WebSocket-Protocol", f"headrace.v1, {BEARER}")], True),
        ([("Sec-WebSocket-Protocol", "headrace.v1"), ("Sec-WebSocket-Protocol", BEARER)], True),
        ([], False),
        ([("Authorization", TOKEN)], False),
        ([("Authorization", "Bearer ")], False),
        ([("Authorization", f"Bearer {TOKEN}x")], False),
        ([("Authorization", f"Basic {TOKEN}")], False),
        ([("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")], False),
        ([("Sec-WebSocket-Protocol", "headrace.bearer.")], False),
        ([("Sec-WebSocket-Protocol", "headrace.bearer.%%%")], False),
        ([("Sec-WebSocket-Protocol", "headrace.bearer._w")], False),
    ],
)
def test_tokens(pairs: list[tuple[str, str]], allowed: bool) -> None:
    """By header or by subprotocol; nothing else, and nothing raises."""
    locked = rules(tokens=(OTHER, TokenConfig.of_secret("alice", TOKEN)))
    assert locked.needs_token
    found = locked.identify(headers(*pairs))
    assert (found is not None and found.name == "alice") is allowed
    assert rules().identify(headers(*pairs)) is ANYONE


def test_every_token_is_compared_whatever_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit: the first, the last and no match cost the same comparisons, of digests of one length."""
    calls: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        calls.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr("headrace.gateway.access.hmac", SimpleNamespace(compare_digest=compare))
    tokens = tuple(TokenConfig.of_secret(f"t{number}", f"secret-{number}") for number in range(4))
    locked = rules(tokens=tokens)
    for shown in ("secret-0", "secret-3", "wrong", "x" * 5000):
        calls.clear()
        locked.identify(headers(("Authorization", f"Bearer {shown}")))
        assert calls == [(32, 32)] * 4


def test_the_token_is_in_no_representation() -> None:
    """A configuration may end in a log; not even the digest is in it."""
    config = AccessConfig(tokens=(TokenConfig.of_secret("alice", TOKEN),))
    assert TOKEN not in repr(config)
    assert "sha256" not in repr(config)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    """What needs no token."""
    assert is_loopback(host) is expected


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", ["/v1/stream", "/healthz", "/v1/models"])
@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ({"Origin": "https://evil.example"}, "forbidden_origin"),
        ({"Host": "rebound.example"}, "forbidden_host"),
    ],
)
async def test_strangers_get_403(gateway: Gateway, path: str, extra: dict[str, str], code: str) -> None:
    """Before the upgrade, on every path."""
    url = gateway.url.replace("/v1/stream", path)
    with pytest.raises(InvalidStatus) as caught:
        await connect(url, additional_headers=Headers(extra), proxy=None, user_agent_header=None)
    assert caught.value.response.status_code == 403
    assert code.encode() in (caught.value.response.body or b"")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_wrong_token_closes_with_4401(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """After accepting, so that a browser sees it; the right one is served; neither is logged."""
    caplog.set_level(logging.DEBUG)
    gateway = make_gateway(pool, access=AccessConfig(tokens=(TokenConfig.of_secret("a", "right-token"),)))
    await gateway.start()
    for wrong in ({}, {"Authorization": "Bearer wrong-token"}):
        async with Client(gateway.url, additional_headers=wrong, logger=logging.getLogger("quiet")) as client:
            assert (client.hello["type"], client.hello["code"]) == ("error", "unauthorized")
            assert await client.closed() == 4401
    right = {"Authorization": "Bearer right-token"}
    async with Client(gateway.url, additional_headers=right, logger=logging.getLogger("quiet")) as client:
        assert client.hello["type"] == "hello"
    records = [r for r in caplog.records if not r.name.startswith("quiet")]
    assert not any("-token" in record.getMessage() for record in records)
    with pytest.raises(InvalidStatus) as caught:
        await connect(gateway.url.replace("/v1/stream", "/v1/models"), proxy=None)
    assert caught.value.response.status_code == 401
    gateway.abort()
