"""The page's files over HTTP: what they load, and the headers that fence them in."""

import asyncio
import http.client
import re

import pytest
from gateway_helpers import running_gateway

from headrace.gateway.config import AccessConfig, TokenConfig
from headrace.gateway.page_files import page_files
from headrace.gateway.server import Gateway
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _get(port: int, path: str, headers: dict[str, str]) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, response.headers, body


async def get(gateway: Gateway, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    """Return the status, the headers and the text at a path."""
    return await asyncio.to_thread(_get, gateway.port, path, headers)


async def test_the_page_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    """All that its files name is among them, and no file names another origin."""
    status, headers, index = await get(gateway, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    found, todo = set(), set(re.findall(r'(?:href|src)="([^#"]+)"', index))
    while todo:
        path = todo.pop()
        found.add(path)
        status, headers, body = await get(gateway, f"/{path}")
        assert status == 200, path
        todo |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', body)} - found
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]", body), path
    assert {f"/{path}" for path in found} | {"/"} == set(page_files())


async def test_the_policy_allows_no_inline_script(gateway: Gateway) -> None:
    """Nor other origins, nor frames; and the page has none of that."""
    _, headers, index = await get(gateway, "/")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]* src=)", index)


async def test_the_page_is_public_and_metrics_are_not(pool: Pool) -> None:
    """The page asks for the token itself; health needs none."""
    access = AccessConfig(tokens=(TokenConfig.of_secret("me", "hush"),))
    async with running_gateway(pool, access=access) as gateway:
        for path in page_files():
            assert (await get(gateway, path))[0] == 200
        assert (await get(gateway, "/healthz"))[0] == 200
        assert (await get(gateway, "/metrics"))[0] == 401
        assert (await get(gateway, "/metrics", Authorization="Bearer hush"))[0] == 200
        assert (await get(gateway, "/", Host="evil.example"))[0] == 403
