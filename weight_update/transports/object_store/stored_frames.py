"""Frames in an object store: writing them, and reading them with all checks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing

import torch

from weight_update.encodings import decoder_for, read_delta
from weight_update.encodings.dense import DenseEncoding, copy_tensors
from weight_update.errors import FormatError, NotEnoughMemoryError
from weight_update.transports.base import Allocate
from weight_update.transports.object_store.manifest import StoredFrame, StoredVersion
from weight_update.transports.object_store.store import ObjectStore
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk, fresh_bytes, payloads_of
from weight_update.wire.memory import byte_view
from weight_update.wire.schema import WeightSchema

PIECE_BYTES = 16 << 20
"""Most bytes of an object; a frame that is larger lies in several, which are written and read at once."""


def write_frame(store: ObjectStore, chunk: WeightChunk, name: str, deadline: float | None) -> StoredFrame:
    """Write a frame into objects of its own; raise as :meth:`ObjectStore.write_all`."""
    head = memoryview(chunk.encode_head(checksum=False))
    payload = memoryview(b"") if chunk.payload is None else byte_view(chunk.payload)
    nbytes = len(head) + len(payload)
    objects = (
        (piece, [head[start:stop], payload[max(start - len(head), 0) : max(stop - len(head), 0)]])
        for piece, start, stop in _objects_of(name, nbytes)
    )
    digests = store.write_all(objects, deadline)
    return StoredFrame(name, nbytes, hashlib.sha256(b"".join(digests)).hexdigest())


def read_frame(
    store: ObjectStore, frame: StoredFrame, deadline: float | None, allocate: Allocate = fresh_bytes
) -> WeightChunk:
    """Read a frame; raise FormatError if the sender did not write it so, or as :meth:`ObjectStore.read`."""
    with closing(_Pieces(store, frame, deadline)) as source:
        prelude = Prelude.decode(source.take(PRELUDE_BYTES))
        header = source.take(prelude.header_bytes)
        if PRELUDE_BYTES + prelude.header_bytes + prelude.payload_bytes != frame.nbytes:
            raise FormatError(f"{frame.name} has another size than its frame")

        def filled(nbytes: int) -> torch.Tensor:
            payload = allocate(nbytes)
            source.fill(byte_view(payload))
            return payload

        chunk = prelude.complete(header, filled)
        if source.digest.hexdigest() != frame.sha256:
            raise FormatError(f"the digest of {frame.name} is wrong")
        return chunk


def _objects_of(name: str, nbytes: int) -> list[tuple[str, int, int]]:
    """Return the objects in which a frame lies: the name of each, and where its piece begins and ends."""
    starts = enumerate(range(0, nbytes, PIECE_BYTES))
    return [(f"{name}.{i}" if i else name, start, min(start + PIECE_BYTES, nbytes)) for i, start in starts]


def read_merged(
    store: ObjectStore, chain: Sequence[StoredVersion], schema: WeightSchema, deadline: float | None
) -> WeightChunk:
    """Return the newest version of a chain as one dense update.

    Raises:
        FormatError, TransportError, SyncTimeoutError: as :func:`read_frame`.
        NotEnoughMemoryError: there is no memory for all weights.
    """

    def memory(nbytes: int) -> torch.Tensor:
        try:
            return fresh_bytes(nbytes)
        except (RuntimeError, MemoryError) as error:
            short = NotEnoughMemoryError(f"no memory for all weights of the store: {error}")
            short.version = chain[-1].version
            raise short from None

    whole = [read_frame(store, frame, deadline, memory) for frame in chain[0].frames]
    decoder, payloads = decoder_for(whole[0].header["encoding"], schema), payloads_of(whole)
    if decoder.is_flat:
        (flat,) = payloads
    else:
        fed = [decoder.feed(index, one, memory) for index, one in enumerate(payloads)]
        flat = memory(schema.nbytes)
        copy_tensors(schema.views(flat), decoder.decode(fed), "reading weights", serial=True)
    newest = whole[0]
    for frame in (frame for one in chain[1:] for frame in one.frames):
        change = read_frame(store, frame, deadline, memory)
        newest = change if change.header["index"] == 0 else newest
        (payload,) = payloads_of([change])
        read_delta(change.header["encoding"], payload, schema).write(flat)
    header = {**newest.header, "base": None, "encoding": DenseEncoding.name, "index": 0, "count": 1}
    return WeightChunk(Kind.UPDATE, header, flat)


class _Pieces:
    """The bytes of a frame in order."""

    def __init__(self, store: ObjectStore, frame: StoredFrame, deadline: float | None) -> None:
        self._frame = frame
        objects = [(piece, stop - start) for piece, start, stop in _objects_of(frame.name, frame.nbytes)]
        self._sizes = iter([nbytes for _, nbytes in objects])
        self._found = store.read_all(objects, deadline)
        self.digest = hashlib.sha256()  # of the digests of what was read
        self._piece = memoryview(b"")

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes; raise FormatError if the frame has fewer."""
        taken = bytearray(nbytes)
        self.fill(memoryview(taken))
        return bytes(taken)

    def fill(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes; raise FormatError if the frame has fewer."""
        while len(target):
            if not len(self._piece):
                self._next_piece()
            part, self._piece = self._piece[: len(target)], self._piece[len(target) :]
            target[: len(part)] = part
            target = target[len(part) :]

    def _next_piece(self) -> None:
        found, digest = next(self._found, (b"", b""))
        if not found or len(found) != next(self._sizes):
            raise FormatError(f"{self._frame.name} has fewer than its {self._frame.nbytes} bytes")
        self.digest.update(digest)
        self._piece = memoryview(found)

    def close(self) -> None:
        """Give up the pieces that are still being read."""
        self._found.close()
