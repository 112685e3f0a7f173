"""Tests for pool/window.py."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.pool.window import Window


def test_an_engine_hears_of_credit_once_it_has_shown_that_it_knows_the_last():
    """One grant on its way at a time; what comes meanwhile is added up."""
    window = Window(4)
    assert window.begin(0) == 4
    window.grant(3)
    assert window.take_due(0) == 0
    assert window.take_due(1) == 3
    for _ in range(100):
        window.grant(1)
    assert window.take_due(4) == 0
    assert not window.is_paused(4)
    assert window.take_due(5) == 100
    assert window.left(5) == 102


def test_a_paused_engine_hears_of_credit_at_once():
    """Who has used all that it knew of has shown that it knew."""
    window = Window(2)
    window.begin(0)
    assert window.is_paused(2)
    window.grant(1)
    assert window.take_due(2) == 1
    assert not window.is_paused(2)


def test_another_engine_starts_with_what_is_left():
    """Credit that the lost engine never heard of is not lost."""
    window = Window(5)
    window.begin(0)
    window.grant(2)
    assert window.begin(3) == 4
    assert window.is_paused(7)
    assert window.take_due(7) == 0


@given(st.integers(1, 5), st.lists(st.one_of(st.integers(1, 5), st.none()), max_size=60))
def test_no_token_without_credit_and_none_withheld(first: int, actions: list[int | None]):
    """Whatever the order of grants and tokens: the engine makes exactly as many tokens as were granted."""
    window, granted, made, on_its_way = Window(first), first, 0, 0
    engine_credit = window.begin(0)
    for action in [*actions, *[None] * 400]:
        if action is not None:
            window.grant(action)
            granted += action
        elif on_its_way:
            engine_credit, on_its_way = engine_credit + on_its_way, 0
        elif made < engine_credit:
            made += 1
        due = window.take_due(made)
        assert not (due and on_its_way)
        on_its_way += due
        assert made <= granted
    assert made == granted
    assert window.is_paused(made)
