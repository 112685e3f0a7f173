"""Run the gateway until it is told to stop: `headrace serve` after its flags have been read.

The listener opens before any model is loaded; then the models are loaded; then it serves until SIGTERM or
SIGINT. The first signal drains, the second one ends the process at once: engine processes notice that their
parent is gone, and exit.
"""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping

from . import __version__
from .gateway.access import is_loopback
from .gateway.server import Gateway
from .loading import LoadingDisplay
from .logs import set_up_logging
from .pool import ModelLoadFailed, Pool, WorkerStatus
from .settings import ServeSettings, access_tokens, gateway_config, pool_config

_ALREADY_SETTLED_S = 1.0
_SPARE_FILES = 256
"""Descriptors for pipes to engines, model files and the like."""


class ServeError(Exception):
    """The server could not start; the message is one line for the operator."""


def run(settings: ServeSettings) -> None:
    """Serve until told to stop.

    Raises:
        SettingsError: the settings make no sense together.
        ServeError: the address is taken, or no model can be loaded.
    """
    set_up_logging(settings.log_format)
    asyncio.run(_serve(settings, os.environ))


async def _serve(settings: ServeSettings, environment: Mapping[str, str]) -> None:
    config = gateway_config(settings, access_tokens(settings, environment))
    _raise_file_limit(config.limits.max_connections)
    if not config.access.tokens and settings.tcp and not is_loopback(settings.host):
        _say(f"warning: {settings.host} is reachable from other machines, and there is no token")
    with _stop_signal() as stop, LoadingDisplay(sys.stderr) as display:
        changed = asyncio.Event()

        def on_change(status: WorkerStatus) -> None:
            display.show(status)
            changed.set()

        async with Pool(pool_config(settings), on_change=on_change) as pool:
            gateway = Gateway(
                pool,
                config,
                server_version=__version__,
                max_queue=settings.max_queue,
                max_tokens=settings.max_tokens,
            )
            await _listen(gateway, settings)
            async with gateway:
                is_loaded = await _load(pool, changed, stop)
                display.close()
                if is_loaded:
                    _announce(gateway, pool)
                    await stop.wait()
                    _say_stopping(pool.statistics().in_flight, settings.drain_timeout)


def _say_stopping(num_running: int, drain_timeout_s: float) -> None:
    if num_running:
        noun = "request" if num_running == 1 else "requests"
        _say(
            f"stopping: {num_running} {noun} may end within {drain_timeout_s:g} s; a second signal means now"
        )


async def _listen(gateway: Gateway, settings: ServeSettings) -> None:
    try:
        await gateway.start()
    except OSError as error:
        raise _listen_error(error, settings) from None


def _listen_error(error: OSError, settings: ServeSettings) -> ServeError:
    what = os.strerror(error.errno) if error.errno else str(error)
    if error.filename is None:
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            return ServeError(f"{where} is taken: choose another --port")
        return ServeError(f"cannot listen on {where}: {what}")
    if error.filename in (settings.tls_cert, settings.tls_key):
        return ServeError(f"cannot use the certificate or key {error.filename}: {what}")
    if error.errno == errno.EADDRINUSE:
        return ServeError(f"--unix {error.filename} is taken by another server")
    return ServeError(f"cannot listen on --unix {error.filename}: {what}")


def _raise_file_limit(max_connections: int) -> None:
    """Let the process have a descriptor for each connection, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _load(pool: Pool, changed: asyncio.Event, stop: asyncio.Event) -> bool:
    """Wait until each model is ready or has failed; return False if told to stop before that.

    Raises:
        ServeError: no model can be loaded.
    """
    # However long: large models take their time, and the display tells how far they are.
    while any(model["state"] not in ("ready", "failed") for model in pool.list_models()):
        changed.clear()
        await _first_of(changed, stop)
        if stop.is_set():
            return False
    try:
        await pool.wait_ready(_ALREADY_SETTLED_S)
    except (ModelLoadFailed, TimeoutError) as error:
        raise ServeError(" ".join(str(error).split())) from None
    return True


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _announce(gateway: Gateway, pool: Pool) -> None:
    models = pool.list_models()
    ready = [model["name"] for model in models if model["state"] == "ready"]
    for model in models:
        if model["state"] == "failed":
            _say(f"warning: the model {model['name']} could not be loaded; the others are served")
    noun = "model" if len(ready) == 1 else "models"
    print(f"Headrace is ready: {gateway.url} ({noun} {', '.join(ready)})", flush=True)


@contextlib.contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """Return an event that the first SIGTERM or SIGINT sets; a second one ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        # From here on the process is on its way out; another signal must still mean now.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)
