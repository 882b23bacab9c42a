"""The receiver's end: it reads the versions that a sender published."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

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
from weight_update.transports.object_store.manifest import StoreManifest, read_manifest
from weight_update.transports.object_store.store import ObjectStore
from weight_update.transports.object_store.stored_frames import read_frame, read_merged
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import Kind, WeightChunk, fresh_bytes
from weight_update.wire.schema import WeightSchema

_LONGEST_PAUSE = 30.0  # seconds between two attempts to read what could not be read
_log = logging.getLogger(__name__)


class ObjectStoreReader(TransportBackend):
    """The receiver's end of a link from an object store.

    If the receiver has none of the versions of the manifest, it gets the newest one with all weights: the
    link applies the changes. Otherwise it gets the changes since its version.

    A store that cannot be read for a while, or a damaged object, ends nothing: the receiver keeps its
    version, and a warning is logged. A receiver that could not apply a version gets all weights later: when
    there is a newer version, or else after pauses that double each time.

    All of this happens in the receiver's thread, while it waits in :meth:`recv_chunk`: the link looks at the
    manifest when it is time to, and reads the frames that the receiver lacks, each when it is asked for.
    What the receiver answers changes what it lacks, or when the link looks again.

    Args:
        store: the object store.
        token: secret of the sender, which signs the manifest.
        poll_seconds: seconds between two looks at the manifest.
    """

    def __init__(self, store: ObjectStore, token: str, poll_seconds: float) -> None:
        self._store, self._token, self._poll_seconds = store, token, poll_seconds
        # the connection
        self._connected = False
        self._joining = False  # until the first version was read
        self._hello: WeightChunk | None = None  # until it is answered
        self._welcome: str | None = None  # digest of the frame that described the weights
        self._schema: WeightSchema | None = None  # the one in that frame
        # the present call of recv_chunk(), which the frames are read for
        self._allocate: Allocate = fresh_bytes
        self._call_deadline: float | None = None
        # when to look at the manifest
        self._pause, self._next_look = poll_seconds, 0.0
        self._again_after, self._again_at = poll_seconds, 0.0  # for a version that could not be applied
        self._trouble: Exception | None = None
        # what was read
        self._seen = "", 0  # run and serial of the newest manifest
        self._position: tuple[str, int] | None = None  # run and version; None if all weights are needed
        self._begun: int | None = None  # a version of which a part was returned
        self._chunks: Iterator[WeightChunk] = iter(())  # the rest of what was found in the last look

    # -- the connection ----------------------------------------------------------------------------

    def restart(self, timeout: float | None = None) -> None:
        if self._store.closed:
            raise LinkClosedError("this end was closed")
        self._connected = True
        self._position, self._welcome, self._begun, self._joining = None, None, None, True
        self._chunks, self._next_look, self._again_at, self._trouble = iter(()), 0.0, 0.0, None

    def disconnect(self) -> None:
        self._connected, self._chunks = False, iter(())

    def close(self) -> None:
        self._store.close()

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        if chunk.kind is Kind.HELLO:
            self._hello = chunk
        elif chunk.kind is Kind.BEHIND:  # it needs all weights, not what comes next
            self._position, self._chunks = None, iter(())
            if self._trouble is None:  # else the same object may still be missing
                self._next_look = 0.0
        elif chunk.kind is Kind.FAILED:  # what hindered it may pass, and no newer version may come
            self._position, self._chunks, self._begun = None, iter(()), None
            self._joining = False  # a receiver that has other weights goes on with them
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
        self._allocate, self._call_deadline = allocate or fresh_bytes, deadline
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

    # -- when to look ------------------------------------------------------------------------------

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

    # -- what to read ------------------------------------------------------------------------------

    def _look(self) -> Iterator[WeightChunk]:
        """Read the manifest, and then the frames that the receiver lacks, each when it is asked for.

        Raises:
            LinkClosedError: the weights are of another structure now, so the receiver has to join again.
        """
        manifest = self._manifest()
        if manifest is None:
            return
        if self._hello is not None:
            welcome = read_frame(self._store, manifest.welcome, self._deadline)
            schema = WeightSchema.from_header(welcome.header["schema"])
            reply, self._hello = _reply(self._hello, welcome, schema, manifest.newest), None
            self._welcome, self._schema = manifest.welcome.sha256, schema
            yield reply
            if reply.kind is Kind.REFUSED:
                return
        elif manifest.welcome.sha256 != self._welcome:
            raise LinkClosedError("another sender publishes other weights now")
        known = [(manifest.run, one.version) for one in manifest.chain]
        if self._position in known:
            todo = manifest.chain[known.index(self._position) + 1 :]
        elif len(manifest.chain) == 1:
            todo = manifest.chain
        else:
            assert self._schema is not None
            yield read_merged(self._store, manifest.chain, self._schema, self._deadline)
            self._arrived(known[-1])
            return
        for one in todo:
            for frame in one.frames:
                chunk = read_frame(self._store, frame, self._deadline, self._allocate)
                self._begun = one.version if frame is not one.frames[-1] else None
                yield chunk
            self._arrived((manifest.run, one.version))

    def _manifest(self) -> StoreManifest | None:
        """Return the manifest, or None if there is nothing new that the receiver should try."""
        deadline, least = self._deadline, time.monotonic() + 0.1
        manifest = read_manifest(self._store, self._token, None if deadline is None else max(deadline, least))
        if manifest is None:
            return None
        run, serial = self._seen
        if manifest.run == run and manifest.serial < serial:
            return None  # a late write of an earlier manifest
        if self._seen != (manifest.run, manifest.serial):
            self._seen, self._again_at = (manifest.run, manifest.serial), 0.0
        return None if time.monotonic() < self._again_at else manifest

    def _arrived(self, position: tuple[str, int]) -> None:
        """Note that the receiver asks for more after a version, so that it does not need this one again."""
        self._position, self._joining = position, False
        self._recover()

    @property
    def _deadline(self) -> float | None:
        """Time by which a request must end; only a receiver that joins has no weights to go on with."""
        return self._call_deadline if self._joining else None


def _reply(hello: WeightChunk, welcome: WeightChunk, schema: WeightSchema, newest: int) -> WeightChunk:
    """Return the answer to a HELLO: the description of the weights, or a refusal if they do not fit."""
    if hello.header["schema"] is not None:
        theirs = WeightSchema.from_header(hello.header["schema"])
        try:
            schema.require_same(theirs, f"worker {hello.header['worker']}", more=True)
        except SchemaMismatchError as error:
            return WeightChunk(Kind.REFUSED, {"reason": brief(error), "problems": list(error.problems)})
    return replace(welcome, header={**welcome.header, "version": newest})
