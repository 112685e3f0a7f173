"""Who is to blame when an engine process dies: one request, perhaps, and its neighbours must not pay for it.

1. Whoever was running when an engine died is a suspect, and its death is counted against it.
2. A suspect goes on with no other suspect beside it in its engine, until it has made `PROBATION_TOKENS`
   more tokens. So when an engine dies with a suspect aboard, that one alone is blamed, and its neighbours go
   on free of it.
3. A request fails once the deaths counted against it reach the limit. The last one counts only if nobody
   else was under suspicion at the time: a request never fails for what its neighbour may have done. Who is
   spared by that has a longer probation the next time, so that a slow killer is found alone in the end.
4. After `FORGIVEN_AFTER_TOKENS` more tokens, nothing is held against a request: a prompt that kills engines
   dies at the same place again, and does not get that far.

With a limit of 1 nothing is tried again, and all that were running fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PROBATION_TOKENS = 2
"""More than an engine makes between the last token that was delivered and its death."""
PROBATION_GROWTH = 4
FORGIVEN_AFTER_TOKENS = 64


@dataclass(slots=True)
class Record:
    """What is held against one request."""

    num_deaths: int = 0
    probation_tokens: int = 0
    tokens_since_death: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it must have no other suspect beside it."""
        return self.tokens_since_death < self.probation_tokens

    def note_tokens(self, num_tokens: int) -> None:
        """Count tokens that it has made."""
        if self.num_deaths:
            self.tokens_since_death += num_tokens
            if self.tokens_since_death >= max(FORGIVEN_AFTER_TOKENS, self.probation_tokens):
                self.num_deaths = self.probation_tokens = self.tokens_since_death = 0


def blame(running: Sequence[Record], *, max_deaths: int) -> None:
    """Count the death of an engine against those that may have caused it."""
    blamed = [record for record in running if record.is_suspect] or running
    for record in blamed:
        record.num_deaths += 1
        if record.num_deaths >= max_deaths > 1 and len(blamed) > 1:
            record.num_deaths = max_deaths - 1
        grown = record.probation_tokens * PROBATION_GROWTH
        record.probation_tokens = max(PROBATION_TOKENS, grown)
        record.tokens_since_death = 0
