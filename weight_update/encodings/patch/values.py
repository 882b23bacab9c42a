"""Values of a patch: raw bits, or steps from the old bits that are split into byte planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import UNSIGNED, Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.gaps import UNITS, join_units, most_units, split_units
from weight_update.encodings.threads import in_threads, threads_for
from weight_update.errors import FormatError

_NONE = np.empty(0, np.uint8)
_FAST = 32  # steps that the compiled loops code in the time of one element of other work
_SHARE = 1 << 18  # steps that one thread decodes at a time


def encode_steps(out: ArrayWriter, steps: Sequence[Array]) -> None:
    """Write steps (unsigned: new - old modulo 2**bits) so that small ones of either sign cost little.

    Steps are zigzag coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). Byte plane k holds byte k of all steps
    and is written as two arrays: the positions of its nonzero bytes, and these bytes. Where that is not
    shorter, the positions are empty and the second array is the whole plane. None of ``steps`` is empty.
    """
    if kernels.library is None:
        for plane in zip(*map(_byte_planes, steps), strict=True):
            _encode_plane(out, plane)
        return
    for k in range(steps[0].itemsize):
        _encode_compiled(out, steps, k)


def _encode_compiled(out: ArrayWriter, steps: Sequence[Array], k: int) -> None:
    """Write byte plane ``k`` as :func:`_encode_plane` does."""
    total = sum(map(len, steps))
    threads = threads_for(total // _FAST)
    filled = sum(in_threads(lambda one: kernels.count_plane(one, k), steps, threads))
    if filled == 0:
        out.join([_NONE])
        out.join([_NONE])
        return
    plane = in_threads(lambda one: kernels.plane_of(one, k), steps, threads)
    if 2 * filled < total:
        _encode_plane(out, plane)
        return
    out.join([_NONE])
    out.join(plane)


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
    planes = [_decode_plane(arrays, count) for _ in range(width)]
    if kernels.library is not None:
        steps = np.empty(count, kind)

        def fill(start: int) -> None:
            parts = [None if one is None else one[start : start + _SHARE] for one in planes]
            kernels.steps_of(parts, steps[start : start + _SHARE])

        in_threads(fill, range(0, count, _SHARE), threads_for(count // _FAST))
        return steps
    zigzag = np.zeros(count, kind)
    for k, plane in enumerate(planes):
        if plane is not None:
            zigzag |= plane.astype(kind) << kind.type(8 * k)
    one = kind.type(1)
    signs: Array = np.negative(zigzag & one)  # all bits set where the step was negative
    zigzag >>= one
    signs ^= zigzag
    return signs


def _decode_plane(arrays: ArrayReader, count: int) -> Array | None:
    """Read one byte for each of ``count`` steps; None if all of them are zero."""
    where = arrays.at_most(most_units(count, count), UNITS)
    part = arrays.at_most(count, (1,))
    if where.size:
        plane = np.zeros(count, np.uint8)
        plane[join_units(where, part.size, count)] = part
        return plane
    if part.size not in (0, count):
        raise FormatError(f"a plane of a patch has {part.size} bytes, not {count}")
    return part if part.size else None
