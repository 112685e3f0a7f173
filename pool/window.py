"""Credit of one request: how many tokens its client allows, and how many of those its engine knows of.

An engine is told of more credit only after it has shown, by a token beyond what it had before, that it has
seen the last grant. So at most one `Credit` of a request is on its way, however many frames its client sends,
and a client can't fill an engine's command queue. Nobody waits longer for that: an engine that has not shown
it yet has tokens left to make.
"""


class Window:
    """Counts in tokens of the whole answer, over all engines that work on it."""

    def __init__(self, num_tokens: int) -> None:
        self._granted = num_tokens
        self._passed = 0
        """What the engine has been told."""
        self._seen_after = 0
        """With more tokens than this, the engine has shown that it knows all of `_passed`."""

    def grant(self, num_tokens: int) -> None:
        """Take more credit from the client."""
        self._granted += num_tokens

    def left(self, num_delivered: int) -> int:
        """Return how many tokens may still come."""
        return self._granted - num_delivered

    def is_paused(self, num_delivered: int) -> bool:
        """Whether the engine has stopped for want of credit that it knows of."""
        return num_delivered >= self._passed

    def begin(self, num_delivered: int) -> int:
        """Return the credit that an engine starts with, which has all of it."""
        self._passed, self._seen_after = self._granted, num_delivered
        return self.left(num_delivered)

    def take_due(self, num_delivered: int) -> int:
        """Return the credit that the engine must be told of now; 0: none, or not yet."""
        if num_delivered <= self._seen_after:
            return 0
        due = self._granted - self._passed
        if due:
            self._seen_after, self._passed = self._passed, self._granted
        return due
