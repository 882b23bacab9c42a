"""Read the patch format with torch operators, for changes that are written on a GPU."""

from __future__ import annotations

import torch

from weight_update.encodings.patch.arrays import ArrayReader
from weight_update.encodings.patch.changes import BITS, DeviceSegment
from weight_update.encodings.patch.gaps import UNITS, most_units
from weight_update.encodings.patch.gaps_cuda import SIGNED, DeviceGaps
from weight_update.encodings.patch.values import require_plane


def read_segment(
    arrays: ArrayReader, count: int, limit: int, width: int, relative: bool, device: torch.device
) -> DeviceSegment:
    """Read ``count`` changes of elements below ``limit``, whose positions are gaps.

    Raises:
        FormatError: the arrays are not valid.
    """
    gaps = DeviceGaps.read(arrays.at_most(most_units(count, limit), UNITS), count, limit, device)
    return DeviceSegment(gaps, read_values(arrays, count, width, relative, device))


def read_values(
    arrays: ArrayReader, count: int, width: int, relative: bool, device: torch.device
) -> torch.Tensor:
    """Read ``count`` values or steps of ``width`` bytes; FormatError if their arrays are not valid."""
    if not relative:
        return torch.from_numpy(arrays.exactly(count, (width,))).view(BITS[width]).to(device)
    zigzag = torch.zeros(count, width, dtype=torch.uint8, device=device)
    for plane in zigzag.unbind(1):
        where = arrays.at_most(most_units(count, count), UNITS)
        part = arrays.at_most(count, (1,))
        there = torch.from_numpy(part).to(device)
        if where.size:
            plane[DeviceGaps.read(where, part.size, count, device).all()] = there
        elif part.size:
            require_plane(part, count)
            plane.copy_(there)
    code = zigzag.view(SIGNED[width]).view(-1)
    largest = torch.iinfo(code.dtype).max  # clears the sign, which a shift of signed integers repeats
    return (((code >> 1) & largest) ^ -(code & 1)).view(BITS[width])
