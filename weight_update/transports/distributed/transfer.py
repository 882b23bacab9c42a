"""Transfers of pieces over a socket, which sum up the bytes while the processor's cache holds them.

The compiled loop of ``transfer.c`` also waits for the socket without the interpreter. Where the loop is
missing (see :mod:`weight_update.wire.compiled`), each piece is summed up after its transfer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

from weight_update.errors import LinkClosedError
from weight_update.transports.distributed.checksum import Checksum
from weight_update.transports.socket_stream import SocketStream
from weight_update.wire.compiled import load
from weight_update.wire.memory import byte_view

library: ctypes.CDLL | None = load(Path(__file__).parent, "_transfer", 1)
"""The compiled library; None where there is none."""


def transfer_piece(
    stream: SocketStream, piece: torch.Tensor, deadline: float | None, total: Checksum, *, sends: bool
) -> None:
    """Send or receive a piece as a :class:`SocketStream` does, and add it to ``total``."""
    if library is None:
        move = stream.send if sends else stream.recv_into
        move(byte_view(piece), deadline)
        total.add(piece)
        return
    wait = stream.await_room if sends else stream.await_more
    if not stream.retry(wait, deadline, _transfer(library, sends, stream, piece, total)):
        raise LinkClosedError("the other end is gone")
    total.end_piece(piece)


def _transfer(
    loops: ctypes.CDLL, sends: bool, stream: SocketStream, piece: torch.Tensor, total: Checksum
) -> Callable[[], bool]:
    """Return a function that transfers a piece, or raises BlockingIOError and goes on in its next call.

    It returns False if the connection ended.
    """
    done, number = ctypes.c_int64(0), ctypes.c_int64(piece.numel())
    addresses = ctypes.byref(done), ctypes.c_void_p(total.sums.ctypes.data)

    def go_on() -> bool:
        fd, start = stream.sock.fileno(), ctypes.c_void_p(piece.data_ptr())
        error: int = loops.wu_transfer(int(sends), fd, start, number, *addresses)
        if error > 0:
            raise OSError(error, os.strerror(error))
        return error == 0

    return go_on
