"""Who may talk to the gateway: Host and Origin allow-lists and bearer tokens. PROTOCOL.md, "Access".

Both lists are on for loopback too. Any web page can open a WebSocket to localhost, which the Origin list
stops; a page can also make its own name resolve to 127.0.0.1 (DNS rebinding), which the Host list stops.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from websockets.datastructures import Headers, MultipleValuesError

from .config import AccessConfig, ListenConfig, TokenConfig

BEARER_SUBPROTOCOL = "headrace.bearer."
"""Prefix of the subprotocol by which a browser, which cannot set headers, shows its token in base64url."""

ANYONE = TokenConfig("")
"""The tenant of all clients where no token is asked for."""

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ANY = "*"


def is_loopback(host: str) -> bool:
    """Return whether a host to listen on is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AccessRules:
    """The rules in force for one gateway. No method raises on what a client sends."""

    def __init__(self, config: AccessConfig, listen: ListenConfig) -> None:
        self._hosts = _LOOPBACK_NAMES | {listen.host.lower()} | _lower(config.allowed_hosts)
        self._origins = _lower(config.allowed_origins)
        # Rebinding needs a name: an address in `Host` was typed by whoever runs the client.
        self._any_address = not is_loopback(listen.host)
        self._tokens = config.tokens

    @property
    def needs_token(self) -> bool:
        """Whether clients must show a token."""
        return bool(self._tokens)

    def allows_host(self, headers: Headers) -> bool:
        """Return whether the `Host` header is one of ours."""
        host = _single(headers, "Host")
        if host is None:
            return False
        if _ANY in self._hosts:
            return True
        name = _host_name(host)
        return name in self._hosts or (self._any_address and _is_address(name))

    def allows_origin(self, headers: Headers) -> bool:
        """Return whether the request comes from no web page, from our own, or from one on the list."""
        if not headers.get_all("Origin"):
            return True  # not a browser
        origin, host = _single(headers, "Origin"), _single(headers, "Host")
        if origin is None or host is None:
            return False
        origin, host = origin.lower(), host.lower()
        if origin in self._origins or _ANY in self._origins:
            return True
        return origin in (f"http://{host}", f"https://{host}")

    def identify(self, headers: Headers) -> TokenConfig | None:
        """Return the entry of the token that the request shows, or None if it must show one and doesn't.

        In constant time for each token shown. Where no token is asked for everybody is `ANYONE`.
        """
        if not self._tokens:
            return ANYONE
        found: TokenConfig | None = None
        # No early exit: how long this takes must not depend on what was shown.
        for shown in _shown_tokens(headers):
            digest = _digest(shown)
            for token in self._tokens:
                if hmac.compare_digest(digest, token.sha256):
                    found = token
        return found


def offered_subprotocols(headers: Headers) -> list[str]:
    """Return the subprotocols that a client offers."""
    values = headers.get_all("Sec-WebSocket-Protocol")
    return [name.strip() for value in values for name in value.split(",")]


def _shown_tokens(headers: Headers) -> list[str]:
    """Return what the request shows as tokens."""
    tokens = []
    authorization = _single(headers, "Authorization")
    if authorization is not None and authorization[:7].lower() == "bearer ":
        tokens.append(authorization[7:].strip())
    for name in offered_subprotocols(headers):
        if name.startswith(BEARER_SUBPROTOCOL):
            encoded = name.removeprefix(BEARER_SUBPROTOCOL)
            try:
                padded = encoded + "=" * (-len(encoded) % 4)
                tokens.append(base64.urlsafe_b64decode(padded.encode()).decode())
            except (binascii.Error, ValueError):
                continue
    return tokens


def _digest(token: str) -> bytes:
    # Digests have one length, so that the comparison says nothing about the token's.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _single(headers: Headers, name: str) -> str | None:
    """Return a header's value; None if it is missing or there are several."""
    try:
        return headers.get(name)
    except MultipleValuesError:
        return None


def _lower(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.lower().rstrip("/") for name in names)


def _host_name(host: str) -> str:
    """Return the name in a `Host` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
