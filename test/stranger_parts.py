"""Strangers on the network between two processes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tap:
    """A proxy of a port of this machine that records the bytes of its clients.

    Attributes:
        to: the port behind it.
        port: its own port.
        heard: what each client said.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self.heard: list[bytearray] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def change(self, data: bytes) -> bytes:
        """Return the bytes that go on in place of ``data`` from a client."""
        return data

    def close(self) -> None:
        """Let nobody else connect."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                there = socket.create_connection(("127.0.0.1", self.to))
                self.heard.append(said := bytearray())
                threading.Thread(target=self._pass_on, args=(client, there, said), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(there, client, None), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, said: bytearray | None) -> None:
        with one, contextlib.suppress(OSError):
            while part := one.recv(1 << 16):
                if said is not None:
                    said += part
                    part = self.change(part)
                other.sendall(part)
            other.shutdown(socket.SHUT_WR)
