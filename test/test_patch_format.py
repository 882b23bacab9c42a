"""The patch format: what goes in comes out, what does not fit is refused, and it is as small as promised."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_update.chunks import WeightSchema
from weight_update.compression import resolve_compression
from weight_update.encodings.changes import BITS, Changes, Run, Sparse
from weight_update.encodings.gaps import join_units
from weight_update.encodings.patch_format import Patch, PatchOptions, decode_patch, encode_patch
from weight_update.errors import FormatError

DOCS = Path(__file__).parent.parent / "docs" / "patch_format.rst"
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def lend(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes + 13,), 0xA5, dtype=torch.uint8)


def options(
    layout: str = "flat", delta: bool = True, values: str = "raw", codec: str = "none"
) -> PatchOptions:
    return PatchOptions(layout, delta, values, resolve_compression(codec))  # type: ignore[arg-type]


ALL_OPTIONS = [
    options(layout, delta, values, codec)
    for layout in ("flat", "coo")
    for delta in (True, False)
    for values in ("raw", "relative")
    for codec in ("none", "zstd")
]
any_options = st.sampled_from(ALL_OPTIONS)
shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=5),
    st.lists(st.sampled_from([1, 3, 300]), min_size=1, max_size=2),
    st.just([70_000]),
)


@dataclasses.dataclass
class Case:
    schema: WeightSchema
    old: torch.Tensor
    new: torch.Tensor
    changes: Changes

    def encode(self, chosen: PatchOptions) -> torch.Tensor:
        return encode_patch(self.changes, self.old, self.schema, 6, 7, chosen, lend)

    def applied(self, payload: torch.Tensor) -> Patch:
        patch = decode_patch(payload, self.schema)
        flat = self.old.clone()
        patch.changes.write(flat)
        assert torch.equal(flat, self.new)
        return patch


def noise(nbytes: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, nbytes, np.uint8))


def places(schema: WeightSchema, rng: np.random.Generator, density: float) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for meta in sorted((schema.tensors[i] for i in schema.distinct), key=lambda meta: meta.offset):
        width = min(meta.dtype.itemsize, 8)
        inside = np.flatnonzero(rng.random(meta.nbytes // width) < density)
        if inside.size and rng.random() < 0.8:
            found.setdefault(width, []).append(inside + meta.offset // width)
        elif meta.nbytes:
            start, end = sorted(rng.integers(0, meta.nbytes + 1, 2).tolist())
            found.setdefault(0, []).extend([(meta.offset + start, end - start)] if end > start else [])
    return found


def make_case(
    schema: WeightSchema, rng: np.random.Generator, density: float, largest_step: int | None = None
) -> Case:
    old = noise(schema.nbytes, rng)
    found = places(schema, rng, density)
    runs = tuple(Run(start, noise(size, rng)) for start, size in found.pop(0, []))
    parts = []
    for width, pieces in sorted(found.items()):
        positions = torch.from_numpy(np.concatenate(pieces))
        before = old.view(BITS[width])[positions]
        values = noise(width * positions.numel(), rng).view(BITS[width])
        if largest_step is not None:
            steps = rng.integers(1, largest_step + 1, positions.numel()) * rng.choice(
                [-1, 1], positions.numel()
            )
            values = before + torch.from_numpy(steps).to(BITS[width])
        parts.append(Sparse(width, positions, values))
    changes = Changes(tuple(parts), runs)
    new = old.clone()
    changes.write(new)
    return Case(schema, old, new, changes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
    tensors = {str(i): torch.empty(shape, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)}
    if tensors and draw(st.booleans()):
        tensors["tied"] = tensors["0"]
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    density = draw(st.sampled_from([1.0, 0.5, 0.05, 0.002, 0.0001]))
    return make_case(WeightSchema.of(tensors), rng, density, draw(st.sampled_from([None, 1, 4, 300])))


def bf16_case(elements: int, density: float, largest_step: int | None = None) -> Case:
    """A bf16 model of four matrices."""
    schema = WeightSchema.of(
        {str(i): torch.empty(elements // 4096, 1024, dtype=torch.bfloat16) for i in range(4)}
    )
    rng = np.random.default_rng(3)
    while True:
        case = make_case(schema, rng, density, largest_step)
        if not case.changes.runs:
            return case


@given(cases(), any_options)
@settings(max_examples=250, deadline=None)
def test_round_trip(case: Case, chosen: PatchOptions) -> None:
    payload = case.encode(chosen)
    patch = case.applied(payload)
    assert (patch.base, patch.version) == (6, 7)
    for part, original in zip(patch.changes.sparse, case.changes.sparse, strict=True):
        assert (part.width, part.values.dtype) == (original.width, original.values.dtype)
        assert part.relative == (chosen.values == "relative")
        assert torch.equal(part.positions, original.positions)


@pytest.mark.parametrize("chosen", ALL_OPTIONS)
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2, 2), (1, 70_000), (70_000, 1)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128])
def test_every_element_of_every_shape(
    shape: tuple[int, ...], dtype: torch.dtype, chosen: PatchOptions
) -> None:
    schema = WeightSchema.of({"before": torch.empty(3, dtype=dtype), "it": torch.empty(shape, dtype=dtype)})
    meta, width = schema.tensors[1], min(dtype.itemsize, 8)
    positions = torch.arange(meta.offset // width, (meta.offset + meta.nbytes) // width)
    old = noise(schema.nbytes, np.random.default_rng(0))
    changes = Changes((Sparse(width, positions, ~old.view(BITS[width])[positions]),))
    new = old.clone()
    changes.write(new)
    case = Case(schema, old, new, changes)
    case.applied(case.encode(chosen))


def test_changes_of_nothing() -> None:
    case = Case(
        WeightSchema.of({}), torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), Changes()
    )
    assert case.encode(options()).numel() == 32
    assert case.applied(case.encode(options())).changes.sparse == ()


@pytest.mark.parametrize("gap", [254, 255, 256, 509, 510, 511, 65_534, 65_535, 65_536, 131_070, 131_071])
@pytest.mark.parametrize("count", [1, 2, 300])
def test_gaps_around_the_escapes(gap: int, count: int) -> None:
    schema = WeightSchema.of({"a": torch.empty((gap + 1) * 300 + 400, dtype=torch.bool)})
    close = torch.arange(0, 400)
    far = 399 + torch.arange(1, count + 1) * (gap + 1)
    for positions in (far, torch.cat([close, far])):
        old = torch.zeros(schema.nbytes, dtype=torch.uint8)
        changes = Changes((Sparse(1, positions, torch.ones(positions.numel(), dtype=torch.uint8)),))
        new = old.clone()
        changes.write(new)
        case = Case(schema, old, new, changes)
        case.applied(case.encode(options()))


def test_positions_beyond_four_billion() -> None:
    schema = WeightSchema.of({"a": torch.empty(1 << 34, dtype=torch.uint8, device="meta")})
    positions = torch.tensor([0, 3, (1 << 32) - 1, 1 << 32, (1 << 34) - 1])
    changes = Changes((Sparse(1, positions, torch.arange(5, dtype=torch.uint8)),))
    for chosen in ALL_OPTIONS:
        if chosen.values == "raw":
            payload = encode_patch(changes, torch.empty(0), schema, 0, 1, chosen, lend)
            assert torch.equal(decode_patch(payload, schema).changes.sparse[0].positions, positions)


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


def test_coordinates_need_a_tensor_of_the_width() -> None:
    schema = WeightSchema.of({"a": torch.empty(8)})
    changes = Changes((Sparse(2, torch.tensor([1]), torch.tensor([1], dtype=torch.int16)),))
    with pytest.raises(ValueError, match="outside the tensors of its width"):
        encode_patch(changes, torch.zeros(64, dtype=torch.uint8), schema, 0, 1, options("coo"), lend)


@pytest.mark.parametrize("values", ["raw", "relative"])
def test_steps_instead_of_bits_give_the_same_patch(values: str) -> None:
    case = bf16_case(1 << 16, 0.1)
    (part,) = case.changes.sparse
    steps = part.values - case.old.view(torch.int16)[part.positions]
    relative = Changes((dataclasses.replace(part, values=steps, relative=True),))
    payload = dataclasses.replace(case, changes=relative).encode(options(values=values))
    assert torch.equal(payload, case.encode(options(values=values)))


# What does not fit is refused.


def decodes_or_refuses(payload: torch.Tensor, schema: WeightSchema) -> bool:
    """Whether a damaged payload is refused; if it is not, it must stay inside the buffer."""
    try:
        patch = decode_patch(payload, schema)
    except FormatError:
        return True
    for part in patch.changes.sparse:
        positions = part.positions.numpy()
        assert positions[0] >= 0
        assert positions[-1] < schema.nbytes // part.width
        assert (np.diff(positions) > 0).all()
        assert part.values.shape == part.positions.shape
    for run in patch.changes.runs:
        assert 0 <= run.start <= run.start + run.data.numel() <= schema.nbytes
    return False


@given(cases(), any_options, st.data())
@settings(max_examples=250, deadline=None)
def test_flipped_bytes(case: Case, chosen: PatchOptions, data: st.DataObject) -> None:
    payload = case.encode(chosen).clone()
    flips = st.tuples(st.integers(0, payload.numel() - 1), st.integers(1, 255))
    for at, bits in data.draw(st.lists(flips, min_size=1, max_size=3)):
        payload[at] ^= bits
    decodes_or_refuses(payload, case.schema)


@given(cases(), any_options, st.data())
@settings(max_examples=150, deadline=None)
def test_truncated_and_lengthened(case: Case, chosen: PatchOptions, data: st.DataObject) -> None:
    payload = case.encode(chosen)
    keep = data.draw(st.integers(0, payload.numel() - 1))
    assert decodes_or_refuses(payload[:keep].clone(), case.schema)
    more = torch.zeros(data.draw(st.integers(1, 9)), dtype=torch.uint8)
    assert decodes_or_refuses(torch.cat([payload, more]), case.schema)


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes(data: bytes) -> None:
    head = struct.pack("<4sBBBB", b"WUPP", 1, *data[:3].ljust(3, b"\0"))
    for raw in (data, head + data):
        payload = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
        decodes_or_refuses(payload, WeightSchema.of({"a": torch.empty(9, 9), "b": torch.empty(5).bfloat16()}))


@given(cases(), any_options)
@settings(max_examples=150, deadline=None)
def test_another_schema(case: Case, chosen: PatchOptions) -> None:
    small = WeightSchema.of({"a": torch.empty(3, 2).bfloat16(), "b": torch.empty(2)})
    decodes_or_refuses(case.encode(chosen), small)


def small_patch(layout: str = "flat", delta: bool = False) -> tuple[bytearray, WeightSchema]:
    """Elements 1 and 6 of 8 x 2 float32, uncompressed: each array takes 8 bytes, the values the last ones."""
    schema = WeightSchema.of({"a": torch.empty(8, 2), "b": torch.empty(2).double()})
    part = Sparse(4, torch.tensor([1, 6]), torch.tensor([10, 20], dtype=torch.int32))
    run = Run(64, torch.arange(8, dtype=torch.uint8))
    old = torch.zeros(schema.nbytes, dtype=torch.uint8)
    payload = encode_patch(Changes((part,), (run,)), old, schema, 0, 1, options(layout, delta), lend)
    return bytearray(payload.numpy().tobytes()), schema


SECTION, TABLE, ENTRY = 32, 48, 32


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<I", 0, "not a patch"),
        (4, "<B", 9, "not a patch of format 1"),
        (5, "<B", 2, "layout 2"),
        (6, "<B", 4, "flags 0x4"),
        (7, "<B", 5, "has elements of|no room for"),
        (8, "<I", 2, "array of a patch has 1 items, not 2"),
        (12, "<I", 1 << 31, "no room for 2147483648 arrays"),
        (16, "<q", -1, "from -1 to 1"),
        (24, "<q", -1, "from 0 to -1"),
        (SECTION, "<Q", 3, r"elements of \[3\] bytes"),
        (SECTION, "<Q", 16, r"elements of \[16\] bytes"),
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
        ("flat", False, 0, [1, 32], "element 32 of 32"),
        ("flat", False, 0, [6, 6], "do not increase"),
        ("flat", True, 0, [1, 30], "element 32 of 32"),
        ("flat", True, 0, [1, 255], "do not make 2 positions"),
        ("flat", True, 0, [255, 1], "do not make 2 positions"),
        ("flat", True, 2, [128], "run of 8 bytes at 128"),
        ("flat", True, 3, [7], "bytes for more runs"),
        ("flat", True, 3, [9], "run of 9 bytes"),
        ("flat", True, 3, [0], "run of 0 bytes"),
        ("coo", False, 0, [2], "names a tensor that is not there"),
        ("coo", False, 0, [1], "empty, tied or of another width"),
        ("coo", False, 1, [0], "changes no element"),
        ("coo", False, 1, [17], "more than there are"),
        ("coo", False, 1, [3], "have 3 changes together, not 2"),
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
    (part,) = patch.changes.sparse
    assert (part.width, part.relative) == (2, True)
    assert part.positions.tolist() == [2, 3, 300]
    assert part.values.tolist() == [1, -2, 256]
    (run,) = patch.changes.runs
    assert (run.start, run.data.tolist()) == (1024, [0, 0, 128, 63])
