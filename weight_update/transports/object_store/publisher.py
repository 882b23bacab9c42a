"""The sender's end: it publishes each version, and answers for the readers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError, TransportError
from weight_update.transports.base import Allocate, Capabilities, TransportBackend
from weight_update.transports.object_store.manifest import (
    MANIFEST_NAME,
    OBJECT_NAME,
    StoredFrame,
    StoredVersion,
    StoreManifest,
    read_manifest,
)
from weight_update.transports.object_store.store import ObjectStore
from weight_update.transports.object_store.stored_frames import write_frame
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import Kind, WeightChunk

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds after which a store that failed is tried again
_log = logging.getLogger(__name__)


class ObjectStorePublisher(TransportBackend):
    """The sender's end of a link whose worker is an object store.

    The store joins as soon as the sender reads from the link. It has applied a version once the manifest
    names that version. If the store cannot be written, the link fails, and the store joins again a little
    later: the sender then gives it all weights anew.

    Args:
        store: the object store.
        token: secret that readers must know; it signs the manifest.
        most_changes: number of versions in a row that may be published as changes. The next one has all
            weights.
    """

    capabilities: Capabilities = Capabilities(allows_rejoin=True)

    def __init__(self, store: ObjectStore, token: str, most_changes: int) -> None:
        self._store, self._token, self._most_changes = store, token, most_changes
        # of the thread that sends
        self._run, self._written = uuid.uuid4().hex, 0  # number of manifests
        self._earlier: StoreManifest | None = None  # the manifest that the first of this run replaces
        self._description: WeightChunk | None = None  # of the weights
        self._welcome: StoredFrame | None = None  # the frame that has it
        self._chain: tuple[StoredVersion, ...] = ()
        self._former: tuple[StoredVersion, ...] = ()  # the chain before, which readers may still read
        self._manifests: list[StoreManifest] = []  # the one in the store, and those that may still be written
        self._left: list[str] = []  # names of frames that earlier runs left
        self._frames: list[StoredFrame] = []  # of the version that is being written
        self._begun = 0.0  # when its first frame came
        self._is_whole = False
        self._declined: int | None = None  # a version that is to come again, with all weights
        # shared with the thread that receives
        self._changed = threading.Condition()
        self._answers: deque[WeightChunk] = deque()
        self._pause = 0.0
        self._back_at: float | None = 0.0  # when the store joins, on the monotonic clock; None once it has

    # -- the link ----------------------------------------------------------------------------------

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        deadline = deadline_of(timeout)
        with self._changed:
            while not self._store.closed:
                left, pause = seconds_left(deadline), seconds_left(self._back_at)
                if self._answers:
                    return self._answers.popleft()
                if pause == 0:
                    self._back_at = None
                    return self._hello()
                if left == 0:
                    return None
                limits = [limit for limit in (left, pause) if limit is not None]
                self._changed.wait(min(limits, default=None))
        raise LinkClosedError("this end was closed")

    def _hello(self) -> WeightChunk:
        header = {"token": self._token, "worker": 0, "pid": os.getpid(), "version": None, "schema": None}
        return WeightChunk(Kind.HELLO, {**header, "error": None, "instance": self._run})

    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        if self._back_at is not None:
            raise LinkClosedError("the store failed, and joins again later")
        deadline = deadline_of(timeout)
        try:
            if chunk.kind is Kind.WELCOME:
                self._begin(chunk, deadline)
            elif chunk.kind is Kind.UPDATE:
                self._take(chunk, deadline)
            elif chunk.kind is Kind.COMMIT:
                self._commit(chunk.header["version"], deadline)
            elif chunk.kind is Kind.ABORT:
                self._frames = []
            elif chunk.kind is Kind.REFUSED:
                self._fail()  # connect() failed in the trainer, which may call it again
            # a GOODBYE changes nothing for readers
        except SyncTimeoutError:
            self._fail()
            raise
        except TransportError as error:
            self._fail()
            raise TransportError(str(error)) from error

    def disconnect(self) -> None:
        self._fail()

    def close(self) -> None:
        self._store.close()
        with self._changed:
            self._changed.notify_all()

    def _fail(self) -> None:
        with self._changed:
            if self._back_at is not None:
                return
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._back_at = time.monotonic() + self._pause
            self._answers.clear()
            self._changed.notify_all()

    def _answer(self, kind: Kind, **header: object) -> None:
        with self._changed:
            self._answers.append(WeightChunk(kind, header))
            self._changed.notify_all()

    # -- versions ----------------------------------------------------------------------------------

    def _begin(self, welcome: WeightChunk, deadline: float | None) -> None:
        self._check_manifest(deadline)
        if self._welcome is None:
            with self._warning(
                "versions of earlier senders stay in the store until the next sender connects"
            ):
                self._left = list(self._found(own=False))
        else:  # on a full disk, what is left of a version would be in the way
            self._remove_unused()
        self._former, self._chain = self._chain or self._former, ()
        self._frames = []
        # A reader sees the number of the version that it is going to get.
        self._description = replace(welcome, header={**welcome.header, "version": None})
        self._welcome = write_frame(self._store, self._description, self._name_of("welcome"), deadline)

    def _take(self, update: WeightChunk, deadline: float | None) -> None:
        header = update.header
        version, index = header["version"], header["index"]
        if index == 0:
            self._is_whole, self._frames, self._begun = header["base"] is None, [], time.perf_counter()
            self._declined = None
            follows = bool(self._chain) and self._chain[-1].version == header["base"]
            # Declined changes of send_together() come again, after all weights of the version before.
            most = self._most_changes if header["commit"] else max(self._most_changes, 1)
            if not self._is_whole and not (follows and len(self._chain) <= most):
                self._decline(version)
        if version == self._declined:
            return
        # Each reader applies it at once: models that are sent together are published one after the other.
        alone = replace(update, header={**header, "commit": True, "group": None})
        name = self._name_of(f"{version:012d}")
        self._frames.append(write_frame(self._store, alone, name, deadline))
        if len(self._frames) < header["count"]:
            self._answer(Kind.TAKEN, version=version, index=index)
        elif not self._check_manifest(deadline) and not self._is_whole:
            self._decline(version)  # the objects of earlier versions may be lost, too
        elif header["commit"]:
            self._publish(version, deadline)
        else:
            self._answer(Kind.STAGED, version=version)

    def _decline(self, version: int) -> None:
        """Ask for a version again, with all weights."""
        self._declined, self._frames = version, []
        self._answer(Kind.BEHIND, version=version)

    def _commit(self, version: int, deadline: float | None) -> None:
        if self._frames:  # otherwise it was published: the sender was interrupted, and told it again
            self._check_manifest(deadline)
            self._publish(version, deadline)

    def _publish(self, version: int, deadline: float | None) -> None:
        """Write the manifest that names a version, and answer that the version is applied."""
        chain = (*(() if self._is_whole else self._chain), StoredVersion(version, tuple(self._frames)))
        assert self._welcome is not None
        self._written += 1
        manifest = StoreManifest(self._run, self._written, self._welcome, chain)
        draft = self._name_of("manifest")
        self._manifests.append(manifest)
        self._store.replace(MANIFEST_NAME, manifest.encode(self._token), draft, deadline)
        self._pause = 0.0
        if self._is_whole:
            self._former = self._chain or self._former
        self._chain, self._manifests, self._frames = chain, [manifest], []
        self._answer(
            Kind.APPLIED,
            version=version,
            apply_seconds=time.perf_counter() - self._begun,
            stall_seconds=0.0,
        )
        if self._is_whole:
            self._remove_unused()

    def _check_manifest(self, deadline: float | None) -> bool:
        """Return whether the store has the manifest that was written last.

        It does not if objects were removed, or if the URL leads to another directory than before.

        Raises:
            TransportError: another sender has published since this one did.
        """
        try:
            present = read_manifest(self._store, self._token, deadline)
        except FormatError:  # another sender writes it now, or a write was cut off
            present = None
        if not self._written:
            self._earlier = present
        if present is None or present == self._earlier:  # the first of this run perhaps failed
            return False
        if present.run != self._run:
            raise TransportError(
                f"another sender has published version {present.newest} in {self._store.url} since this one "
                "did; end one of the two, or give each a URL of its own"
            )
        return present.serial == self._written

    def _name_of(self, stem: str) -> str:
        return f"{self._run}/{stem}-{uuid.uuid4().hex[:8]}.frame"

    def _remove_unused(self) -> None:
        """Remove the frames of this run that no reader needs and, if it has published, those of earlier runs.

        Frames of a later run are left alone, also if this one is late.
        """
        assert self._welcome is not None
        assert self._description is not None
        versions = [*self._former, *(version for one in self._manifests for version in one.chain)]
        needed = {frame.name for version in versions for frame in version.frames}
        needed |= {self._welcome.name, *(one.welcome.name for one in self._manifests)}
        with self._warning("old versions could not be removed yet"):
            found = self._found(own=True)
            left = self._left if self._chain else []
            unused = [*left, *(name for name, frame in found.items() if frame not in needed)]
            if self._welcome.name not in found:  # perhaps a rule of the bucket removes old objects
                write_frame(self._store, self._description, self._welcome.name, None)
            if unused:
                self._store.remove(unused)
            if self._chain:
                self._left = []

    def _found(self, *, own: bool) -> dict[str, str]:
        """Return the objects in the store, of this run or of all others, and the frame of each."""
        objects = filter(None, map(OBJECT_NAME.fullmatch, self._store.names()))
        return {one[0]: one[1] for one in objects if one[0].startswith(self._run) is own}

    @contextlib.contextmanager
    def _warning(self, effect: str) -> Iterator[None]:
        """Log errors of the store and their effect: objects that are left there harm nobody."""
        try:
            yield
        except LinkClosedError:
            pass
        except (TransportError, SyncTimeoutError, FileNotFoundError) as error:
            _log.warning("%s: %s", effect, error)
