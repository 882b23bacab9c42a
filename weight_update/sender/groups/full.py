"""What the workers of one kind are sent: all that take the same bytes and are meant to have one version."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.encodings import Encoder, Lend, WholeEncoding
from weight_update.sender.buffers import Content, Shipment, Slot, give_back
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step, frames_of

__all__ = ["Borrow", "Lane", "Staged", "WholeLane"]


Borrow = Callable[[list[Slot]], Lend]
"""Makes a ``lend`` that enters the slots it lends into a list; each counts one user."""


@dataclass
class Staged:
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


class Lane(ABC):
    """What a set of workers is sent.

    An update is staged, then settled (it is the version that workers are to have) or dropped.

    Args:
        schema: the tensors as they travel, in the receivers' dtypes.
        borrow: where payloads lie.
        lock: the sender's lock; it guards versions and the count of users of each slot.

    Attributes:
        content: what was settled last.
        pending: number of what is staged and neither settled nor dropped.
        family: lanes that were last given the same weights have the same.
    """

    def __init__(self, schema: WeightSchema, borrow: Borrow, lock: threading.Condition) -> None:
        self.schema = schema
        self.content: Content | None = None
        self.pending: int | None = None
        self.family: Hashable = None
        self._borrow, self._lock = borrow, lock

    @property
    def version(self) -> int | None:
        """Number of what was settled last."""
        return None if self.content is None else self.content.version

    def target(self, has: Content | None) -> int | None:
        """The version that a worker with ``has`` is to be sent, if any."""
        if self.pending is not None and (has is not None or self.version is None):
            return self.pending
        return self.version

    @property
    @abstractmethod
    def held(self) -> list[Shipment]:
        """The whole updates that it keeps in memory; the sender's lock is held."""

    def welcome(self) -> dict[str, Any]:
        """What a joining worker is told beside the schema; see ``docs/wire_format.rst``."""
        return {"keep": False, "version": self.version, "digests": None}

    @abstractmethod
    def stage(
        self, step: Step, tensors: Mapping[str, torch.Tensor], holders: Sequence[Content] = ()
    ) -> Staged:
        """Encode an update. Called by one thread at a time, as are :meth:`settle` and :meth:`drop`.

        Args:
            step: which update.
            tensors: live, by name.
            holders: what the workers of this lane have now, as far as it is known.
        """

    @abstractmethod
    def settle(self) -> None:
        """What is pending is from now on what workers are to have."""

    @abstractmethod
    def drop(self) -> None:
        """Forget what is pending."""

    @abstractmethod
    def ready(self, has: Content | None) -> Shipment | None:
        """What brings a worker from ``has`` to its target; None if :meth:`prepare` is needed first.

        The sender's lock is held.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Make the whole weights ready to send; may take long, the sender's lock is not held."""

    @abstractmethod
    def fork(self) -> Lane:
        """Another lane that begins where this one is."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all memory."""


class WholeLane(Lane):
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
        self._latest: Shipment | None = None
        self._next: Shipment | None = None

    @property
    def held(self) -> list[Shipment]:
        return [one for one in (self._latest, self._next) if one is not None]

    def stage(
        self, step: Step, tensors: Mapping[str, torch.Tensor], holders: Sequence[Content] = ()
    ) -> Staged:
        del holders
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
            self._next = Shipment(Content(step.version), chunks, slots)
            self._step, self.pending = step, step.version
        elements = self.schema.elements
        return Staged(self._encoding.label, elements, elements)

    def settle(self) -> None:
        with self._lock:
            shipment, self._next = self._next, None
            if shipment is None:
                return
            if not self._step.commit:
                payloads = [chunk.payload for chunk in shipment.chunks if chunk.payload is not None]
                step = self._step.committed()
                chunks = frames_of(step, self.schema, self._encoding.name, payloads)
                shipment = Shipment(shipment.content, chunks, shipment.slots)
            if self._latest is not None:
                self._latest.release()
            self._latest, self.content, self.pending = shipment, shipment.content, None

    def drop(self) -> None:
        with self._lock:
            if self._next is not None:
                self._next.release()
            self._next, self.pending = None, None

    def ready(self, has: Content | None) -> Shipment | None:
        pending = self.pending is not None and self.target(has) == self.pending
        return self._next if pending else self._latest

    def prepare(self) -> None:
        """See :meth:`Lane.prepare`; whole updates are always ready."""

    def fork(self) -> Lane:
        """See :meth:`Lane.fork`; the memory is shared."""
        other = WholeLane(self.schema, self._borrow, self._lock, self._encoding, self._encoder)
        with self._lock:
            other.content, other.family = self.content, self.family
            other._latest = None if self._latest is None else self._latest.retain()
        return other

    def close(self) -> None:
        with self._lock:
            self.drop()
            if self._latest is not None:
                self._latest.release()
            self._latest = self.content = None
