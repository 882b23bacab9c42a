"""Reports of updates, events of workers, the lag of policies, and the observers that are told of all this."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weight_update.text import format_size, plural

STAGES = ("extract", "convert", "encode", "send", "ack")
"""Stages of an update, in their order."""


@dataclass
class SyncReport:
    """The report of one update: what was sent, and how long it took.

    Its text is one line, such as ``version 1: dense, 19 kB, applied by 3 workers, longest stall 0.09 ms; took
    1.91 ms (extract 0.11, encode 0.32, send 0.20, ack 1.28)``.

    Attributes:
        version: number of the update.
        encoding: name of the encoding that was used, e.g. ``"dense"``. It is ``"bucket"`` where a
            :class:`~weight_update.PatchEncoding` sends all weights.
        dense_bytes: size in bytes of all weights, sent once.
        wire_bytes: bytes passed to the transport, for all workers together. A shared buffer that all workers
            read counts once. Bytes for a busy worker count when they are sent.
        changed_fraction: share of the elements that were sent (1.0 when all were).
        compression: label of the compression of a patch, e.g. ``"zstd"``; empty when nothing was compressed.
        seconds: time of each stage in seconds: ``extract``, ``convert``, ``encode``, ``send``, ``ack``.
            ``convert`` is a stage of its own with ``max_in_flight`` and on sharded trainers. Otherwise
            ``extract`` includes the conversion.
        apply_seconds: seconds from the arrival of the update until it was visible, by worker.
        stall_seconds: seconds for which the update kept forward passes waiting, by worker.
        failures: errors, as text, of the workers that did not apply the update, by worker. Only reports for
            observers have it; other callers get :class:`~weight_update.SyncFailedError`. A lost worker is in
            only one such report until it joins again.
        began: time at which the update began, in seconds since the epoch.
    """

    version: int
    encoding: str
    dense_bytes: int = 0
    wire_bytes: int = 0
    changed_fraction: float = 1.0
    compression: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    apply_seconds: dict[int, float] = field(default_factory=dict)
    stall_seconds: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time, compare=False)

    @property
    def total_seconds(self) -> float:
        """Sum of the stages, in seconds."""
        return sum(self.seconds.values())

    def __repr__(self) -> str:
        return f"SyncReport({self})"

    def __str__(self) -> str:
        workers = len(self.apply_seconds)
        how = f"{self.encoding} ({self.compression})" if self.compression else self.encoding
        sent = format_size(self.wire_bytes)
        if self.changed_fraction != 1.0:
            sent += f" of {format_size(self.dense_bytes)} ({self.changed_fraction:.2%} changed)"
        parts = [f"version {self.version}: {how}, {sent}"]
        if workers:
            parts.append(f"applied by {plural(workers, 'worker')}")
        if self.stall_seconds:
            parts.append(f"longest stall {1e3 * max(self.stall_seconds.values()):.2f} ms")
        took = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in self.seconds.items())
        return ", ".join(parts) + (f"; took {1e3 * self.total_seconds:.2f} ms ({took})" if took else "")


def report_of(fields: Mapping[str, Any]) -> SyncReport:
    """Return the report with these fields; the indices of workers may be texts, as JSON writes them."""
    by_worker = {
        name: {int(idx): value for idx, value in fields[name].items()}
        for name in ("apply_seconds", "stall_seconds", "failures")
    }
    return SyncReport(**{**fields, **by_worker})


_WORDS = {
    "joined": "joined",
    "left": "left",
    "lost": "was lost",
    "late": "is late",
    "full_update": "is sent all weights",
    "applied": "applied an update",
}


@dataclass(frozen=True)
class WorkerEvent:
    """A change of one worker.

    Attributes:
        kind: the change:

            - ``"joined"``: it joined, or joined again.
            - ``"left"``: it called ``shutdown()``.
            - ``"lost"``: its process ended, or its connection failed.
            - ``"late"``: it did not apply an update in time.
            - ``"full_update"``: it was sent all weights instead of a patch: it missed too many versions, its
              weights were changed or only partly loaded, or a patch would not have been smaller.
            - ``"applied"``: it applied a version that no report covers in time: the first weights of a worker
              that joins during training, an update that it applied earlier or later than a busy worker, or,
              for an explorer of a :class:`~weight_update.Synchronizer`, any version.

        worker: index of the worker.
        version: number of the weights that it has, or of the update that it is late with or was sent; None if
            unknown.
        reason: error, as text; empty for ``"joined"``, ``"left"`` and ``"applied"``.
        time: time of the event, in seconds since the epoch.
        late_joiner: whether the worker is a late joiner, which the sender forgets once it has left or was
            lost.
    """

    kind: Literal["joined", "left", "lost", "late", "full_update", "applied"]
    worker: int
    version: int | None = None
    reason: str = ""
    time: float = field(default_factory=time.time)
    late_joiner: bool = False

    def __str__(self) -> str:
        version = "" if self.version is None else f", version {self.version}"
        return f"worker {self.worker} {_WORDS[self.kind]}{version}" + f": {self.reason}" * bool(self.reason)


@dataclass(frozen=True)
class PolicyLag:
    """The policy lag of a batch that a collector has yielded.

    The lag of a frame is the trainer's version minus the version that made the frame.

    Attributes:
        version: the trainer's version: the newest one that it has sent.
        frames: number of frames in the batch.
        mean: mean lag of the frames.
        max: largest lag of a frame.
        time: time at which the batch was yielded, in seconds since the epoch.
    """

    version: int
    frames: int
    mean: float
    max: int
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.frames} frames with a lag of {self.mean:.3g} (at most {self.max})"
        )


Event = SyncReport | WorkerEvent | PolicyLag
"""The events that an observer is told of."""

Observer = Callable[[Event], None]
"""A function that is told of each update, once all workers have applied it or failed, and of other events."""
