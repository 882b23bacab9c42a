"""Read the patch format with torch operators, for changes that are written on a GPU."""

from __future__ import annotations

import torch

from weight_update.encodings.patch.arrays import ArrayReader
from weight_update.encodings.patch.changes import Segment, Sparse
from weight_update.encodings.patch.gaps import UNITS, most_units
from weight_update.encodings.patch.gaps_cuda import read_units
from weight_update.encodings.patch.values import read_plane
from weight_update.wire.schema import BITS


def read_sparse(
    arrays: ArrayReader, width: int, count: int, limit: int, relative: bool, device: torch.device
) -> Sparse:
    """Read ``count`` changes of elements below ``limit``, whose positions are gaps.

    Raises:
        FormatError: the arrays are not valid.
    """
    parts = read_units(arrays.at_most(most_units(count, limit), UNITS), count, limit, device)
    if relative:
        values = _read_steps(arrays, count, width, device)
    else:
        values = torch.from_numpy(arrays.exactly(count, (width,))).view(BITS[width]).to(device)
    each = torch.split(values, [one.count for one in parts])
    return Sparse(width, tuple(map(Segment, parts, each)), relative)


def _read_steps(arrays: ArrayReader, count: int, width: int, device: torch.device) -> torch.Tensor:
    """Read steps as :func:`~weight_update.encodings.patch.values.decode_steps` does."""
    zigzag = torch.zeros(count, width, dtype=torch.uint8, device=device)
    for plane in zigzag.unbind(1):
        where, part = read_plane(arrays, count)
        there = torch.from_numpy(part).to(device)
        if where.size:
            parts = read_units(where, part.size, count, device)
            plane[torch.cat([one.positions for one in parts])] = there
        elif part.size:
            plane.copy_(there)
    code = zigzag.view(BITS[width]).view(-1)
    largest = torch.iinfo(code.dtype).max  # clears the sign, which a shift of signed integers repeats
    return ((code >> 1) & largest) ^ -(code & 1)
