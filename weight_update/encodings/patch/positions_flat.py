"""The layout "flat" of a patch: positions in the whole buffer, as gaps or as they are."""

from __future__ import annotations

import numpy as np

from weight_update.encodings.patch.arrays import Array, ArrayReader, ArrayWriter
from weight_update.encodings.patch.changes import Segment, Sparse
from weight_update.encodings.patch.gaps import UNITS, Gaps, cut_units, merge_gaps, most_units
from weight_update.errors import FormatError
from weight_update.threads import in_threads, threads_for


def encode_flat(out: ArrayWriter, part: Sparse, delta: bool) -> None:
    """Write the positions of ``part`` as gaps if ``delta``, else as they are."""
    if not delta:
        out.integers(part.positions.numpy())
        return
    shares = part.shares()
    todo = sum(len(one.offsets) for one in shares if isinstance(one, Segment))
    out.join(merge_gaps(in_threads(lambda one: one.gaps, shares, threads_for(todo))))


def decode_flat(arrays: ArrayReader, count: int, limit: int, delta: bool) -> Array | list[Gaps]:
    """Read ``count`` positions, int64, or as gaps if ``delta``.

    Raise FormatError unless they increase and are below ``limit``.
    """
    if delta:
        return cut_units(arrays.at_most(most_units(count, limit), UNITS), count, limit)
    positions = arrays.exactly(count)
    if int(positions[-1]) >= limit:
        raise FormatError(f"a patch changes element {positions[-1]}, but there are only {limit}")
    require_increasing(positions)
    return positions.astype(np.int64)


def require_increasing(positions: Array) -> None:
    """Raise FormatError unless each position is larger than the previous one."""
    if not (positions[1:] > positions[:-1]).all():
        raise FormatError("the positions of a patch do not increase")
