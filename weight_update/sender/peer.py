"""What the sender knows of one worker."""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from weight_update.sender.buffers import MIXED, Content, Shipment
from weight_update.sender.groups.full import Lane
from weight_update.transports.base import TransportBackend
from weight_update.transports.shared_memory.slots import may_run
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step

__all__ = ["Peer"]

_MAX_FAILURES = 8


class Arriving(Protocol):
    """A version that workers are being sent chunk by chunk.

    See :class:`~weight_update.sender.pipeline.Pipeline`.
    """

    step: Step

    def taken(self, peer: Peer, index: int) -> None:
        """A worker has read the chunks up to ``index``."""

    def leave(self, peer: Peer, *, reading: bool) -> None:
        """A worker has all, or will not have it."""

    def busy(self, peer: Peer) -> bool:
        """Whether a thread still writes to a worker that left."""


class Holder(NamedTuple):
    """The receiver that an index belongs to.

    Attributes:
        instance: its random name; None if it gave none.
        pid: its process.
    """

    instance: str | None
    pid: int


class Peer:
    """One worker: its link, what it is meant to have, what it has, and how it was lost.

    Attributes:
        schema: what it is to have, in the sender's dtypes.
        tracked: names of the weights that updates carry; None for all.
        lane: what it is sent; None until it first joins.
        has: the weights it has; None if unknown.
        applied: what it has; where memory is shared, what it reads.
        inflight: what it was sent and has not answered yet.
        pipeline: what it is just being sent chunk by chunk; ``former``: what it was last sent so.
        writing: whether a thread is sending ``inflight``, or about to.
        reached: the newest version it ever applied; not forgotten when it leaves.
        failures: why it did not apply a version, for the last few.
        guest: whether it came beyond the first number of workers; nobody waits for it when it has gone.
        left: whether it said goodbye.
        replaced: whether another receiver is about to join in its place.
        holder: the receiver that was last admitted under this index.
        admitted: until when, on the monotonic clock, a connection that was admitted may reach the link.
        arrivals: how many connections were admitted; tells an error of one from an error of the next.
    """

    def __init__(
        self,
        idx: int,
        link: TransportBackend,
        schema: WeightSchema,
        tracked: frozenset[str] | None = None,
        *,
        guest: bool = False,
    ) -> None:
        self.idx, self.link, self.schema, self.tracked = idx, link, schema, tracked
        self.guest, self.left = guest, False
        self.lane: Lane | None = None
        self.joined = False
        self.replaced = False
        self.holder: Holder | None = None
        self.admitted = 0.0
        self.arrivals = 0
        self.pid = 0
        self.has: Content | None = None
        self.reached = -1
        self.staged: int | None = None
        self.applied: Shipment | None = None
        self.inflight: Shipment | None = None
        self.pipeline: Arriving | None = None
        self.former: Arriving | None = None
        self.writing = False
        self.since = 0.0
        self.lost: Exception | None = None
        self.failures: dict[int, Exception] = {}
        self.apply_seconds = 0.0
        self.stall_seconds = 0.0
        self.sending = threading.Lock()
        self.thread: threading.Thread | None = None

    @property
    def missed(self) -> bool:
        """Whether it is an error that it does not have an update; guests may leave whenever they like."""
        return self.joined or not (self.guest and self.left)

    def trouble(self) -> Exception | None:
        """What keeps it from having the weights: its own error, else how it was lost."""
        return next(iter(self.failures.values()), self.lost)

    @property
    def version(self) -> int | None:
        """Number of the weights it has."""
        return None if self.has is None or self.has is MIXED else self.has.version

    @property
    def lacks(self) -> int | None:
        """The version that it should be sent; None if it has that, or failed to apply it."""
        target = None if self.lane is None else self.lane.target(self.has)
        if target is None or target in self.failures:
            return None
        return None if self.version is not None and self.version >= target else target

    @property
    def awaited(self) -> bool:
        """Whether it is here, and an update is on its way to it or about to be sent.

        Of a version that travels in chunks nothing is kept for a worker that joins meanwhile.
        """
        idle = self.inflight is None and self.pipeline is None and self.lacks is None and not self.writing
        return self.joined and not idle

    def failure(self, version: int) -> Exception | None:
        """Why it has neither ``version`` nor a newer one in its place, and will not get one by itself."""
        if version in self.failures:
            return self.failures[version]
        newer = [error for number, error in self.failures.items() if number > version]
        return newer[-1] if newer and self.lacks is None else None

    def forget_old_failures(self) -> None:
        """Keep the last few: whoever sends without waiting asks for them later."""
        for version in list(self.failures)[:-_MAX_FAILURES]:
            del self.failures[version]

    def hold(self, role: str, shipment: Shipment | None) -> None:
        """Set ``applied`` or ``inflight``, keeping count of who uses which memory."""
        old: Shipment | None = self.__dict__[role]
        self.__dict__[role] = shipment.retain() if shipment is not None else None
        if old is not None:
            old.release()

    @property
    def may_read(self) -> bool:
        """Whether it may still read memory of ours, connected or not."""
        return self.link.shares_memory and (not self.link.near or may_run(self.pid))

    def let_go(self) -> None:
        """Stop counting on its answer. If it may still read our memory, never write there again."""
        reading = self.may_read
        if self.pipeline is not None:
            self.pipeline.leave(self, reading=reading)
        if reading:
            for shipment in (self.applied, self.inflight):
                for slot in shipment.slots if shipment is not None else ():
                    slot.abandoned = True
        self.joined, self.has, self.staged = False, None, None
        self.hold("inflight", None)
        self.hold("applied", None)
