"""The main function of an engine process, and the only place where the pool touches `engine/`.

Two threads. The main thread loads the model and steps it: MLX wants both on one thread. The reader thread
takes commands off the pipe at once, whatever the model is doing. When it is told to stop, or when the pipe
ends because the parent has gone, the main thread has a short time to finish its step; then the process
exits under it.

Nothing depends on stdout: it is joined to stderr before the engine is imported, so that a `print` somewhere
below can't get into what the gateway's process prints.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from ..protocol.messages import (
    Cancel,
    Command,
    Credit,
    EngineStats,
    LoadFailed,
    Loading,
    Ready,
    Report,
    Step,
    Stop,
    Submit,
    decode_command,
    encode_report,
)
from .json_logs import JsonFormatter

if TYPE_CHECKING:
    from ..engine.interface import Engine

STOP_GRACE_S = 0.5
"""How long the step under way may take once the process is to exit."""
LOADING_INTERVAL_S = 0.1
"""How often a stage of loading is reported."""
SIGN_OF_LIFE_S = 1.0
"""How often an engine without events is reported, busy or idle, unless the pool wants it more often."""

Commands = queue.SimpleQueue[Command]


def main(
    read_end: "Connection[bytes, bytes]",
    write_end: "Connection[bytes, bytes]",
    engine_config: Any,
    sign_of_life_s: float = SIGN_OF_LIFE_S,
) -> NoReturn:
    """Run an engine until told to stop. Never returns: the process exits.

    Args:
        read_end: commands.
        write_end: reports.
        engine_config: an `EngineConfig`.
        sign_of_life_s: how often the engine's thread must be heard of, whatever it does.
    """
    _set_up_process(engine_config.log_format)
    from ..engine.interface import EngineLoadError

    commands: Commands = queue.SimpleQueue()
    finished = threading.Event()
    reader = threading.Thread(
        target=_read_commands, args=(read_end, commands, finished), name="commands", daemon=True
    )
    reader.start()
    exit_code = 1
    try:
        engine = _load(engine_config, write_end)
        _send(write_end, Ready(engine.info))
        _serve(engine, commands, write_end, sign_of_life_s)
        exit_code = 0
    except EngineLoadError as error:
        _send_last(write_end, LoadFailed(str(error), error.permanent))
    except BrokenPipeError:
        pass  # The parent has gone.
    except BaseException:
        traceback.print_exc()
    finished.set()
    _exit(exit_code)


def _set_up_process(log_format: str) -> None:
    # The terminal sends Ctrl-C to the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # Its warnings are for people who train.
    with contextlib.suppress(OSError, RuntimeError):  # A parent without stderr has nothing to keep clean.
        os.dup2(2, 1)
        faulthandler.enable()
    name = multiprocessing.current_process().name
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s")
    if log_format == "json":
        logging.getLogger().handlers[0].setFormatter(JsonFormatter())


def _exit(code: int) -> NoReturn:
    """Exit without waiting for anybody: what an engine holds, the system takes back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _read_commands(
    read_end: "Connection[bytes, bytes]", commands: Commands, finished: threading.Event
) -> None:
    try:
        while not isinstance(command := decode_command(read_end.recv_bytes()), Stop):
            commands.put(command)
    except (EOFError, OSError):
        pass
    except Exception:
        traceback.print_exc()
        _exit(1)
    commands.put(Stop())
    finished.wait(STOP_GRACE_S)
    os._exit(0)  # No flush: the main thread may hold a stream's lock.


def _load(config: Any, write_end: "Connection[bytes, bytes]") -> "Engine":
    """Load the engine that the configuration asks for.

    Raises:
        EngineLoadError: whatever went wrong, with what is known of it for the operator.
    """
    from ..engine.interface import EngineLoadError

    reporter = _LoadReporter(write_end)
    reporter(Loading("start", 0, None, "steps"))
    try:
        if config.kind == "scripted":
            from ..engine.scripted import ScriptedEngine

            return ScriptedEngine.load(config, reporter)
        from ..engine.mlx_engine import MlxEngine

        return MlxEngine.load(config, reporter)
    except (EngineLoadError, BrokenPipeError):
        raise
    except Exception as error:
        traceback.print_exc()
        message = f"loading failed with {type(error).__name__}: {error}"
        raise EngineLoadError(message, permanent=isinstance(error, ImportError)) from error


class _LoadReporter:
    """Sends a stage of loading when it begins, when it is complete, and now and then between."""

    def __init__(self, write_end: "Connection[bytes, bytes]") -> None:
        self._write_end = write_end
        self._stage: str | None = None
        self._next_s = 0.0

    def __call__(self, loading: Loading) -> None:
        now_s = time.monotonic()
        if loading.stage == self._stage and loading.done != loading.total and now_s < self._next_s:
            return
        self._stage = loading.stage
        self._next_s = now_s + LOADING_INTERVAL_S
        _send(self._write_end, loading)


def _serve(
    engine: "Engine", commands: Commands, write_end: "Connection[bytes, bytes]", sign_of_life_s: float
) -> None:
    """Take commands, step, report; wait for commands when there is nothing to do.

    Every report carries the time of this thread, and none is sent by another: what the watchdog hears of is
    that this loop goes round.
    """
    sent_stats: EngineStats | None = None
    sent_at_s = 0.0
    while True:
        num_taken = _take_commands(engine, commands, sign_of_life_s)
        if num_taken is None:
            engine.close()
            return
        events = engine.step() if engine.busy or num_taken else []
        stats = engine.stats
        now_s = time.monotonic()
        is_news = stats != sent_stats and not engine.busy
        if events or is_news or now_s >= sent_at_s + sign_of_life_s:
            _send(write_end, Step(events, stats, now_s))
            sent_stats, sent_at_s = stats, now_s


def _take_commands(engine: "Engine", commands: Commands, timeout_s: float) -> int | None:
    """Give the engine all commands that have come; wait so long for one if it is idle.

    Returns:
        How many there were; None: it is to stop.
    """
    num_taken = 0
    try:
        command = commands.get(block=not engine.busy, timeout=timeout_s)
        while True:
            match command:
                case Submit():
                    engine.submit(command)
                case Cancel():
                    engine.cancel(command.rid, command.reason)
                case Credit():
                    engine.credit(command.rid, command.tokens)
                case Stop():
                    return None
            num_taken += 1
            command = commands.get_nowait()
    except queue.Empty:
        return num_taken


def _send(write_end: "Connection[bytes, bytes]", report: Report) -> None:
    write_end.send_bytes(encode_report(report))


def _send_last(write_end: "Connection[bytes, bytes]", report: Report) -> None:
    with contextlib.suppress(OSError):
        _send(write_end, report)
