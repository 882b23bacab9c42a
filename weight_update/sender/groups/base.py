"""Send groups: workers that take the same bytes of each update, and those whose updates carry all weights."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from weight_update.encodings import Difference, Encoder, WholeEncoding
from weight_update.sender.buffers import BufferPool, EncodedUpdate, SlotUse, VersionId
from weight_update.strategy.named_weights import NamedWeights
from weight_update.wire.frames import Step, WeightChunk, frames_of
from weight_update.wire.schema import WeightSchema


class UpdateFacts(NamedTuple):
    """Facts about a staged update, for reports: labels, and the numbers of elements sent and of all."""

    encoding: str
    compression: str
    changed: int
    total: int


@dataclass(frozen=True)
class EncodedChange:
    """An encoded change of ``base`` that leads to the version after it."""

    base: VersionId
    payload: torch.Tensor = field(repr=False)
    uses: list[SlotUse]


@dataclass(frozen=True)
class Staged:
    """An update that is neither committed nor discarded."""

    version_id: VersionId
    step: Step
    whole: EncodedUpdate | None = None  # all weights, if they are sent before the update is committed
    difference: Difference | None = None  # changes since the version before; None for all weights
    change: EncodedChange | None = None  # the encoded difference; None sends all weights


class SendGroup(ABC):
    """Workers that take the same bytes, and the updates that are kept for them.

    An update is staged first. Then it is committed, and is the version that workers are to have, or
    discarded.

    Args:
        schema: the tensors as they travel, in the receivers' dtypes.
        pool: memory for payloads; its lock guards versions, too.
        whole: encoding of updates that carry all weights.
    """

    sends_changes: ClassVar[bool] = False  # whether updates carry changes

    def __init__(self, schema: WeightSchema, pool: BufferPool, whole: WholeEncoding) -> None:
        self.schema = schema
        self.whole_bytes = max(schema.nbytes, sum(whole.payload_sizes(schema)))  # of all its payloads
        self.version_id: VersionId | None = None  # the weights that were committed last
        self.whole: EncodedUpdate | None = None  # carries all of them, if there is one in memory
        self.source: Hashable = None  # key of the weights last given; equal for groups that got the same
        self._staged: Staged | None = None
        self.whole_encoding = whole
        self._fill, self._lock = pool.fill, pool.lock
        self._whole_facts = UpdateFacts(whole.label, whole.compressed_with, schema.elements, schema.elements)

    @property
    def version(self) -> int | None:
        """Number of the weights that were committed last."""
        return None if self.version_id is None else self.version_id.version

    @property
    def pending(self) -> int | None:
        """Number of the update that is staged and neither committed nor discarded."""
        return None if self._staged is None else self._staged.step.version

    @property
    def needs_all(self) -> bool:
        """Whether the next update must have all weights, not only those that updates carry."""
        return False

    @property
    def origin(self) -> Hashable:
        """Key of the weights that updates do not carry; None if updates carry all."""
        return None

    @property
    def kept(self) -> tuple[EncodedUpdate | None, EncodedUpdate | None]:
        """The committed and the staged update with all weights; the caller holds the sender's lock."""
        return self.whole, None if self._staged is None else self._staged.whole

    def target(self, has: VersionId | None, *, together: bool) -> int | None:
        """Return the version that a worker with ``has`` is to be sent, if any.

        Only a worker that changes several models ``together`` is sent a version that waits for COMMIT.
        """
        return self.version if self._offered_to(has, together) is None else self.pending

    def _offered_to(self, has: VersionId | None, together: bool) -> Staged | None:
        staged = self._staged_for(has)
        return staged if staged is not None and (together or staged.step.commit) else None

    @abstractmethod
    def _staged_for(self, has: VersionId | None) -> Staged | None:
        """Return the staged update if a worker with ``has`` can be brought to it."""

    def welcome(self) -> dict[str, Any]:
        """Return the fields that WELCOME carries beside the schema; see ``docs/wire_format.rst``."""
        return {"keep": False, "version": self.version, "digests": None}

    @abstractmethod
    def stage(self, step: Step, named: NamedWeights, bases: Sequence[VersionId] = ()) -> UpdateFacts:
        """Encode an update. One thread at a time calls this, :meth:`commit` or :meth:`discard`.

        ``bases`` are the weights that the workers of this group have now, as far as they are known.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the staged update the one that workers are to have."""

    def discard(self) -> None:
        """Forget the staged update."""
        with self._lock:
            self._staged = None
            if self.version_id is None:
                self.whole = None  # it was of the staged update

    @abstractmethod
    def update_for(self, has: VersionId | None, *, together: bool) -> EncodedUpdate | None:
        """Return the update that brings a worker from ``has`` to its target; None until :meth:`prepare` ran.

        The caller holds the sender's lock.
        """

    def prepare(self) -> None:  # noqa: B027 - groups that keep a full update have it ready
        """Encode all weights for a worker that no change can serve.

        This may take long. The caller does not hold the sender's lock.
        """

    @abstractmethod
    def fork(self) -> SendGroup:
        """Return another group that starts with the same weights."""

    def close(self) -> None:
        """Release all memory."""
        with self._lock:
            self.discard()
            self.whole = self.version_id = None

    def _put(self, staged: Staged) -> None:
        with self._lock:
            self.discard()
            self._staged = staged

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The encoder of all updates that carry all weights; one thread at a time uses it."""
        return self.whole_encoding.encoder(self.schema)

    def _encode_whole(self, step: Step, values: Sequence[torch.Tensor]) -> EncodedUpdate:
        """Return the update that carries all weights, given in schema order."""
        encode = self.encoder.encode
        chunks, uses = self._fill(lambda lend: self._whole_frames(step, encode(values, lend)))
        return EncodedUpdate(VersionId(step.version), chunks, uses)

    def _whole_frames(self, step: Step, payloads: list[torch.Tensor]) -> list[WeightChunk]:
        return [*frames_of(step, self.schema, self.whole_encoding.name, payloads, len(payloads))]


class FullGroup(SendGroup):
    """A send group whose updates carry all weights."""

    def _staged_for(self, has: VersionId | None) -> Staged | None:
        return self._staged if has is not None or self.version_id is None else None

    def stage(self, step: Step, named: NamedWeights, bases: Sequence[VersionId] = ()) -> UpdateFacts:
        update = self._encode_whole(step, named.in_order(self.schema.names))
        self._put(Staged(update.version_id, step, update))
        return self._whole_facts

    def commit(self) -> None:
        with self._lock:
            staged = self._staged
            if staged is None or staged.whole is None:  # the group was closed meanwhile
                return
            update = staged.whole
            if not staged.step.commit:
                payloads = [chunk.payload for chunk in update.chunks if chunk.payload is not None]
                chunks = self._whole_frames(staged.step.committed(), payloads)
                update = EncodedUpdate(update.version_id, chunks, update.uses)
            # no call in between: a signal handler may raise in one, and without `whole` nobody gets weights
            self._staged = None
            self.whole, self.version_id = update, update.version_id

    def update_for(self, has: VersionId | None, *, together: bool) -> EncodedUpdate | None:
        staged = self._offered_to(has, together)
        return self.whole if staged is None else staged.whole

    def fork(self) -> SendGroup:
        """Return another group that starts with the same update, in the same memory."""
        with self._lock:
            other = copy.copy(self)
            other._staged = None
        return other
