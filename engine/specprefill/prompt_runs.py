"""A prompt's text with what became of each part of it: `specprefill_debug`. PROTOCOL.md, "SpecPrefill"."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from ...protocol.server_frames import PromptRun
from .selection import Range

MAX_CHARS = 1 << 18
"""Most characters of all runs together; later runs have their number of tokens and no text."""

Fate = Literal["cached", "kept", "left_out"]


class Decoder(Protocol):
    """Turns tokens into text one at a time, and holds back characters that are not complete."""

    def push(self, token: int) -> str:
        """Return the text that is certain now."""

    def finish(self) -> str:
        """Return what is left."""


def prompt_runs(
    tokens: Sequence[int], num_cached: int, kept: Iterable[Range], new_decoder: Callable[[], Decoder]
) -> list[PromptRun]:
    """Return a prompt as runs of tokens that had the same fate, in order.

    Args:
        tokens: the whole prompt.
        num_cached: so many of its first tokens came from the cache.
        kept: half-open ranges of the others that were read, in order.
        new_decoder: for the text. A character belongs to the run of its last token.
    """
    decoder, room = new_decoder(), MAX_CHARS
    runs: list[PromptRun] = []
    for fate, start, stop in _fates(len(tokens), num_cached, kept):
        text = ""
        if room > 0:
            text = "".join(map(decoder.push, tokens[start:stop]))[:room]
            room -= len(text)
        runs.append({"fate": fate, "tokens": stop - start, "text": text})
    if runs and room > 0:
        runs[-1]["text"] += decoder.finish()
    return runs


def _fates(num_tokens: int, num_cached: int, kept: Iterable[Range]) -> Iterator[tuple[Fate, int, int]]:
    if num_cached:
        yield "cached", 0, num_cached
    end = num_cached
    for start, stop in kept:
        if start > end:
            yield "left_out", end, start
        yield "kept", start, stop
        end = stop
    if num_tokens > end:
        yield "left_out", end, num_tokens
