"""Memory that updates are encoded into: its uses, when it is free again, and chunks that are still read."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from weight_update.encodings import Lend
from weight_update.errors import LinkClosedError, NotEnoughMemoryError
from weight_update.transports.base import Buffer, TransportBackend
from weight_update.wire.frames import WeightChunk
from weight_update.wire.memory import pin

_IDLE_UPDATES = 8
_CHECK_SECONDS = 0.2
_T = TypeVar("_T")
_KEPT_BYTES = 16 << 10  # as small frames, too, this fits into the default buffer of a Unix socket


@dataclass(eq=False)
class Slot:
    """A buffer of the pool."""

    buffer: Buffer
    taken: int = 0  # number of the update, counted by the pool, that it was last taken for
    abandoned: bool = False  # whether a lost worker may still read it; it is then never written again
    _use: Callable[[], SlotUse | None] = lambda: None  # a weak reference

    @property
    def in_use(self) -> bool:
        """Whether an object refers to its last use."""
        return self._use() is not None

    def begin_use(self) -> SlotUse:
        """Begin a use; only a slot that is not in use has another one."""
        use = SlotUse(self)
        self._use = weakref.ref(use)
        return use


@dataclass(frozen=True, eq=False)
class SlotUse:
    """A use of a slot, which ends with the last reference to this object.

    There is no count that a signal handler could leave wrong. Code that gives up an update drops its
    references before it releases the sender's lock, so that others find the slot free.
    """

    slot: Slot


@dataclass(frozen=True, eq=False)
class VersionId:
    """Identity of the weights that some workers were given as ``version``.

    Workers may be given different weights under one number; each set has an identity of its own.
    """

    version: int


MIXED = VersionId(-1)
"""Identity of weights that are part of one version and part of another."""


@dataclass(eq=False)
class EncodedUpdate:
    """Frames that bring a worker to ``version_id``, and the uses of the slots that hold their payloads."""

    version_id: VersionId
    chunks: list[WeightChunk]
    uses: list[SlotUse]

    @property
    def version(self) -> int:
        """Number of the version that the frames lead to."""
        return self.version_id.version

    def abandon(self) -> None:
        """Never write its memory again."""
        for use in self.uses:
            use.slot.abandoned = True


@dataclass(eq=False)
class ChunkedUpdate(EncodedUpdate):
    """An update that one worker is sent chunk by chunk; it has the uses of chunks that were not read yet."""

    read: int = 0  # number of chunks that the worker has read

    def note_read(self, index: int) -> None:
        """Note that the worker has read the chunks up to ``index``."""
        del self.uses[: max(index + 1 - self.read, 0)]
        self.read = max(index + 1, self.read)


def are_short(chunks: Iterable[WeightChunk]) -> bool:
    """Return whether a connection keeps frames, without their payloads, until a worker reads them."""
    return sum(len(chunk.encode_head(checksum=False)) for chunk in chunks) <= _KEPT_BYTES


class BufferPool:
    """Buffers for payloads, reused as soon as no worker reads them. ``lock`` is the sender's."""

    def __init__(
        self, link: TransportBackend, lock: threading.RLock, changed: threading.Condition, timeout: float
    ) -> None:
        self.lock = lock
        self._link, self._changed, self._timeout = link, changed, timeout
        self._slots: list[Slot] = []
        self._reserved: dict[int, int] = {}
        self._updates = 0
        self._closed = False

    def reserve(self, sizes: Mapping[int, int]) -> None:
        """Allocate buffers until there are as many of each size as ``sizes`` has; :meth:`trim` keeps them."""
        present = Counter(slot.buffer.tensor.numel() for slot in self._slots)
        for nbytes, count in sizes.items():
            self._reserved[nbytes] = max(count, self._reserved.get(nbytes, 0))
            for _ in range(count - present[nbytes]):
                self._slots.append(Slot(self._link.allocate(nbytes)))
                pin(self._slots[-1].buffer.tensor)

    def fill(self, encode: Callable[[Lend], _T]) -> tuple[_T, list[SlotUse]]:
        """Return the result of ``encode(lend)`` and the uses of the slots that ``lend`` took for it."""
        uses: list[SlotUse] = []

        def lend(nbytes: int) -> torch.Tensor:
            uses.append(self.take(nbytes))
            return uses[-1].slot.buffer.tensor

        try:
            return encode(lend), uses
        except BaseException:
            uses.clear()  # an object that keeps the error keeps no slot
            raise

    def take(self, nbytes: int) -> SlotUse:
        """Return the use of a slot that no worker reads; wait for one while memory is short.

        Raises:
            LinkClosedError: the pool was closed.
            NotEnoughMemoryError: none became free in time, or none is in use that could be waited for.
        """
        deadline = time.monotonic() + self._timeout
        with self.lock:
            while True:
                if self._closed:
                    raise LinkClosedError("the sender was shut down")
                try:
                    return self._find(nbytes).begin_use()
                except NotEnoughMemoryError as error:
                    if not self._slots:
                        raise
                    if time.monotonic() > deadline:
                        raise NotEnoughMemoryError(f"{error}; workers did not release any in time") from None
                    self._changed.wait(_CHECK_SECONDS)

    def _find(self, nbytes: int) -> Slot:
        """Return a free slot of exactly this size, else a new one; NotEnoughMemoryError if there is none."""
        free = [slot for slot in self._slots if not slot.in_use]
        self._drop([slot for slot in free if slot.abandoned])
        for slot in free:
            if slot.abandoned or slot.buffer.tensor.numel() != nbytes:
                continue
            if slot.buffer.is_read_elsewhere():  # a call of the system: not for each of a thousand buckets
                self._drop([slot])
                continue
            slot.buffer.use += 1
            slot.taken = self._updates
            if slot.buffer.use == 1:  # not before: memory of some sizes is used only once
                pin(slot.buffer.tensor)
            return slot
        try:
            self._slots.append(Slot(self._link.allocate(nbytes), self._updates))
        except NotEnoughMemoryError:
            others = [slot for slot in self._slots if not slot.in_use]
            if not others:
                raise
            self._drop(others)
            return self._find(nbytes)
        return self._slots[-1]

    def trim(self, keep: int) -> None:
        """Free unused buffers beyond ``keep`` bytes, and those that the last few updates did not need.

        Call it once for each update.
        """
        with self.lock:
            self._updates += 1
            counts = Counter([slot.buffer.tensor.numel() for slot in self._slots])
            spare = 0
            for slot in reversed([slot for slot in self._slots if not slot.in_use]):
                nbytes = slot.buffer.tensor.numel()
                extra = counts[nbytes] > self._reserved.get(nbytes, 0)
                idle = extra and self._updates - slot.taken > _IDLE_UPDATES
                spare += 0 if idle else nbytes
                if idle or spare > keep:
                    self._drop([slot])
                    counts[nbytes] -= 1

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.buffer.close()

    def close(self) -> None:
        """Free all memory, and lend no more."""
        with self.lock:
            self._closed = True
            self._drop(list(self._slots))
