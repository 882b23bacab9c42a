"""ANS: entropy coding of bytes, close to the limit for the gaps and steps of patches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from weight_update.compression import ans_numpy
from weight_update.compression.base import register_compression
from weight_update.compression.blocks import BlockCompression, Buffer, joined, separated
from weight_update.errors import FormatError
from weight_update.wire.compiled import load

SEGMENT_BYTES = 1 << 16
"""Bytes that share a table: few enough that it suits them, and many enough that it costs little."""


library = load(Path(__file__).parent, "_ans", 1, ["ans_encode"])
"""The compiled loops; None where there are none."""


@register_compression
@dataclass(frozen=True)
class AnsCompression(BlockCompression):
    """Range asymmetric numeral systems (rANS), with a table of frequencies for each 64 KiB.

    It finds no repeated strings, only bytes that are more frequent than others. This suits patches, whose
    gaps and steps hardly repeat: zstd, which spends at least one bit on a byte, makes them larger. ANS needs
    no package, but without the compiled loops it is slow: about 10 MB/s.

    The method is Jarek Duda's (https://arxiv.org/abs/1311.2540), with interleaved states as Fabian Giesen
    describes them (https://arxiv.org/abs/1402.3392).

    Args:
        threads: largest number of threads that compress, at most one for each core and for each 4 MiB.
    """

    name: ClassVar[str] = "ans/1"
    device: ClassVar[str] = "cpu"

    def shrink(self, block: memoryview) -> Buffer:
        data = np.frombuffer(block, np.uint8)
        segments = [data[at : at + SEGMENT_BYTES] for at in range(0, len(data), SEGMENT_BYTES)]
        coded = ans_numpy.encode(segments) if library is None else [_encode(library, one) for one in segments]
        return joined(coded)

    @classmethod
    def expand(cls, block: memoryview, nbytes: int) -> Buffer:
        parts = separated(block, -(-nbytes // SEGMENT_BYTES), "ANS segment")
        coded = [np.frombuffer(part, np.uint8) for part in parts]
        whole = np.empty(nbytes, np.uint8)
        segments = [whole[at : at + SEGMENT_BYTES] for at in range(0, nbytes, SEGMENT_BYTES)]
        if library is None:
            valid = ans_numpy.decode(coded, segments)
        else:
            valid = all(_decode(library, one, into) for one, into in zip(coded, segments, strict=True))
        if not valid:
            raise FormatError(f"not an ANS block of {nbytes} bytes")
        return whole.data


def _encode(compiled: ctypes.CDLL, segment: ans_numpy.Bytes) -> bytes:
    out = np.empty(ans_numpy.MOST_HEAD + 2 * len(segment), np.uint8)
    used = compiled.ans_encode(_at(segment), ctypes.c_int64(len(segment)), _at(out))
    return out[:used].tobytes()


def _decode(compiled: ctypes.CDLL, coded: ans_numpy.Bytes, into: ans_numpy.Bytes) -> bool:
    coded_size, size = ctypes.c_int64(len(coded)), ctypes.c_int64(len(into))
    return not compiled.ans_decode(_at(coded), coded_size, _at(into), size)


def _at(array: ans_numpy.Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
