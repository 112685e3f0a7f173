"""What a gateway listens on: TCP, with TLS if there is a certificate, and a Unix socket."""

import errno
import os
import socket
import ssl
import stat
from pathlib import Path

from .config import ListenConfig

UNIX_MODE = 0o600
"""Only the user that runs the server may connect."""
_PROBE_TIMEOUT_S = 1.0


def tls_context(config: ListenConfig) -> ssl.SSLContext | None:
    """Return the context of the server's certificate; None without one.

    Raises:
        OSError: a file cannot be read, or is no certificate or key; it has the file's name.
    """
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name in filter(None, (config.tls_cert, config.tls_key)):
        with open(name, "rb"):  # ssl's own error does not say which file
            pass
    try:
        # With a password of its own a locked key doesn't ask for one at the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="-")
    except ssl.SSLError:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), config.tls_cert) from None
    return context


def bind_unix(path: Path) -> socket.socket:
    """Return a socket that is bound to a path and open to this user only; listen on it next.

    A socket that a server has left behind, which nobody answers, is replaced.

    Raises:
        OSError: a server answers there (`EADDRINUSE`), or something else is at this path; it has the path.
    """
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        bound.bind(str(path))
        # Before it listens, so that nobody can be faster.
        path.chmod(UNIX_MODE)
    except OSError as error:
        bound.close()
        raise _error(error.errno or 0, path) from None
    return bound


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def remove_unix(path: Path, bound: tuple[int, int] | None) -> None:
    """Remove a socket's file, if it still is the one that was bound: device and inode."""
    try:
        if bound == file_identity(path):
            path.unlink()
    except OSError:
        pass


def file_identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a file."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _error(errno.EEXIST, path)
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(_PROBE_TIMEOUT_S)
    try:
        probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    except TimeoutError:
        raise _error(errno.EADDRINUSE, path) from None  # it is busy
    else:
        raise _error(errno.EADDRINUSE, path)
    finally:
        probe.close()
