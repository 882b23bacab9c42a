"""What workers are sent where updates carry what changed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.encodings import DeltaEncoding, Difference, Lend, Tracker
from weight_update.sender.buffers import EncodedUpdate, Slot, VersionId, give_back
from weight_update.sender.groups.full import Borrow, SendGroup, UpdateStats
from weight_update.wire.memory import digest
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step, frames_of

__all__ = ["DeltaGroup"]

_NOT_WORTH = 0.9
"""Share of all elements, or of all bytes, above which an update is sent whole."""

_REMEMBERED = 8
"""Steps that are remembered; each may take two file descriptors."""


class DeltaGroup(SendGroup):
    """Updates carry what changed; whole weights go to those who just joined or missed too much.

    It remembers the weights of ``version``, and the payloads of the last few steps that led there, so that a
    worker which was busy meanwhile gets several at once.

    Args:
        schema: see :class:`SendGroup`.
        borrow: see :class:`SendGroup`.
        lock: see :class:`SendGroup`.
        encoding: how changes are found and told.
        tracked: positions of the entries that updates may change; None for all.
        tracker: what to begin with, for a fork.
    """

    def __init__(
        self,
        schema: WeightSchema,
        borrow: Borrow,
        lock: threading.Condition,
        encoding: DeltaEncoding,
        tracked: Sequence[int] | None = None,
        tracker: Tracker[Any] | None = None,
    ) -> None:
        super().__init__(schema, borrow, lock)
        self._encoding, self._tracked = encoding, tracked
        self._tracker = tracker or encoding.tracker(schema, tracked)
        self._remembering = threading.Lock()  # held while the tracker is read or changed
        self._step = Step(-1)
        self._next: _Pending | None = None
        self._past: deque[_PastDelta] = deque()
        self._whole: EncodedUpdate | None = None
        self._first: int | None = None
        self._digests: list[str | None] | None = None

    @property
    def kept(self) -> list[EncodedUpdate]:
        return [] if self._whole is None else [self._whole]

    def target(self, has: VersionId | None) -> int | None:
        """See :meth:`SendGroup.target`; what is pending goes to workers that changes can bring there."""
        return self.version if self._pending_for(has) is None else self.pending

    def welcome(self) -> dict[str, Any]:
        """See :meth:`SendGroup.welcome`; the digests are of what a worker must have already."""
        with self._remembering:
            return {"keep": True, "version": self.version, "digests": self._digests_to_tell()}

    def stage(
        self, step: Step, tensors: Mapping[str, torch.Tensor], bases: Sequence[VersionId] = ()
    ) -> UpdateStats:
        elements = self.schema.elements
        if self.version is None:
            with self._remembering:
                self._tracker.begin([tensors[name] for name in self.schema.names])
            self._put(_Pending(VersionId(step.version), step, None, None, []))
            return UpdateStats(self._encoding.whole.label, elements, elements)
        difference = self._tracker.compare([tensors.get(name) for name in self.schema.names])
        if not step.commit and any(self._past_since(one) is None for one in bases):
            whole = self._whole_of(step, tensors)  # no change leads there from what some worker has
            self._put(_Pending(whole.version_id, step, difference, None, whole.slots, whole))
            return UpdateStats(self._encoding.whole.label, elements, elements)
        slots: list[Slot] = []
        payload = None
        try:
            if difference.changed <= _NOT_WORTH * elements or not step.commit:
                payload = self._tracker.encode(difference, self.version, step.version, self._lend(slots))
        except BaseException:
            self._give_back(slots)
            raise
        if payload is not None and step.commit and payload.numel() > _NOT_WORTH * self.schema.dense_bytes:
            self._give_back(slots)
            payload, slots = None, []
        self._put(_Pending(VersionId(step.version), step, difference, payload, slots))
        told = self._encoding.whole if payload is None else self._encoding
        return UpdateStats(told.label, difference.changed, difference.total, told.compressed_with)

    def _whole_of(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> EncodedUpdate:
        """All weights as they are in ``tensors``, and as remembered where they are not there."""
        kept = dict(zip(self.schema.names, self._tracker.weights(), strict=True))
        slots: list[Slot] = []
        try:
            values = [tensors.get(name, kept[name]) for name in self.schema.names]
            payloads = self._encoding.whole.encoder(self.schema).encode(values, self._borrow(slots))
        except BaseException:
            self._give_back(slots)
            raise
        chunks = frames_of(step, self.schema, self._encoding.whole.name, payloads)
        return EncodedUpdate(VersionId(step.version), chunks, slots)

    def settle(self) -> None:
        done = self._next
        if done is None:
            return
        with self._remembering:
            if done.difference is not None:
                self._tracker.advance(done.difference)
            with self._lock:
                self._next, self.pending = None, None
                self._drop_whole()
                if done.payload is None or self.version_id is None:
                    give_back(done.slots)
                    self._forget_past(0)
                else:
                    self._past.append(_PastDelta(self.version_id, done.payload, done.slots))
                    self._forget_past(_REMEMBERED)
                self._step, self.version_id = done.step.committed(), done.version_id
                self._first = self.version if self._first is None else self._first

    def drop(self) -> None:
        with self._lock:
            if self._next is not None:
                give_back(self._next.slots)
            if self.version_id is None:
                self._drop_whole()
            self._next, self.pending = None, None

    def ready(self, has: VersionId | None) -> EncodedUpdate | None:
        past, pending = self._past_since(has), self._pending_for(has)
        if pending is not None and pending.whole is not None:
            return pending.whole
        if past is None or self.version_id is None or has is None:
            return self._whole
        payloads = [one.payload for one in past]
        slots = [slot for one in past for slot in one.slots]
        step, version_id = self._step, self.version_id
        if pending is not None and pending.payload is not None:
            payloads.append(pending.payload)
            slots.extend(pending.slots)
            step, version_id = pending.step, pending.version_id
        if not payloads:
            return self._whole
        chunks = frames_of(step, self.schema, self._encoding.name, payloads, has.version)
        return EncodedUpdate(version_id, chunks, slots)

    def prepare(self) -> None:
        with self._remembering:
            slots: list[Slot] = []
            version_id, step = self._goal()
            if self._whole is not None or version_id is None:  # another worker's thread was first
                return
            try:
                if self._digests_to_tell() is None:
                    encoder = self._encoding.whole.encoder(self.schema)
                    payloads = encoder.encode(self._tracker.weights(), self._borrow(slots))
                    chunks = frames_of(step, self.schema, self._encoding.whole.name, payloads)
                else:
                    payload = self._tracker.bootstrap(step.version, self._lend(slots))
                    chunks = frames_of(step, self.schema, self._encoding.name, [payload], step.version)
            except BaseException:
                self._give_back(slots)
                raise
            with self._lock:
                if self._goal()[0] is version_id:
                    self._whole = EncodedUpdate(version_id, chunks, slots)
                else:  # it was closed or dropped meanwhile
                    give_back(slots)

    def fork(self) -> SendGroup:
        """See :meth:`SendGroup.fork`; what is remembered is copied."""
        with self._remembering:
            other = DeltaGroup(
                self.schema, self._borrow, self._lock, self._encoding, self._tracked, self._tracker.copy()
            )
        with self._lock:
            other.version_id, other.family, other._step = self.version_id, self.family, self._step
            other._first, other._digests = self._first, self._digests
            for one in self._past:
                EncodedUpdate(one.base, [], one.slots).retain()
                other._past.append(one)
        return other

    def close(self) -> None:
        with self._lock:
            self.drop()
            self._drop_whole()
            self._forget_past(0)
            self.version_id = None

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

    def _put(self, pending: _Pending) -> None:
        with self._lock:
            self.drop()
            self._next, self.pending = pending, pending.step.version

    def _lend(self, slots: list[Slot]) -> Lend:
        """Memory for payloads whose size is never the same: of few sizes, so that it is used again."""
        lend = self._borrow(slots)
        return lambda nbytes: lend(_rounded(nbytes))[:nbytes]

    def _goal(self) -> tuple[VersionId | None, Step]:
        """What whole weights bring a worker to: what was settled last, else the first that is staged."""
        if self.version_id is not None or self._next is None:
            return self.version_id, self._step
        return self._next.version_id, self._next.step

    def _past_since(self, has: VersionId | None) -> list[_PastDelta] | None:
        """The steps from ``has`` to what was settled last; None if they are not known."""
        if has is self.version_id:
            return []
        past = list(self._past)
        first = next((i for i, one in enumerate(past) if one.base is has), None)
        return None if first is None else past[first:]

    def _pending_for(self, has: VersionId | None) -> _Pending | None:
        """What is staged, if a worker with ``has`` can be brought there."""
        if self._next is not None and self._next.whole is not None:
            return None if has is None else self._next
        told = self._next is not None and (self._next.payload is not None or self.version_id is None)
        return self._next if told and self._past_since(has) is not None else None

    def _drop_whole(self) -> None:
        if self._whole is not None:
            self._whole.release()
            self._whole = None

    def _forget_past(self, steps: int) -> None:
        """Forget the oldest steps until there are at most ``steps``, with half the bytes of the weights.

        The last one stays even if it is larger: it is just being sent.
        """
        total = sum(one.payload.numel() for one in self._past)
        while len(self._past) > min(steps, 1) and (
            len(self._past) > steps or total > self.schema.nbytes // 2
        ):
            oldest = self._past.popleft()
            total -= oldest.payload.numel()
            self._give_back(oldest.slots)

    def _give_back(self, slots: list[Slot]) -> None:
        with self._lock:
            give_back(slots)


@dataclass(frozen=True)
class _Pending:
    """What is staged; without a payload, workers are sent whole weights: these, or those settled later."""

    version_id: VersionId
    step: Step
    difference: Difference | None
    payload: torch.Tensor | None
    slots: list[Slot]
    whole: EncodedUpdate | None = None


@dataclass(frozen=True)
class _PastDelta:
    """A step from ``base`` to what came next."""

    base: VersionId
    payload: torch.Tensor
    slots: list[Slot]


def _rounded(nbytes: int) -> int:
    """A size at least ``nbytes``, at most an eighth larger (from 4 KB on), of which there are few."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), 1 << 12)
    return -(-nbytes // step) * step
