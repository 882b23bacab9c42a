"""Values of a patch: raw bits, or steps from the old bits that are split into byte planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weight_update.encodings.patch.arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.positions_flat import UNITS, join_units, most_units, split_units
from weight_update.errors import FormatError

_NONE = np.empty(0, np.uint8)


def encode_steps(out: ArrayWriter, steps: Sequence[Array]) -> None:
    """Write steps (unsigned: new - old modulo 2**bits) so that small ones of either sign cost little.

    Steps are zigzag coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). Byte plane k holds byte k of all steps
    and is written as two arrays: the positions of its nonzero bytes, and these bytes. Where that is not
    shorter, the positions are empty and the second array is the whole plane. None of ``steps`` is empty.
    """
    for plane in zip(*map(_byte_planes, steps), strict=True):
        _encode_plane(out, plane)


def _byte_planes(steps: Array) -> list[Array]:
    signed = steps.view(f"<i{steps.itemsize}")
    zigzag = signed << 1
    zigzag ^= signed >> (8 * steps.itemsize - 1)
    folded = zigzag.view(steps.dtype)
    shifts = range(0, 8 * steps.itemsize, 8)
    return [(folded >> folded.dtype.type(shift)).astype(np.uint8) for shift in shifts]


def _encode_plane(out: ArrayWriter, plane: Sequence[Array]) -> None:
    filled = sum(int(np.count_nonzero(one)) for one in plane)
    where: Sequence[Array] = [_NONE]
    if filled == 0:
        plane = [_NONE]
    elif 2 * filled < sum(map(len, plane)):
        together = np.concatenate(plane)
        places = np.flatnonzero(together)
        where, plane = split_units([(0, places)]), [together[places]]
    out.join(where)
    out.join(plane)


def decode_steps(arrays: ArrayReader, count: int, width: int) -> Array:
    """Read ``count`` steps of ``width`` bytes, unsigned; raise FormatError for a plane that is not valid."""
    kind = UNSIGNED[width]
    zigzag = np.zeros(count, kind)
    for plane in range(width):
        where = arrays.at_most(most_units(count, count), UNITS)
        part = arrays.at_most(count, (1,)).astype(kind)
        part <<= kind.type(8 * plane)
        if where.size:
            zigzag[join_units(where, part.size, count)] |= part
        elif part.size == count:
            zigzag |= part
        elif part.size:
            raise FormatError(f"a plane of a patch has {part.size} bytes, not {count}")
    one = kind.type(1)
    signs: Array = np.negative(zigzag & one)  # all bits set where the step was negative
    zigzag >>= one
    signs ^= zigzag
    return signs
