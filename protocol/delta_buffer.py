"""Deltas of one request that wait to go on as one."""

from io import StringIO

from .messages import Delta


class DeltaBuffer:
    """Takes deltas and gives them back as one; what that costs is in proportion to what was added.

    Joining strings one by one would copy the whole text for every token of an answer that is collected.
    """

    __slots__ = ("_first", "_reasoning", "_text")

    def __init__(self) -> None:
        self._first: Delta | None = None
        self._text: StringIO | None = None
        self._reasoning: StringIO | None = None

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return self._first is not None

    def add(self, delta: Delta) -> None:
        """Take a delta, which belongs to this buffer from now on."""
        first = self._first
        if first is None:
            self._first = delta
            return
        if self._text is None or self._reasoning is None:
            self._text, self._reasoning = StringIO(), StringIO()
            self._text.write(first.text)
            self._reasoning.write(first.reasoning)
        self._text.write(delta.text)
        self._reasoning.write(delta.reasoning)
        delta.text = delta.reasoning = ""
        first.merge(delta)

    def take(self) -> Delta | None:
        """Return all that waits as one delta, or None; the buffer is empty then."""
        first, text, reasoning = self._first, self._text, self._reasoning
        self._first = self._text = self._reasoning = None
        if first is not None and text is not None and reasoning is not None:
            first.text, first.reasoning = text.getvalue(), reasoning.getvalue()
        return first
