"""Send groups whose updates carry changes."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from weight_update.encodings import DeltaEncoding, Tracker
from weight_update.errors import undo_on_error
from weight_update.sender.buffers import BufferPool, EncodedUpdate, SlotUse, VersionId
from weight_update.sender.groups.base import EncodedChange, SendGroup, Staged, UpdateFacts
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.frames import Step, frames_of
from weight_update.wire.memory import digest
from weight_update.wire.schema import WeightSchema, aligned, dtype_name

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_NOT_WORTH = 0.9
"""Share of all elements, or of all bytes, above which an update is sent whole."""

_IN_A_ROW = 3
"""Number of updates in a row after which it is logged that most elements change."""

_REMEMBERED = 8
"""Number of changes that are remembered; each may take two file descriptors."""


class DeltaGroup(SendGroup):
    """A send group whose updates carry changes; workers that joined or missed too much get all weights.

    The group remembers the weights of ``version``, and the payloads of the last few changes that led there. A
    worker that was busy meanwhile gets several of them at once. After an error of the tracker, no version is
    remembered, and the next update carries all weights. Updates may change the entries ``tracked``; None is
    all.
    """

    sends_changes: ClassVar[bool] = True

    def __init__(
        self, schema: WeightSchema, pool: BufferPool, encoding: DeltaEncoding, tracked: frozenset[str] | None
    ) -> None:
        super().__init__(schema, pool, encoding.whole)
        places = enumerate(schema.names)
        self._tracked = None if tracked is None else [i for i, name in places if name in tracked]
        self._encoding = encoding
        self._tracker: Tracker[Any] = encoding.tracker(schema, self._tracked)
        self._remembering = threading.Lock()  # held while the tracker or the encoder is used
        self._mostly_new = 0  # updates in a row that changed most elements, as far as they are counted
        self._step = Step(-1)
        self._past: deque[EncodedChange] = deque()
        self._first: VersionId | None = None  # of the version that had all weights
        self._digests: list[str | None] | None = None
        self._untold = False  # whether a worker joined before there were digests to tell

    @property
    def needs_all(self) -> bool:
        return self._tracked is not None and self._first is None

    @property
    def origin(self) -> Hashable:
        return None if self._tracked is None else self._first

    def welcome(self) -> dict[str, Any]:
        """Return the fields for WELCOME; the digests are of weights that the worker must have already."""
        with self._remembering:
            self._untold = self._untold or self._first is None
            return {"keep": True, "version": self.version, "digests": self._digests_to_tell()}

    def stage(self, step: Step, named: NamedWeights, bases: Sequence[VersionId] = ()) -> UpdateFacts:
        tensors = named.tensors
        difference: Any = None  # of the tracker's own type
        if self.version is None:
            with self._remembering:
                self._begin(tensors)
        else:
            with self._remembering, undo_on_error(self.close):
                difference = self._tracker.compare([tensors.get(name) for name in self.schema.names])
        if not step.commit and any(self._changes_since(one) is None for one in bases):
            # for a worker that no known change can bring there; names that updates do not carry are known
            with self._remembering:
                whole = self._encode_whole(step, self._updated(tensors))
            self._put(Staged(whole.version_id, step, whole, difference))
            return self._whole_facts
        if (base := self.version_id) is None:
            self._put(Staged(VersionId(step.version), step))
            return self._whole_facts
        change: EncodedChange | None = None
        mostly_new = difference.changed > _NOT_WORTH * self.schema.elements
        if step.commit:  # else a patch is sent in any case
            self._count(mostly_new)
        if not mostly_new or not step.commit:
            payload, uses = self._changes(self._tracker.encode, difference, base.version, step.version)
            most = _NOT_WORTH * self.schema.dense_bytes if step.commit else math.inf
            if payload is not None and payload.numel() <= most:
                change = EncodedChange(base, payload, uses)
        self._put(Staged(VersionId(step.version), step, None, difference, change))
        used = self.whole_encoding if change is None else self._encoding
        return UpdateFacts(used.label, used.compressed_with, difference.changed, difference.total)

    def _begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember these weights, for the first time or after an error of the tracker."""
        if self._first is None:
            self._tracker.begin([tensors[name] for name in self.schema.names])
            return
        tracker = self._encoding.tracker(self.schema, self._tracked)
        tracker.begin(self._updated(tensors))
        self._tracker = tracker

    def _updated(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the remembered weights in schema order, with ``tensors`` in their places."""
        names, weights = self.schema.names, self._tracker.weights()
        updated = [tensors.get(name, kept) for name, kept in zip(names, weights, strict=True)]
        for first, other in self.schema.ties:  # updates may carry only one of the names
            if names[first] not in tensors and names[other] in tensors:
                updated[first] = updated[other]
        return updated

    def _changes(self, encode: Callable[..., _T], *args: Any) -> tuple[_T, list[SlotUse]]:
        """Return the payload ``encode(*args, lend)`` and its uses of slots, of sizes that serve again."""
        return self._fill(lambda lend: encode(*args, lambda nbytes: lend(_rounded(nbytes))[:nbytes]))

    def _count(self, mostly_new: bool) -> None:
        """Log a warning, once, when several updates in a row have changed most elements."""
        if self._mostly_new == _IN_A_ROW:  # it was logged
            return
        self._mostly_new = self._mostly_new + 1 if mostly_new else 0
        if self._mostly_new == _IN_A_ROW:
            _log.warning(
                "more than %d %% of the elements changed in each of the last %d updates, so these carried "
                "all weights. The workers take %s: if they compute in a narrower dtype, give "
                "convert=cast(dtype) or implement InferenceEngine.expected_weights(). Otherwise use another "
                "encoding, such as 'bucket'",
                100 * _NOT_WORTH,
                _IN_A_ROW,
                " and ".join(sorted(set(map(dtype_name, self.schema.dtypes)))),
            )

    def commit(self) -> None:
        done = self._staged
        if done is None:
            return
        with self._remembering, undo_on_error(self.close):
            if done.difference is not None:
                self._tracker.advance(done.difference)
            with self._lock:
                self._staged = self.whole = None
                if done.change is None or self.version_id is None:
                    self._forget_past(0)
                else:
                    self._past.append(done.change)
                    self._forget_past(_REMEMBERED)
                self._step, self.version_id = done.step.committed(), done.version_id
                self._first = self._first or self.version_id

    def update_for(self, has: VersionId | None, *, together: bool) -> EncodedUpdate | None:
        past, staged = self._changes_since(has), self._offered_to(has, together)
        if staged is not None and staged.whole is not None:
            return staged.whole
        if past is None or self.version_id is None or has is None:
            return self.whole
        step, version_id = self._step, self.version_id
        if staged is not None and staged.change is not None:
            past.append(staged.change)
            step, version_id = staged.step, staged.version_id
        payloads = [one.payload for one in past]
        uses = [use for one in past for use in one.uses]
        chunks = [*frames_of(step, self.schema, self._encoding.name, payloads, len(payloads), has.version)]
        return EncodedUpdate(version_id, chunks, uses)

    def prepare(self) -> None:
        with self._remembering:
            version_id, step = self._goal()
            if self.whole is not None or version_id is None:  # another worker's thread was first
                return
            with undo_on_error(self.close):
                weights = self._tracker.weights()
            if self._digests_to_tell() is None:
                whole = self._encode_whole(step, weights)
            else:
                payload, uses = self._changes(self._tracker.bootstrap, step.version)
                chunks = [*frames_of(step, self.schema, self._encoding.name, [payload], 1, step.version)]
                whole = EncodedUpdate(version_id, chunks, uses)
            whole.version_id = version_id
            with self._lock:
                if self._goal()[0] is version_id:  # else it was closed or dropped meanwhile
                    self.whole = whole

    def fork(self) -> SendGroup:
        """Return another group that starts with a copy of the remembered weights and changes."""
        with self._remembering, undo_on_error(self.close):
            tracker = self._tracker.copy()
        with self._lock:
            other = copy.copy(self)
            other._tracker, other._remembering = tracker, threading.Lock()
            other._staged = other.whole = None
            vars(other).pop("encoder", None)  # other threads use it
            other._past = deque(self._past)
        return other

    def close(self) -> None:
        with self._lock:
            super().close()
            self._forget_past(0)

    def _digests_to_tell(self) -> list[str | None] | None:
        """Return digests of the first weights if the encoding trusts workers to have them; None later."""
        if self._untold or self._first is None or self.version_id is not self._first:
            return None
        sent = set(self._encoding.bootstraps(self.schema))
        if len(sent) == len(self.schema.tensors):
            return None
        if self._digests is None:
            weights = self._tracker.weights()
            self._digests = [None if i in sent else digest(tensor) for i, tensor in enumerate(weights)]
        return self._digests

    def _goal(self) -> tuple[VersionId | None, Step]:
        """Return the version of full updates: the committed one, or else the first one staged."""
        if self.version_id is not None or self._staged is None:
            return self.version_id, self._step
        return self._staged.version_id, self._staged.step

    def _changes_since(self, has: VersionId | None) -> list[EncodedChange] | None:
        """Return the changes from ``has`` to the committed version; None if they are not known."""
        if has is self.version_id:
            return []
        past = list(self._past)
        first = next((i for i, one in enumerate(past) if one.base is has), None)
        return None if first is None else past[first:]

    def _staged_for(self, has: VersionId | None) -> Staged | None:
        if self._staged is not None and self._staged.whole is not None:
            return None if has is None else self._staged
        sendable = self._staged is not None and (self._staged.change is not None or self.version_id is None)
        return self._staged if sendable and self._changes_since(has) is not None else None

    def _forget_past(self, limit: int) -> None:
        """Forget the oldest changes until at most ``limit`` are left, with at most half the weights' bytes.

        The last change stays even if it is larger: it is just being sent. The caller holds the sender's lock.
        """
        total = sum(one.payload.numel() for one in self._past)
        while len(self._past) > limit or (len(self._past) > 1 and total > self.schema.nbytes // 2):
            total -= self._past.popleft().payload.numel()


def _rounded(nbytes: int) -> int:
    """Return one of a few sizes: at least ``nbytes``, and at most an eighth larger (from 4 KB on)."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), 1 << 12)
    return aligned(nbytes, step)
