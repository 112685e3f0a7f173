"""Token files: one or several, every mistake named, and no token in any message."""

import hashlib
from pathlib import Path

import pytest

from headrace.gateway.config import TokenConfig
from headrace.tokens import TokenFileError, read_tokens

SECRET = "hush-hush"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def test_a_plain_file_or_the_environment_has_one(tmp_path: Path) -> None:
    """The file wins."""
    path = tmp_path / "token"
    path.write_text("of-file\n")
    environment = {"HEADRACE_TOKEN": "of-environment"}
    assert read_tokens(str(path), environment) == (TokenConfig.of_secret("default", "of-file"),)
    assert read_tokens(None, environment) == (TokenConfig.of_secret("default", "of-environment"),)
    assert read_tokens(None, {"HEADRACE_TOKEN": " of-environment\n"}) == read_tokens(None, environment)
    assert read_tokens(None, {}) == read_tokens(None, {"HEADRACE_TOKEN": ""}) == ()


def test_a_toml_file_has_several(tmp_path: Path) -> None:
    """With limits each; in clear or as a digest."""
    path = tmp_path / "tokens.toml"
    path.write_text(
        f'[[token]]\nname = "alice"\ntoken = "{SECRET}"\nmax_in_flight = 8\nmax_connections = 4\n'
        f'[[token]]\nname = "bob"\nsha256 = "{"ab" * 32}"\n'
    )
    alice, bob = read_tokens(str(path), {"HEADRACE_TOKEN": "ignored"})
    assert (alice.name, alice.max_in_flight, alice.max_connections) == ("alice", 8, 4)
    assert alice.sha256.hex() == DIGEST
    assert bob == TokenConfig("bob", bytes.fromhex("ab" * 32))
    assert SECRET not in repr((alice, bob))
    assert DIGEST not in repr((alice, bob))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "token: "),
        ("token = []", "token: "),
        (f'[[token]]\nname = "a"\ntoken = {SECRET}', "not valid TOML"),
        (f'[[token]]\ntoken = "{SECRET}"', "token.0.name: "),
        (f'[[token]]\nname = "a b"\ntoken = "{SECRET}"', "token.0.name: "),
        ('[[token]]\nname = "a"', "token.0: needs either token or sha256"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nsha256 = "{DIGEST}"', "needs either"),
        ('[[token]]\nname = "a"\nsha256 = "12"', "token.0.sha256: "),
        ('[[token]]\nname = "a"\ntoken = ""', "token.0.token: "),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET} "', "token.0: token begins or ends with a blank"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nmax_in_flight = 0', "token.0.max_in_flight: "),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nlimit = 1', "token.0.limit: there is no such field"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\n' * 2, "same name"),
        (
            f'[[token]]\nname = "a"\ntoken = "{SECRET}"\n[[token]]\nname = "b"\nsha256 = "{DIGEST}"',
            "same token",
        ),
    ],
)
def test_mistakes_are_named_without_the_token(tmp_path: Path, text: str, message: str) -> None:
    """In one line."""
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(TokenFileError, match=message) as caught:
        read_tokens(str(path), {})
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_empty_or_not_there(tmp_path: Path) -> None:
    """A mistake, not an open door."""
    path = tmp_path / "token"
    with pytest.raises(TokenFileError, match="cannot be read"):
        read_tokens(str(path), {})
    path.write_text("\n")
    with pytest.raises(TokenFileError, match="empty"):
        read_tokens(str(path), {})
