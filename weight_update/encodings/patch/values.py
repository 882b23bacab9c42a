"""Values of a patch: raw bits, or steps from the old bits that are split into byte planes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.gaps import UNITS, Gaps, join_units, merge_gaps, most_units
from weight_update.errors import FormatError
from weight_update.threads import in_threads, threads_for

_NONE = np.empty(0, np.uint8)
_FAST = 32  # steps that are coded in the time of one element of other work
_SHARE = 1 << 18  # steps that one thread decodes at a time


def encode_steps(out: ArrayWriter, steps: Sequence[Array]) -> None:
    """Write steps (unsigned: new - old modulo 2**bits) so that small ones of either sign cost little.

    Steps are zigzag coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). Byte plane k holds byte k of all steps
    and is written as two arrays: the positions of its nonzero bytes, and these bytes. Where that is not
    shorter, the positions are empty and the second array is the whole plane. None of ``steps`` is empty.
    """
    total = sum(map(len, steps))
    for k in range(steps[0].itemsize):
        found = in_threads(partial(kernels.plane_of, plane=k), steps, threads_for(total // _FAST))
        plane, filled = [one for one, _ in found], sum(count for _, count in found)
        where = [_NONE]
        if filled == 0:
            plane = [_NONE]
        elif 2 * filled < total:
            together = np.concatenate(plane)
            places = np.flatnonzero(together)
            where, plane = merge_gaps([Gaps.of(places)]), [together[places]]
        out.join(where)
        out.join(plane)


def decode_steps(arrays: ArrayReader, count: int, width: int) -> Array:
    """Read ``count`` steps of ``width`` bytes, unsigned; raise FormatError for a plane that is not valid."""
    kind = UNSIGNED[width]
    planes = [_decode_plane(arrays, count) for _ in range(width)]
    steps = np.empty(count, kind)

    def fill(start: int) -> None:
        parts = [None if one is None else one[start : start + _SHARE] for one in planes]
        kernels.steps_of(parts, steps[start : start + _SHARE])

    in_threads(fill, range(0, count, _SHARE), threads_for(count // _FAST))
    return steps


def _decode_plane(arrays: ArrayReader, count: int) -> Array | None:
    """Read one byte for each of ``count`` steps; None if all of them are zero."""
    where, part = read_plane(arrays, count)
    if where.size:
        plane = np.zeros(count, np.uint8)
        plane[join_units(where, part.size, count)] = part
        return plane
    return part if part.size else None


def read_plane(arrays: ArrayReader, count: int) -> tuple[Array, Array]:
    """Read the two arrays of a plane of ``count`` steps, as :func:`encode_steps` writes them.

    Raises:
        FormatError: the first one is empty, and the second one is neither empty nor a whole plane.
    """
    where = arrays.at_most(most_units(count, count), UNITS)
    part = arrays.at_most(count, (1,))
    if not where.size and part.size not in (0, count):
        raise FormatError(f"a plane of a patch has {part.size} bytes, not {count}")
    return where, part
