"""The compression "ans/1": its bytes, and the compiled loops beside numpy's."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from fuzz import examples
from hypothesis import given
from hypothesis import strategies as st
from marks import quick_for

from weight_update.compression import AnsCompression, ans, ans_numpy
from weight_update.compression.blocks import Buffer
from weight_update.errors import FormatError

DOCS = Path(__file__).parents[2] / "docs" / "compression.rst"

compiled = pytest.mark.skipif(
    ans.library is None, reason="there was no C compiler when the package was installed"
)


@contextmanager
def portable() -> Iterator[None]:
    """Take the branch of the compiled code that needs no special instructions, if this processor has two."""
    assert ans.library is not None
    with suppress(ValueError):
        ctypes.c_int.in_dll(ans.library, "ans_portable").value = True
    yield
    with suppress(ValueError):
        ctypes.c_int.in_dll(ans.library, "ans_portable").value = False


@contextmanager
def numpy_loops() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ans, "library", None)
        yield


def blocks_of(dice: np.random.Generator, size: int) -> list[np.ndarray]:
    """Return bytes of a few distributions."""
    rare = np.where(dice.random(size) < 0.001, dice.integers(0, 256, size), 7)
    return [
        one.astype(np.uint8)
        for one in (
            np.minimum(dice.geometric(0.01, size) - 1, 255),
            dice.integers(0, 2, size),
            dice.integers(0, 256, size),
            np.full(size, 255),
            rare,
            np.arange(size) % 256,
        )
    ]


def result_of(work: Callable[[], Buffer]) -> bytes | str:
    """Return the result, or the message of a FormatError; the same with each of the loops."""
    results: list[bytes | str] = []
    for way in (nullcontext, portable, numpy_loops):
        with way():
            try:
                results.append(bytes(work()))
            except FormatError as error:
                results.append(str(error))
    assert results == results[:1] * 3
    return results[0]


@compiled
@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 1000, 65_535, 65_536, 65_537, 200_000])
def test_the_same_bytes(size: int) -> None:
    for data in blocks_of(np.random.default_rng(size), size):
        packed = result_of(lambda data=data: AnsCompression().shrink(data.data))
        assert isinstance(packed, bytes)
        block = memoryview(packed)
        assert result_of(lambda block=block: AnsCompression.expand(block, size)) == data.tobytes()


@compiled
@pytest.mark.parametrize("seed", quick_for(range(60), *range(20)))
def test_damaged_blocks(seed: int) -> None:
    """They are accepted with the same result, or refused with the same error; nothing behind them is read."""
    dice = np.random.default_rng(seed)
    size = int(dice.choice([1, 40, 700, 5000, 70_000]))
    for data in blocks_of(dice, size):
        packed = bytearray(AnsCompression().shrink(data.data))
        damage = dice.integers(0, 4)
        if damage < 2:  # in the table or anywhere
            at = int(dice.integers(4, 40 if damage else len(packed)))
            packed[at] ^= int(dice.integers(1, 256))
        else:
            cut = int(dice.integers(1, min(len(packed) - 4, 80)))
            packed = packed[:-cut] if damage == 2 else packed + bytes(cut)
            last = 4 * (-(-size // ans.SEGMENT_BYTES) - 1)  # where the length of the last segment is
            length = int.from_bytes(packed[last : last + 4], "little") + (-cut if damage == 2 else cut)
            packed[last : last + 4] = length.to_bytes(4, "little")
        result_of(lambda block=bytes(packed): AnsCompression.expand(memoryview(block), size))


@compiled
@given(table=st.binary(max_size=600), size=st.integers(1, 300))
@examples(200)
def test_arbitrary_bytes(table: bytes, size: int) -> None:
    block = len(table).to_bytes(4, "little") + table
    result_of(lambda: AnsCompression.expand(memoryview(block), size))


@pytest.mark.usefixtures("inner_loops")
def test_frequencies_that_are_not_valid() -> None:
    """Their sum is not 4096, or the table is cut short."""
    good = bytes([0, 0x80, 32]) + (1 << 16).to_bytes(4, "little") * ans_numpy.LANES
    for segment, valid in (
        (good, True),
        (bytes([0, 0x81, 32]) + good[3:], False),
        (bytes([0, 0xFF, 31]) + good[3:], False),
        (bytes([1, 0x80, 32, 1]) + good[3:], False),
        (good[:2], False),
        (good[:1], False),
        (b"", False),
        (good[:-1], False),
        (good + b"\0\0", False),
    ):
        block = memoryview(len(segment).to_bytes(4, "little") + segment)
        if valid:
            assert bytes(AnsCompression.expand(block, 9)) == bytes(9)
        else:
            with pytest.raises(FormatError, match="not an ANS block of 9 bytes"):
                AnsCompression.expand(block, 9)


@pytest.mark.usefixtures("inner_loops")
def test_the_size_is_near_the_entropy() -> None:
    """Of gaps and steps, which are what patches consist of, within 1 %."""
    dice = np.random.default_rng(0)
    gaps = np.minimum(dice.geometric(0.01, 1 << 20) - 1, 255).astype(np.uint8)
    steps = dice.choice([1, 2, 3, 4, 5, 6, 9], 1 << 20, p=[0.45, 0.44, 0.03, 0.03, 0.02, 0.02, 0.01])
    for data in (gaps, steps.astype(np.uint8)):
        counts = np.bincount(data)
        shares = counts[counts > 0] / len(data)
        entropy = -(shares * np.log2(shares)).sum() / 8
        assert entropy <= len(AnsCompression().shrink(data.data)) / len(data) <= 1.01 * entropy


@pytest.mark.usefixtures("inner_loops")
def test_the_documented_example() -> None:
    listing = re.search(r"example segment::\n\n((?: {4}.*\n)+)", DOCS.read_text())
    assert listing is not None
    segment = bytes.fromhex("".join(line.split("#")[0] for line in listing[1].splitlines()))
    data = bytes(30) + b"\1" * 10
    packed = AnsCompression().shrink(memoryview(data))
    assert bytes(packed) == len(segment).to_bytes(4, "little") + segment
    assert bytes(AnsCompression.expand(memoryview(bytes(packed)), 40)) == data
