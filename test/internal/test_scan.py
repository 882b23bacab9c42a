"""The changes that a scan finds turn the snapshot into the live tensors, bit for bit."""

from __future__ import annotations

import pytest
import torch
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st
from scan_parts import Tensors, check_form, flat_of, flip, same, schema_of

from weight_update.encodings.patch import diff_cpu as scan_module
from weight_update.encodings.patch.diff_cpu import LARGE, TILE, Scan, Scanner
from weight_update.testing import Zoo, random_bits
from weight_update.testing.models import small_views
from weight_update.wire.schema import DTYPES, TensorMeta, WeightSchema

pytestmark = pytest.mark.usefixtures("inner_loops")


def scanned(scanner: Scanner, schema: WeightSchema, tensors: Tensors, snapshot: torch.Tensor) -> Scan:
    """Scan, and check everything that holds for all tracked."""
    before = snapshot.clone()
    scan = scanner.scan(tensors, snapshot)
    assert same(snapshot, before)
    check_form(scan.changes, schema.nbytes)
    scan.changes.write(snapshot)
    assert same(snapshot, flat_of(schema, tensors, before))
    assert scanner.scan(tensors, snapshot).changed == 0
    return scan


def test_nothing_changed() -> None:
    tensors = [random_bits((3, 5), dtype, 1) for dtype in DTYPES.values()]
    schema = schema_of(tensors)
    scan = Scanner(schema).scan(tensors, flat_of(schema, tensors))
    assert (scan.changes.sparse, scan.changes.ranges) == ((), ())
    assert (scan.changed, scan.total) == (0, 15 * (len(DTYPES) + 1))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_zoo(seed: int, threads: int) -> None:
    old, new = ([*Zoo(i).parameters(), *Zoo(i).buffers()] for i in (0, seed))
    schema = schema_of(old)
    scanned(Scanner(schema, threads=threads), schema, new, flat_of(schema, old))


@pytest.mark.parametrize("fraction", [0.0001, 0.02, 0.15, 1.0])
@pytest.mark.parametrize("count", [1, 1001, 100_005])
@pytest.mark.parametrize("group", [1 << 16, 1 << 18])
def test_counts_are_exact(fraction: float, count: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "TILE", 1 << 16)
    monkeypatch.setattr(scan_module, "GROUP", group)
    monkeypatch.setattr(scan_module, "LARGE", 1 << 12)
    for dtype in DTYPES.values():
        tensor = random_bits((count,), dtype, 1)
        schema = schema_of([tensor])
        snapshot = flat_of(schema, [tensor])
        changed = flip(tensor, fraction, 3)
        scan = scanned(Scanner(schema, threads=2), schema, [tensor], snapshot)
        assert (scan.changed, scan.total) == (changed, tensor.nbytes // min(8, dtype.itemsize)), dtype


@pytest.mark.parametrize(
    "strided",
    [
        random_bits((140_001,), torch.float32, 1)[::2],
        random_bits((140_001,), torch.uint8, 1)[::2],
        random_bits((70_000, 3), torch.float8_e4m3fn, 1)[:, 0],
        random_bits((1,), torch.int64, 1).expand(50_000),
    ],
    ids=["every other", "every other byte", "a column", "one number"],
)
def test_large_strided_views_of_one_dimension(strided: torch.Tensor) -> None:
    schema = schema_of([strided])
    scanned(Scanner(schema), schema, [strided], torch.zeros(schema.nbytes, dtype=torch.uint8))


def test_lazy_and_strided_views(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = list(small_views(1).values())
    large = random_bits((400, 300), torch.complex64, 2)
    large = torch.view_as_complex(torch.nan_to_num(torch.view_as_real(large)))
    tensors += [
        large.conj(),
        large.t(),
        large.conj().imag,
        large.real[::2],
        large[0, 0],
        torch.ones(3).expand(50000, 3),
    ]
    images = torch.randn(64, 64, 9, 9).contiguous(memory_format=torch.channels_last)
    tensors += [images, random_bits((70001,), torch.bfloat16, 1)[1:], torch.ones(()).requires_grad_()]
    schema = schema_of(tensors)
    zeros = torch.zeros(schema.nbytes, dtype=torch.uint8)
    for dense_above in (0.0, 0.5, 1.0):
        monkeypatch.setattr(scan_module, "DENSE_ABOVE", dense_above)
        scanned(Scanner(schema), schema, tensors, zeros.clone())


@pytest.mark.parametrize(
    ("live", "kept"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.complex128, torch.complex64),
    ],
)
@pytest.mark.parametrize("count", [50, 1000, 300_001])
def test_conversion(live: torch.dtype, kept: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, dtype=live, generator=torch.Generator().manual_seed(1))
    schema = schema_of([tensor.to(kept), tensor[:7].to(kept), tensor[:9]])
    tensors = [tensor, tensor[:7], tensor[:9]]
    snapshot = flat_of(schema, tensors)
    with torch.no_grad():
        tensor[::97] *= 1.5
        tensor[1::97] *= 1 + 1e-14  # lost in conversion, unless it is none
    scan = scanned(Scanner(schema), schema, tensors, snapshot)
    assert 0 < scan.changed < 0.1 * scan.total + 10


def test_many_small_tensors_are_one_stream() -> None:
    tensors = [random_bits((1 + i % 7,), torch.bfloat16, i) for i in range(5000)]
    schema = schema_of(tensors)
    snapshot = flat_of(schema, tensors)
    for tensor in tensors[::2]:
        flip(tensor[:1], 1.0, 0)
    scan = scanned(Scanner(schema), schema, tensors, snapshot)
    (part,) = scan.changes.sparse
    assert part.positions.tolist() == [32 * i for i in range(0, 5000, 2)]
    assert scan.changed == 2500


def test_ranges_leave_untracked_entries_alone() -> None:
    tensors = [random_bits((200 + i,), torch.uint8, i) for i in range(40)]
    schema = schema_of(tensors)
    tracked = [i for i in range(40) if i % 3]
    snapshot = torch.zeros(schema.nbytes, dtype=torch.uint8)
    scan = Scanner(schema, tracked).scan(tensors, snapshot)
    assert len(scan.changes.ranges) == 13
    assert scan.total == sum(tensors[i].numel() for i in tracked)
    scan.changes.write(snapshot)
    for i, view in enumerate(schema.views(snapshot)):
        assert same(view, tensors[i] if i in tracked else torch.zeros_like(view)), i


def test_untracked_entries_are_not_found() -> None:
    tensors = [random_bits((LARGE + i,), torch.uint8, i) for i in range(3)] + [torch.ones(2), torch.ones(3)]
    schema = schema_of(tensors)
    scan = Scanner(schema, [1, 4]).scan(tensors, torch.zeros(schema.nbytes, dtype=torch.uint8))
    assert scan.total == LARGE + 1 + 3
    assert [one.start for one in scan.changes.ranges] == [
        *range(schema.tensors[1].offset, schema.tensors[2].offset - 64, TILE),
        schema.tensors[4].offset,
    ]


@pytest.mark.parametrize("tracked", [None, [0], [1], [1, 0]])
def test_tied_entries_are_looked_at_once(tracked: list[int] | None) -> None:
    weight = torch.ones(1000)
    schema = schema_of([weight, weight])
    scan = scanned(
        Scanner(schema, tracked), schema, [weight, weight], torch.zeros(schema.nbytes, dtype=torch.uint8)
    )
    assert (scan.changed, scan.total) == (1000, 1000)


def test_places_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "DENSE_ABOVE", 1.0)
    metas = [
        TensorMeta("a", (5,), torch.int16, 128),
        TensorMeta("b", (5,), torch.int16, 0),
        TensorMeta("c", (9,), torch.int8, 64),
    ]
    schema = WeightSchema(tuple(metas), 192)
    tensors = [torch.arange(5).short(), torch.arange(5).short(), torch.arange(9).to(torch.int8)]
    scanned(Scanner(schema), schema, tensors, torch.zeros(192, dtype=torch.uint8))


@pytest.mark.parametrize("tensors", [[], [torch.empty(0, 3)], [torch.empty(0), torch.tensor(1.5)]])
def test_little_or_nothing(tensors: Tensors) -> None:
    schema = schema_of(tensors)
    scan = scanned(Scanner(schema), schema, tensors, torch.zeros(schema.nbytes, dtype=torch.uint8))
    assert scan.changed == scan.total == sum(tensor.numel() for tensor in tensors)


def test_signs_of_zero_and_payloads_of_nan_count() -> None:
    old = torch.tensor([0.0, 0.0, float("nan"), 1.0])
    new = old.clone()
    new[0] = -0.0
    new.view(torch.int32)[2] ^= 1
    schema = schema_of([old])
    scan = scanned(Scanner(schema), schema, [new], flat_of(schema, [old]))
    assert scan.changes.sparse[0].positions.tolist() == [0, 2]


def test_results_share_no_memory() -> None:
    tensors = [torch.zeros(LARGE), torch.zeros(10), torch.zeros(10, dtype=torch.uint8)]
    schema = schema_of(tensors)
    scanner, snapshot = Scanner(schema), flat_of(schema, tensors)
    for tensor in tensors:
        tensor.fill_(1)
    scan = scanner.scan(tensors, snapshot)
    expected = flat_of(schema, tensors, snapshot)
    for tensor in tensors:
        tensor.fill_(2)
    scanner.scan(tensors, snapshot)
    scan.changes.write(snapshot)
    assert same(snapshot, expected)


SHAPES = st.lists(st.integers(0, 40), max_size=2).map(tuple) | st.sampled_from(
    [(LARGE,), (257, 301), (TILE // 8 + 3,)]
)
DTYPE_NAMES = st.sampled_from(sorted(DTYPES))


@examples(40)
@given(
    st.lists(st.tuples(SHAPES, DTYPE_NAMES, st.sampled_from([0.0, 0.001, 0.1, 1.0])), max_size=12),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.booleans(),
    st.integers(1, 3),
    st.data(),
)
def test_any_model(
    entries: list[tuple[tuple[int, ...], str, float]],
    dense_above: float,
    relative: bool,
    threads: int,
    data: st.DataObject,
) -> None:
    tensors = [random_bits(shape, DTYPES[name], i) for i, (shape, name, _) in enumerate(entries)]
    schema = schema_of(tensors)
    tracked = data.draw(st.lists(st.sampled_from(range(len(entries))), unique=True)) if entries else []
    snapshot = flat_of(schema, tensors)
    flipped = [
        flip(tensor, fraction, i)
        for i, (tensor, (_, _, fraction)) in enumerate(zip(tensors, entries, strict=True))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "DENSE_ABOVE", dense_above)
        scanner = Scanner(schema, tracked, relative, threads)
    before = snapshot.clone()
    scan = scanner.scan(tensors, snapshot)
    check_form(scan.changes, schema.nbytes)
    assert scan.changed == sum(flipped[i] for i in tracked)
    scan.changes.write(snapshot)
    for i, (view, was) in enumerate(zip(schema.views(snapshot), schema.views(before), strict=True)):
        assert same(view, tensors[i] if i in tracked else was)
