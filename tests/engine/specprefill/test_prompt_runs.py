"""A prompt as runs of tokens that were cached, kept or left out."""

from headrace.engine.specprefill.prompt_runs import MAX_CHARS, prompt_runs


class Utf8Decoder:
    """One byte a token; holds back characters that are not complete."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, token: int) -> str:
        """Return the text that is certain now."""
        self._held += bytes([token])
        try:
            text = self._held.decode()
        except UnicodeDecodeError:
            return ""
        self._held = b""
        return text

    def finish(self) -> str:
        """Return what is left."""
        return self._held.decode(errors="replace")


def test_the_runs_are_the_prompt() -> None:
    """In order, each token once, the cached ones first."""
    text = "The weir and the mill"
    runs = prompt_runs(list(text.encode()), 4, [(4, 8), (17, 21)], Utf8Decoder)
    assert runs == [
        {"fate": "cached", "tokens": 4, "text": "The "},
        {"fate": "kept", "tokens": 4, "text": "weir"},
        {"fate": "left_out", "tokens": 9, "text": " and the "},
        {"fate": "kept", "tokens": 4, "text": "mill"},
    ]


def test_a_character_belongs_to_the_run_of_its_last_token() -> None:
    """Never to two, and never as U+FFFD; one that the prompt doesn't complete is shown as such."""
    tokens = list("a漢b".encode())
    runs = prompt_runs(tokens, 0, [(0, 2), (4, 5)], Utf8Decoder)
    assert [run["text"] for run in runs] == ["a", "漢", "b"]
    assert [run["tokens"] for run in runs] == [2, 2, 1]
    assert prompt_runs(tokens[:3], 0, [(0, 3)], Utf8Decoder)[0]["text"] == "a\ufffd"


def test_the_text_is_bounded() -> None:
    """Past the bound runs have their tokens and no text."""
    tokens = [97] * (MAX_CHARS + 100)
    runs = prompt_runs(tokens, 0, [(MAX_CHARS - 10, MAX_CHARS + 50)], Utf8Decoder)
    assert sum(run["tokens"] for run in runs) == len(tokens)
    assert sum(len(run["text"]) for run in runs) == MAX_CHARS
    assert runs[-1] == {"fate": "left_out", "tokens": 50, "text": ""}


def test_no_tokens_no_runs() -> None:
    """And everything kept is one run."""
    assert prompt_runs([], 0, [], Utf8Decoder) == []
    assert prompt_runs([97, 98], 0, [(0, 2)], Utf8Decoder) == [{"fate": "kept", "tokens": 2, "text": "ab"}]
