"""The compiled inner loops of patches: the same results as numpy's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from weight_update.encodings.patch import kernels
from weight_update.encodings.patch.changes import BITS, Changes, Sparse
from weight_update.encodings.patch.positions_flat import UNITS, join_units, split_units
from weight_update.errors import FormatError

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
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_differences(width: int, fraction: float, relative: bool) -> None:
    dice = np.random.default_rng(width)
    for count in COUNTS:
        old = dice.integers(0, 256, count * width, np.uint8)
        new = old.copy()
        elements, before = new.view(f"<u{width}"), old.view(f"<u{width}")
        elements[dice.random(count) < fraction] ^= np.asarray(1 << 8 * width - 1, elements.dtype)
        buffer = kernels.DiffBuffer(len(new) + 1)
        buffer.offsets[count:] = buffer.values[count * width :] = 77
        where, values = kernels.diff(width, new, old, relative, buffer)
        expected = np.flatnonzero(elements != before)
        assert where.tolist() == expected.tolist()
        assert values.dtype == kernels.INTEGER[width]
        steps = elements - before if relative else elements
        assert values.tobytes() == steps[expected].tobytes()
        assert (buffer.offsets[count:] == 77).all()  # nothing was written behind the room for all elements
        assert (buffer.values[count * width :] == 77).all()


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
@pytest.mark.parametrize("seed", range(30))
def test_units(seed: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = random_segments(np.random.default_rng(seed), wide)
    positions = np.concatenate([first + offsets.astype(np.int64) for first, offsets in segments])
    limit = int(positions[-1]) + 1
    compiled = split_units(segments)
    joined = join_units(np.concatenate(compiled), len(positions), limit)
    assert joined.dtype == (np.int32 if limit < 1 << 31 else np.int64)
    monkeypatch.setattr(kernels, "library", None)
    plain = split_units(segments)
    assert [one.dtype for one in compiled] == [one.dtype for one in plain]
    assert np.concatenate(compiled).tobytes() == np.concatenate(plain).tobytes()
    assert (
        joined.tolist()
        == positions.tolist()
        == join_units(np.concatenate(plain), len(positions), limit).tolist()
    )


@pytest.mark.parametrize("size", UNITS)
@pytest.mark.parametrize("seed", range(40))
def test_units_that_are_not_valid(size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random units, counts and limits: accepted with the same positions, or refused with the same error."""
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


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_writing(width: int, wide: bool, relative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(width)
    old = torch.from_numpy(dice.integers(0, 256, 8 * 5000, np.uint8))
    positions = np.sort(dice.choice(len(old) // width, 1500, replace=False))
    values = torch.from_numpy(dice.integers(0, 256, 1500 * width, np.uint8)).view(BITS[width])
    where = torch.from_numpy(positions.astype(np.int64 if wide else np.int32))
    changes = Changes((Sparse.of(width, where, values, relative),))
    results = []
    for library in (kernels.library, None):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "library", library)
            results.append(old.clone())
            changes.write(results[-1])
    assert torch.equal(*results)
    assert not torch.equal(results[0], old)


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
