"""Tests for pool/quarantine.py."""

import random

import pytest

from headrace.pool.quarantine import (
    ESTABLISHED_TOKENS,
    FORGIVEN_AFTER_TOKENS,
    PROBATION_TOKENS,
    Record,
    blame,
    may_join,
)


def test_all_are_suspects_after_a_first_death():
    """Nobody knows who it was; each must prove itself, one at a time."""
    running = [Record() for _ in range(3)]
    blame(running, max_deaths=2)
    assert [record.num_deaths for record in running] == [1, 1, 1]
    assert all(record.is_suspect for record in running)
    assert not may_join(running[0], running[1:])
    assert may_join(Record(), running)
    running[0].note_tokens(PROBATION_TOKENS)
    assert not may_join(running[1], running[2:])
    assert may_join(running[1], running[:1])
    assert [record.is_suspect for record in running] == [False, True, True]


def test_who_was_long_there_goes_on_at_once():
    """The first time: what kills an engine mostly does so at once. It is held against it all the same."""
    old, new = Record(tokens_here=ESTABLISHED_TOKENS), Record()
    blame([old, new], max_deaths=2)
    assert (old.num_deaths, old.is_suspect, new.is_suspect) == (1, False, True)
    old.note_tokens(1)
    blame([old], max_deaths=3)
    assert (old.num_deaths, old.is_suspect) == (2, True)


def test_a_lone_suspect_takes_all_the_blame():
    """Its neighbours go on free of it."""
    suspect, neighbours = Record(), [Record(), Record()]
    blame([suspect], max_deaths=2)
    blame([suspect, *neighbours], max_deaths=2)
    assert suspect.num_deaths == 2
    assert [record.num_deaths for record in neighbours] == [0, 0]
    assert not any(record.is_suspect for record in neighbours)


def test_nobody_fails_for_what_a_neighbour_may_have_done():
    """Deaths in company count up to the last but one, and the probation gets longer each time."""
    running = [Record(), Record()]
    for probation_tokens in (2, 8, 32):
        blame(running, max_deaths=2)
        assert [record.num_deaths for record in running] == [1, 1]
        assert [record.probation_tokens for record in running] == [probation_tokens] * 2
        assert not any(record.needs_solitude for record in running)
        for record in running:
            record.note_tokens(probation_tokens)


def test_who_was_spared_goes_on_in_solitude():
    """One that passed its probation may have been it: the next death must leave no doubt."""
    suspect, cleared = Record(), Record()
    blame([suspect, cleared], max_deaths=2)
    cleared.note_tokens(PROBATION_TOKENS)
    blame([suspect, cleared], max_deaths=2)
    assert (suspect.num_deaths, suspect.needs_solitude) == (1, True)
    assert not cleared.is_suspect
    assert not may_join(suspect, [cleared])
    assert not may_join(cleared, [suspect])
    assert may_join(suspect, [Record()])
    blame([suspect, Record()], max_deaths=2)
    assert suspect.num_deaths == 2


def test_a_limit_of_one_spares_nobody():
    """Nothing is tried again."""
    running = [Record(), Record()]
    blame(running, max_deaths=1)
    assert [record.num_deaths for record in running] == [1, 1]


def test_forgives():
    """A request that has gone well past the place of the death is like new."""
    record = Record()
    blame([record], max_deaths=2)
    record.note_tokens(PROBATION_TOKENS + FORGIVEN_AFTER_TOKENS - 1)
    assert not record.is_suspect
    assert record.num_deaths == 1
    record.note_tokens(1)
    assert record.num_deaths == 0


@pytest.mark.parametrize("strikes_after", [0, 1, 5, 20, 40, 63])
@pytest.mark.parametrize("tokens_before", [0, 100])
def test_a_killer_fails_and_its_neighbours_do_not(strikes_after: int, tokens_before: int):
    """Simulated: one of 16 kills every engine, some tokens after its start there; it alone fails."""
    rng = random.Random(strikes_after)
    records = [Record(tokens_here=tokens_before) for _ in range(16)]
    killer = records[rng.randrange(16)]
    waiting, aboard, made, num_engines = list(records), [], {}, 0
    for _ in range(100_000):
        if killer.num_deaths >= 2:
            break
        for record in sorted(waiting, key=lambda record: not record.is_suspect):
            if may_join(record, aboard):
                waiting.remove(record)
                aboard.append(record)
                made[id(record)] = 0
        if killer in aboard and made[id(killer)] == strikes_after:
            num_engines += 1
            blame(aboard, max_deaths=2)
            waiting, aboard = waiting + aboard, []
            rng.shuffle(waiting)
            continue
        for record in aboard:
            made[id(record)] += 1
            record.note_tokens(1)
    assert killer.num_deaths == 2
    assert num_engines <= 9
    assert [record.num_deaths < 2 for record in records].count(False) == 1
