"""Send groups whose updates carry all weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from weight_update.encodings import Encoder, WholeEncoding
from weight_update.sender.buffers import EncodedUpdate, Slot, VersionId, give_back
from weight_update.sender.groups.base import Borrow, SendGroup, UpdateStats
from weight_update.wire.frames import Step, frames_of
from weight_update.wire.schema import WeightSchema

__all__ = ["FullGroup"]


class FullGroup(SendGroup):
    """A send group whose updates carry all weights."""

    def __init__(
        self,
        schema: WeightSchema,
        borrow: Borrow,
        lock: threading.Condition,
        encoding: WholeEncoding,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(schema, borrow, lock)
        self._encoding = encoding
        self._encoder = encoder or encoding.encoder(schema)
        self._step = Step(-1)
        self._latest: EncodedUpdate | None = None
        self._staged: EncodedUpdate | None = None

    @property
    def kept(self) -> list[EncodedUpdate]:
        return [one for one in (self._latest, self._staged) if one is not None]

    def stage(
        self, step: Step, tensors: Mapping[str, torch.Tensor], bases: Sequence[VersionId] = ()
    ) -> UpdateStats:
        del bases
        slots: list[Slot] = []
        try:
            payloads = self._encoder.encode(
                [tensors[name] for name in self.schema.names], self._borrow(slots)
            )
        except BaseException:
            with self._lock:
                give_back(slots)
            raise
        chunks = frames_of(step, self.schema, self._encoding.name, payloads)
        with self._lock:
            self.discard()
            self._staged = EncodedUpdate(VersionId(step.version), chunks, slots)
            self._step, self.pending = step, step.version
        elements = self.schema.elements
        return UpdateStats(self._encoding.label, elements, elements)

    def commit(self) -> None:
        with self._lock:
            update, self._staged = self._staged, None
            if update is None:
                return
            if not self._step.commit:
                payloads = [chunk.payload for chunk in update.chunks if chunk.payload is not None]
                step = self._step.committed()
                chunks = frames_of(step, self.schema, self._encoding.name, payloads)
                update = EncodedUpdate(update.version_id, chunks, update.slots)
            if self._latest is not None:
                self._latest.release()
            self._latest, self.version_id, self.pending = update, update.version_id, None

    def discard(self) -> None:
        with self._lock:
            if self._staged is not None:
                self._staged.release()
            self._staged, self.pending = None, None

    def update_for(self, has: VersionId | None) -> EncodedUpdate | None:
        pending = self.pending is not None and self.target(has) == self.pending
        return self._staged if pending else self._latest

    def fork(self) -> SendGroup:
        """Return another group that starts with the same update, in the same memory."""
        other = FullGroup(self.schema, self._borrow, self._lock, self._encoding, self._encoder)
        with self._lock:
            other.version_id, other.source = self.version_id, self.source
            other._latest = None if self._latest is None else self._latest.retain()
        return other

    def close(self) -> None:
        with self._lock:
            self.discard()
            if self._latest is not None:
                self._latest.release()
            self._latest = self.version_id = None
