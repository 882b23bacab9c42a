"""The compiled inner loops of patches: the same results as numpy's."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from background import repeating
from scan_parts import flat_of, flip, schema_of

from weight_update import PatchEncoding
from weight_update.compression import resolve_compression
from weight_update.encodings.patch import gaps as gaps_module
from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.arrays import ArrayReader, ArrayWriter
from weight_update.encodings.patch.changes import Changes, Sparse
from weight_update.encodings.patch.diff_cpu import Scanner
from weight_update.encodings.patch.format import decode_patch, encode_patch
from weight_update.encodings.patch.gaps import UNITS, Gaps, cut_units, join_units, merge_gaps
from weight_update.encodings.patch.values import decode_steps, encode_steps
from weight_update.errors import FormatError, NotEnoughMemoryError
from weight_update.testing import random_bits
from weight_update.wire.compiled import load
from weight_update.wire.schema import BITS

pytestmark = pytest.mark.skipif(
    kernels.library is None, reason="there was no C compiler when the package was installed"
)

COUNTS = (0, 1, 7, 31, 32, 33, 63, 64, 65, 1000, 4097)


@pytest.fixture(params=[False, True], ids=["any instructions", "portable"])
def portable(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the branch of the compiled code that needs no special instructions."""
    assert kernels.library is not None
    try:
        switch = ctypes.c_int.in_dll(kernels.library, "wu_portable")
    except ValueError:
        pytest.skip("this processor has one branch only")
    switch.value = request.param
    yield
    switch.value = 0


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_differences(width: int, fraction: float, relative: bool) -> None:
    """Two tiles with elements between them; nothing is written behind the room that a scan may use."""
    dice = np.random.default_rng(width)
    for count in COUNTS:
        first, between = int(dice.integers(0, 1000)), int(dice.integers(0, 1000))
        old, new = (dice.integers(0, 256, 2 * count * width, np.uint8) for _ in range(2))
        elements, before = new.view(f"<u{width}"), old.view(f"<u{width}")
        same = dice.random(2 * count) >= fraction
        elements[same] = before[same]
        buffer = kernels.GapBuffer(width, 2 * count + between)
        for room in buffer._arrays():
            room[-1:] = 77
        buffer.start(first)
        buffer.scan(tiles(new, old, width, (first, first + count + between), 2 * count), relative)
        expected = np.flatnonzero(elements != before)
        assert buffer.found == len(expected)
        assert [room[-1] for room in buffer._arrays()] == [77, 77]
        if len(expected) == 0:
            continue
        units, values = buffer.take()
        gaps = Gaps(first, buffer.last, units, buffer.found)
        moved = first + np.where(expected >= count, between, 0)
        assert (gaps.positions - moved).tolist() == expected.tolist()
        assert gaps.positions[-1] == gaps.last
        assert values.dtype == f"i{width}"
        steps = elements - before if relative else elements
        assert values.tobytes() == steps[expected].tobytes()


def tiles(new: np.ndarray, old: np.ndarray, width: int, starts: tuple[int, ...], most: int) -> np.ndarray:
    """Return equal parts of two arrays of bytes as tiles that begin at these elements."""
    size = len(new) // len(starts)
    rows = [
        (new.ctypes.data + k * size, old.ctypes.data + k * size, size // width, start, most, 0)
        for k, start in enumerate(starts)
    ]
    return np.array(rows, kernels.TILE)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_tiles_with_too_many_differences(width: int) -> None:
    """They are counted, but not part of the result."""
    old = np.zeros(3 * 640 * width, np.uint8)
    new = old.copy()
    elements = new.view(f"<u{width}")
    elements[[5, 639]] = elements[640:1280] = elements[[1300, 1301]] = 1
    table = tiles(new, old, width, (0, 640, 1280), 320)
    buffer = kernels.GapBuffer(width, 3 * 640)
    buffer.start(0)
    buffer.scan(table, False)
    assert table["found"].tolist() == [2, 640, 2]
    units, values = buffer.take()
    assert Gaps(0, buffer.last, units, buffer.found).positions.tolist() == [5, 639, 1300, 1301]
    assert values.tolist() == [1] * 4


def test_no_memory_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(NotEnoughMemoryError, match=r"5\.\d MB .* raise .*ulimit -v.*overcommit_memory"):
        kernels.GapBuffer(4, 1 << 20)


def test_memory_of_changes() -> None:
    """It is used again unless a result is still in use, and has no room for more than twice the changes."""
    count = 1 << 20
    old, few = np.zeros((2, count), "<u4")
    few[:1000] = 1
    buffer = kernels.GapBuffer(4, count)

    def scan(new: np.ndarray) -> np.ndarray:
        buffer.start(0)
        buffer.scan(tiles(new.view(np.uint8), old.view(np.uint8), 4, (0,), count), False)
        return buffer.take()[1]

    first = scan(old + 1)
    assert 4 * count <= resident(first) < 5.1 * count
    second = scan(few)
    assert first.all()
    assert not np.shares_memory(first, second)
    place = second.ctypes.data
    del second
    third = scan(old + 1)
    assert third.ctypes.data == place
    del first, third
    assert resident(scan(few)) <= 2 * 5 * 1000 + 4 * mmap.PAGESIZE


def resident(array: np.ndarray) -> int:
    """Return the bytes of memory that a GapBuffer of a million changes has, whose values are ``array``."""
    pages = -(-5 * (1 << 20) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(array.ctypes.data // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(8 * pages), np.uint64)
    return mmap.PAGESIZE * int(np.count_nonzero(entries >> np.uint64(62)))  # present or swapped


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_weights_that_change_while_they_are_compared(width: int) -> None:
    """Every position lies in its tile, also if the only element that differed is equal again."""
    new, old = np.zeros((2, 65), f"<u{width}")
    new[64] = 1  # behind each tile
    count = 2000
    starts = range(0, 64 * count, 64)
    rows = [(new.ctypes.data, old.ctypes.data, 64, start, 64, 0) for start in starts]
    buffer, table = kernels.GapBuffer(width, 64 * count), np.array(rows, kernels.TILE)

    def toggle() -> None:
        for _ in range(100):
            new[63:64] ^= 1

    with repeating(toggle):
        for _ in range(200):
            buffer.start(0)
            buffer.scan(table, False)
            units, _ = buffer.take()
            places = Gaps(0, buffer.last, units, buffer.found).positions if buffer.found else np.empty(0)
            assert (places % 64 == 63).all()


def random_segments(dice: np.random.Generator, wide: bool) -> list[tuple[int, np.ndarray]]:
    """Return segments with gaps around all escapes; offsets are int64 if ``wide``."""
    segments, first = [], int(dice.integers(0, 1 << 20))
    for _ in range(dice.integers(1, 5)):
        gaps = dice.choice(
            [0, 1, 253, 254, 255, 256, 509, 510, 65534, 65535, 65536, 200_000], dice.integers(1, 200)
        )
        offsets = np.cumsum(gaps + 1)
        segments.append((first, offsets.astype(np.int64 if wide else np.int32)))
        first += int(offsets[-1]) + int(dice.choice([0, 1, 254, 255, 1 << 34 if wide else 70_000]))
    return segments


@pytest.mark.parametrize("wide", [False, True])
def test_units(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        segments = random_segments(np.random.default_rng(seed), wide)
        positions = np.concatenate([first + offsets.astype(np.int64) for first, offsets in segments])
        limit, results = int(positions[-1]) + 1, []
        for library in (kernels.library, None):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "library", library)
                merged = merge_gaps([Gaps.of(first + offsets) for first, offsets in segments])
                joined = join_units(np.concatenate(merged), len(positions), limit)
            assert joined.tolist() == positions.tolist(), seed
            assert library is None or joined.dtype == (np.int32 if limit < 1 << 31 else np.int64)
            results.append(({one.dtype for one in merged}, np.concatenate(merged).tobytes()))
        assert results[0] == results[1], seed


@pytest.mark.parametrize("size", UNITS)
def test_units_that_are_not_valid(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random units, counts and limits: accepted with the same positions, or refused with the same error."""
    for seed in range(40):
        dice = np.random.default_rng(seed)
        top = (1 << 8 * size) - 1
        units = dice.choice([0, 1, 5, top - 1, top], dice.integers(0, 8)).astype(f"<u{size}")
        total = int(units.sum(dtype=np.uint64)) + int(np.count_nonzero(units != top))
        for count in range(int(np.count_nonzero(units != top)) + 2):
            for limit in (max(total - 1, 0), total, total + 1, 1 << 40):
                results = []
                for library in (kernels.library, None):
                    with monkeypatch.context() as patch:
                        patch.setattr(kernels, "library", library)
                        try:
                            results.append(join_units(units, count, limit).tolist())
                        except FormatError as error:
                            results.append(str(error))
                assert results[0] == results[1]


@pytest.mark.parametrize("size", UNITS)
def test_cuts_of_units_that_are_not_valid(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random units: the same end with and without the compiled loop, or refused by both."""
    for seed in range(40):
        dice = np.random.default_rng(seed)
        top = (1 << 8 * size) - 1
        units = dice.choice([0, 1, 5, top - 1, top], dice.integers(0, 30)).astype(f"<u{size}")
        count, total = int(np.count_nonzero(units != top)), int(units.sum(dtype=np.uint64))
        for number in (count, count + 1):
            for limit in (max(total - 1, 0), total, 1 << 40):
                compiled = kernels.index(units, number, limit, 7)
                with monkeypatch.context() as patch:
                    patch.setattr(kernels, "library", None)
                    plain = kernels.index(units, number, limit, 7)
                assert (compiled is None) == (plain is None)
                assert compiled is None or compiled[-1].tolist() == plain[-1].tolist()


def test_parts_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units cut into parts stand for the same positions, and merge into the same units."""
    for seed in range(30):
        monkeypatch.setattr(gaps_module, "_STEP", 100)
        segments = random_segments(np.random.default_rng(seed), False)
        positions = np.concatenate([first + offsets.astype(np.int64) for first, offsets in segments])
        units = np.concatenate(merge_gaps([Gaps.of(first + offsets) for first, offsets in segments]))
        parts = cut_units(units, len(positions), int(positions[-1]) + 1)
        assert np.concatenate([one.positions for one in parts]).tolist() == positions.tolist()
        assert all(one.positions[-1] == one.last and len(one.positions) == one.count for one in parts)
        assert np.concatenate(merge_gaps(parts)).tobytes() == units.tobytes()
        for count, limit in (
            (len(positions) - 1, 1 << 40),
            (len(positions) + 1, 1 << 40),
            (len(positions), positions[-1]),
        ):
            with pytest.raises(FormatError):
                cut_units(units, count, int(limit))


@pytest.mark.parametrize("size", UNITS)
def test_units_that_change_after_the_check(size: int) -> None:
    """Nothing is written outside the words, whatever the units are."""
    for seed in range(40):
        dice = np.random.default_rng(seed)
        units = dice.integers(0, 1 << 8 * size, 300, np.uint32).astype(f"<u{size}")
        if seed % 2:
            units[dice.random(300) < 0.9] //= 16 << 8 * (size - 1)
        units[dice.random(300) < 0.1] = (1 << 8 * size) - 1
        memory = np.zeros(3000, np.uint16)
        values = np.ones(int(dice.integers(1, 300)), np.uint16)
        whole = int(units.sum(dtype=np.uint64)) + int(np.count_nonzero(units + units.dtype.type(1))) <= 1000
        fits = np.count_nonzero(units + units.dtype.type(1)) == len(values)
        assert kernels.apply(memory[1000:2000], units, values, True) == (whole and fits)
        assert not memory[:1000].any()
        assert not memory[2000:].any()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
def test_planes(width: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose planes are empty, sparse or full become the same arrays, and the same steps again."""
    dice = np.random.default_rng(count)
    kind = f"<i{width}"
    small = dice.integers(-4, 5, count).astype(kind)
    some = np.where(
        dice.random(count) < 0.1, dice.integers(0, 256, count * width, np.uint8).view(kind), small
    )
    for steps in (small, some, dice.integers(0, 256, count * width, np.uint8).view(kind)):
        written = []
        for library in (kernels.library, None):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "library", library)
                out = ArrayWriter(resolve_compression("none"))
                encode_steps(out, [one.view(f"<u{width}") for one in np.array_split(steps, 3) if len(one)])
                payload = out.write(b"", lambda size: torch.empty(size, dtype=torch.uint8))
                written.append(payload.numpy().tobytes())
                again = decode_steps(ArrayReader(payload, 0, len(out)), count, width)
                assert again.tobytes() == steps.tobytes()
        assert written[0] == written[1]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_writing(width: int, wide: bool, relative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(width)
    old = torch.from_numpy(dice.integers(0, 256, 8 * 5000, np.uint8))
    positions = np.sort(dice.choice(len(old) // width, 1500, replace=False))
    values = torch.from_numpy(dice.integers(0, 256, 1500 * width, np.uint8)).view(BITS[width])
    where = torch.from_numpy(positions.astype(np.int64 if wide else np.int32))
    results = []
    for library in (kernels.library, None):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "library", library)
            results.append(old.clone())
            Changes((Sparse.of(width, where, values, relative),)).write(results[-1])
    assert torch.equal(*results)
    assert not torch.equal(results[0], old)


@pytest.mark.parametrize("fraction", [0.0001, 0.003, 0.01, 0.2, 0.49, 0.6])
@pytest.mark.parametrize("values", ["raw", "relative"])
@pytest.mark.parametrize("layout", ["flat", "coo"])
def test_payloads(fraction: float, values: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the comparison to the payload, compiled and numpy's code give the same bytes."""
    kinds = (torch.bfloat16, torch.float32, torch.complex128, torch.uint8)
    old = [random_bits((300, 300), kind, seed) for seed, kind in enumerate(kinds)]
    old += [random_bits((count,), kind, count) for kind in kinds for count in (1, 31, 700)]
    old.append(random_bits((3_000_000,), torch.bfloat16, 1))
    new = [one.clone() for one in old]
    for seed, tensor in enumerate(new):
        flip(tensor, fraction, seed)
    schema = schema_of(old)
    snapshot, payloads = flat_of(schema, old), []
    chosen = PatchEncoding(values=values, layout=layout).options  # type: ignore[arg-type]
    for library in (kernels.library, None):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "library", library)
            scan = Scanner(schema, relative=values == "relative", threads=2).scan(new, snapshot)
            lend = partial(torch.empty, dtype=torch.uint8)
            payloads.append(encode_patch(scan.changes, schema, 0, 1, chosen, lend))
            written = snapshot.clone()
            decode_patch(payloads[-1], schema).write(written)
            assert torch.equal(written, flat_of(schema, new, snapshot))
    assert torch.equal(*payloads)


@pytest.mark.slow
def test_switched_off_by_the_environment() -> None:
    program = "from weight_update.encodings.patch import kernels; print(kernels.library)"
    environment = {**os.environ, "WEIGHT_UPDATE_KERNELS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "None\n"


@pytest.mark.skipif(kernels.library is None, reason="the compiled inner loops are not built here")
def test_a_library_of_another_version_is_not_used() -> None:
    """A checkout may hold one that an earlier version has built."""
    assert kernels.library is not None
    folder, version = Path(kernels.__file__).parent, ctypes.c_int.in_dll(kernels.library, "wu_version").value
    assert load(folder, "_kernels", version) is not None
    assert load(folder, "_kernels", version - 1) is None
