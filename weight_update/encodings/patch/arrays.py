"""The arrays of a patch payload: a table that describes them, then their bytes, each compressed by itself.

``docs/patch_format.rst`` shows the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_update.compression import Compression, decompressor_for, pack
from weight_update.encodings.base import Lend
from weight_update.errors import FormatError

__all__ = ["Array", "ArrayReader", "ArrayWriter", "narrowest"]

Array = npt.NDArray[Any]

ALIGNMENT = 8
"""Every array starts at a multiple of this many bytes, so that it can be viewed where it lies."""

UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""The unsigned integer of so many bytes."""

_ENTRY = struct.Struct("<B15sQQ")
ENTRY_BYTES = _ENTRY.size
_MAX_CODEC_NAME = 15
_PLAIN = "none/1"


def narrowest(largest: int) -> np.dtype[Any]:
    """The narrowest unsigned integer that holds ``largest``."""
    return next(dtype for dtype in UNSIGNED.values() if largest <= np.iinfo(dtype).max)


class ArrayWriter:
    """Collects arrays, then writes them behind a head into one payload."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._entries: list[bytes] = []
        self._bodies: list[list[torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def integers(self, array: Array) -> None:
        """Add unsigned integers in the narrowest type that fits them."""
        largest = int(array.max()) if array.size else 0
        self.add(array.astype(narrowest(largest), copy=False))

    def add(self, array: Array) -> None:
        """Add a 1-D array of unsigned integers as it is."""
        data = torch.from_numpy(array.view(np.uint8))
        self.put(_moved(data, self._compression.device), array.itemsize)

    def put(self, data: torch.Tensor, width: int) -> None:
        """Add the bytes (1-D uint8, on a device that the compression works on) of integers of ``width``."""
        codec, packed = pack(self._compression, data)
        self._enter(width, codec, data.numel() // width, [packed])

    def join(self, pieces: Sequence[Array]) -> None:
        """Add 1-D arrays of one unsigned type, at least one, one behind the other as a single array."""
        if self._compression.name != _PLAIN:
            self.add(np.concatenate(pieces))
            return
        items, bodies = sum(map(len, pieces)), [torch.from_numpy(piece.view(np.uint8)) for piece in pieces]
        self._enter(pieces[0].itemsize, _PLAIN, items, bodies)  # spares one copy

    def _enter(self, width: int, codec: str, items: int, body: Sequence[torch.Tensor]) -> None:
        name = codec.encode("ascii")
        if len(name) > _MAX_CODEC_NAME:
            raise ValueError(f"the name of a compression has at most {_MAX_CODEC_NAME} bytes: {codec!r}")
        stored = sum(piece.numel() for piece in body)
        self._entries.append(_ENTRY.pack(width, name, items, stored))
        self._bodies.append(list(body))

    def write(self, head: bytes, lend: Lend) -> torch.Tensor:
        """Head, table and arrays in memory from ``lend``, 1-D uint8, without a byte to spare."""
        table = torch.frombuffer(bytearray(head + b"".join(self._entries)), dtype=torch.uint8)
        pieces, end = [table], table.numel()
        for body in self._bodies:
            pieces += [torch.zeros(_align(end) - end, dtype=torch.uint8), *body]
            end = _align(end) + sum(piece.numel() for piece in body)
        payload = lend(end)[:end]
        _gather(pieces, payload.numpy())
        return payload


def _gather(pieces: Sequence[torch.Tensor], out: Array) -> None:
    """Copy the pieces one behind the other; what lies on a GPU comes from there in one transfer."""
    gpu = next((piece.device for piece in pieces if piece.is_cuda), None)
    if gpu is not None:
        together = torch.cat([piece.to(gpu) for piece in pieces])
        pieces = [torch.empty(together.shape, dtype=torch.uint8, pin_memory=True).copy_(together)]
    at = 0
    for piece in pieces:
        out[at : at + piece.numel()] = piece.numpy()
        at += piece.numel()


class ArrayReader:
    """Gives the arrays of a payload back, one after the other.

    Args:
        payload: 1-D uint8 CPU tensor.
        start: first byte of the table.
        arrays: number of its entries.

    Raises:
        FormatError: the table does not fit into the payload.
    """

    def __init__(self, payload: torch.Tensor, start: int, arrays: int) -> None:
        self._payload = payload
        self._bytes = payload.numpy()
        self._at = start + arrays * ENTRY_BYTES
        if self._at > payload.numel():
            raise FormatError(f"a patch of {payload.numel()} bytes has no room for {arrays} arrays")
        self._entries = _ENTRY.iter_unpack(self._bytes[start : self._at].tobytes())

    def exactly(self, items: int, widths: Sequence[int] = (1, 2, 4, 8)) -> Array:
        """The next array; see :meth:`at_most`.

        Raises:
            FormatError: it does not have ``items`` items, or is not valid.
        """
        array = self.at_most(items, widths)
        if array.size != items:
            raise FormatError(f"an array of a patch has {array.size} items, not {items}")
        return array

    def at_most(self, items: int, widths: Sequence[int] = (1, 2, 4, 8)) -> Array:
        """The next array: 1-D, unsigned, perhaps a view into the payload.

        Its size is checked before memory is allocated.

        Raises:
            FormatError: there is none, it announces more than ``items`` items or items of another width
                than ``widths``, it does not lie in the payload, or it does not decompress to its size.
        """
        width, name, there, stored = next(self._entries, (0, b"", 0, 0))
        if width not in widths or there > items:
            raise FormatError(f"a patch has {there} items of {width} bytes where {items} of {widths} can be")
        data = self._next_bytes(stored)
        codec = decompressor_for(name.rstrip(b"\0").decode("ascii", "replace"))
        if codec.device == "cuda" and not torch.cuda.is_available():
            raise FormatError(f"the patch is compressed with {codec.name}, and torch sees no CUDA device")
        plain = codec.decompress(_moved(data, codec.device), there * width)
        return plain.cpu().numpy().view(UNSIGNED[width])

    def _next_bytes(self, stored: int) -> torch.Tensor:
        start = _align(self._at)
        if start + stored > self._payload.numel():
            raise FormatError("an array of a patch does not lie inside the payload")
        if self._bytes[self._at : start].any():
            raise FormatError("the bytes between the arrays of a patch are not zero")
        self._at = start + stored
        return self._payload[start : self._at]

    def finish(self) -> None:
        """Check that all was read.

        Raises:
            FormatError: an array or a byte is left.
        """
        if next(self._entries, None) is not None or self._at != self._payload.numel():
            raise FormatError("a patch has more arrays or bytes than its head announces")


def _moved(data: torch.Tensor, device: str) -> torch.Tensor:
    return data.cuda() if device == "cuda" else data


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
