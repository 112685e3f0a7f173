"""Tests for pool/supervisor.py: the table and the backoff. The processes are in test_faults.py."""

import os
import signal

import pytest
from pool_helpers import eventually, make_config, model

from headrace.pool.states import TRANSITIONS, WorkerEvent, WorkerState
from headrace.pool.supervisor import Supervisor, backoff_s
from headrace.protocol.errors import IllegalTransition
from headrace.protocol.frames import SpecPrefillAbility
from headrace.protocol.messages import EngineInfo, Ready

ABILITY: SpecPrefillAbility = {"supported": False, "reason": "unsupported_model", "draft": None}


class Nobody:
    """A listener that does not listen."""

    def on_events(self, worker, events):
        pass

    def on_state(self, worker, previous):
        pass

    def on_loading(self, worker):
        pass

    def may_replace(self, worker):
        return True

    def has_requests(self, worker):
        return False


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


async def test_weights_over_the_memory_limit_are_given_up_at_once():
    """A limit that the model can't keep is said, not tried again and again."""
    config = make_config(model(scripted_load_s=60), memory_limit_bytes=1 << 20)
    worker = Supervisor("words/0", config.models[0], config, {}, Nobody())
    worker.start()
    info = EngineInfo("words", 1, 2, True, ABILITY, "cpu", "float32", 3, 2 << 20, 5.0)
    worker._on_reports([Ready(info)])
    assert worker.state is WorkerState.FAILED
    assert "more than the memory limit" in (worker.status.last_failure or "")
    await eventually(lambda: worker.status.pid is None)
    assert worker.state is WorkerState.FAILED
    await worker.stop()


@pytest.mark.parametrize("busy", [False, True])
async def test_what_dies_with_requests_aboard_is_always_started_again(busy):
    """A request may have killed it; one that dies of itself, again and again, is given up."""

    class Somebody(Nobody):
        def has_requests(self, worker):
            return busy

    config = make_config(max_restarts_in_a_row=1, restart_backoff_initial_s=0.01)
    worker = Supervisor("words/0", config.models[0], config, {}, Somebody())
    worker.start()
    for _ in range(3):
        await eventually(lambda: worker.state in (WorkerState.READY, WorkerState.FAILED))
        if worker.state is WorkerState.FAILED:
            break
        os.kill(worker.status.pid, signal.SIGKILL)
        await eventually(lambda: worker.state is not WorkerState.READY)
    await eventually(lambda: worker.state in (WorkerState.READY, WorkerState.FAILED))
    assert worker.state is (WorkerState.READY if busy else WorkerState.FAILED)
    await worker.stop()
