"""Positions <-> (tensor, row, column); the layout "coo" of a patch, as RLinf's weight syncer documents it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weight_update.encodings.patch.arrays import Array, ArrayReader, ArrayWriter
from weight_update.errors import FormatError
from weight_update.wire.schema import WeightSchema


@dataclass(frozen=True, eq=False)
class Grid:
    """The tensors of one element width as matrices, in the order of their offsets.

    A scalar is 1 x 1, a vector 1 x N, and a tensor of more than two dimensions is shape[0] x prod(shape[1:]).
    Elements of 16 bytes are two of 8, so that complex128 has twice the columns. Attributes are 1-D int64,
    with one item for each tensor that is neither empty nor tied to an earlier one.

    Attributes:
        ordinals: position in ``schema.tensors``.
        starts: first element in the flat buffer, in elements of this width.
    """

    ordinals: Array
    starts: Array
    rows: Array
    columns: Array

    @classmethod
    def of(cls, schema: WeightSchema, width: int) -> Grid:
        """Return the grid of the tensors whose elements have ``width`` bytes."""
        found = []
        for ordinal in schema.distinct:
            meta = schema.tensors[ordinal]
            if min(meta.dtype.itemsize, 8) == width and meta.nbytes:
                rows = meta.shape[0] if len(meta.shape) > 1 else 1
                columns = math.prod(meta.shape) // rows * (meta.dtype.itemsize // width)
                found.append((meta.offset // width, ordinal, rows, columns))
        starts, ordinals, rows_, columns_ = np.array(sorted(found), np.int64).reshape(-1, 4).T
        return cls(ordinals, starts, rows_, columns_)

    def take(self, index: Array) -> Grid:
        """Return the grid of some of the tensors."""
        return Grid(self.ordinals[index], self.starts[index], self.rows[index], self.columns[index])


def encode_coo(out: ArrayWriter, positions: Array, grid: Grid, delta: bool) -> None:
    """Write ``positions`` (int64, strictly increasing, not empty): ordinals, counts, rows, columns."""
    ends = grid.starts + grid.rows * grid.columns
    counts = np.searchsorted(positions, ends) - np.searchsorted(positions, grid.starts)
    touched = np.flatnonzero(counts)
    grid, counts = grid.take(touched), counts[touched]
    first = np.cumsum(counts) - counts
    rows, columns = _coordinates(positions, first, grid)
    if delta:
        rows, columns = _differences(rows, columns, first)
    for array in (grid.ordinals, counts, rows, columns):
        out.integers(array)


def _coordinates(positions: Array, first: Array, grid: Grid) -> tuple[Array, Array]:
    # Numpy cannot divide by a number outside the dtype.
    largest = max(int(positions[-1]), int(grid.columns.max()))
    columns = positions.astype(np.uint32 if largest < 1 << 32 else np.uint64)
    rows = np.empty_like(columns)
    # Tensor by tensor: dividing by a scalar is many times faster than by an array.
    for (begin, end), start, _, width in _tensor_ranges(first, positions.size, grid):
        row, column = rows[begin:end], columns[begin:end]
        column -= start
        np.floor_divide(column, width, out=row)
        column -= row * width
    return rows, columns


def _tensor_ranges(first: Array, size: int, grid: Grid) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """Yield the range of changes, the start, the rows and the columns of each tensor."""
    ranges = pairwise([*first.tolist(), size])
    return zip(ranges, grid.starts.tolist(), grid.rows.tolist(), grid.columns.tolist(), strict=True)


def _differences(rows: Array, columns: Array, first: Array) -> tuple[Array, Array]:
    steps = rows.copy()
    steps[1:] -= rows[:-1]
    steps[first] = rows[first]
    fresh = steps != 0
    fresh[first] = True
    gaps = columns.copy()
    gaps[1:] -= columns[:-1]
    np.copyto(gaps, columns, where=fresh)
    return steps, gaps


def decode_coo(arrays: ArrayReader, count: int, schema: WeightSchema, width: int, delta: bool) -> Array:
    """Read ``count`` positions, int64; raise FormatError unless they increase and lie in the tensors."""
    grid = Grid.of(schema, width)
    ordinals = arrays.at_most(grid.ordinals.size)
    counts = arrays.exactly(ordinals.size)
    rows = arrays.exactly(count)
    columns = arrays.exactly(count)
    grid = _chosen(grid, ordinals, len(schema.tensors))
    if (counts == 0).any() or (counts > (grid.rows * grid.columns).astype(np.uint64)).any():
        raise FormatError("a patch lists a tensor with no changed elements, or with more than it has")
    counts = counts.astype(np.int64)
    if counts.sum() != count:
        raise FormatError(f"the tensors of a patch have {counts.sum()} changes in total, not {count}")
    if int(rows.max()) >= int(grid.rows.max()) or int(columns.max()) >= int(grid.columns.max()):
        raise FormatError("a patch changes a row or column that no tensor has")
    place = _from_differences if delta else _from_coordinates
    return place(rows, columns, counts, grid)


def _chosen(grid: Grid, ordinals: Array, tensors: int) -> Grid:
    index = np.full(tensors, -1)
    index[grid.ordinals] = np.arange(grid.ordinals.size)
    if not ordinals.size or int(ordinals.max()) >= tensors:
        raise FormatError("a patch names a tensor that does not exist")
    chosen = index[ordinals.astype(np.int64)]
    if (chosen < 0).any():
        raise FormatError("a patch names a tensor that is empty, tied or of another width")
    require_increasing(chosen)
    return grid.take(chosen)


def _from_coordinates(rows: Array, columns: Array, counts: Array, grid: Grid) -> Array:
    positions = columns.astype(np.int64)
    for (begin, end), start, height, width in _tensor_ranges(np.cumsum(counts) - counts, rows.size, grid):
        row, place = rows[begin:end].astype(np.int64), positions[begin:end]
        if row.max() >= height or place.max() >= width:
            raise FormatError("a patch changes a row or column that its tensor does not have")
        row *= width
        row += start
        place += row
    require_increasing(positions)
    return positions


def require_increasing(positions: Array) -> None:
    """Raise FormatError unless each position is larger than the previous one."""
    if not (positions[1:] > positions[:-1]).all():
        raise FormatError("the positions of a patch do not increase")


def _from_differences(rows: Array, gaps: Array, counts: Array, grid: Grid) -> Array:
    first = np.cumsum(counts) - counts
    fresh = rows != 0
    fresh[first] = True
    heads = np.flatnonzero(fresh)  # the first change of each row
    if max(int(rows.max()), int(gaps.max())) * gaps.size >= 1 << 63:  # no writer makes such steps
        raise FormatError("the coordinates of a patch are too far apart")  # their sums could wrap around
    owner = np.searchsorted(first, heads, side="right") - 1
    jumps = rows[heads].astype(np.int64)
    row = np.cumsum(jumps)
    row -= (row - jumps)[np.searchsorted(heads, first)][owner]  # running sums that restart at each tensor
    last = np.add.reduceat(gaps, heads, dtype=np.int64)  # the last column of each row
    if (row >= grid.rows[owner]).any() or (last >= grid.columns[owner]).any():
        raise FormatError("a patch changes a row or column that its tensor does not have")
    if np.count_nonzero(gaps) - np.count_nonzero(gaps[heads]) != gaps.size - heads.size:
        raise FormatError("the columns of a patch do not increase")
    begin = grid.starts[owner] + row * grid.columns[owner]
    steps = gaps.astype(np.int64)
    steps[heads] += begin
    steps[heads[1:]] -= (begin + last)[:-1]
    return np.cumsum(steps, out=steps)
