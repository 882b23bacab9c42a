"""Memory that the sender encodes into: who uses which buffer, and when one is free again."""

from __future__ import annotations

from dataclasses import dataclass

from weight_update.errors import NotEnoughMemoryError
from weight_update.transports.base import Buffer, TransportBackend
from weight_update.wire.frames import WeightChunk

__all__ = ["MIXED", "BufferPool", "EncodedUpdate", "Slot", "VersionId", "give_back"]


_IDLE_UPDATES = 8


class Slot:
    """A buffer and how many updates in use lie in it.

    Attributes:
        taken: the update, as the pool counts them, that it was last taken for.
    """

    def __init__(self, buffer: Buffer, taken: int = 0) -> None:
        self.buffer = buffer
        self.users = 0
        self.abandoned = False
        self.taken = taken


@dataclass(frozen=True, eq=False)
class VersionId:
    """The weights that some workers were given as ``version``; others may have been given others as that."""

    version: int


MIXED = VersionId(-1)
"""No version: a part of one and a part of another."""


class EncodedUpdate:
    """The frames that bring a worker to ``version_id``, and the slots that their payloads lie in."""

    def __init__(self, version_id: VersionId, chunks: list[WeightChunk], slots: list[Slot]) -> None:
        self.version_id, self.chunks, self.slots = version_id, chunks, slots

    @property
    def version(self) -> int:
        """Number of the version_id."""
        return self.version_id.version

    def retain(self) -> EncodedUpdate:
        """Count one more user of its memory; itself."""
        for slot in self.slots:
            slot.users += 1
        return self

    def release(self) -> None:
        """Count one user less."""
        give_back(self.slots)


def give_back(slots: list[Slot]) -> None:
    """Count one user less of each."""
    for slot in slots:
        slot.users -= 1


class BufferPool:
    """Buffers for payloads, reused as soon as nobody reads them."""

    def __init__(self, link: TransportBackend) -> None:
        self._link = link
        self._slots: list[Slot] = []
        self._reserved: dict[int, int] = {}
        self._updates = 0

    def reserve(self, nbytes: int, count: int) -> None:
        """Make sure that ``count`` buffers of this size exist, and that :meth:`trim` leaves so many."""
        self._reserved[nbytes] = max(count, self._reserved.get(nbytes, 0))
        while sum(slot.buffer.tensor.numel() == nbytes for slot in self._slots) < count:
            self._slots.append(Slot(self._link.allocate(nbytes)))

    def take(self, nbytes: int) -> Slot | None:
        """A free buffer of exactly this size, else a new one; None if it does not fit while others are used.

        Raises:
            NotEnoughMemoryError: a new one does not fit, and none is in use that could be waited for.
        """
        self._drop([slot for slot in self._slots if slot.abandoned and slot.users == 0])
        free = [slot for slot in self._slots if slot.users == 0]
        for slot in free:
            if slot.buffer.tensor.numel() == nbytes:
                slot.buffer.use += 1
                slot.taken = self._updates
                return slot
        try:
            self._slots.append(Slot(self._link.allocate(nbytes), self._updates))
        except NotEnoughMemoryError:
            if free:
                self._drop(free)  # of other sizes
                return self.take(nbytes)
            if not self._slots:
                raise
            return None
        return self._slots[-1]

    def trim(self, keep: int) -> None:
        """Give back free buffers beyond ``keep`` bytes, and those that a few updates did without.

        Called once for each update.
        """
        self._updates += 1
        idle = [one for one in self._slots if one.users == 0 and self._updates - one.taken > _IDLE_UPDATES]
        for slot in idle:
            nbytes = slot.buffer.tensor.numel()
            same = sum(one.buffer.tensor.numel() == nbytes for one in self._slots)
            if same > self._reserved.get(nbytes, 0):
                self._drop([slot])
        spare = 0
        for slot in reversed([slot for slot in self._slots if slot.users == 0]):
            spare += slot.buffer.tensor.numel()
            if spare > keep:
                self._drop([slot])

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.buffer.close()

    def close(self) -> None:
        """Give all memory back."""
        self._drop(list(self._slots))
