"""Transfers of pieces over a socket, with a checksum as fast as memory.

The compiled loop of ``transfer.c`` sums up the bytes while the processor's cache holds them, and waits for
the socket without the interpreter. Where the loop is missing (see :mod:`weight_update.wire.compiled`), each
piece is summed up after its transfer.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from weight_update.errors import LinkClosedError
from weight_update.transports.socket_stream import SocketStream
from weight_update.wire.compiled import load
from weight_update.wire.memory import byte_view

library: ctypes.CDLL | None = load(Path(__file__).parent, "_transfer", 1)
"""The compiled library; None where there is none."""

CHECKSUM = "lanes256/1"
"""Name of the checksum on the wire; ``docs/wire_format.rst`` defines it."""

BLOCK = 4 << 20
"""Number of bytes in one block of sums."""

LANES = 256
_ROW = 8 * LANES


class Checksum:
    """256 sums of 64-bit words for each block, and a digest of all sums.

    It detects every change within one word, so of any single bit, and blocks in another order. It is five
    times as fast as CRC-32 of zlib. It detects errors; it does not stop deliberate manipulation.
    """

    def __init__(self) -> None:
        self.sums = np.zeros(LANES, dtype=np.uint64)  # of the block that is not complete
        self._blocks: list[bytes] = []  # the sums of each complete block
        self._filled = 0  # bytes of the block that is being summed

    def add(self, piece: torch.Tensor) -> None:
        """Add the next bytes: 1-D uint8 on the CPU.

        The length is a multiple of 2048 and divides :data:`BLOCK`; only the last piece may have another one.
        """
        data = piece.numpy()  # not torch: its threads hang in forked processes
        rows = data[: data.size // _ROW * _ROW].view(np.uint64).reshape(-1, LANES)
        self.sums += np.add.reduce(rows, axis=0, dtype=np.uint64)
        self.end_piece(piece)

    def end_piece(self, piece: torch.Tensor) -> None:
        """Do the rest of :meth:`add` for a piece whose whole rows of 2048 bytes were added to the sums."""
        data = piece.numpy()
        if data.size % _ROW:
            rest = np.zeros(_ROW, dtype=np.uint8)
            rest[: data.size % _ROW] = data[data.size // _ROW * _ROW :]
            self.sums += rest.view(np.uint64)
        self._filled += data.size
        if self._filled == BLOCK:
            self._end_block()

    def blocks(self) -> list[bytes]:
        """Return the sums of each block; nothing can be added after it."""
        if self._filled:
            self._end_block()
        return self._blocks

    def _end_block(self) -> None:
        self._blocks.append(self.sums.astype("<u8", copy=False).tobytes())
        self.sums[:] = 0
        self._filled = 0


def joint_hex(parts: Sequence[Checksum]) -> str:
    """Return the digest of a payload whose blocks were added to the ``parts`` in turns."""
    digest = hashlib.blake2b(digest_size=16)
    for blocks in itertools.zip_longest(*(part.blocks() for part in parts), fillvalue=b""):
        for sums in blocks:
            digest.update(sums)
    return digest.hexdigest()


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
