"""Updates and events as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from typing import Any

from weight_update.errors import Closing
from weight_update.observers.files import open_file
from weight_update.report import Event, PolicyLag, SyncReport, WorkerEvent

PID = 1
TRACKS = 1000
"""Tracks of the trainer, and of each worker. Viewers sort tracks by their number."""
INSIDE = 0.5
"""Microseconds between the start of a slice and its arrow; at the start itself, the slice before ends."""
Span = tuple[int, int]
"""Start and end in microseconds since the epoch, which a JSON reader that has only doubles keeps exactly."""


class ChromeTraceObserver(Closing):
    """Observer that writes a trace, to be opened with https://ui.perfetto.dev or ``chrome://tracing``.

    The trace has one track for the trainer and one for each worker. The trainer's track shows the stages of
    each update. A worker's track shows ``transfer``, from the start of ``send`` until the worker switches,
    and ``swap``, the time for which forward passes waited. Arrows with the version as their id lead from
    ``send`` to ``swap``. Events of workers and failures are instants, and the mean and the largest policy lag
    of a collector's batches are a counter. If updates overlap, as with ``send_async()``, the later one goes
    to another track of the same name, below the first.

    Workers report durations, not points in time. The slowest worker of an update is drawn so that it ends
    with the stage ``ack``, and the others relative to it. If the update has failures, workers are drawn as if
    they began to apply it at the end of ``send``. Version 0 has no stage ``send``: workers are drawn as if
    they began to apply it when they joined.

    The format is the JSON array of Google's *Trace Event Format*. The file is complete JSON after each update
    and event. Use one observer for each scheme, because the versions of two schemes would be mixed up.

    Args:
        path: the file. A file that exists is replaced.

    Raises:
        OSError: the file cannot be opened; the message names the fix.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_file(path, "wb")
        self._end = 0  # where the next events go: over the closing bracket
        self._is_torn = False  # whether a full disk may have left a part of events in the file
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[int | None, dict[int, int]] = {}  # ends of the last spans, by worker and track
        self._joined: dict[int, int] = {}  # times, by worker
        self._meta("process_name", "weight_update")
        self._track(None)
        self.flush()

    def __call__(self, news: Event) -> None:
        """Write an update or an event to the file, unless it is closed."""
        if self._file.closed:  # as when an error ends the with block, before shutdown() tells of the end
            return
        if isinstance(news, WorkerEvent):
            args = {"version": news.version, "reason": news.reason}
            if news.kind == "joined":
                self._joined[news.worker] = _micros(news.time)
            self._instant(news.worker, news.kind, _micros(news.time), args)
        elif isinstance(news, PolicyLag):
            lag = {"mean": news.mean, "max": news.max}
            self._add("C", 1, _micros(news.time), name="policy lag", args=lag)
        else:
            self._update(news)
        self.flush()

    def flush(self) -> None:
        """Write all events to the file."""
        lines = ",\n".join(map(json.dumps, self._events))
        self._events.clear()
        if lines:
            body = (b",\n" if self._end else b"[\n") + lines.encode()
            was_torn, self._is_torn = self._is_torn, True
            self._file.seek(self._end)
            self._file.write(body + b"\n]\n")
            if was_torn:
                self._file.truncate()
            self._end += len(body)
            self._file.flush()
            self._is_torn = False

    def close(self) -> None:
        """Write all events and close the file. Updates and events that come later are ignored."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _update(self, report: SyncReport) -> None:
        """Add the stages, workers and arrows of an update."""
        stages: dict[str, Span] = {}
        now = began = _micros(report.began)
        for stage, seconds in report.seconds.items():
            stages[stage] = (now, now + _length(seconds))
            now = stages[stage][1]
        trainer = self._track(None, (began, now))
        about = {"version": report.version, "encoding": report.encoding, "bytes": report.wire_bytes}
        for stage, span in stages.items():
            self._slice(trainer, stage, span, about)
        for worker, seconds in report.apply_seconds.items():
            joined = max(now, self._joined.get(worker, now))
            sent = stages.get("send", (joined, joined))
            stall = _length(report.stall_seconds.get(worker, 0.0))
            earliest = sent[0] + 1 + stall  # viewers draw no arrow back in time
            visible = max(earliest, _visible(report, seconds, sent, now))
            track = self._track(worker, (sent[0], visible))
            args = {"version": report.version, "apply_ms": 1e3 * seconds}
            self._slice(track, "transfer", (sent[0], visible - stall), args)
            self._slice(track, "swap", (visible - stall, visible), args)
            if "send" in stages:
                arrow = {"id": report.version, "name": "weights", "cat": f"worker {worker}"}
                self._add("s", trainer, sent[0] + INSIDE, **arrow)
                self._add("f", track, visible - stall + INSIDE, bp="e", **arrow)
        for worker, error in report.failures.items():
            self._instant(worker, "failed", now, {"version": report.version, "reason": error})

    def _track(self, worker: int | None, span: Span = (0, 0)) -> int:
        """Return the first track of a worker, or of the trainer, that is free at the start of ``span``.

        The track is then occupied to the end of ``span``.
        """
        ends = self._tracks.setdefault(worker, {})
        track = next((track for track, end in ends.items() if end <= span[0]), None)
        if track is None:
            first = 1 if worker is None else (1 + worker) * TRACKS + 1
            track = first + min(len(ends), TRACKS - 1)  # further updates at one time share the last track
            if track not in ends:
                self._meta("thread_name", "trainer" if worker is None else f"worker {worker}", track)
        ends[track] = max(span[1], ends.get(track, 0))
        return track

    def _instant(self, worker: int, name: str, at: int, args: dict[str, Any]) -> None:
        if worker not in self._tracks:
            self._track(worker)
        self._add("i", next(iter(self._tracks[worker])), at, name=name, s="t", args=args)

    def _slice(self, track: int, name: str, span: Span, args: dict[str, Any]) -> None:
        self._add("X", track, span[0], name=name, dur=span[1] - span[0], args=args)

    def _meta(self, kind: str, name: str, track: int = 1) -> None:
        self._add("M", track, 0, name=kind, args={"name": name})

    def _add(self, phase: str, track: int, at: float, **fields: Any) -> None:
        self._events.append({"ph": phase, "pid": PID, "tid": track, "ts": at, **fields})


def _visible(report: SyncReport, seconds: float, sent: Span, end: int) -> int:
    """Return the estimated time at which a worker that needed ``seconds`` had the update."""
    if report.failures or "ack" not in report.seconds:
        return sent[1] + _length(seconds)
    return end - _micros(max(report.apply_seconds.values()) - seconds)


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)


def _length(seconds: float) -> int:
    """Return a duration in microseconds, at least 1: viewers bind no arrow to an empty slice."""
    return max(1, _micros(seconds))
