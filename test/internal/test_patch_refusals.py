"""Payloads that are no valid patch are refused by FormatError, and by nothing else."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st
from patch_cases import AS_ON_A_GPU, Case, any_options, cases, lend, options

from weight_update.encodings.patch.changes import ByteRange, Changes, Sparse
from weight_update.encodings.patch.format import PatchOptions, decode_patch, encode_patch
from weight_update.encodings.patch.gaps import join_units
from weight_update.errors import FormatError
from weight_update.wire.schema import WeightSchema

pytestmark = pytest.mark.usefixtures("inner_loops")


def decodes_or_refuses(payload: torch.Tensor, schema: WeightSchema) -> bool:
    """Whether a damaged payload is refused; if it is not, it must stay inside the buffer."""
    try:
        patch = decode_patch(payload, schema)
    except FormatError as error:
        message = re.escape(str(error))
        with pytest.raises(FormatError, match=f"^{message}$"):
            decode_patch(payload, schema, AS_ON_A_GPU)
        return True
    there = decode_patch(payload, schema, AS_ON_A_GPU)
    for ours, theirs in zip(patch.sparse, there.sparse, strict=True):
        assert torch.equal(ours.positions, theirs.positions)
        assert torch.equal(ours.values, theirs.values)
    for part in patch.sparse:
        positions = part.positions.numpy()
        assert positions[0] >= 0
        assert positions[-1] < schema.nbytes // part.width
        assert (np.diff(positions) > 0).all()
        assert part.values.shape == part.positions.shape
    for one in patch.ranges:
        assert 0 <= one.start <= one.start + one.data.numel() <= schema.nbytes
    return False


@given(cases(), any_options, st.data())
@examples(250)
def test_flipped_bytes(case: Case, chosen: PatchOptions, data: st.DataObject) -> None:
    payload = case.encode(chosen).clone()
    flips = st.tuples(st.integers(0, payload.numel() - 1), st.integers(1, 255))
    for at, bits in data.draw(st.lists(flips, min_size=1, max_size=3)):
        payload[at] ^= bits
    decodes_or_refuses(payload, case.schema)


@given(cases(), any_options, st.data())
@examples(150)
def test_truncated_and_lengthened(case: Case, chosen: PatchOptions, data: st.DataObject) -> None:
    payload = case.encode(chosen)
    keep = data.draw(st.integers(0, payload.numel() - 1))
    assert decodes_or_refuses(payload[:keep].clone(), case.schema)
    more = torch.zeros(data.draw(st.integers(1, 9)), dtype=torch.uint8)
    assert decodes_or_refuses(torch.cat([payload, more]), case.schema)


@given(st.binary(max_size=400))
@examples(200)
def test_arbitrary_bytes(data: bytes) -> None:
    head = struct.pack("<4sBBBB", b"WUPP", 1, *data[:3].ljust(3, b"\0"))
    for raw in (data, head + data):
        payload = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
        decodes_or_refuses(payload, WeightSchema.of({"a": torch.empty(9, 9), "b": torch.empty(5).bfloat16()}))


@given(cases(), any_options)
@examples(150)
def test_another_schema(case: Case, chosen: PatchOptions) -> None:
    small = WeightSchema.of({"a": torch.empty(3, 2).bfloat16(), "b": torch.empty(2)})
    decodes_or_refuses(case.encode(chosen), small)


def small_patch(layout: str = "flat", delta: bool = False) -> tuple[bytearray, WeightSchema]:
    """Elements 1 and 6 of 8 x 2 float32 and a byte range, uncompressed: each array takes 8 bytes."""
    schema = WeightSchema.of({"a": torch.empty(8, 2), "b": torch.empty(2).double()})
    part = Sparse.of(4, torch.tensor([1, 6]), torch.tensor([10, 20], dtype=torch.int32))
    replaced = ByteRange(64, torch.arange(8, dtype=torch.uint8))
    payload = encode_patch(Changes((part,), (replaced,)), schema, 0, 1, options(layout, delta), lend)
    return bytearray(payload.numpy().tobytes()), schema


SECTION, TABLE, ENTRY = 32, 48, 32


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<I", 0, "not a patch"),
        (4, "<B", 9, "not a patch of format 1"),
        (5, "<B", 2, "layout 2"),
        (6, "<B", 4, "flags 0x4"),
        (7, "<B", 5, "has sections of widths|too short for"),
        (8, "<I", 2, "array of a patch has 1 items, not 2"),
        (12, "<I", 1 << 31, "too short for 2147483648 arrays"),
        (16, "<q", -1, "from -1 to 1"),
        (24, "<q", -1, "from 0 to -1"),
        (SECTION, "<Q", 3, r"sections of widths \[3\]"),
        (SECTION, "<Q", 16, r"sections of widths \[16\]"),
        (SECTION + 8, "<Q", 0, "changes 0 of 32"),
        (SECTION + 8, "<Q", 33, "changes 33 of 32"),
        (SECTION + 8, "<Q", 1 << 60, "changes 1152921504606846976 of 32"),
        (SECTION + 8, "<Q", 3, "2 items, not 3"),
        (TABLE, "<B", 3, "2 items of 3 bytes"),
        (TABLE + 1, "<4s", b"nono", "unknown compression"),
        (TABLE + 16, "<Q", 1 << 60, "1152921504606846976 items"),
        (TABLE + 24, "<Q", 1 << 60, "does not lie inside the payload"),
        (TABLE + 4 * ENTRY + 16, "<Q", 129, "129 items"),
    ],
)
def test_lying_heads(at: int, form: str, value: Any, message: str) -> None:
    raw, schema = small_patch()
    struct.pack_into(form, raw, at, value)
    with pytest.raises(FormatError, match=message):
        decode_patch(torch.frombuffer(raw, dtype=torch.uint8), schema)


@pytest.mark.parametrize(
    ("layout", "delta", "array", "items", "message"),
    [
        ("flat", False, 0, [1, 32], "element 32, but there are only 32"),
        ("flat", False, 0, [6, 6], "do not increase"),
        ("flat", True, 0, [1, 30], "element 32, but there are only 32"),
        ("flat", True, 0, [1, 255], "do not give 2 positions"),
        ("flat", True, 0, [255, 1], "do not give 2 positions"),
        ("flat", True, 2, [128], "range of 8 bytes at byte 128"),
        ("flat", True, 3, [7], "more bytes than its byte ranges need"),
        ("flat", True, 3, [9], "range of 9 bytes"),
        ("flat", True, 3, [0], "range of 0 bytes"),
        ("coo", False, 0, [2], "names a tensor that does not exist"),
        ("coo", False, 0, [1], "empty, tied or of another width"),
        ("coo", False, 1, [0], "with no changed elements"),
        ("coo", False, 1, [17], "with more than it has"),
        ("coo", False, 1, [3], "have 3 changes in total, not 2"),
        ("coo", False, 2, [0, 8], "no tensor has"),
        ("coo", False, 3, [0, 2], "no tensor has"),
        ("coo", False, 2, [3, 0], "do not increase"),
        ("coo", True, 2, [7, 1], "its tensor does not have"),
        ("coo", True, 2, [1, 0], "do not increase|its tensor does not have"),
        ("coo", True, 2, [0, 0], "do not increase|its tensor does not have"),
    ],
)
def test_lying_arrays(layout: str, delta: bool, array: int, items: list[int], message: str) -> None:
    raw, schema = small_patch(layout, delta)
    arrays = struct.unpack_from("<I", raw, 12)[0]
    start = TABLE + arrays * ENTRY + 8 * array
    raw[start : start + len(items)] = bytes(items)
    with pytest.raises(FormatError, match=message):
        decode_patch(torch.frombuffer(raw, dtype=torch.uint8), schema)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("row", [3, 7])
def test_a_row_that_only_another_tensor_has(row: int, delta: bool) -> None:
    """Without this check, a change would lie outside its tensor."""
    schema = WeightSchema.of({"a": torch.empty(2, 2), "b": torch.empty(8, 2)})
    positions = torch.tensor([0, schema.tensors[1].offset // 4])
    part = Sparse.of(4, positions, torch.tensor([10, 20], dtype=torch.int32))
    payload = encode_patch(Changes((part,)), schema, 0, 1, options("coo", delta), lend)
    raw = bytearray(payload.numpy().tobytes())
    arrays = struct.unpack_from("<I", raw, 12)[0]
    raw[TABLE + arrays * ENTRY + 8 * 2] = row
    with pytest.raises(FormatError, match="row or column that its tensor does not have"):
        decode_patch(torch.frombuffer(raw, dtype=torch.uint8), schema)


def test_byte_ranges_that_overlap() -> None:
    schema = WeightSchema.of({"a": torch.empty(4)})
    ranges = tuple(ByteRange(start, torch.arange(8, dtype=torch.uint8)) for start in (0, 7))
    payload = encode_patch(Changes((), ranges), schema, 0, 1, options("flat", True), lend)
    with pytest.raises(FormatError, match="range of 8 bytes at byte 7"):
        decode_patch(payload, schema)


def test_bytes_between_arrays_are_zero() -> None:
    raw, schema = small_patch()
    raw[TABLE + 5 * ENTRY + 7] = 1
    with pytest.raises(FormatError, match="between the arrays"):
        decode_patch(torch.frombuffer(raw, dtype=torch.uint8), schema)


def test_a_head_without_arrays() -> None:
    raw, schema = small_patch()
    struct.pack_into("<I", raw, 12, 0)
    with pytest.raises(FormatError, match="0 items of 0 bytes"):
        decode_patch(torch.frombuffer(raw[:TABLE], dtype=torch.uint8), schema)


def test_gaps_whose_sum_would_wrap_around() -> None:
    count = (1 << 31) + 1
    units = np.broadcast_to(np.uint32(7), (count,))
    with pytest.raises(FormatError, match="2147483649 units of 4 bytes"):
        join_units(units, count, 1 << 42)
