"""Metrics of a running trainer, as its ``PrometheusObserver`` serves them."""

from __future__ import annotations

import math
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from weight_update.cli.output import Document, Row
from weight_update.report import STAGES
from weight_update.threads import call_in_thread

TIMEOUT = 5.0
"""Seconds that a trainer has to answer, and to send all metrics."""
_LARGEST = 64 << 20
_PIECE = 1 << 16
_PREFIX = "weight_update_"

# Metrics are on the trainer's network, where a proxy for the web is of no use.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Metrics:
    """The metrics of one moment.

    Attributes:
        values: values by label, by name of the metric. The label is empty for a metric without labels.
        at: time at which they arrived, on the monotonic clock.
    """

    values: dict[str, dict[str, float]]
    at: float = field(default_factory=time.monotonic)

    def get(self, name: str, label: str = "") -> float | None:
        """Return a value, or None if there is none yet."""
        value = self.values.get(name, {}).get(label, math.nan)
        return None if math.isnan(value) else value


def fetch(url: str) -> Metrics:
    """Return the metrics at an address.

    Raises:
        OSError: nothing answers, or not in time, or with an HTTP error.
        http.client.HTTPException: the answer is not HTTP.
        ValueError: the answer has no metrics of this library.
    """
    answer = call_in_thread("weight_update-watch", _read, url)  # no other way limits the time for all of it
    try:
        content = answer.result(TIMEOUT)
    except FutureTimeout:
        raise TimeoutError(f"timed out: the answer did not end within {TIMEOUT:g} s") from None
    return _parse(content.decode())


def _read(url: str) -> bytes:
    """Read an answer, as a thread, until it ends or takes too long."""
    deadline = time.monotonic() + TIMEOUT
    content = bytearray()
    with _open(url, timeout=TIMEOUT) as reply:
        while piece := reply.read1(_PIECE):
            content += piece
            if time.monotonic() > deadline:
                raise FutureTimeout  # nobody waits any more
            if len(content) > _LARGEST:
                raise ValueError(f"the answer exceeds {_LARGEST} bytes")
    return bytes(content)


def _parse(text: str) -> Metrics:
    values: dict[str, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(_PREFIX) and len(sample.labels) <= 1:  # a bucket has two
                    label = next(iter(sample.labels.values()), "")
                    values.setdefault(sample.name.removeprefix(_PREFIX), {})[label] = sample.value
    except (ValueError, IndexError) as error:  # the parser raises both
        raise ValueError("the answer has no metrics") from error
    if "sent_bytes_total" not in values:  # it is there before the first update
        raise ValueError("the answer has no metrics of weight_update")
    return Metrics(values)


def document_of(now: Metrics, before: Metrics | None) -> Document:
    """Return what to show: the trainer as facts, and a table of its workers.

    Args:
        now: the metrics.
        before: the metrics of the last look, for the rate of updates; None for the first look.
    """
    stages = now.values.get("last_update_stage_seconds", {})
    return {
        "version": _integer(now.get("version")),
        "updates_per_second": _rate(now, before),
        "last_update_bytes": _integer(now.get("last_update_bytes")),
        "stage_ms": {stage: 1e3 * stages[stage] for stage in STAGES if stage in stages},
        "policy_lag_mean": now.get("policy_lag_mean"),
        "policy_lag_max": _integer(now.get("policy_lag_max")),
        "workers": sorted(_workers(now), key=lambda row: (row["state"] == "joined", row["worker"])),
    }


def _rate(now: Metrics, before: Metrics | None) -> float | None:
    """Return the updates per second since the last look; None if the trainer has started again since."""
    if before is None:
        return None
    count = _updates(now) - _updates(before)
    return count / (now.at - before.at) if count >= 0 else None


def _updates(metrics: Metrics) -> float:
    return sum(metrics.values.get("updates_total", {}).values())


def _workers(now: Metrics) -> Iterator[Row]:
    newest = now.get("version")
    for worker in now.values.get("worker_up", {}).keys() | now.values.get("worker_late", {}).keys():
        version = now.get("worker_version", worker)
        yield {
            "worker": int(worker),
            "state": _state(now, worker),
            "version": _integer(version),
            "lag": None if newest is None or version is None else max(0, int(newest - version)),
            "apply_ms": _milliseconds(now.get("apply_seconds", worker)),
            "stall_ms": _milliseconds(now.get("stall_seconds", worker)),
            "failures": _integer(now.get("worker_failures_total", worker)) or 0,
        }


def _state(now: Metrics, worker: str) -> str:
    if now.get("worker_up", worker) == 0:
        return "lost"
    return "late" if now.get("worker_late", worker) else "joined"


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
