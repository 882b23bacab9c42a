"""The patch format: what goes in comes out, as small as promised."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz import examples
from hypothesis import given
from patch_cases import ALL_OPTIONS, Case, any_options, bf16_case, cases, lend, make_case, noise, options

from weight_update.encodings.patch.changes import Changes, Sparse
from weight_update.encodings.patch.format import PatchOptions, decode_patch, encode_patch
from weight_update.wire.schema import BITS, WeightSchema

pytestmark = pytest.mark.usefixtures("inner_loops")

DOCS = Path(__file__).parents[2] / "docs" / "patch_format.rst"


@given(cases(), any_options)
@examples(250)
def test_round_trip(case: Case, chosen: PatchOptions) -> None:
    payload = case.encode(chosen)
    patch = case.applied(payload)
    assert (patch.base, patch.version) == (6, 7)
    for part, original in zip(patch.sparse, case.changes.sparse, strict=True):
        assert (part.width, part.values.dtype) == (original.width, original.values.dtype)
        assert part.relative == chosen.relative
        assert torch.equal(part.positions, original.positions)


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2, 2), (1, 70_000), (70_000, 1)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128])
def test_every_element_of_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    schema = WeightSchema.of({"before": torch.empty(3, dtype=dtype), "it": torch.empty(shape, dtype=dtype)})
    meta, width = schema.tensors[1], min(dtype.itemsize, 8)
    positions = torch.arange(meta.offset // width, (meta.offset + meta.nbytes) // width)
    old = noise(schema.nbytes, np.random.default_rng(0))
    changes = Changes((Sparse.of(width, positions, ~old.view(BITS[width])[positions]),))
    new = old.clone()
    changes.write(new)
    case = Case(schema, old, new, changes)
    for chosen in ALL_OPTIONS:
        case.applied(case.encode(chosen))


@pytest.mark.parametrize("chosen", ALL_OPTIONS)
def test_a_kept_patch_survives_its_payload(chosen: PatchOptions) -> None:
    case = bf16_case(1 << 16, 0.02)
    payload = case.encode(chosen)
    kept = decode_patch(payload, case.schema).kept()
    payload.fill_(77)
    flat = case.old.clone()
    kept.write(flat)
    assert torch.equal(flat, case.new)


def test_changes_of_nothing() -> None:
    case = Case(
        WeightSchema.of({}), torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), Changes()
    )
    assert case.encode(options()).numel() == 32
    assert case.applied(case.encode(options())).sparse == ()


@pytest.mark.parametrize("gap", [254, 255, 256, 509, 510, 511, 65_534, 65_535, 65_536, 131_070, 131_071])
@pytest.mark.parametrize("count", [1, 2, 300])
def test_gaps_around_the_escapes(gap: int, count: int) -> None:
    schema = WeightSchema.of({"a": torch.empty((gap + 1) * count + 400, dtype=torch.bool)})
    close = torch.arange(0, 400)
    far = 399 + torch.arange(1, count + 1) * (gap + 1)
    for positions in (far, torch.cat([close, far])):
        old = torch.zeros(schema.nbytes, dtype=torch.uint8)
        changes = Changes((Sparse.of(1, positions, torch.ones(positions.numel(), dtype=torch.uint8)),))
        new = old.clone()
        changes.write(new)
        case = Case(schema, old, new, changes)
        case.applied(case.encode(options()))


def test_positions_beyond_four_billion() -> None:
    schema = WeightSchema.of({"a": torch.empty(1 << 34, dtype=torch.uint8, device="meta")})
    positions = torch.tensor([0, 3, (1 << 32) - 1, 1 << 32, (1 << 34) - 1])
    changes = Changes((Sparse.of(1, positions, torch.arange(5, dtype=torch.uint8)),))
    for chosen in ALL_OPTIONS:
        if not chosen.relative:
            payload = encode_patch(changes, schema, 0, 1, chosen, lend)
            assert torch.equal(decode_patch(payload, schema).sparse[0].positions, positions)


def test_gaps_that_add_up_to_more_than_four_billion() -> None:
    schema = WeightSchema.of({"a": torch.empty(1 << 34, dtype=torch.uint8, device="meta")})
    positions = torch.arange(300_000) * 50_000
    changes = Changes((Sparse.of(1, positions, torch.ones(300_000, dtype=torch.uint8)),))
    payload = encode_patch(changes, schema, 0, 1, options(), lend)
    assert torch.equal(decode_patch(payload, schema).sparse[0].positions, positions)


def test_schema_whose_entries_are_not_in_the_order_of_their_places() -> None:
    rows = [["a", [4, 4], "float32", 128], ["b", [3, 3], "float32", 0], ["c", [2], "float32", 64]]
    schema = WeightSchema.from_header({"nbytes": 192, "tensors": rows})
    case = make_case(schema, np.random.default_rng(4), 0.9)
    for chosen in ALL_OPTIONS:
        case.applied(case.encode(chosen))


def test_payload_at_an_odd_address() -> None:
    case = bf16_case(1 << 14, 0.1)
    payload = case.encode(options())
    shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:]
    case.applied(shifted.copy_(payload))


# Sizes.


def bytes_a_change(case: Case, chosen: PatchOptions) -> float:
    count = sum(part.positions.numel() for part in case.changes.sparse)
    payload = case.encode(chosen)
    case.applied(payload)
    return payload.numel() / count


def test_one_percent_takes_little_more_than_three_bytes() -> None:
    assert bytes_a_change(bf16_case(1 << 22, 0.01), options()) <= 3.2


def test_small_steps_take_less_than_two_bytes_compressed() -> None:
    case = bf16_case(1 << 22, 0.01, largest_step=4)
    assert bytes_a_change(case, options(values="relative", codec="zstd")) <= 2.0


def test_steps_of_mostly_one_ulp_take_little_more_than_their_entropy() -> None:
    """Positions take 1.01 bytes, and steps 0.22."""
    dice = np.random.default_rng(0)
    steps = torch.from_numpy(np.where(dice.random(1 << 19) < 0.9, 1, dice.integers(2, 9, 1 << 19)))
    signs = torch.from_numpy(dice.choice([-1, 1], 1 << 19))
    case = bf16_case(1 << 24, 0.01)
    (part,) = case.changes.sparse
    relative = (steps * signs)[: len(part)].to(torch.int16)
    changes = Changes((Sparse.of(2, part.positions, relative, relative=True),))
    new = case.old.clone()
    changes.write(new)
    case = dataclasses.replace(case, changes=changes, new=new)
    assert bytes_a_change(case, options(values="relative", codec="ans")) <= 1.25


def test_small_steps_take_little_more_than_two_bytes_uncompressed() -> None:
    case = bf16_case(1 << 22, 0.01, largest_step=4)
    assert bytes_a_change(case, options(values="relative")) <= 2.2


# The page.


def test_the_documented_example() -> None:
    listing = re.search(r"example bytes::\n\n((?: {4}.*\n)+)", DOCS.read_text())
    assert listing is not None
    raw = bytearray.fromhex("".join(line.split("#")[0] for line in listing[1].splitlines()))
    schema = WeightSchema.of({"weight": torch.empty(16, 32, dtype=torch.bfloat16), "bias": torch.empty(4)})
    patch = decode_patch(torch.frombuffer(raw, dtype=torch.uint8), schema)
    assert (patch.base, patch.version) == (41, 42)
    (part,) = patch.sparse
    assert (part.width, part.relative) == (2, True)
    assert part.positions.tolist() == [2, 3, 300]
    assert part.values.tolist() == [1, -2, 256]
    (replaced,) = patch.ranges
    assert (replaced.start, replaced.data.tolist()) == (1024, [0, 0, 128, 63])


@pytest.mark.parametrize("delta", [True, False])
def test_coordinates_of_a_tensor_with_more_columns_than_32_bits_count(delta: bool) -> None:
    rows = [["wide", [1, (1 << 32) + 8], "uint8", 0]]
    schema = WeightSchema.from_header({"nbytes": (1 << 32) + 64, "tensors": rows})
    positions = torch.tensor([3, 70_000])
    changes = Changes((Sparse.of(1, positions, torch.tensor([1, 2], dtype=torch.uint8)),))
    chosen = dataclasses.replace(options("coo"), delta=delta)
    payload = encode_patch(changes, schema, 0, 1, chosen, lend)
    (part,) = decode_patch(payload, schema).sparse
    assert torch.equal(part.positions, positions)
