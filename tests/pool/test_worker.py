"""Tests for pool/worker.py: a real process, the test on the other ends of its pipes."""

import contextlib
import multiprocessing
import time

import pytest
from pool_helpers import LIMIT_S, frame, scripted

from headrace.pool import worker
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import (
    Cancel,
    Delta,
    EngineStats,
    LoadFailed,
    Loading,
    Progress,
    Ready,
    Report,
    Step,
    Stop,
    Submit,
    decode_report,
    encode_command,
)


class Child:
    """An engine process and its pipes."""

    def __init__(self, config: object) -> None:
        context = multiprocessing.get_context("spawn")
        command_read, self.commands = context.Pipe(duplex=False)
        self.reports, report_write = context.Pipe(duplex=False)
        self.process = context.Process(
            target=worker.main, args=(command_read, report_write, config), name="child", daemon=True
        )
        self.process.start()
        command_read.close()
        report_write.close()

    def receive(self, kind: type[Report]) -> Report:
        """Return the next report, which must be of a kind (steps of loading are skipped)."""
        while True:
            assert self.reports.poll(LIMIT_S)
            report = decode_report(self.reports.recv_bytes())
            if not isinstance(report, Loading) or kind is Loading:
                assert isinstance(report, kind)
                return report

    def submit(self, rid: str, prompt: str = "one two three", max_tokens: int = 3) -> None:
        request = frame(prompt)
        options = request.options.resolve(model="words", max_tokens=max_tokens, temperature=0, seed=7)
        self.send(Submit(RequestId(rid), request.input, options, "", 1.0))

    def send(self, command: Submit | Cancel | Stop) -> None:
        self.commands.send_bytes(encode_command(command))

    def exit_code(self, limit_s: float = LIMIT_S) -> int | None:
        self.process.join(limit_s)
        return self.process.exitcode


@contextlib.contextmanager
def running(**fields):
    child = Child(scripted(**fields))
    try:
        yield child
    finally:
        child.process.kill()
        child.process.join(LIMIT_S)
        child.commands.close()
        child.reports.close()


def test_loads_answers_and_stops():
    """Loading, ready, a report per step with the gauges back at zero at the end, exit on `Stop`."""
    with running(scripted_token_delay_ms=1.0) as child:
        assert child.receive(Loading) == Loading("start", 0, None, "steps")
        assert isinstance(child.receive(Ready), Ready)
        child.submit("r1")
        events, stats = [], EngineStats()
        while not events or stats.in_flight:
            step = child.receive(Step)
            events += step.events
            stats = step.stats
        assert [type(event).__name__ for event in events] == ["Progress", "Delta", "Delta", "Delta", "End"]
        assert stats == EngineStats(prefill_tokens_total=3, completion_tokens_total=3, steps_total=3)
        assert not child.reports.poll(0.1)
        child.send(Stop())
        assert child.exit_code() == 0


def test_commands_are_taken_between_steps():
    """A cancel that comes while the engine works takes effect at the next step."""
    with running(scripted_token_delay_ms=5.0) as child:
        child.receive(Ready)
        child.submit("r1", max_tokens=1_000_000)
        while not any(isinstance(event, Delta) for event in child.receive(Step).events):
            pass
        child.send(Cancel(RequestId("r1"), "client"))
        for _ in range(5):
            step = child.receive(Step)
            if not isinstance(step.events[-1], Delta):
                break
        assert step.events[-1].status == "cancelled"
        assert step.stats.in_flight == 0


@pytest.mark.parametrize("way", ["stop", "end of file"])
def test_exits_in_the_middle_of_a_step(way: str):
    """`Stop`, and the end of the command pipe, end a process whose step takes an hour."""
    with running(scripted_token_delay_ms=1.0) as child:
        child.receive(Ready)
        child.submit("r1", "[[hang]]")
        num_tokens = 0
        while num_tokens < 2:
            num_tokens += sum(isinstance(event, Delta) for event in child.receive(Step).events)
        started_s = time.monotonic()
        if way == "stop":
            child.send(Stop())
        else:
            child.commands.close()
        assert child.exit_code() == 0
        assert time.monotonic() - started_s < 5 * worker.STOP_GRACE_S


def test_exits_while_loading():
    """A load that takes a minute does not keep the process alive."""
    with running(scripted_load_s=60.0) as child:
        child.receive(Loading)
        child.send(Stop())
        assert child.exit_code() == 0


def test_an_exception_in_a_step_ends_the_process(capfd: pytest.CaptureFixture[str]):
    """The traceback goes to stderr, and the exit code says that something was wrong."""
    with running(scripted_token_delay_ms=1.0) as child:
        child.receive(Ready)
        child.submit("r1", "[[raise]]")
        assert child.exit_code() == 1
    assert "RuntimeError: the prompt asked for it" in capfd.readouterr().err


def test_stdout_is_kept_clean(capfd: pytest.CaptureFixture[str]):
    """What an engine prints goes to stderr: stdout is the parent's."""
    with running() as child:
        child.receive(Ready)
        child.submit("r1", "[[print]]", max_tokens=3)
        num_tokens = 0
        while num_tokens < 3:
            step = child.receive(Step)
            num_tokens += sum(isinstance(event, Delta) for event in step.events)
        child.send(Stop())
        assert child.exit_code() == 0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("x") >= 1 << 20


def test_a_load_failure_is_told():
    """An `EngineLoadError` becomes a report, and the process exits."""
    with running(model="fault:permanent") as child:
        assert child.receive(LoadFailed) == LoadFailed("this model never loads: name another", True)
        assert child.exit_code() == 1


def test_a_command_that_does_not_decode_ends_the_process(capfd: pytest.CaptureFixture[str]):
    """Nonsense on the command pipe is a bug: the process says so and exits."""
    with running() as child:
        child.receive(Ready)
        child.commands.send_bytes(b'["what",{}]')
        assert child.exit_code() == 1
    assert "unknown command" in capfd.readouterr().err


def test_progress_of_a_long_prompt():
    """A prompt of many chunks reports its progress between them."""
    fields = {"scripted_prefill_tokens_per_s": 1000.0, "chunk_target_ms": 20.0, "progress_interval_s": 0.02}
    with running(**fields) as child:
        child.receive(Ready)
        child.submit("r1", "word " * 200, max_tokens=1)
        progress: list[Progress] = []
        events = []
        while not any(isinstance(event, Delta) for event in events):
            events = child.receive(Step).events
            progress += [event for event in events if isinstance(event, Progress)]
        assert len(progress) >= 4
        assert [event.processed for event in progress] == sorted(event.processed for event in progress)
        assert {event.total for event in progress} == {200}
