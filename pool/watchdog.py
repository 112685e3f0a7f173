"""Notice that an engine process does nothing any more: no clock and no process here, only the rule.

The sign of life is the time of the engine thread's last step, which only that thread reports: while it works,
while it waits (once a second), not from within a step that never ends, and not under SIGSTOP. While a model
is being loaded it is the last progress of loading.
"""

LATE_FACTOR = 3.0
"""A look that comes this many intervals after the last one proves that this process itself was held up."""


class Watchdog:
    """Judges one engine process. All times are `time.monotonic()`, which both processes share.

    Args:
        interval_s: how often `is_hanging` is going to be asked.
    """

    def __init__(self, *, hang_timeout_s: float, load_timeout_s: float, interval_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._load_timeout_s = load_timeout_s
        self._interval_s = interval_s
        self._last_sign_s = 0.0
        self._last_look_s = 0.0

    def start(self, now_s: float) -> None:
        """Begin: a process has been started."""
        self._last_sign_s = self._last_look_s = now_s

    def note_sign(self, at_s: float) -> None:
        """Note that the engine was alive at a time."""
        self._last_sign_s = max(self._last_sign_s, at_s)

    def silent_s(self, now_s: float) -> float:
        """Return for how long there was no sign of life."""
        return now_s - self._last_sign_s

    def is_hanging(self, now_s: float, *, is_loading: bool) -> bool:
        """Return whether the engine must be given up.

        Time in which nobody looked does not count: what the engine said then has not been heard.
        """
        unwatched_s = now_s - self._last_look_s
        self._last_look_s = now_s
        if unwatched_s > LATE_FACTOR * self._interval_s:
            self._last_sign_s = min(now_s, self._last_sign_s + unwatched_s)
        limit_s = self._load_timeout_s if is_loading else self._hang_timeout_s
        return self.silent_s(now_s) > limit_s
