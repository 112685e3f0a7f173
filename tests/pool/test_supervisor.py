"""Tests for pool/supervisor.py: the table and the backoff. The processes are in test_faults.py."""

import pytest
from pool_helpers import make_config

from headrace.pool.states import TRANSITIONS, WorkerEvent, WorkerState
from headrace.pool.supervisor import Supervisor, backoff_s
from headrace.protocol.errors import IllegalTransition


class Nobody:
    """A listener that does not listen."""

    def on_events(self, worker, events):
        pass

    def on_state(self, worker, previous):
        pass

    def on_loading(self, worker):
        pass


def test_every_state_can_be_stopped_and_reached():
    """Whatever a worker is doing, it can be told to stop; and no state is unreachable."""
    assert {state for state, event in TRANSITIONS if event is WorkerEvent.STOP} == set(WorkerState)
    assert set(TRANSITIONS.values()) == set(WorkerState)


def test_only_what_waits_can_be_started():
    """A second process is never started beside a first."""
    able = {state for state, event in TRANSITIONS if event is WorkerEvent.START}
    assert able == {WorkerState.STOPPED, WorkerState.BACKOFF}


async def test_an_illegal_event_changes_nothing():
    """What the table does not allow raises."""
    config = make_config()
    worker = Supervisor("words/0", config.models[0], config, {}, Nobody())
    with pytest.raises(IllegalTransition, match="LOADED in STOPPED"):
        worker._apply(WorkerEvent.LOADED)
    assert worker.state is WorkerState.STOPPED


def test_backoff_doubles_up_to_its_bound():
    """Each failure in a row waits twice as long, up to a bound, however many there are."""
    config = make_config(restart_backoff_initial_s=0.5, restart_backoff_max_s=3.0)
    assert [backoff_s(failures, config) for failures in (1, 2, 3, 4, 5, 10_000)] == [0.5, 1, 2, 3, 3, 3]
