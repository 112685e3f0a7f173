"""Who is to blame when an engine process dies: one request, perhaps, and its neighbours must not pay for it.

1. A death is counted against all that were running. Those that had made few tokens in that engine are
   suspects: what kills an engine mostly does so at once. The others, with `ESTABLISHED_TOKENS`, are none the
   first time.
2. A suspect is on probation until it has made `PROBATION_TOKENS` more tokens. Meanwhile nobody joins it in
   its engine that has anything held against it. When an engine dies with a suspect aboard, that one
   alone is blamed.
3. A request fails once the deaths counted against it reach the limit. The last one counts only if nobody else
   aboard had anything held against it. A suspect that is spared by that, because one that passed its
   probation may still have been it, goes on in solitude: beside none but those that nothing is held against.
   And a probation gets longer each time.
4. After its probation and `FORGIVEN_AFTER_TOKENS` more tokens, nothing is held against a request: a prompt
   that kills engines dies at the same place again, and does not get that far.
5. An engine that is replaced on purpose has not died. But a request that loses one engine after the other to
   that before its first token there, and so would never get on, is treated as if it had killed them.

So a request never fails for what its neighbour has done, and one that kills every engine fails: after as many
deaths as the limit says if it is tried first (those with the fewest tokens are), and a few more at worst. One
that gets further than `FORGIVEN_AFTER_TOKENS` in each is not caught: it gets on, and its neighbours with it.
With a limit of 1 nothing is tried again, and all that were running fail.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ESTABLISHED_TOKENS = 16
PROBATION_TOKENS = 2
"""More than an engine makes between the last token that was delivered and its death."""
PROBATION_GROWTH = 4
FORGIVEN_AFTER_TOKENS = 64


@dataclass(slots=True, eq=False)
class Record:
    """What is held against one request."""

    num_deaths: int = 0
    """Deaths of engines; 0: nothing is held against it."""
    probation_tokens: int = 0
    tokens_since_death: int = 0
    was_spared: bool = False
    """Whether the last death would have been one too many, had there been no doubt."""
    tokens_here: int = 0
    """Tokens made in the engine that it is in."""
    num_replaced: int = 0
    """Engines in a row that were replaced before they made a token of it."""

    @property
    def is_suspect(self) -> bool:
        """Whether it is on probation."""
        return self.tokens_since_death < self.probation_tokens

    @property
    def needs_solitude(self) -> bool:
        """Whether it must have none beside it that anything is held against."""
        return self.was_spared and self.is_suspect

    def note_tokens(self, num_tokens: int) -> None:
        """Count tokens that it has made."""
        self.tokens_here += num_tokens
        self.num_replaced = 0 if num_tokens else self.num_replaced
        if self.num_deaths:
            self.tokens_since_death += num_tokens
            if self.tokens_since_death >= self.probation_tokens + FORGIVEN_AFTER_TOKENS:
                self.num_deaths = self.probation_tokens = self.tokens_since_death = 0
                self.was_spared = False

    def note_replaced(self) -> bool:
        """Note that its engine was replaced; return whether it gets nowhere that way, and not for once."""
        if self.tokens_here == 0:
            self.num_replaced += 1
        self.tokens_here = 0
        return self.num_replaced > 1


def may_join(record: Record, aboard: Iterable[Record]) -> bool:
    """Return whether a request may run in an engine beside those that do."""
    if not record.num_deaths:
        return True
    held = [other for other in aboard if other.num_deaths]
    if record.needs_solitude:
        return not held
    return not any(other.is_suspect for other in held)


def blame(running: Sequence[Record], *, max_deaths: int) -> None:
    """Count the death of an engine against those that may have caused it."""
    blamed = [record for record in running if record.is_suspect] or running
    is_proven = len(blamed) == 1 and not any(r.num_deaths for r in running if r is not blamed[0])
    for record in blamed:
        is_free = record.num_deaths == 0 and record.tokens_here >= ESTABLISHED_TOKENS
        record.num_deaths += 1
        if record.num_deaths >= max_deaths > 1 and not is_proven:
            record.num_deaths = max_deaths - 1
            record.was_spared = len(blamed) == 1
        if not is_free:
            grown = record.probation_tokens * PROBATION_GROWTH
            record.probation_tokens = max(PROBATION_TOKENS, grown)
        record.tokens_since_death = 0
    for record in running:
        record.tokens_here = 0
        record.tokens_since_death = min(record.tokens_since_death, record.probation_tokens)
