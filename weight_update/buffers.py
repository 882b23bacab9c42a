"""Memory that the sender encodes into: who uses which buffer, and when one is free again."""

from __future__ import annotations

from dataclasses import replace

from weight_update.chunks import WeightChunk
from weight_update.errors import NotEnoughMemoryError
from weight_update.transports.base import Buffer, TransportBackend

__all__ = ["BufferPool", "Slot", "Update"]


class Slot:
    """A buffer and how many updates in use lie in it."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.users = 0
        self.abandoned = False


class Update:
    """One version, encoded, and the slots it lies in."""

    def __init__(self, version: int, chunks: list[WeightChunk], slots: list[Slot]) -> None:
        self.version, self.chunks, self.slots = version, chunks, slots

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads together."""
        return sum(chunk.payload_bytes for chunk in self.chunks)

    def settle(self) -> None:
        """It is committed: a worker that joins from now on applies it at once, and on its own."""
        self.chunks = [
            replace(chunk, header={**chunk.header, "commit": True, "group": None}) for chunk in self.chunks
        ]

    def retain(self) -> Update:
        """Count one more user of its memory; itself."""
        for slot in self.slots:
            slot.users += 1
        return self

    def release(self) -> None:
        """Count one user less."""
        for slot in self.slots:
            slot.users -= 1


class BufferPool:
    """Buffers for payloads, reused as soon as nobody reads them."""

    def __init__(self, link: TransportBackend) -> None:
        self._link = link
        self._slots: list[Slot] = []

    def reserve(self, nbytes: int) -> None:
        """Make sure that two buffers of this size exist."""
        while sum(slot.buffer.tensor.numel() == nbytes for slot in self._slots) < 2:
            self._slots.append(Slot(self._link.allocate(nbytes)))

    def take(self, nbytes: int, limit: int | None) -> Slot | None:
        """A free buffer, or a new one if there are fewer than ``limit``, or None.

        Raises:
            NotEnoughMemoryError: there is none, ``limit`` is None, and a new one does not fit.
        """
        self._drop([slot for slot in self._slots if slot.abandoned and slot.users == 0])
        same = [slot for slot in self._slots if slot.buffer.tensor.numel() == nbytes and not slot.abandoned]
        free = [slot for slot in same if slot.users == 0]
        if free:
            if limit is not None and len(same) > limit:
                self._drop(free[1:])
            return free[0]
        if limit is not None and len(same) >= limit:
            return None
        try:
            self._slots.append(Slot(self._link.allocate(nbytes)))
        except NotEnoughMemoryError:
            if limit is None or not same:
                raise
            return None  # one of them will be free soon
        return self._slots[-1]

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.buffer.close()

    def close(self) -> None:
        """Give all memory back."""
        self._drop(list(self._slots))
