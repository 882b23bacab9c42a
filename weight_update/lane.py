"""What the workers of one kind are sent: all that take the same bytes and are meant to have one version."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.buffers import Shipment, Slot
from weight_update.chunks import WeightSchema, digest
from weight_update.encodings import DeltaEncoding, Difference, Encoder, Lend, Tracker, WholeEncoding
from weight_update.frames import Step, frames_of

__all__ = ["Borrow", "ChangeLane", "Lane", "Staged", "WholeLane"]

_NOT_WORTH = 0.9
"""Share of all elements, or of all bytes, above which an update is sent whole."""

Borrow = Callable[[list[Slot]], Lend]
"""Makes a ``lend`` that enters the slots it lends into a list; each counts one user."""


@dataclass
class Staged:
    """What staging an update came to.

    Attributes:
        label: how it will travel, as shown in reports.
        changed: elements that will be sent.
        total: elements there are.
    """

    label: str
    changed: int
    total: int


class Lane(ABC):
    """What a set of workers is sent.

    An update is staged, then settled (it is the version that workers are to have) or dropped.

    Args:
        schema: the tensors as they travel, in the receivers' dtypes.
        borrow: where payloads lie.
        moved: the sender's lock; it guards versions and the count of users of each slot.

    Attributes:
        version: what was settled last.
        pending: what is staged and neither settled nor dropped.
        family: lanes that were last given the same weights have the same number.
    """

    def __init__(self, schema: WeightSchema, borrow: Borrow, moved: threading.Condition) -> None:
        self.schema = schema
        self.version: int | None = None
        self.pending: int | None = None
        self.family = 0
        self._borrow, self._moved = borrow, moved

    def target(self, has: int | None) -> int | None:
        """The version that a worker with version ``has`` is to be sent, if any."""
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
    def stage(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> Staged:
        """Encode an update. Called by one thread at a time, as are :meth:`settle` and :meth:`drop`."""

    @abstractmethod
    def settle(self) -> None:
        """What is pending is from now on what workers are to have."""

    @abstractmethod
    def drop(self) -> None:
        """Forget what is pending."""

    @abstractmethod
    def ready(self, has: int | None) -> Shipment | None:
        """What brings a worker from version ``has`` to its target; None if :meth:`prepare` is needed first.

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
        moved: threading.Condition,
        encoding: WholeEncoding,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(schema, borrow, moved)
        self._encoding = encoding
        self._encoder = encoder or encoding.encoder(schema)
        self._step = Step(-1)
        self._latest: Shipment | None = None
        self._next: Shipment | None = None

    @property
    def held(self) -> list[Shipment]:
        """See :attr:`Lane.held`."""
        return [one for one in (self._latest, self._next) if one is not None]

    def stage(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> Staged:
        """See :meth:`Lane.stage`."""
        slots: list[Slot] = []
        try:
            payloads = self._encoder.encode(
                [tensors[name] for name in self.schema.names], self._borrow(slots)
            )
        except BaseException:
            with self._moved:
                Shipment(step.version, [], slots).release()
            raise
        chunks = frames_of(step, self.schema, self._encoding.name, payloads)
        with self._moved:
            self.drop()
            self._next, self._step, self.pending = Shipment(step.version, chunks, slots), step, step.version
        elements = self.schema.elements
        return Staged(self._encoding.label, elements, elements)

    def settle(self) -> None:
        """See :meth:`Lane.settle`."""
        with self._moved:
            shipment, self._next = self._next, None
            if shipment is None:
                return
            if not self._step.commit:
                payloads = [chunk.payload for chunk in shipment.chunks if chunk.payload is not None]
                step = self._step.committed()
                chunks = frames_of(step, self.schema, self._encoding.name, payloads)
                shipment = Shipment(step.version, chunks, shipment.slots)
            if self._latest is not None:
                self._latest.release()
            self._latest, self.version, self.pending = shipment, shipment.version, None

    def drop(self) -> None:
        """See :meth:`Lane.drop`."""
        with self._moved:
            if self._next is not None:
                self._next.release()
            self._next, self.pending = None, None

    def ready(self, has: int | None) -> Shipment | None:
        """See :meth:`Lane.ready`."""
        pending = self.pending is not None and self.target(has) == self.pending
        return self._next if pending else self._latest

    def prepare(self) -> None:
        """See :meth:`Lane.prepare`; whole updates are always ready."""

    def fork(self) -> Lane:
        """See :meth:`Lane.fork`; the memory is shared."""
        other = WholeLane(self.schema, self._borrow, self._moved, self._encoding, self._encoder)
        with self._moved:
            other.version, other.family = self.version, self.family
            other._latest = None if self._latest is None else self._latest.retain()
        return other

    def close(self) -> None:
        """See :meth:`Lane.close`."""
        with self._moved:
            self.drop()
            if self._latest is not None:
                self._latest.release()
            self._latest = self.version = None


class ChangeLane(Lane):
    """Updates carry what changed; whole weights go to those who just joined or missed too much.

    It remembers the weights of ``version``, and the payloads of the last few steps that led there, so that a
    worker which was busy meanwhile gets several at once.

    Args:
        schema: see :class:`Lane`.
        borrow: see :class:`Lane`.
        moved: see :class:`Lane`.
        encoding: how changes are found and told.
        tracked: positions of the entries that updates may change; None for all.
        tracker: what to begin with, for a fork.
    """

    def __init__(
        self,
        schema: WeightSchema,
        borrow: Borrow,
        moved: threading.Condition,
        encoding: DeltaEncoding,
        tracked: Sequence[int] | None = None,
        tracker: Tracker[Any] | None = None,
    ) -> None:
        super().__init__(schema, borrow, moved)
        self._encoding, self._tracked = encoding, tracked
        self._tracker = tracker or encoding.tracker(schema, tracked)
        self._remembering = threading.Lock()  # held while the tracker is read or changed
        self._step = Step(-1)
        self._next: _Next | None = None
        self._past: deque[_Past] = deque()
        self._whole: Shipment | None = None
        self._first: int | None = None
        self._digests: list[str | None] | None = None

    @property
    def held(self) -> list[Shipment]:
        """See :attr:`Lane.held`."""
        return [] if self._whole is None else [self._whole]

    def target(self, has: int | None) -> int | None:
        """See :meth:`Lane.target`; what is pending goes to workers that have the version before."""
        return self.pending if self.pending is not None and has == self.version else self.version

    def welcome(self) -> dict[str, Any]:
        """See :meth:`Lane.welcome`; the digests are of what a worker must have already."""
        return {"keep": True, "version": self.version, "digests": self._digests_to_tell()}

    def stage(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> Staged:
        """See :meth:`Lane.stage`."""
        elements = self.schema.elements
        if self.version is None:
            with self._remembering:
                self._tracker.begin([tensors[name] for name in self.schema.names])
            self._put(_Next(step, None, None, []))
            return Staged(self._encoding.whole.label, elements, elements)
        difference = self._tracker.compare([tensors.get(name) for name in self.schema.names])
        slots: list[Slot] = []
        payload = None
        try:
            if difference.changed <= _NOT_WORTH * difference.total or not step.commit:
                payload = self._tracker.encode(difference, self.version, step.version, self._lend(slots))
        except BaseException:
            self._give_back(slots)
            raise
        if payload is not None and step.commit and payload.numel() > _NOT_WORTH * self.schema.dense_bytes:
            self._give_back(slots)
            payload, slots = None, []
        self._put(_Next(step, difference, payload, slots))
        told = self._encoding.whole if payload is None else self._encoding
        return Staged(told.label, difference.changed, difference.total)

    def settle(self) -> None:
        """See :meth:`Lane.settle`."""
        done = self._next
        if done is None:
            return
        with self._remembering:
            if done.difference is not None:
                self._tracker.advance(done.difference)
            with self._moved:
                self._next, self.pending = None, None
                self._drop_whole()
                if done.payload is None or self.version is None:
                    self._forget_past(0)
                else:
                    self._past.append(_Past(self.version, done.step.version, done.payload, done.slots))
                    self._forget_past(self.schema.nbytes // 2)
                self._step, self.version = done.step.committed(), done.step.version
                self._first = self.version if self._first is None else self._first

    def drop(self) -> None:
        """See :meth:`Lane.drop`."""
        if self._next is not None:
            self._give_back(self._next.slots)
        self._next, self.pending = None, None

    def ready(self, has: int | None) -> Shipment | None:
        """See :meth:`Lane.ready`."""
        if self._next is not None and self._next.payload is not None and has == self.version:
            return self._shipment(self._next.step, [self._next.payload], has, self._next.slots)
        steps = [one for one in self._past if has is not None and one.base >= has]
        if steps and steps[0].base == has:
            slots = [slot for one in steps for slot in one.slots]
            return self._shipment(self._step, [one.payload for one in steps], has, slots)
        return self._whole

    def prepare(self) -> None:
        """See :meth:`Lane.prepare`."""
        with self._remembering:
            slots: list[Slot] = []
            try:
                if self._digests_to_tell() is None:
                    encoder = self._encoding.whole.encoder(self.schema)
                    payloads = encoder.encode(self._tracker.weights(), self._borrow(slots))
                    chunks = frames_of(self._step, self.schema, self._encoding.whole.name, payloads)
                else:
                    payload = self._tracker.bootstrap(self._step.version, self._lend(slots))
                    chunks = frames_of(
                        self._step, self.schema, self._encoding.name, [payload], self._step.version
                    )
            except BaseException:
                self._give_back(slots)
                raise
            with self._moved:
                self._drop_whole()
                self._whole = Shipment(self._step.version, chunks, slots)

    def fork(self) -> Lane:
        """See :meth:`Lane.fork`; what is remembered is copied."""
        with self._remembering:
            other = ChangeLane(
                self.schema, self._borrow, self._moved, self._encoding, self._tracked, self._tracker.copy()
            )
        with self._moved:
            other.version, other.family, other._step = self.version, self.family, self._step
            other._first, other._digests = self._first, self._digests
            for one in self._past:
                Shipment(one.version, [], one.slots).retain()
                other._past.append(one)
        return other

    def close(self) -> None:
        """See :meth:`Lane.close`."""
        with self._moved:
            self.drop()
            self._drop_whole()
            self._forget_past(0)
            self.version = None

    def _digests_to_tell(self) -> list[str | None] | None:
        """Digests of the first weights, where the encoding trusts workers to have them; None later."""
        if self.version is None or self.version != self._first:
            return None
        sent = set(self._encoding.bootstraps(self.schema))
        if len(sent) == len(self.schema.tensors):
            return None
        if self._digests is None:
            weights = self._tracker.weights()
            self._digests = [None if i in sent else digest(tensor) for i, tensor in enumerate(weights)]
        return self._digests

    def _put(self, pending: _Next) -> None:
        with self._moved:
            self.drop()
            self._next, self.pending = pending, pending.step.version

    def _lend(self, slots: list[Slot]) -> Lend:
        """Memory for payloads whose size is never the same: of few sizes, so that it is used again."""
        lend = self._borrow(slots)
        return lambda nbytes: lend(_rounded(nbytes))[:nbytes]

    def _shipment(
        self, step: Step, payloads: list[torch.Tensor], base: int | None, slots: list[Slot]
    ) -> Shipment:
        chunks = frames_of(step, self.schema, self._encoding.name, payloads, base)
        return Shipment(step.version, chunks, slots)

    def _drop_whole(self) -> None:
        if self._whole is not None:
            self._whole.release()
            self._whole = None

    def _forget_past(self, keep: int) -> None:
        """Forget the oldest steps, until the others have at most ``keep`` bytes together."""
        total = sum(one.payload.numel() for one in self._past)
        while self._past and total > keep:
            oldest = self._past.popleft()
            total -= oldest.payload.numel()
            self._give_back(oldest.slots)

    def _give_back(self, slots: list[Slot]) -> None:
        with self._moved:
            Shipment(-1, [], slots).release()


@dataclass(frozen=True)
class _Next:
    """What is staged; without a payload, workers are sent whole weights."""

    step: Step
    difference: Difference | None
    payload: torch.Tensor | None
    slots: list[Slot]


@dataclass(frozen=True)
class _Past:
    """A step from one version to the next."""

    base: int
    version: int
    payload: torch.Tensor
    slots: list[Slot]


def _rounded(nbytes: int) -> int:
    """A size at least ``nbytes``, at most an eighth larger (from 4 KB on), of which there are few."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), 1 << 12)
    return -(-nbytes // step) * step
