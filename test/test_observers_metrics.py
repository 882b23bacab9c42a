"""Observers that need a package of their own: metrics for Prometheus, scalars for TensorBoard."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pairs import connect_pair
from test_observers_ready import BEGAN, LAG, LOST, report_of
from torch import nn

from weight_update import MemoryWeightSyncScheme, PolicyLag, WorkerEvent
from weight_update.observers import PrometheusObserver, TensorBoardObserver
from weight_update.observers import prometheus as prometheus_observer
from weight_update.report import Observer
from weight_update.testing.processes import wait_until


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("prometheus_client", lambda folder: PrometheusObserver(), "prometheus"),
        ("tensorboard", TensorBoardObserver, "tensorboard"),
    ],
)
def test_a_missing_package_is_named(
    package: str, make: Callable[[Path], Any], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'pip install "weight-update\[{extra}\]"') as raised:
        make(tmp_path)
    assert raised.value.name == package


# -- Prometheus ------------------------------------------------------------------------------------


@pytest.fixture
def prometheus() -> Any:
    reason = 'needs prometheus_client: pip install "weight-update[prometheus]"'
    return pytest.importorskip("prometheus_client", reason=reason)


def read(url: str) -> dict[str, float]:
    """Return the metrics at ``url``; a key is a name with its labels, as in ``up{worker=1}``."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = [one for family in families for one in family.samples]
    found = {}
    for sample in samples:
        labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
        name = sample.name.removeprefix("weight_update_")
        assert name != sample.name, sample
        found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def test_prometheus_serves_updates(prometheus: Any) -> None:
    with PrometheusObserver() as observer:
        assert observer.url == f"http://127.0.0.1:{observer.port}/metrics"
        assert read(observer.url) == {"sent_bytes_total": 0, "frames_total": 0}  # nothing is NaN
        observer(report_of(1, seconds={"convert": 1.0, "send": 0.5}))
        observer(report_of(2, failures={2: "it is late"}))
        found = read(observer.url)
    expected = {
        "version": 2,
        "updates_total{encoding=patch}": 2,
        "sent_bytes_total": 800,
        "last_update_bytes": 400,
        "last_update_changed_ratio": 0.5,
        "last_update_timestamp_seconds": BEGAN,
        "last_update_stage_seconds{stage=ack}": 0.010,
        "last_update_stage_seconds{stage=send}": 0.003,
        "stage_seconds_sum{stage=send}": 0.503,
        "stage_seconds_count{stage=send}": 2,
        "stage_seconds_bucket{le=0.005,stage=send}": 1,
        "stage_seconds_bucket{le=0.5,stage=send}": 2,
        "apply_seconds{worker=1}": 0.008,
        "stall_seconds{worker=1}": 0.002,
        "worker_version{worker=0}": 2,
        "worker_up{worker=0}": 1,
        "worker_late{worker=0}": 0,
        "worker_failures_total{worker=2}": 1,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert "last_update_stage_seconds{stage=convert}" not in found  # that of the update before
    assert not any("_created" in name for name in found)


def test_prometheus_leaves_other_registries_as_they_are(prometheus: Any) -> None:
    with PrometheusObserver():
        mine = prometheus.CollectorRegistry()
        prometheus.Counter("mine", "A counter of the program", registry=mine)
        assert b"mine_created" in prometheus.generate_latest(mine)


def test_prometheus_serves_the_state_of_workers(prometheus: Any) -> None:
    with PrometheusObserver() as observer:
        for idx in range(3):
            observer(WorkerEvent("joined", idx, 4))
        observer(report_of(5, apply_seconds={0: 0.1, 1: 0.2, 2: 0.3}))
        for event in (WorkerEvent("late", 0, 6), LOST, WorkerEvent("left", 2, 5)):
            observer(event)
        observer(report_of(5, apply_seconds={1: 0.1, 2: 0.1}))  # settled after they had gone
        found = read(observer.url)
        state = {key: value for key, value in found.items() if key.startswith("worker_")}
        assert state == {
            **{f"worker_events_total{{kind={kind}}}": 1 for kind in ("late", "lost", "left")},
            "worker_events_total{kind=joined}": 3,
            "worker_version{worker=0}": 5,
            "worker_up{worker=0}": 1,
            "worker_late{worker=0}": 1,
            "worker_up{worker=1}": 0,
        }
        observer(WorkerEvent("joined", 1, 5))
        observer(WorkerEvent("applied", 0, 6))
        found = read(observer.url)
    assert [found[f"worker_{name}{{worker=1}}"] for name in ("up", "version", "late")] == [1, 5, 0]
    assert [found[f"worker_{name}{{worker=0}}"] for name in ("up", "version", "late")] == [1, 6, 0]


@pytest.mark.parametrize("kind", ["left", "lost"])
def test_prometheus_forgets_late_joiners(prometheus: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine of a fleet may join under an index of its own."""
    monkeypatch.setattr("weight_update.observers.prometheus._MAX_GONE", 4)
    with PrometheusObserver() as observer:
        observer(WorkerEvent("joined", 0, 4))
        for idx in range(1, 20):
            observer(WorkerEvent("joined", idx, late_joiner=True))
            observer(report_of(4, apply_seconds={0: 0.1, idx: 0.1}, failures={idx: "it is late"}))
            observer(WorkerEvent(kind, idx, 4, late_joiner=True))
            observer(report_of(5, apply_seconds={0: 0.1, idx: 0.1}, failures={idx: "it is lost"}))
        found = read(observer.url)
        assert [key for key in found if "{worker=" in key and "{worker=0}" not in key] == []
        assert found[f"worker_events_total{{kind={kind}}}"] == 19
        observer(WorkerEvent("joined", 1, 5, late_joiner=True))
        assert read(observer.url)["worker_up{worker=1}"] == 1
        assert len(observer._metrics._gone) == 4


def test_prometheus_serves_policy_lag(prometheus: Any) -> None:
    with PrometheusObserver() as observer:
        assert "policy_lag_mean" not in read(observer.url)
        observer(LAG)
        observer(PolicyLag(version=5, frames=10, mean=0.5, max=1))
        found = read(observer.url)
    assert [found[name] for name in ("policy_lag_mean", "policy_lag_max", "frames_total")] == [0.5, 1, 50]


def test_prometheus_observes_a_scheme(prometheus: Any) -> None:
    scheme = MemoryWeightSyncScheme()
    with PrometheusObserver() as observer, scheme:
        scheme.add_observer(observer)
        receiver = connect_pair(scheme, nn.Linear(2, 2), nn.Linear(2, 2))
        for _ in range(3):
            scheme.send()
        wait_until(lambda: read(observer.url).get("version") == 3)
        found = read(observer.url)
        assert (found["worker_version{worker=0}"], found["worker_up{worker=0}"]) == (3, 1)
        assert found["sent_bytes_total"] >= 3 * found["last_update_bytes"] > 0
        receiver.shutdown()
        wait_until(lambda: "worker_up{worker=0}" not in read(observer.url))


def test_prometheus_keeps_no_port(prometheus: Any) -> None:
    """A forked child has a copy of the socket; the port is free again nevertheless."""
    first = PrometheusObserver()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    first.close()
    first.close()
    with PrometheusObserver(first.port) as second:
        assert "version" not in read(second.url)
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{second.port}.*port=0 takes a free port"):
            PrometheusObserver(second.port)
    with pytest.raises(OSError, match="refused"):
        read(second.url)
    os.close(read_end)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0


def test_prometheus_is_closed_in_a_forked_child(prometheus: Any) -> None:
    """No thread serves there, so there is none to wait for; the parent goes on serving."""
    with PrometheusObserver() as metrics:
        child = multiprocessing.get_context("fork").Process(target=metrics.close)
        child.start()
        child.join(20.0)
        ended = child.exitcode
        child.kill()
        child.join()
        assert ended == 0
        with urllib.request.urlopen(metrics.url, timeout=20.0) as reply:
            assert b"weight_update_sent_bytes_total" in reply.read()


@pytest.mark.parametrize("addr", [None, b"127.0.0.1", 0x7F000001])
def test_prometheus_refuses_another_address_before_it_serves(prometheus: Any, addr: Any) -> None:
    running, open_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match=r"addr is a string, such as '127\.0\.0\.1', got "):
        PrometheusObserver(0, addr)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (running, open_files)


def test_connections_without_a_request_are_closed(
    prometheus: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus_observer, "_SILENCE_SECONDS", 0.2)
    running = threading.active_count()
    with PrometheusObserver() as observer, ExitStack() as stack:
        for begun in (b"", b"GET /metrics"):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", observer.port), timeout=10))
            stranger.sendall(begun)
            assert stranger.recv(1) == b""
        wait_until(lambda: threading.active_count() == running + 1)
        assert "updates_total" in str(urllib.request.urlopen(observer.url, timeout=10).read())
    assert capsys.readouterr().err == ""


# -- TensorBoard -----------------------------------------------------------------------------------


@pytest.fixture
def tensorboard() -> Any:
    reason = 'needs tensorboard: pip install "weight-update[tensorboard]"'
    pytest.importorskip("tensorboard", reason=reason)
    return pytest.importorskip("torch.utils.tensorboard", reason=reason)


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars of the event files in ``folder``: values by step, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def tell(observer: Observer) -> None:
    for news in (report_of(1), LOST, report_of(2, failures={1: "it is lost"}), LAG, LAG):
        observer(news)


EXPECTED = {
    "ack_ms": {1: 10, 2: 10},
    "wire_bytes": {1: 400, 2: 400},
    "slowest_apply_ms": {1: 8, 2: 8},
    "workers_failed": {1: 0, 2: 1},
    "workers_lost": {1: 0, 2: 1},
    "policy_lag_mean": {40: 1.5, 80: 1.5},
    "policy_lag_max": {40: 3, 80: 3},
}


def test_tensorboard_writes_scalars(tensorboard: Any, tmp_path: Path) -> None:
    with TensorBoardObserver(tmp_path) as observer:
        tell(observer)
    found = scalars_in(tmp_path)
    for name, values in EXPECTED.items():
        assert found[f"weight_sync/{name}"] == pytest.approx(values), name


def test_tensorboard_begins_no_other_file_once_it_is_closed(tensorboard: Any, tmp_path: Path) -> None:
    observer = TensorBoardObserver(tmp_path)
    observer.close()
    before = list(tmp_path.iterdir())
    tell(observer)
    observer.close()
    assert list(tmp_path.iterdir()) == before


def test_tensorboard_needs_a_directory_or_a_writer() -> None:
    with pytest.raises(TypeError, match="a directory or a SummaryWriter, not an object of type Linear"):
        TensorBoardObserver(nn.Linear(1, 1))


def test_tensorboard_leaves_a_given_writer_open(tensorboard: Any, tmp_path: Path) -> None:
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        with TensorBoardObserver(writer, prefix="sync/") as observer:
            tell(observer)
        assert scalars_in(tmp_path)["sync/workers_lost"] == {1: 0, 2: 1}  # flushed
        writer.add_scalar("loss", 0.5, 3)
    assert scalars_in(tmp_path)["loss"] == {3: 0.5}
