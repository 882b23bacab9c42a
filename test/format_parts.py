"""Readers of frames, updates and patches that use nothing of the library.

They are written from the pages ``wire_format``, ``patch_format`` and ``compression`` of the manual.
"""

from __future__ import annotations

import enum
import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

Bytes = np.ndarray[Any, Any]
WIDTH = {"bool": 1, "int64": 8, "float32": 4, "float64": 8, "bfloat16": 2, "complex128": 16}
DTYPES = {name: getattr(torch, name) for name in WIDTH}
Kind = enum.IntEnum(
    "Kind", "HELLO WELCOME REFUSED UPDATE STAGED COMMIT ABORT APPLIED FAILED GOODBYE BEHIND TAKEN"
)
PRELUDE = struct.Struct("<4sBBHIQII")


class Frame(NamedTuple):
    kind: str
    header: dict[str, Any]
    payload: Bytes


def read_head(raw: bytes) -> tuple[str, dict[str, Any], int, int]:
    """Kind, header, bytes of the payload, and its CRC-32 or 0."""
    magic, form, kind, flags, size, payload, crc, payload_crc = PRELUDE.unpack(raw[:28])
    assert (magic, form, flags & ~1) == (b"WUPD", 1, 0)
    assert zlib.crc32(raw[:20] + raw[28 : 28 + size]) == crc
    assert flags or not payload_crc
    return Kind(kind).name, json.loads(raw[28 : 28 + size]), payload, payload_crc if flags else 0


def read_frame(raw: bytes) -> Frame:
    kind, header, nbytes, crc = read_head(raw)
    payload = raw[len(raw) - nbytes :]
    assert not crc or zlib.crc32(payload) == crc
    return Frame(kind, header, np.frombuffer(payload, np.uint8))


def make_frame(kind: str, **header: Any) -> bytes:
    body = json.dumps(header).encode()
    start = struct.pack("<4sBBHIQ", b"WUPD", 1, Kind[kind], 0, len(body), 0)
    return start + struct.pack("<II", zlib.crc32(start + body), 0) + body


# -- full updates ----------------------------------------------------------------------------------


def laid_out_in(schema: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The second schema of a bucket, with ``dtype`` for floating-point tensors."""
    rows, places, end = [], {}, 0
    for name, shape, old, offset in schema["tensors"]:
        kind = dtype if old in ("float32", "float64", "bfloat16") else old
        if offset not in places:
            places[offset] = end
            end += -(-int(np.prod(shape)) * WIDTH[kind] // 64) * 64
        rows.append([name, shape, kind, places[offset]])
    return {"nbytes": end, "tensors": rows}


def tensors_of(schema: dict[str, Any], flat: Bytes) -> dict[str, torch.Tensor]:
    found = {}
    for name, shape, dtype, offset in schema["tensors"]:
        raw = flat[offset : offset + int(np.prod(shape)) * WIDTH[dtype]]
        found[name] = torch.from_numpy(raw.copy()).view(DTYPES[dtype]).view(shape)
    return found


def from_buckets(schema: dict[str, Any], buckets: list[Bytes]) -> dict[str, torch.Tensor]:
    parts, end, dtype = [], 0, b""
    for bucket in buckets:
        magic, instant, dtype, first, stop, total = struct.unpack("<4sB3x16sQQQ16x", bucket[:64].tobytes())
        assert (magic, instant, first) == (b"WUBK", 1, end)
        assert len(bucket) == 64 + stop - first
        parts.append(bucket[64:])
        end = stop
    assert end == total
    name = dtype.rstrip(b"\0").decode()
    sent = laid_out_in(schema, name) if name else schema
    assert sent["nbytes"] == total
    found = tensors_of(sent, np.concatenate(parts))
    return {name: found[name].to(DTYPES[dtype]) for name, _, dtype, _ in schema["tensors"]}


# -- patches ---------------------------------------------------------------------------------------


def parts_of(data: bytes, count: int) -> list[bytes]:
    """The parts behind a table of their lengths."""
    sizes, start, found = struct.unpack(f"<{count}I", data[: 4 * count]), 4 * count, []
    for size in sizes:
        found.append(data[start : start + size])
        start += size
    assert start == len(data)
    return found


def from_ans(segment: bytes, nbytes: int) -> bytes:
    last, frequencies, at = segment[0], [], 1
    while len(frequencies) <= last:
        value, at = segment[at], at + 1
        if value >= 128:
            value, at = value - 128 + 128 * segment[at], at + 1
        frequencies.append(value)
    assert sum(frequencies) == 4096
    symbols = [symbol for symbol, count in enumerate(frequencies) for _ in range(count)]
    states = list(struct.unpack("<32I", segment[at : at + 128]))
    words = struct.iter_unpack("<H", segment[at + 128 :])
    found = bytearray()
    for i in range(nbytes):
        x = states[i % 32]
        symbol = symbols[x % 4096]
        x = frequencies[symbol] * (x // 4096) + x % 4096 - sum(frequencies[:symbol])
        states[i % 32] = x if x >= 65536 else 65536 * x + next(words)[0]
        found.append(symbol)
    assert next(words, None) is None
    assert set(states) == {65536}
    return bytes(found)


def from_block(name: str, block: bytes, nbytes: int) -> bytes:
    if len(block) == nbytes:
        return block
    if name == "zstd/1":
        return bytes(pytest.importorskip("zstandard").ZstdDecompressor().decompress(block))
    if name == "lz4/1":
        return bytes(pytest.importorskip("lz4.block").decompress(block, uncompressed_size=nbytes))
    assert name == "ans/1"
    segments = parts_of(block, -(-nbytes // (1 << 16)))
    sizes = (min(nbytes - start, 1 << 16) for start in range(0, nbytes, 1 << 16))
    return b"".join(map(from_ans, segments, sizes))


def decompressed(name: str, data: bytes, nbytes: int) -> bytes:
    if name == "none/1":
        return data
    blocks = parts_of(data, -(-nbytes // (1 << 20)))
    sizes = (min(nbytes - start, 1 << 20) for start in range(0, nbytes, 1 << 20))
    return b"".join(from_block(name, block, size) for block, size in zip(blocks, sizes, strict=True))


def read_gaps(units: Bytes, count: int) -> Bytes:
    positions, escape, gap, before = [], np.iinfo(units.dtype).max, 0, -1
    for unit in units.tolist():
        gap += unit
        if unit != escape:
            before += gap + 1
            positions.append(before)
            gap = 0
    assert len(positions) == count
    return np.array(positions, np.int64)


def read_coo(schema: dict[str, Any], arrays: Iterator[Bytes], width: int, delta: bool) -> Bytes:
    ordinals, counts, rows, columns = (next(arrays).astype(np.int64) for _ in range(4))
    positions, at = [], 0
    for ordinal, count in zip(ordinals, counts, strict=True):
        _, shape, dtype, offset = schema["tensors"][ordinal]
        size = int(np.prod(shape)) * (WIDTH[dtype] // width)
        wide = size // shape[0] if len(shape) > 1 else size
        row = column = 0
        for i in range(at, at + count):
            if delta:
                fresh = i == at or rows[i] != 0
                row = int(rows[i]) + (0 if i == at else row)
                column = int(columns[i]) + (0 if fresh else column)
            else:
                row, column = int(rows[i]), int(columns[i])
            positions.append(offset // width + row * wide + column)
        at += count
    assert at == len(rows) == len(columns)
    return np.array(positions, np.int64)


def read_steps(arrays: Iterator[Bytes], count: int, width: int) -> Bytes:
    steps = np.zeros(count, f"<u{width}")
    for k in range(width):
        where, filled = next(arrays), next(arrays)
        plane = np.zeros(count, np.uint8)
        if len(where):
            plane[read_gaps(where, len(filled))] = filled
        elif len(filled):
            plane[:] = filled
        steps |= plane.astype(steps.dtype) << steps.dtype.type(8 * k)
    one = steps.dtype.type(1)
    return (steps >> one) ^ (np.zeros_like(steps) - (steps & one))


def apply_patch(schema: dict[str, Any], flat: Bytes, patch: Bytes, base: int) -> int:
    """Change ``flat`` from version ``base``; return the version that the patch makes."""
    raw = patch.tobytes()
    magic, form, layout, flags, sections, ranges, count, there, version = struct.unpack(
        "<4sBBBBIIqq", raw[:32]
    )
    assert (magic, form, there) == (b"WUPP", 1, base)
    table = 32 + 16 * sections
    end, found = table + 32 * count, []
    for item, name, items, stored in struct.iter_unpack("<B15sQQ", raw[table:end]):
        start = -(-end // 8) * 8
        assert not any(raw[end:start])
        end = start + stored
        plain = decompressed(name.rstrip(b"\0").decode(), raw[start:end], item * items)
        found.append(np.frombuffer(plain, f"<u{item}"))
        assert len(found[-1]) == items
    assert end == len(raw)
    arrays = iter(found)
    for width, changed in struct.iter_unpack("<QQ", raw[32:table]):
        if layout == 1:
            positions = read_coo(schema, arrays, width, bool(flags & 1))
        elif flags & 1:
            positions = read_gaps(next(arrays), changed)
        else:
            positions = next(arrays).astype(np.int64)
        assert len(positions) == changed
        elements = flat[: len(flat) // width * width].view(f"<u{width}")
        if flags & 2:
            elements[positions] += read_steps(arrays, changed, width)
        else:
            elements[positions] = next(arrays)
    if ranges:
        starts, lengths, data = next(arrays), next(arrays), next(arrays)
        at = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            flat[start : start + length] = data[at : at + length]
            at += length
        assert at == len(data)
    assert next(arrays, None) is None
    return int(version)


class Reader:
    """The weights of a worker."""

    def __init__(self, welcome: Frame) -> None:
        self.schema: dict[str, Any] = welcome.header["schema"]
        text = json.dumps(self.schema, separators=(",", ":"))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.version: int | None = None
        self.encodings: list[str] = []
        self._flat = np.zeros(0, np.uint8)
        self._chunks: list[Bytes] = []

    def take(self, update: Frame) -> bool:
        """Take one chunk; return whether it was the last."""
        header = update.header
        assert (update.kind, header["schema"]) == ("UPDATE", self.digest)
        assert header["index"] == len(self._chunks)
        self._chunks.append(update.payload)
        if header["index"] < header["count"] - 1:
            return False
        chunks, self._chunks = self._chunks, []
        self.encodings.append(header["encoding"])
        if header["encoding"] == "patch/1":
            assert header["base"] == self.version
            for chunk in chunks:
                self.version = apply_patch(self.schema, self._flat, chunk, self.version)
            assert self.version == header["version"]
        elif header["encoding"] == "dense/1":
            (self._flat,) = (chunk.copy() for chunk in chunks)
            assert len(self._flat) == self.schema["nbytes"]
        else:
            assert header["encoding"] == "bucket/1"
            self._flat = np.zeros(self.schema["nbytes"], np.uint8)
            tensors = from_buckets(self.schema, chunks)
            for name, _, _, offset in self.schema["tensors"]:
                data = tensors[name].contiguous().view(-1).view(torch.uint8).numpy()
                self._flat[offset : offset + len(data)] = data
        self.version = header["version"]
        return True

    def weights(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.schema, self._flat)
