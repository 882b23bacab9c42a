"""Write the patch format with torch operators, for changes on a GPU.

The bytes are those of :func:`~weight_update.encodings.patch.format.add_on_cpu`. The CPU asks the device for
sizes as seldom as possible, because each question waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weight_update.encodings.patch.arrays import ArrayWriter, narrowest
from weight_update.encodings.patch.changes import Sparse
from weight_update.encodings.patch.format import PatchOptions
from weight_update.encodings.patch.gaps import UNITS
from weight_update.encodings.patch.gaps_cuda import DeviceGaps, gaps_of, units_needed, units_of
from weight_update.encodings.patch.positions_coo import Grid
from weight_update.wire.schema import BITS, WeightSchema

Tensor = torch.Tensor


@torch.no_grad()
def add_on_device(out: ArrayWriter, part: Sparse, schema: WeightSchema, options: PatchOptions) -> None:
    """Do the work of ``add_on_cpu`` for tensors on a GPU, queued in the caller's current stream."""
    if options.layout == "coo":
        _add_coordinates(out, part.positions, Grid.of(schema, part.width), options.delta)
    elif options.delta:
        _add_positions(out, part)
    else:
        _add_integers(out, [part.positions])
    if part.relative:
        _add_byte_planes(out, part.values)
    else:
        out.put(part.values.contiguous().view(torch.uint8), part.width)


def _add(out: ArrayWriter, numbers: Tensor, width: int) -> None:
    """Add integers that fit ``width`` bytes, unsigned."""
    out.put(numbers.to(BITS[width]).view(torch.uint8), width)  # modulo: the bits of the unsigned one


def _add_integers(out: ArrayWriter, arrays: Sequence[Tensor]) -> None:
    """Add each array in its narrowest type; no array is empty."""
    for array, largest in zip(arrays, torch.stack([one.max() for one in arrays]).tolist(), strict=True):
        _add(out, array, narrowest(largest).itemsize)


def _add_positions(out: ArrayWriter, part: Sparse) -> None:
    """Add gaps; those that a scan coded already are joined, unless wider units may take fewer bytes."""
    coded = [one.gaps.units for one in part.segments if isinstance(one.gaps, DeviceGaps)]
    coded = [units for units in coded if units.itemsize == UNITS[0]]
    starts = [0, *(one.gaps.last + 1 for one in part.segments)]
    follow = all(one.gaps.first == start for one, start in zip(part.segments, starts, strict=False))
    if follow and len(coded) == len(part.segments) and sum(map(len, coded)) <= UNITS[1] * len(part):
        _add(out, torch.cat(coded), UNITS[0])
    else:
        _add_gaps(out, part.positions)


def _add_gaps(out: ArrayWriter, positions: Tensor) -> None:
    """Add gaps as :func:`~weight_update.encodings.patch.gaps.merge_gaps` returns them."""
    gaps = gaps_of(positions)
    needed = torch.stack([units_needed(gaps, size) for size in UNITS]).tolist()
    size, count = min(zip(UNITS, needed, strict=True), key=lambda one: one[0] * one[1])
    _add(out, units_of(gaps, size, count), size)


def _add_byte_planes(out: ArrayWriter, steps: Tensor) -> None:
    """Add byte planes as :func:`~weight_update.encodings.patch.values.encode_steps` writes them."""
    width = steps.itemsize
    zigzag = (steps << 1) ^ (steps >> (8 * width - 1))
    planes = zigzag.view(torch.uint8).view(-1, width).t().contiguous()
    filled = planes.count_nonzero(1).tolist()
    nothing = planes.new_empty(0)
    for plane, count in zip(planes, filled, strict=True):
        if 0 < 2 * count < plane.numel():
            places = plane.nonzero().view(-1)
            _add_gaps(out, places)
            out.put(plane[places], 1)
        else:
            out.put(nothing, 1)
            out.put(plane if count else nothing, 1)


def _add_coordinates(out: ArrayWriter, positions: Tensor, grid: Grid, delta: bool) -> None:
    """Add coordinates as :func:`~weight_update.encodings.patch.positions_coo.encode_coo` writes them."""
    table = np.stack([grid.ordinals, grid.starts, grid.starts + grid.rows * grid.columns, grid.columns])
    ordinals, starts, ends, widths = torch.from_numpy(table).to(positions.device)
    owner = torch.searchsorted(ends, positions, right=True)
    inside = positions - starts[owner]
    rows, columns = inside // widths[owner], inside % widths[owner]
    touched, counts = torch.unique_consecutive(owner, return_counts=True)
    if delta:
        rows, columns = _differences(rows, columns, owner)
    _add_integers(out, [ordinals[touched], counts, rows, columns])


def _differences(rows: Tensor, columns: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return increments over the previous change; a tensor's first row and a row's first column are kept."""
    steps, gaps = rows.clone(), columns.clone()
    same_tensor = owner[1:] == owner[:-1]
    steps[1:] -= rows[:-1] * same_tensor
    gaps[1:] -= columns[:-1] * (same_tensor & (rows[1:] == rows[:-1]))
    return steps, gaps
