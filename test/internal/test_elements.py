"""Which elements of a weight a patch changes."""

from __future__ import annotations

import multiprocessing
import random

import pytest
import torch

from weight_update.encodings.patch.changes import ByteRange, Changes, Sparse
from weight_update.wire.schema import BITS, WeightSchema

pytestmark = pytest.mark.usefixtures("inner_loops")

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)


def random_schema(dice: random.Random) -> WeightSchema:
    shapes = [(dice.randrange(4), dice.randrange(1, 40)) for _ in range(6)]
    named = {str(i): torch.zeros(shape, dtype=dice.choice(DTYPES)) for i, shape in enumerate(shapes)}
    named["tied"] = named["0"]
    return WeightSchema.of(named)


def random_changes(dice: random.Random, schema: WeightSchema) -> Changes:
    """Return changes of elements of any width and of byte ranges, in padding as well."""
    parts, ranges, start = [], [], 0
    for width in BITS:
        count = schema.nbytes // width
        if count and dice.random() < 0.7:
            chosen = sorted(dice.sample(range(count), dice.randrange(1, min(count, 30) + 1)))
            parts.append(Sparse.of(width, torch.tensor(chosen), torch.zeros(len(chosen), dtype=BITS[width])))
    while (start := start + dice.randrange(200)) < schema.nbytes:
        length = min(dice.randrange(1, 400), schema.nbytes - start)
        ranges.append(ByteRange(start, torch.zeros(length, dtype=torch.uint8)))
        start += length
    return Changes(tuple(parts), tuple(ranges))


def test_elements_of_random_changes() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        schema = random_schema(dice)
        check_elements(schema, random_changes(dice, schema))


def check_elements(schema: WeightSchema, changes: Changes) -> None:
    changed = torch.zeros(schema.nbytes, dtype=torch.uint8)
    for part in changes.sparse:
        changed.view(-1, part.width)[part.positions] = 1
    for one in changes.ranges:
        changed[one.start : one.start + one.data.numel()] = 1
    touched = []
    for i, meta in enumerate(schema.tensors):
        raw = changed[meta.offset : meta.offset + meta.nbytes].view(-1, meta.dtype.itemsize)
        expected = raw.any(dim=1).nonzero().flatten()
        found = changes.elements_of(meta)
        if found is None:  # perhaps more than needed: values of all elements are right, too
            wide = [part.width for part in changes.sparse if part.width > meta.dtype.itemsize]
            assert wide or len(expected) == len(raw)
        else:
            assert found.dtype is torch.int64
            assert found.tolist() == expected.tolist()
        touched += [i] * bool(len(expected))
    assert changes.touched(schema) == touched


def test_a_forked_child_finds_changes_of_several_segments() -> None:
    """Torch would join the segments with threads, which a forked child does not have."""
    positions = torch.arange(300_000)
    changes = Changes((Sparse.of(1, positions, torch.ones_like(positions, dtype=torch.int8)),))
    assert len(changes.sparse[0].segments) > 1
    torch.ones(10_000_000).add_(1)  # with the threads of this process
    schema = WeightSchema.of({"weight": torch.zeros(len(positions), dtype=torch.uint8)})
    child = multiprocessing.get_context("fork").Process(target=changes.touched, args=(schema,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
