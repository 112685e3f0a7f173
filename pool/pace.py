"""How fast requests end: a guess for those that are refused, when to try again."""

from collections.abc import Sequence

RETRY_AFTER_MIN_MS = 100
RETRY_AFTER_MAX_MS = 60_000
RETRY_AFTER_UNKNOWN_MS = 1000
"""The hint before anything is known."""
_AVERAGE_WEIGHT = 0.2


class Pace:
    """Remembers about how long requests run, the latest ones more than the others."""

    def __init__(self) -> None:
        self._mean_run_s: float | None = None

    def note_run(self, run_s: float) -> None:
        """Note how long a request ran."""
        mean_s = run_s if self._mean_run_s is None else self._mean_run_s
        self._mean_run_s = mean_s + _AVERAGE_WEIGHT * (run_s - mean_s)

    def retry_after_ms(self, num_running: int, *, is_ready: bool, loads_s: Sequence[float]) -> int:
        """Guess when a full line will next have room: requests end one after another, so many at a time.

        Args:
            loads_s: how long the model took to load, in each of its processes; they decide if none is ready.
        """
        if not is_ready:
            next_end_ms = max((int(load_s * 1000) for load_s in loads_s), default=RETRY_AFTER_UNKNOWN_MS)
        elif self._mean_run_s is None:
            next_end_ms = RETRY_AFTER_UNKNOWN_MS
        else:
            next_end_ms = int(self._mean_run_s * 1000 / max(1, num_running))
        return min(max(next_end_ms, RETRY_AFTER_MIN_MS), RETRY_AFTER_MAX_MS)
