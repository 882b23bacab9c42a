"""The receiver's end: it reads the versions that a sender published."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from weight_update.encodings import decoder_for, read_delta
from weight_update.encodings.dense import DenseEncoding, copy_tensors
from weight_update.errors import (
    FormatError,
    JoinRefusedError,
    LinkClosedError,
    SchemaMismatchError,
    SyncTimeoutError,
    TransportError,
)
from weight_update.text import brief
from weight_update.transports.base import Allocate, TransportBackend
from weight_update.transports.object_store.manifest import (
    StoredFrame,
    StoredVersion,
    StoreManifest,
    read_manifest,
)
from weight_update.transports.object_store.store import ObjectStore
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import PRELUDE_BYTES, Kind, Prelude, WeightChunk, fresh_bytes, payloads_of
from weight_update.wire.memory import byte_view
from weight_update.wire.schema import WeightSchema

_PIECE = 64 << 20  # bytes of an object that one request reads
_LONGEST_PAUSE = 30.0  # seconds between two attempts to read what could not be read
_log = logging.getLogger(__name__)


class ObjectStoreReader(TransportBackend):
    """The receiver's end of a link from an object store.

    If the receiver has none of the versions of the manifest, it gets the newest one with all weights: the
    link applies the changes. Otherwise it gets the changes since its version.

    A store that cannot be read for a while, or a damaged object, ends nothing: the receiver keeps its
    version, and a warning is logged. A receiver that could not apply a version gets all weights later: when
    there is a newer version, or else after pauses that double each time.

    Args:
        store: the object store.
        token: secret of the sender, which signs the manifest.
        poll_seconds: seconds between two looks at the manifest.
    """

    def __init__(self, store: ObjectStore, token: str, poll_seconds: float) -> None:
        self._store, self._token, self._poll_seconds = store, token, poll_seconds
        self._hello: WeightChunk | None = None  # until it is answered
        self._welcome: str | None = None  # digest of the frame that described the weights
        self._schema: WeightSchema | None = None  # the one in that frame
        self._connected = False
        self._joining = False  # until the first version was read
        self._position: tuple[str, int] | None = None  # run and version that were read last
        self._seen = "", 0  # run and serial of the newest manifest that was seen
        self._pause, self._next_look = poll_seconds, 0.0
        self._again_after, self._again_at = poll_seconds, 0.0  # for a version that could not be applied
        self._chunks: Iterator[WeightChunk] = iter(())
        self._begun: int | None = None  # a version of which a part was returned
        self._allocate: Allocate = fresh_bytes
        self._deadline: float | None = None
        self._trouble: Exception | None = None

    # -- the link ----------------------------------------------------------------------------------

    def restart(self, timeout: float | None = None) -> None:
        if self._store.closed:
            raise LinkClosedError("this end was closed")
        self._connected = True
        self._position, self._welcome, self._begun, self._joining = None, None, None, True
        self._chunks, self._next_look, self._again_at, self._trouble = iter(()), 0.0, 0.0, None

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        if chunk.kind is Kind.HELLO:
            self._hello = chunk
        elif chunk.kind is Kind.BEHIND:  # it needs all weights, not what comes next
            self._position, self._chunks, self._next_look = None, iter(()), 0.0
        elif chunk.kind is Kind.FAILED:  # what hindered it may pass, and no newer version may come
            self._position, self._chunks, self._begun = None, iter(()), None
            self._joining, self._deadline = False, None  # a receiver that has other weights goes on with them
            self._again_after *= 2
            self._again_at = time.monotonic() + self._again_after
        elif chunk.kind is Kind.APPLIED:
            self._again_after = self._poll_seconds

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        if not self._connected:
            raise LinkClosedError("not connected to the store")
        deadline = deadline_of(timeout)
        self._allocate, self._deadline = allocate or fresh_bytes, deadline if self._joining else None
        while (chunk := self._next()) is None:
            left = seconds_left(deadline)
            if left == 0:
                if not self._joining:
                    return None
                if self._trouble is None:
                    raise SyncTimeoutError(
                        f"no version is in {self._store.url} yet; has the trainer called connect(), with the "
                        "same URL?"
                    )
                raise SyncTimeoutError(f"nothing could be read in time: {self._trouble}")
            pause = max(self._next_look - time.monotonic(), 0.0)
            self._store.rest(pause if left is None else min(pause, left))
        return chunk

    def _next(self) -> WeightChunk | None:
        """Return the next chunk, or None if there is none yet or it cannot be read now."""
        try:
            chunk = next(self._chunks, None)
            if chunk is None and time.monotonic() >= self._next_look:
                self._look_after(self._pause)  # also if this fails for lack of memory
                self._chunks = self._look()
                chunk = next(self._chunks, None)
                if chunk is None:
                    self._recover()
            return chunk
        except (FileNotFoundError, TransportError, SyncTimeoutError, FormatError) as error:
            fatal = (LinkClosedError, JoinRefusedError) if self._joining else LinkClosedError
            if isinstance(error, fatal):
                raise
            if self._trouble is None and not isinstance(error, FileNotFoundError):
                _log.warning("the weights are not updated now: %s", error)
            if self._trouble is None or not isinstance(error, SyncTimeoutError):
                self._trouble = error  # a read that was only late does not hide the cause before
            self._look_after(min(2 * self._pause, _LONGEST_PAUSE))
            begun, self._begun = self._begun, None
            return None if begun is None else WeightChunk(Kind.ABORT, {"version": begun})

    def _look_after(self, pause: float) -> None:
        self._pause, self._next_look = pause, time.monotonic() + pause

    def _recover(self) -> None:
        """Note that nothing is left to be read."""
        self._look_after(self._poll_seconds)
        self._trouble = None

    def disconnect(self) -> None:
        self._connected, self._chunks = False, iter(())

    def close(self) -> None:
        self._store.close()

    # -- versions ----------------------------------------------------------------------------------

    def _look(self) -> Iterator[WeightChunk]:
        """Read the manifest; return the frames that the receiver lacks.

        Raises:
            LinkClosedError: the weights are of another structure now, so the receiver has to join again.
        """
        limit = seconds_left(self._deadline)
        manifest = read_manifest(self._store, self._token, None if limit is None else max(limit, 0.1))
        if manifest is None:
            return iter(())
        run, serial = self._seen
        if manifest.run == run and manifest.serial < serial:
            return iter(())  # a late write of an earlier manifest
        if self._seen != (manifest.run, manifest.serial):
            self._seen, self._again_at = (manifest.run, manifest.serial), 0.0
        if time.monotonic() < self._again_at:
            return iter(())
        if self._hello is None and manifest.welcome.sha256 != self._welcome:
            raise LinkClosedError("another sender publishes other weights now")
        known = [(manifest.run, one.version) for one in manifest.chain]
        if self._hello is None and self._position == known[-1]:
            return iter(())
        return self._chunks_of(manifest, known)

    def _chunks_of(self, manifest: StoreManifest, known: list[tuple[str, int]]) -> Iterator[WeightChunk]:
        if self._hello is not None:
            welcome = self._load(manifest.welcome)
            schema = WeightSchema.from_header(welcome.header["schema"])
            reply, self._hello = _reply(self._hello, welcome, schema, manifest.newest), None
            self._welcome, self._schema = manifest.welcome.sha256, schema
            yield reply
            if reply.kind is Kind.REFUSED:
                return
        if self._position in known:
            todo = manifest.chain[known.index(self._position) + 1 :]
        elif len(manifest.chain) == 1:
            todo = manifest.chain
        else:
            assert self._schema is not None
            yield self._merged(manifest.chain, self._schema)
            todo = ()
            self._arrived(manifest.run, manifest.newest)
        for one in todo:
            for frame in one.frames:
                chunk = self._load(frame)
                self._begun = one.version if frame is not one.frames[-1] else None
                yield chunk
            self._arrived(manifest.run, one.version)

    def _arrived(self, run: str, version: int) -> None:
        self._position, self._joining, self._deadline = (run, version), False, None
        self._recover()

    def _merged(self, chain: Sequence[StoredVersion], schema: WeightSchema) -> WeightChunk:
        """Return the newest version of a chain as one dense update."""
        whole = [self._load(frame, fresh=True) for frame in chain[0].frames]
        decoder, payloads = decoder_for(whole[0].header["encoding"], schema), payloads_of(whole)
        if decoder.is_flat:
            (flat,) = payloads
        else:
            fed = [decoder.feed(index, one, fresh_bytes) for index, one in enumerate(payloads)]
            flat = fresh_bytes(schema.nbytes)
            copy_tensors(schema.views(flat), decoder.decode(fed), "reading weights", serial=True)
        newest = whole[0]
        for one in chain[1:]:
            for frame in one.frames:
                change = self._load(frame, fresh=True)
                newest = change if change.header["index"] == 0 else newest
                (payload,) = payloads_of([change])
                read_delta(change.header["encoding"], payload, schema).write(flat)
        header = {**newest.header, "base": None, "encoding": DenseEncoding.name, "index": 0, "count": 1}
        return WeightChunk(Kind.UPDATE, header, flat)

    def _load(self, frame: StoredFrame, *, fresh: bool = False) -> WeightChunk:
        """Read a frame; raise FormatError if it is not the one that the sender wrote."""
        source = _Pieces(self._store, frame, self._deadline)
        prelude = Prelude.decode(source.take(PRELUDE_BYTES))
        header = bytes(source.take(prelude.header_bytes))
        if PRELUDE_BYTES + prelude.header_bytes + prelude.payload_bytes != frame.nbytes:
            raise FormatError(f"{frame.name} has another size than its frame")

        def filled(nbytes: int) -> torch.Tensor:
            payload = (fresh_bytes if fresh else self._allocate)(nbytes)
            source.fill(byte_view(payload))
            return payload

        chunk = prelude.complete(header, filled)
        if source.digest != frame.sha256:
            raise FormatError(f"the digest of {frame.name} is wrong")
        return chunk


def _reply(hello: WeightChunk, welcome: WeightChunk, schema: WeightSchema, newest: int) -> WeightChunk:
    """Return the answer to a HELLO: the description of the weights, or a refusal if they do not fit."""
    if hello.header["schema"] is not None:
        theirs = WeightSchema.from_header(hello.header["schema"])
        try:
            schema.require_same(theirs, f"worker {hello.header['worker']}", more=True)
        except SchemaMismatchError as error:
            return WeightChunk(Kind.REFUSED, {"reason": brief(error), "problems": list(error.problems)})
    return replace(welcome, header={**welcome.header, "version": newest})


class _Pieces:
    """The bytes of an object in order, read in pieces of bounded size."""

    def __init__(self, store: ObjectStore, frame: StoredFrame, deadline: float | None) -> None:
        self._store, self._frame, self._deadline = store, frame, deadline
        self._digest = hashlib.sha256()
        self._piece, self._read = memoryview(b""), 0

    @property
    def digest(self) -> str:
        """SHA-256 of what was read, as hexadecimal digits."""
        return self._digest.hexdigest()

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes; raise FormatError if the object has fewer."""
        taken = bytearray(nbytes)
        self.fill(memoryview(taken))
        return bytes(taken)

    def fill(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes; raise FormatError if the object has fewer."""
        while len(target):
            if not len(self._piece):
                self._next_piece()
            part, self._piece = self._piece[: len(target)], self._piece[len(target) :]
            target[: len(part)] = part
            target = target[len(part) :]

    def _next_piece(self) -> None:
        frame, start = self._frame, self._read
        stop = min(start + _PIECE, frame.nbytes)
        found = self._store.read(frame.name, start, stop, seconds_left(self._deadline))
        if len(found) < stop - start:
            raise FormatError(f"{frame.name} has fewer than its {frame.nbytes} bytes")
        if len(found) > stop - start:
            raise FormatError(f"the server ignores ranges of bytes, so {frame.name} cannot be read")
        self._digest.update(found)
        self._piece, self._read = memoryview(found), stop
