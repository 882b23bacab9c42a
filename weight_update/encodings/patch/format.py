"""The patch format: changes <-> one payload. ``docs/patch_format.rst`` describes it byte by byte.

::

    head | one section for each element width | table of arrays | arrays

All integers are little endian. A reader trusts nothing: it checks lengths, counts and positions against the
schema before it allocates or writes memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from weight_update.compression import Compression
from weight_update.encodings.base import CPU, Lend
from weight_update.encodings.patch.arrays import ALIGNMENT, UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.changes import ByteRange, Changes, Segment, Sparse
from weight_update.encodings.patch.decode_cuda import read_sparse
from weight_update.encodings.patch.gaps import UNITS, cut_units, merge_gaps, most_units
from weight_update.encodings.patch.positions_coo import Grid, decode_coo, encode_coo, require_increasing
from weight_update.encodings.patch.values import decode_steps, encode_steps
from weight_update.errors import FormatError
from weight_update.wire.schema import BITS, WeightSchema

_HEAD = struct.Struct("<4sBBBBIIqq")
_SECTION = struct.Struct("<QQ")
_MAGIC = b"WUPP"
_FORMAT = 1
_LAYOUTS = ("flat", "coo")
_DELTA, _RELATIVE = 1, 2


@dataclass(frozen=True)
class PatchOptions:
    """The options of :class:`~weight_update.PatchEncoding` that a reader finds in the patch."""

    layout: Literal["flat", "coo"]
    delta: bool
    relative: bool
    compression: Compression


class PatchHead(NamedTuple):
    """The head of a patch and its sections, which can be read without the schema.

    Attributes:
        ranges: number of byte ranges.
        arrays: number of arrays.
        base: version that the patch applies to.
        sections: width in bytes and number of changed elements of each section.
    """

    layout: str
    delta: bool
    relative: bool
    ranges: int
    arrays: int
    base: int
    version: int
    sections: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of head and sections."""
        return _HEAD.size + len(self.sections) * _SECTION.size

    @classmethod
    def decode(cls, raw: Array) -> PatchHead:
        """Read the head of a payload (1-D uint8).

        Raises:
            FormatError: the payload is not a patch of this format, or widths of its sections are not valid.
        """
        if raw.size < _HEAD.size:
            raise FormatError(f"a patch has at least {_HEAD.size} bytes, not {raw.size}")
        magic, form, layout, flags, count, ranges, arrays, base, version = _HEAD.unpack(
            raw[: _HEAD.size].tobytes()
        )
        if magic != _MAGIC or form != _FORMAT:
            raise FormatError(f"not a patch of format {_FORMAT}: it starts with {magic!r}, {form}")
        if layout >= len(_LAYOUTS) or flags & ~(_DELTA | _RELATIVE) or base < 0 or version < 0:
            raise FormatError(
                f"unknown layout {layout} or flags {flags:#x}, or a negative version: "
                f"from {base} to {version}"
            )
        sections = _read_sections(raw[_HEAD.size : _HEAD.size + count * _SECTION.size], count)
        delta, relative = bool(flags & _DELTA), bool(flags & _RELATIVE)
        return cls(_LAYOUTS[layout], delta, relative, ranges, arrays, base, version, sections)


@dataclass(frozen=True, eq=False)
class Patch(Changes):
    """The content of a payload, which may hold views into it; a :class:`~weight_update.encodings.Delta`.

    Attributes:
        base: version that it applies to.
        version: version that it makes.
    """

    base: int = 0
    version: int = 0

    def kept(self) -> Patch:
        """Return the same patch without views into its payload."""
        return self.map(lambda tensor: tensor.clone() if tensor.is_cpu else tensor)


def add_on_cpu(out: ArrayWriter, part: Sparse, schema: WeightSchema, options: PatchOptions) -> None:
    """Add the positions and values of changes of one width, which are CPU tensors."""
    if options.layout == "coo":
        encode_coo(out, part.positions.numpy(), Grid.of(schema, part.width), options.delta)
    elif options.delta:
        out.join(merge_gaps([one.cpu_gaps for one in part.segments]))
    else:
        out.integers(part.positions.numpy())
    write_values = encode_steps if part.relative else ArrayWriter.join
    write_values(out, [one.values.numpy().view(UNSIGNED[part.width]) for one in part.segments])


def encode_patch(
    changes: Changes,
    schema: WeightSchema,
    base: int,
    version: int,
    options: PatchOptions,
    lend: Lend,
    add: Callable[[ArrayWriter, Sparse, WeightSchema, PatchOptions], None] = add_on_cpu,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Write ``changes`` from ``base`` to ``version`` into one payload, 1-D uint8, exactly as long as needed.

    Changes are relative exactly if ``options`` are, and their positions are trusted. ``add`` is for the
    device that they are on. A compression that works on GPUs works on ``device`` if that is one.
    """
    out = ArrayWriter(options.compression, device)
    for part in changes.sparse:
        assert part.relative == options.relative
        add(out, part, schema, options)
    if changes.ranges:
        data = [one.data for one in changes.ranges]
        out.integers(np.array([one.start for one in changes.ranges], np.uint64))
        out.integers(np.array([one.numel() for one in data], np.uint64))
        if data[0].is_cuda:
            out.put(torch.cat(data), 1)
        else:
            out.join([one.numpy() for one in data])
    flags = _DELTA * options.delta | _RELATIVE * options.relative
    layout, count = _LAYOUTS.index(options.layout), len(changes.sparse)
    head = _HEAD.pack(_MAGIC, _FORMAT, layout, flags, count, len(changes.ranges), len(out), base, version)
    return out.write(head + b"".join(_SECTION.pack(part.width, len(part)) for part in changes.sparse), lend)


def decode_patch(payload: torch.Tensor, schema: WeightSchema, device: torch.device = CPU) -> Patch:
    """Read a payload (1-D uint8, CPU), for weights on ``device``.

    On the CPU, the payload must outlive the patch and must not change.

    Raises:
        FormatError: the payload is not valid: its head, a length or a count is wrong; a position is out of
            order or outside the buffer or the tensor; a codec is unknown or fails; or bytes are left.
    """
    if payload.data_ptr() % ALIGNMENT:
        payload = torch.from_numpy(payload.numpy().copy())
    head = PatchHead.decode(payload.numpy())
    for width, items in head.sections:
        if not 0 < items <= schema.nbytes // width:
            raise FormatError(
                f"a patch changes {items} of {schema.nbytes // width} elements of {width} bytes"
            )
    reader = ArrayReader(payload, head.nbytes, head.arrays, device)
    sparse = tuple(_decode_sparse(reader, *section, schema, head, device) for section in head.sections)
    ranges = _decode_ranges(reader, head.ranges, schema.nbytes)
    reader.finish()
    if device != CPU:
        ranges = tuple(replace(one, data=one.data.to(device)) for one in ranges)
    return Patch(sparse, ranges, head.base, head.version)


def _read_sections(raw: Array, count: int) -> tuple[tuple[int, int], ...]:
    if raw.size != count * _SECTION.size:
        raise FormatError(f"a patch is too short for {count} sections")
    sections = tuple(_SECTION.iter_unpack(raw.tobytes()))
    widths = [width for width, _ in sections]
    if not set(widths) <= set(BITS) or widths != sorted(set(widths)):
        raise FormatError(f"a patch has sections of widths {widths}")
    return sections


def _decode_sparse(
    arrays: ArrayReader,
    width: int,
    count: int,
    schema: WeightSchema,
    head: PatchHead,
    device: torch.device,
) -> Sparse:
    limit = schema.nbytes // width
    if head.layout == "coo":
        positions = decode_coo(arrays, count, schema, width, head.delta)
    elif not head.delta:
        positions = _decode_positions(arrays, count, limit)
    elif device != CPU:
        return read_sparse(arrays, width, count, limit, head.relative, device)
    else:
        gaps = cut_units(arrays.at_most(most_units(count, limit), UNITS), count, limit)
        each = torch.split(_decode_values(arrays, count, width, head.relative), [one.count for one in gaps])
        return Sparse(width, tuple(map(Segment, gaps, each)), head.relative)
    values = _decode_values(arrays, count, width, head.relative)
    found = Sparse.of(width, torch.from_numpy(positions), values, head.relative)
    return found.map(lambda tensor: tensor.to(device))


def _decode_values(arrays: ArrayReader, count: int, width: int, relative: bool) -> torch.Tensor:
    values = decode_steps(arrays, count, width) if relative else arrays.exactly(count, (width,))
    return torch.from_numpy(values).view(BITS[width])


def _decode_positions(arrays: ArrayReader, count: int, limit: int) -> Array:
    """Read ``count`` positions, int64; raise FormatError unless they increase and are below ``limit``."""
    positions = arrays.exactly(count)
    if int(positions[-1]) >= limit:
        raise FormatError(f"a patch changes element {positions[-1]}, but there are only {limit}")
    require_increasing(positions)
    return positions.astype(np.int64)


def _decode_ranges(arrays: ArrayReader, count: int, nbytes: int) -> tuple[ByteRange, ...]:
    if count == 0:
        return ()
    if count > nbytes:
        raise FormatError(f"a patch has {count} byte ranges in a buffer of {nbytes} bytes")
    starts, lengths = arrays.exactly(count), arrays.exactly(count)
    data = torch.from_numpy(arrays.at_most(nbytes, (1,)))
    end = at = 0
    ranges = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if start < end or length == 0 or start + length > nbytes or at + length > data.numel():
            raise FormatError(f"a patch has an invalid range of {length} bytes at byte {start}")
        ranges.append(ByteRange(start, data[at : at + length]))
        end, at = start + length, at + length
    if at != data.numel():
        raise FormatError("a patch has more bytes than its byte ranges need")
    return tuple(ranges)
