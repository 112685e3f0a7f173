"""The page at `/`: its files, read once, and the headers that fence it in. PROTOCOL.md, "HTTP".

Everything that the page loads comes from here, and its policy allows nothing else: no other origin, nothing
inline, no HTML made from text. Anybody may load it; what it can do is decided at the WebSocket.
"""

from collections.abc import Mapping
from http import HTTPStatus
from importlib import resources
from pathlib import PurePosixPath
from types import MappingProxyType

from .http import Page, response

_CONTENT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
    }
)


def page_files() -> dict[str, Page]:
    """Return the page's files by path: `index.html` at `/`, the others under `/page/`."""
    pages = {}
    for entry in resources.files(__package__).joinpath("page").iterdir():
        content_type = _CONTENT_TYPES.get(PurePosixPath(entry.name).suffix)
        if content_type is not None:
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            pages[path] = _file(entry.read_bytes(), content_type)
    return pages


def _file(body: bytes, content_type: str) -> Page:
    return Page(lambda _: response(HTTPStatus.OK, body, content_type, _HEADERS), is_public=True)
