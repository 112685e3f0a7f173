"""From generated tokens to the text a client sees: characters, stop strings, reasoning, tool calls.

Three stages, each of which holds back only what may still change:

1. `Detokenizer`: bytes of an incomplete character;
2. `StopMatcher`: the longest end of the text that may still become a stop string;
3. mlx-lm's `TextStateMachine`: what may still become a marker of reasoning or of a tool call.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..protocol.frames import ToolCallDelta

logger = logging.getLogger(__name__)

PRIMING_TOKENS = 8
"""So many prompt tokens tell the decoder what stands before the answer (a leading space depends on it)."""
MAX_CHARACTER_BYTES = 4
MAX_HELD_TOKENS = 16
"""No character takes more tokens than this: what is held longer is broken output, and is shown as such."""


class Detokenizer:
    """Turns one request's tokens into text, a token at a time.

    The joined text is what decoding all tokens at once gives. Tokenizers without a fast implementation go
    through mlx-lm's streaming detokenizer.

    Args:
        prompt_tail: the last tokens of the prompt.
    """

    def __init__(self, tokenizer: TokenizerWrapper, prompt_tail: Sequence[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = backend if isinstance(backend, Tokenizer) else None
        if self._backend is None:
            self._slow = tokenizer.detokenizer
            return
        self._context, self._held = _split_open_character(self._backend, list(prompt_tail))
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)
        for token in self._held:
            self._stream.step(self._backend, token)

    def push(self, token: int) -> str:
        """Return the text that is certain now; may be empty."""
        if self._backend is None:
            self._slow.add_token(token)
            return str(self._slow.last_segment)
        self._held.append(token)
        text = self._stream.step(self._backend, token)
        if text:
            self._context = self._held
            self._held = []
            return text
        return self._flush() if len(self._held) > MAX_HELD_TOKENS else ""

    def finish(self) -> str:
        """Return what is left: an incomplete character becomes U+FFFD, as in a whole decode."""
        if self._backend is None:
            self._slow.finalize()
            return str(self._slow.last_segment)
        return self._flush() if self._held else ""

    def _flush(self) -> str:
        assert self._backend is not None
        before = self._backend.decode(self._context, skip_special_tokens=False)
        whole = self._backend.decode(self._context + self._held, skip_special_tokens=False)
        self._stream = DecodeStream(ids=self._held, skip_special_tokens=False)
        self._context, self._held = self._held, []
        return whole[len(before) :]


def _split_open_character(backend: Tokenizer, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Split a prompt's end where its last character, if incomplete, begins: the answer may complete it."""
    for length in range(MAX_CHARACTER_BYTES):
        whole = tokens[: len(tokens) - length]
        if not backend.decode(whole, skip_special_tokens=False).endswith("\ufffd"):
            return whole, tokens[len(whole) :]
    return [], []


class StopMatcher:
    """Finds the first stop string to be completed, wherever the borders between tokens lie.

    Of two that are completed by the same character the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that cannot belong to a stop string; sets `stopped` when one is complete."""
        if not self._stops:
            return text
        buffer = self._held + text
        found = [(index + len(stop), -len(stop)) for stop in self._stops if (index := buffer.find(stop)) >= 0]
        if found:
            end, negative_length = min(found)
            self.stopped, self._held = True, ""
            return buffer[: end + negative_length]
        keep = self._longest_open_end(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return what was held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_open_end(self, buffer: str) -> int:
        """Return how many of the last characters are the beginning of some stop string."""
        longest = min(len(buffer), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass
class Piece:
    """What some tokens say."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __iadd__(self, later: "Piece") -> "Piece":
        self.text += later.text
        self.reasoning += later.reasoning
        self.tool_calls += later.tool_calls
        return self

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


class AnswerFormat:
    """How a model marks reasoning and tool calls: read off its tokenizer once, by mlx-lm."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._machine = make_text_state_machine(tokenizer)
        self.has_markers = bool(
            tokenizer.has_thinking
            or tokenizer.has_tool_calling
            or tokenizer.structural_markers
            or tokenizer.response_transitions
        )
        self.tool_call_start = tokenizer.tool_call_start or ""
        self.tool_call_end = tokenizer.tool_call_end or ""
        self.tool_parser: Callable[[str, Any], Any] | None = tokenizer.tool_parser

    def start(self, state: str) -> Any:
        """Return the machine's state at the beginning of an answer."""
        return self._machine.make_state(state)


class Answer:
    """One request's answer: tokens in, pieces out.

    Args:
        call_id_prefix: ids of tool calls are this and a number.
        tools: the request's tools; without any, a tool call is text like any other.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        answer_format: AnswerFormat,
        *,
        stops: Sequence[str],
        starts_in: str,
        tools: list[dict[str, Any]] | None,
        call_id_prefix: str,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._format = answer_format
        self._machine = answer_format.start(starts_in) if answer_format.has_markers else None
        self._machine_state = starts_in
        self._tools = tools
        self._call_id_prefix = call_id_prefix
        self._tool_text = ""
        self.num_tool_calls = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: the answer ends before it."""
        return self._stops.stopped

    def push(self, token: int) -> Piece:
        """Take one token; return what is certain now."""
        return self._parse(self._stops.push(self._detokenizer.push(token)))

    def finish(self) -> Piece:
        """Return all that was held back; the answer is over."""
        text = ""
        if not self.stopped:
            text = self._stops.push(self._detokenizer.finish())
        if not self.stopped:
            text += self._stops.finish()
        piece = self._parse(text)
        if self._machine is not None:
            self._machine, rest, _ = TextStateMachine.flush(self._machine)
            self._add(piece, self._machine_state, rest)
            if self._machine_state == "tool":
                self._close_tool_call(piece, closed=not self._format.tool_call_end)
        return piece

    def _parse(self, text: str) -> Piece:
        piece = Piece()
        if self._machine is None:
            piece.text = text
        elif text:
            self._machine, segments = TextStateMachine.split(self._machine, text)
            for state, segment in segments:
                if self._machine_state == "tool" and state != "tool":
                    self._close_tool_call(piece)
                self._machine_state = state
                self._add(piece, state, segment)
        return piece

    def _add(self, piece: Piece, state: str, text: str) -> None:
        if state == "tool":
            self._tool_text += text
        elif state == "reasoning":
            piece.reasoning += text
        else:
            piece.text += text

    def _close_tool_call(self, piece: Piece, *, closed: bool = True) -> None:
        """Parse a tool call; what cannot be parsed stays text, so nothing is lost."""
        text, self._tool_text = self._tool_text, ""
        calls = self._parse_calls(text) if self._tools else None
        if calls is None:
            end = self._format.tool_call_end if closed else ""
            piece.text += f"{self._format.tool_call_start}{text}{end}"
            return
        for name, arguments in calls:
            piece.tool_calls.append(
                {
                    "index": self.num_tool_calls,
                    "id": f"{self._call_id_prefix}{self.num_tool_calls}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            )
            self.num_tool_calls += 1

    def _parse_calls(self, text: str) -> list[tuple[str, str]] | None:
        """Return names and arguments (JSON texts), or None: there is none, or one that no frame can hold."""
        if self._format.tool_parser is None:
            return None
        try:
            parsed = self._format.tool_parser(text, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            named = [(str(call["name"]), _as_json(call.get("arguments", {}))) for call in calls]
            # An escape in the model's JSON may be half a surrogate pair.
            "".join(part for call in named for part in call).encode()
        except Exception as error:  # parsers raise whatever the malformed text leads them to
            logger.info("a tool call could not be parsed: %s", type(error).__name__)
            return None
        return named or None


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
