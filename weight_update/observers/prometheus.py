"""Updates and events as metrics for Prometheus."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from weight_update.arguments import port_number
from weight_update.errors import Closing, optional
from weight_update.report import Event, PolicyLag, SyncReport, WorkerEvent

BUCKETS = tuple(
    round(digit * 10.0**power, 6) for power in range(-4, 2) for digit in (1, 2.5, 5)
)  # 0.1 ms to 50 s
WORKER = ("worker",)
_MAX_GONE = 1024
"""Number of workers that have gone which are remembered, until the reports of their updates have come."""
_SILENCE_SECONDS = 10.0
"""Seconds after which a connection is closed whose other end sends nothing, or does not read the answer."""


class PrometheusObserver(Closing):
    """Observer that serves metrics at an address of its own, for Prometheus and ``weight-update watch``.

    ::

        with PrometheusObserver(port=9400) as metrics:
            scheme.add_observer(metrics)
            print(metrics.url)                      # http://127.0.0.1:9400/metrics
            ...

    The page *Observers* of the manual lists the metrics. Use one observer for each scheme, because the
    versions of two schemes would be mixed up. Needs ``pip install "weight-update[prometheus]"``.

    Args:
        port: port to listen on; 0 takes a free one.
        addr: address of the interface to listen on. The default, loopback, admits only processes of this
            machine. Metrics are served without authentication.

    Raises:
        ImportError: the package ``prometheus_client`` is not installed.
        TypeError: ``addr`` is no string.
        ValueError: ``port`` is not the number of a port.
        OSError: the port is taken, or the address is not of this machine.

    Attributes:
        port: port that is listened on.
        url: address of the metrics.
    """

    def __init__(self, port: int = 0, addr: str = "127.0.0.1") -> None:
        port_number(port)
        if not isinstance(addr, str):
            raise TypeError(f"addr is a string, such as '127.0.0.1', got {addr!r}")
        prometheus_client = optional("prometheus_client", "prometheus")
        registry = _registry(prometheus_client)
        self._metrics = _Metrics(prometheus_client, registry)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr, registry)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot serve metrics at {addr}:{port} ({error.strerror}); port=0 takes a free port, "
                "and addr= is an address of this machine",
            ) from error
        self._server.RequestHandlerClass = _with_timeout(self._server.RequestHandlerClass)
        self._pid = os.getpid()
        self.port: int = int(self._server.server_port)
        host = f"[{addr}]" if ":" in addr else addr
        self.url: str = f"http://{host}:{self.port}/metrics"

    def __call__(self, news: Event) -> None:
        """Enter an update or an event into the metrics."""
        if isinstance(news, SyncReport):
            self._metrics.update(news)
        elif isinstance(news, PolicyLag):
            self._metrics.lag(news)
        else:
            self._metrics.event(news)

    def close(self) -> None:
        """Stop serving. Calling it twice is fine; in a forked child it does nothing."""
        if os.getpid() != self._pid:
            return  # the thread that serves is the parent's
        self._server.shutdown()
        with contextlib.suppress(OSError):  # it is closed already
            self._server.socket.shutdown(socket.SHUT_RDWR)  # in forked children, too, which have a copy
        self._server.server_close()
        self._thread.join()


def _with_timeout(base: Any) -> type[Any]:
    """Return a class of request handlers like ``base`` whose threads do not wait for ever."""

    class Handler(base):  # type: ignore[misc]
        timeout = _SILENCE_SECONDS

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # such as TimeoutError; socketserver would print it
                super().handle()

    return Handler


def _registry(prometheus_client: Any) -> Any:
    """Return a registry without the time at which each counter was made, which is of no use here.

    The package can leave these times out only for all registries of the process.
    """
    base: Any = prometheus_client.CollectorRegistry

    class Registry(base):  # type: ignore[misc]
        def collect(self) -> Iterator[Any]:
            for family in super().collect():
                family.samples = [one for one in family.samples if not one.name.endswith("_created")]
                yield family

    return Registry()


class _Metrics:
    """The metrics of one registry. A gauge without labels enters it with its first value.

    Args:
        make: the package ``prometheus_client``.
        registry: the registry.
    """

    def __init__(self, make: Any, registry: Any) -> None:
        self._registry, self._unset = registry, list[Any]()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            made = make.Gauge(f"weight_update_{name}", text, labels, registry=registry if labels else None)
            if not labels:
                self._unset.append(made)
            return made

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return make.Counter(f"weight_update_{name}", text, labels, registry=registry)

        self.version = gauge("version", "Number of the newest update")
        self.updates = counter("updates", "Updates", ("encoding",))
        self.sent_bytes = counter("sent_bytes", "Bytes handed to the transport, for all workers together")
        self.stage_seconds = make.Histogram(
            "weight_update_stage_seconds", "Seconds by stage", ("stage",), buckets=BUCKETS, registry=registry
        )
        self.last_bytes = gauge("last_update_bytes", "Bytes handed to the transport for the last update")
        self.last_stages = gauge(
            "last_update_stage_seconds", "Seconds by stage of the last update", ("stage",)
        )
        self.last_changed = gauge(
            "last_update_changed_ratio", "Share of the elements that the last update sent"
        )
        self.last_began = gauge(
            "last_update_timestamp_seconds", "Time at which the last update began, since the epoch"
        )
        self.failures = counter(
            "worker_failures",
            "Updates that a worker did not apply; those that a lost worker misses count once",
            WORKER,
        )
        self.events = counter("worker_events", "Events of workers", ("kind",))
        self.policy_lag_mean = gauge("policy_lag_mean", "Mean policy lag of the frames of the last batch")
        self.policy_lag_max = gauge("policy_lag_max", "Largest policy lag of a frame of the last batch")
        self.frames = counter("frames", "Frames of the batches that had a policy lag")
        self.apply_seconds = gauge("apply_seconds", "Seconds from arrival of an update until visible", WORKER)
        self.stall_seconds = gauge("stall_seconds", "Seconds for which forward passes waited", WORKER)
        self.worker_version = gauge("worker_version", "Version of the weights of a worker", WORKER)
        self.worker_up = gauge("worker_up", "1 for a worker that is connected, 0 for a lost one", WORKER)
        self.worker_late = gauge("worker_late", "1 for a worker that is late with an update", WORKER)
        self._state: tuple[Any, ...] = (self.apply_seconds, self.stall_seconds, self.worker_version)
        self._state += (self.worker_up, self.worker_late)
        self._versions: dict[int, int] = {}
        self._gone: OrderedDict[int, bool] = OrderedDict()  # whether it was a late joiner, by worker
        self._stages: set[str] = set()
        self._newest = -1

    def update(self, report: SyncReport) -> None:
        """Enter an update."""
        self._set_version(report.version)
        self.updates.labels(report.encoding).inc()
        self.sent_bytes.inc(report.wire_bytes)
        self._set(self.last_bytes, report.wire_bytes)
        self._set(self.last_changed, report.changed_fraction)
        self._set(self.last_began, report.began)
        for stage in self._stages - report.seconds.keys():
            self.last_stages.remove(stage)
        self._stages = set(report.seconds)
        for stage, seconds in report.seconds.items():
            self.stage_seconds.labels(stage).observe(seconds)
            self.last_stages.labels(stage).set(seconds)
        # the report of an update may come after a worker has gone
        for worker in report.apply_seconds.keys() - self._gone.keys():
            self.apply_seconds.labels(worker).set(report.apply_seconds[worker])
            self.stall_seconds.labels(worker).set(report.stall_seconds.get(worker, 0.0))
            self._present(worker, max(report.version, self._versions.get(worker, -1)))
        for worker in report.failures:
            if not self._gone.get(worker):
                self.failures.labels(worker).inc()

    def event(self, event: WorkerEvent) -> None:
        """Enter an event of a worker."""
        self.events.labels(event.kind).inc()
        if event.kind in ("joined", "applied"):
            self._gone.pop(event.worker, None)
            self._present(event.worker, event.version)
            self._set_version(event.version)
        elif event.kind in ("left", "lost"):
            self._forget(event)
        elif event.kind == "late":
            self.worker_late.labels(event.worker).set(1)

    def lag(self, lag: PolicyLag) -> None:
        """Enter the policy lag of a batch."""
        self.frames.inc(lag.frames)
        self._set(self.policy_lag_mean, lag.mean)
        self._set(self.policy_lag_max, lag.max)

    def _set_version(self, version: int | None) -> None:
        """Enter a version, unless it is older than the newest one: busy workers apply some of these."""
        if version is not None and version > self._newest:
            self._newest = version
            self._set(self.version, version)

    def _set(self, gauge: Any, value: float) -> None:
        """Set a gauge without labels; serve it from now on."""
        gauge.set(value)
        if gauge in self._unset:
            self._unset.remove(gauge)
            self._registry.register(gauge)

    def _present(self, worker: int, version: int | None) -> None:
        """Note that a worker is connected and not late, and the version that it has."""
        self.worker_up.labels(worker).set(1)
        self.worker_late.labels(worker).set(0)
        if version is not None:
            self._versions[worker] = version
            self.worker_version.labels(worker).set(version)

    def _forget(self, event: WorkerEvent) -> None:
        """Remove the present state of a worker that has gone, and all of a late joiner."""
        worker = event.worker
        self._gone[worker] = event.late_joiner
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)
        self._versions.pop(worker, None)
        for metric in (*self._state, self.failures) if event.late_joiner else self._state:
            with contextlib.suppress(KeyError):  # it has no such value
                metric.remove(worker)
        if event.kind == "lost" and not event.late_joiner:
            self.worker_up.labels(worker).set(0)
