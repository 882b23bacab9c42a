"""A send group: workers that take the same bytes of each update, and the updates that are kept for them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.encodings import Encoder, Lend, WholeEncoding
from weight_update.sender.buffers import EncodedUpdate, Slot, VersionId, give_back
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step, frames_of

__all__ = ["Borrow", "FullGroup", "SendGroup", "UpdateStats"]


Borrow = Callable[[list[Slot]], Lend]
"""Makes a ``lend`` that enters the slots it lends into a list; each counts one user."""


@dataclass
class UpdateStats:
    """What staging an update came to.

    Attributes:
        label: how it will travel, as shown in reports.
        changed: elements that will be sent.
        total: elements there are.
        compression: what the payload is compressed with, as shown in reports; empty for nothing.
    """

    label: str
    changed: int
    total: int
    compression: str = ""


class SendGroup(ABC):
    """What a set of workers is sent.

    An update is staged, then settled (it is the version that workers are to have) or dropped.

    Args:
        schema: the tensors as they travel, in the receivers' dtypes.
        borrow: where payloads lie.
        lock: the sender's lock; it guards versions and the count of users of each slot.

    Attributes:
        version_id: what was settled last.
        pending: number of what is staged and neither settled nor dropped.
        family: groups that were last given the same weights have the same.
    """

    def __init__(self, schema: WeightSchema, borrow: Borrow, lock: threading.Condition) -> None:
        self.schema = schema
        self.version_id: VersionId | None = None
        self.pending: int | None = None
        self.family: Hashable = None
        self._borrow, self._lock = borrow, lock

    @property
    def version(self) -> int | None:
        """Number of what was settled last."""
        return None if self.version_id is None else self.version_id.version

    def target(self, has: VersionId | None) -> int | None:
        """The version that a worker with ``has`` is to be sent, if any."""
        if self.pending is not None and (has is not None or self.version is None):
            return self.pending
        return self.version

    @property
    @abstractmethod
    def kept(self) -> list[EncodedUpdate]:
        """The whole updates that it keeps in memory; the sender's lock is held."""

    def welcome(self) -> dict[str, Any]:
        """What a joining worker is told beside the schema; see ``docs/wire_format.rst``."""
        return {"keep": False, "version": self.version, "digests": None}

    @abstractmethod
    def stage(
        self, step: Step, tensors: Mapping[str, torch.Tensor], bases: Sequence[VersionId] = ()
    ) -> UpdateStats:
        """Encode an update. Called by one thread at a time, as are :meth:`settle` and :meth:`drop`.

        Args:
            step: which update.
            tensors: live, by name.
            bases: what the workers of this group have now, as far as it is known.
        """

    @abstractmethod
    def settle(self) -> None:
        """What is pending is from now on what workers are to have."""

    @abstractmethod
    def drop(self) -> None:
        """Forget what is pending."""

    @abstractmethod
    def ready(self, has: VersionId | None) -> EncodedUpdate | None:
        """What brings a worker from ``has`` to its target; None if :meth:`prepare` is needed first.

        The sender's lock is held.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Make the whole weights ready to send; may take long, the sender's lock is not held."""

    @abstractmethod
    def fork(self) -> SendGroup:
        """Another group that begins where this one is."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all memory."""


class FullGroup(SendGroup):
    """Every update carries all weights."""

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
        self._next: EncodedUpdate | None = None

    @property
    def kept(self) -> list[EncodedUpdate]:
        return [one for one in (self._latest, self._next) if one is not None]

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
            self.drop()
            self._next = EncodedUpdate(VersionId(step.version), chunks, slots)
            self._step, self.pending = step, step.version
        elements = self.schema.elements
        return UpdateStats(self._encoding.label, elements, elements)

    def settle(self) -> None:
        with self._lock:
            update, self._next = self._next, None
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

    def drop(self) -> None:
        with self._lock:
            if self._next is not None:
                self._next.release()
            self._next, self.pending = None, None

    def ready(self, has: VersionId | None) -> EncodedUpdate | None:
        pending = self.pending is not None and self.target(has) == self.pending
        return self._next if pending else self._latest

    def prepare(self) -> None:
        """See :meth:`SendGroup.prepare`; whole updates are always ready."""

    def fork(self) -> SendGroup:
        """See :meth:`SendGroup.fork`; the memory is shared."""
        other = FullGroup(self.schema, self._borrow, self._lock, self._encoding, self._encoder)
        with self._lock:
            other.version_id, other.family = self.version_id, self.family
            other._latest = None if self._latest is None else self._latest.retain()
        return other

    def close(self) -> None:
        with self._lock:
            self.drop()
            if self._latest is not None:
                self._latest.release()
            self._latest = self.version_id = None
