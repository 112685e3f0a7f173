"""A TCP proxy in front of a server, whose connections can be cut."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class CutProxy:
    """Passes bytes on in both directions, until `cut`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection that is open, without a word."""
        for open_socket in self._sockets:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def close(self) -> None:
        """Let no more connections in, and cut those there are."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cut_proxy(target_port: int) -> Iterator[CutProxy]:
    """A proxy in front of a port of this machine."""
    proxy = CutProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
