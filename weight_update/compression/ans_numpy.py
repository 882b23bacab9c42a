"""The segments of ``ans/1`` without the compiled loops; ``docs/compression.rst`` describes the bytes.

Segments are processed together, one symbol of each lane at a time, because a call of numpy takes longer than
the work on one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

LANES = 32
"""States of a segment, which take turns."""

BITS = 12
"""Frequencies add up to 2**BITS."""

LOW = 1 << 16
"""The least value of a state between two symbols."""

MOST_HEAD = 1 + 2 * 256 + 4 * LANES
"""Most bytes of a segment before its words."""


def encode(segments: Sequence[Bytes]) -> list[bytes]:
    """Compress segments, none of which is empty."""
    coded: list[bytes] = []
    for _, group in groupby(segments, len):
        coded += _encode(np.stack(list(group)))
    return coded


def _encode(data: Bytes) -> list[bytes]:
    """Compress segments of equal length, of shape [segments, length]."""
    count, length = data.shape
    frequencies = np.stack([_frequencies_of(one) for one in data])
    starts = np.cumsum(frequencies, 1) - frequencies
    rows = np.arange(count)[:, None]
    states = np.full((count, LANES), LOW, np.int64)
    rounds = -(-length // LANES)
    words = np.zeros((count, rounds, LANES), "<u2")
    written = np.zeros((count, rounds, LANES), np.bool_)
    for turn in reversed(range(rounds)):
        symbols = data[:, turn * LANES : (turn + 1) * LANES]
        lanes = symbols.shape[1]
        state, frequency = states[:, :lanes], frequencies[rows, symbols]
        full = state >= frequency << (32 - BITS)
        words[:, turn, :lanes], written[:, turn, :lanes] = state & 0xFFFF, full
        state = np.where(full, state >> 16, state)
        quotient, remainder = np.divmod(state, frequency)
        states[:, :lanes] = (quotient << BITS) + remainder + starts[rows, symbols]
    return [
        _table_bytes(frequencies[k]) + states[k].astype("<u4").tobytes() + words[k][written[k]].tobytes()
        for k in range(count)
    ]


def _frequencies_of(segment: Bytes) -> Numbers:
    """Return 256 frequencies in proportion to the counts of symbols, at least 1 for each that occurs."""
    counts = np.bincount(segment, minlength=256)
    occurs = counts > 0
    shared = (1 << BITS) - np.count_nonzero(occurs)
    ends = np.cumsum(counts) * shared // len(segment)
    frequencies: Numbers = np.diff(ends, prepend=0) + occurs
    return frequencies


def _table_bytes(frequencies: Numbers) -> bytes:
    """Return the last symbol that occurs, and the frequencies up to it, in one or two bytes each."""
    last = int(np.flatnonzero(frequencies)[-1])
    table = bytearray([last])
    for frequency in frequencies[: last + 1].tolist():
        table += bytes([frequency & 0x7F | 0x80, frequency >> 7] if frequency >= 0x80 else [frequency])
    return bytes(table)


def read_table(coded: Bytes) -> tuple[Numbers, Bytes] | None:
    """Return the frequencies of a segment, and its states and words; None if they are not valid."""
    table, at = coded[:MOST_HEAD].tolist(), 1
    frequencies = np.zeros(256, np.int64)
    for symbol in range(table[0] + 1 if table else 0):
        size = 1 if at < len(table) and table[at] < 0x80 else 2
        if at + size > len(table):
            return None
        frequencies[symbol] = table[at] if size == 1 else table[at] & 0x7F | table[at + 1] << 7
        at += size
    rest = coded[at:]
    valid = frequencies.sum() == 1 << BITS and len(rest) >= 4 * LANES and len(rest) % 2 == 0
    return (frequencies, rest) if valid else None


def decode(coded: Sequence[Bytes], segments: Sequence[Bytes]) -> bool:
    """Restore ``segments``; return False if one is not valid."""
    pairs = list(zip(coded, segments, strict=True))
    return all(_decode(list(group)) for _, group in groupby(pairs, lambda pair: len(pair[1])))


def _decode(pairs: Sequence[tuple[Bytes, Bytes]]) -> bool:
    """Restore segments of equal length."""
    tables = [table for coded, _ in pairs if (table := read_table(coded)) is not None]
    if len(tables) < len(pairs):
        return False
    frequencies = np.stack([one for one, _ in tables])
    starts = np.cumsum(frequencies, 1) - frequencies
    symbols = np.stack([np.repeat(np.arange(256, dtype=np.uint8), one) for one in frequencies])
    states = np.stack([rest[: 4 * LANES].view("<u4") for _, rest in tables]).astype(np.int64)
    words = [rest[4 * LANES :].view("<u2") for _, rest in tables]
    ends = np.cumsum([len(one) for one in words])
    places = ends - [len(one) for one in words]
    behind = np.zeros(1, "<u2")  # for places behind the end
    every = np.concatenate([*words, behind]).astype(np.int64)
    rows, length = np.arange(len(pairs))[:, None], len(pairs[0][1])
    for at in range(0, length, LANES):
        lanes = min(LANES, length - at)
        numbers = states[:, :lanes] & (1 << BITS) - 1
        found = symbols[rows, numbers]
        for (_, segment), row in zip(pairs, found, strict=True):
            segment[at : at + lanes] = row
        state = frequencies[rows, found] * (states[:, :lanes] >> BITS) + numbers - starts[rows, found]
        more = state < LOW
        taken = np.cumsum(more, 1)
        next_words = every.take(places[:, None] + taken - 1, mode="clip")
        states[:, :lanes] = np.where(more, state << 16 | next_words, state)
        places += taken[:, -1]
        if (places > ends).any():
            return False
    return bool((places == ends).all() and (states == LOW).all())
