"""The access tokens that `headrace serve` asks for: one from a plain file or the environment, or a TOML file.

[[token]]
name = "alice"              # keeps prompt caches and streams apart; shown in the log, unlike the token
token = "…"                 # or sha256 = "…", the digest of the token in 64 hex digits
max_in_flight = 8           # requests of all its connections together; without it: no limit of its own
max_connections = 4
"""

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .gateway.config import TokenConfig

ENVIRONMENT_NAME = "HEADRACE_TOKEN"
ONLY_NAME = "default"
"""Name of the token of a plain file or the environment."""


class TokenFileError(Exception):
    """The token file makes no sense; the message is one line for the operator, without any token."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    token: Annotated[SecretStr, Field(min_length=1)] | None = None
    sha256: Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    max_in_flight: Annotated[int, Field(ge=1, strict=True)] | None = None
    max_connections: Annotated[int, Field(ge=1, strict=True)] | None = None

    @model_validator(mode="after")
    def _has_one_secret(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise PydanticCustomError("one_secret", "needs either token or sha256")
        if self.token is not None and self.token.get_secret_value().strip() != self.token.get_secret_value():
            raise PydanticCustomError("blanks", "token begins or ends with a blank, which no client can show")
        return self

    def config(self) -> TokenConfig:
        if self.token is not None:
            digest = hashlib.sha256(self.token.get_secret_value().encode()).digest()
        else:
            digest = bytes.fromhex(self.sha256 or "")
        return TokenConfig(self.name, digest, self.max_in_flight, self.max_connections)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    token: Annotated[list[_Entry], Field(min_length=1)]


def read_tokens(path: str | None, environment: Mapping[str, str]) -> tuple[TokenConfig, ...]:
    """Return the tokens of a file, else the one of the environment; none: no token is asked for.

    A file whose name ends in `.toml` has any number of them; any other is one token.

    Raises:
        TokenFileError: the file cannot be read, or there is no token in it.
    """
    if path is None:
        secret = environment.get(ENVIRONMENT_NAME)
        # An HTTP header has no blanks at its ends, so no client could show them.
        return (TokenConfig.of_secret(ONLY_NAME, secret.strip()),) if secret else ()
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise TokenFileError("cannot be read") from None
    if path.endswith(".toml"):
        return _read_toml(text)
    if not text.strip():
        raise TokenFileError("it is empty")
    return (TokenConfig.of_secret(ONLY_NAME, text.strip()),)


def _read_toml(text: str) -> tuple[TokenConfig, ...]:
    try:
        entries = _File.model_validate(tomllib.loads(text)).token
    except tomllib.TOMLDecodeError:
        raise TokenFileError("it is not valid TOML") from None  # its message may quote a token
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
        raise TokenFileError(f"{where}: {what}" if where else what) from None
    tokens = tuple(entry.config() for entry in entries)
    if len({token.name for token in tokens}) < len(tokens):
        raise TokenFileError("two tokens have the same name")
    if len({token.sha256 for token in tokens}) < len(tokens):
        raise TokenFileError("two names have the same token")
    return tokens
