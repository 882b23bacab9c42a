"""The arrays of a patch payload: a table, then the bytes of each array, compressed separately.

``docs/patch_format.rst`` shows the bytes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_update.compression import Compression, NoCompression, decompressor_for, pack
from weight_update.encodings.base import CPU, Lend
from weight_update.encodings.dense import copy_together
from weight_update.errors import FormatError
from weight_update.threads import in_threads, threads_for
from weight_update.wire.schema import aligned

Array = npt.NDArray[Any]

ALIGNMENT = 8
"""Bytes to which every array is aligned, so that it can be viewed in place."""

UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Unsigned integer dtype by size in bytes."""

_ENTRY = struct.Struct("<B15sQQ")
_ENTRY_BYTES = _ENTRY.size
_MANY = 32  # bytes that are copied in the time of one element of other work


def narrowest(largest: int) -> np.dtype[Any]:
    """Return the narrowest unsigned integer dtype that holds ``largest``."""
    return next(dtype for dtype in UNSIGNED.values() if largest <= np.iinfo(dtype).max)


def union(parts: Sequence[Array]) -> Array:
    """Return the distinct positions (1-D int32 or int64) in all of ``parts``, in ascending order."""
    # Parts are mostly ascending, which sorting profits from; np.unique may take a hundred times as long.
    found = np.sort(np.concatenate(parts), kind="stable")
    distinct: Array = found[np.diff(found, prepend=-1) != 0]
    return distinct


class ArrayWriter:
    """A writer that collects arrays and writes them behind a head into one payload.

    If ``device`` is a GPU, a compression that works on GPUs works on it.
    """

    def __init__(self, compression: Compression, device: torch.device = CPU) -> None:
        self._compression, self._device = compression, device
        self._entries: list[bytes] = []
        self._bodies: list[list[torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def integers(self, array: Array) -> None:
        """Add unsigned integers in the narrowest type that holds them."""
        largest = int(array.max()) if array.size else 0
        self.join([array.astype(narrowest(largest), copy=False)])

    def put(self, data: torch.Tensor, width: int) -> None:
        """Add the bytes (1-D uint8) of integers of ``width``."""
        codec, packed = pack(self._compression, _on_device(data, self._compression.device, self._device))
        self._enter(width, codec, data.numel() // width, [packed])

    def join(self, arrays: Sequence[Array]) -> None:
        """Add one or more 1-D arrays of one unsigned type as a single array."""
        width, bodies = arrays[0].itemsize, [torch.from_numpy(one.view(np.uint8)) for one in arrays]
        if self._compression.name == NoCompression.name:
            self._enter(width, NoCompression.name, sum(map(len, arrays)), bodies)  # spares one copy
        else:
            self.put(torch.from_numpy(np.concatenate(arrays).view(np.uint8)), width)

    def _enter(self, width: int, codec: str, items: int, body: Sequence[torch.Tensor]) -> None:
        stored = sum(one.numel() for one in body)
        self._entries.append(_ENTRY.pack(width, codec.encode("ascii"), items, stored))
        self._bodies.append(list(body))

    def write(self, head: bytes, lend: Lend) -> torch.Tensor:
        """Write head, table and arrays into memory from ``lend``; return exactly these bytes, 1-D uint8."""
        table = torch.frombuffer(bytearray(head + b"".join(self._entries)), dtype=torch.uint8)
        buffers, end = [table], table.numel()
        for body in self._bodies:
            buffers += [torch.zeros(aligned(end, ALIGNMENT) - end, dtype=torch.uint8, device="cpu"), *body]
            end = aligned(end, ALIGNMENT) + sum(one.numel() for one in body)
        payload = lend(end)[:end]
        _gather(buffers, payload.numpy())
        return payload


def _gather(buffers: Sequence[torch.Tensor], out: Array) -> None:
    """Copy the buffers, which may be on a GPU, into ``out``, in order."""
    ends = itertools.accumulate(one.numel() for one in buffers)
    places = [(out[end - one.numel() : end], one) for one, end in zip(buffers, ends, strict=True)]
    on_gpu = [(torch.from_numpy(place), one) for place, one in places if one.is_cuda]
    if on_gpu:
        copy_together(*zip(*on_gpu, strict=True))

    def copy(place_and_buffer: tuple[Array, torch.Tensor]) -> None:
        place, one = place_and_buffer
        place[:] = one.numpy()

    on_cpu = [(place, one) for place, one in places if not one.is_cuda]
    in_threads(copy, on_cpu, threads_for(sum(len(place) for place, _ in on_cpu) // _MANY))


class ArrayReader:
    """A reader of the arrays of a payload, in order.

    Their table of ``arrays`` entries begins at ``start``; FormatError is raised if it does not fit in. If
    ``device`` is a GPU, a compression that works on GPUs works on it.
    """

    def __init__(self, payload: torch.Tensor, start: int, arrays: int, device: torch.device = CPU) -> None:
        self._payload, self._device = payload, device
        self._bytes = payload.numpy()
        self._at = start + arrays * _ENTRY_BYTES
        if self._at > payload.numel():
            raise FormatError(f"a patch of {payload.numel()} bytes is too short for {arrays} arrays")
        self._entries = _ENTRY.iter_unpack(self._bytes[start : self._at].tobytes())

    def exactly(self, items: int, widths: Sequence[int] = (1, 2, 4, 8)) -> Array:
        """Read the next array as :meth:`at_most` does; raise FormatError unless it has ``items`` items."""
        array = self.at_most(items, widths)
        if array.size != items:
            raise FormatError(f"an array of a patch has {array.size} items, not {items}")
        return array

    def at_most(self, items: int, widths: Sequence[int] = (1, 2, 4, 8)) -> Array:
        """Read the next array: 1-D, unsigned, perhaps a view into the payload.

        Its size is checked before memory is allocated; FormatError is raised if anything is wrong with it.
        """
        width, name, there, stored = next(self._entries, (0, b"", 0, 0))
        if width not in widths or there > items:
            raise FormatError(
                f"an array has {there} items of {width} bytes, expected at most {items} of {widths}"
            )
        data = self._next_bytes(stored)
        codec = decompressor_for(name.rstrip(b"\0").decode("ascii", "replace"))
        if codec.device == "cuda" and not torch.cuda.is_available():
            raise FormatError(f"the patch is compressed with {codec.name}, and torch sees no CUDA device")
        plain = codec.decompress(_on_device(data, codec.device, self._device), there * width)
        return plain.cpu().numpy().view(UNSIGNED[width])

    def _next_bytes(self, stored: int) -> torch.Tensor:
        start = aligned(self._at, ALIGNMENT)
        if start + stored > self._payload.numel():
            raise FormatError("an array of a patch does not lie inside the payload")
        if self._bytes[self._at : start].any():
            raise FormatError("the bytes between the arrays of a patch are not zero")
        self._at = start + stored
        return self._payload[start : self._at]

    def finish(self) -> None:
        """Raise FormatError if arrays or bytes are left."""
        if next(self._entries, None) is not None or self._at != self._payload.numel():
            raise FormatError("a patch has more arrays or bytes than its head announces")


def _on_device(data: torch.Tensor, kind: str, device: torch.device) -> torch.Tensor:
    """Return ``data`` where a compression works on it: ``device`` if it is of this kind.

    ``"any"`` is where the data is. Threads of this package have a current GPU that nobody chose.
    """
    if kind in ("any", data.device.type):
        return data
    return data.to(device if device.type == kind else kind)
