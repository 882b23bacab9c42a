"""Observers of a scheme: what they are told of, in which order, and what they cannot break."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_parts import Trace

from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MemoryWeightSyncScheme,
    Observers,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
    WorkerEvent,
)
from weight_update.observers import ChromeTraceObserver
from weight_update.sender import observers as sender_observers
from weight_update.testing.models import Brittle, mlp, scramble
from weight_update.testing.processes import eventually, freeze, wait_until
from weight_update.testing.worker_processes import WorkerProcesses

KINDS = [SharedMemWeightSyncScheme, DistributedWeightSyncScheme]


class Told(list[Any]):
    """An observer that keeps what it is told."""

    def __call__(self, event: SyncReport | WorkerEvent) -> None:
        self.append(event)

    @property
    def reports(self) -> list[SyncReport]:
        return [one for one in self if isinstance(one, SyncReport)]

    @property
    def versions(self) -> list[int]:
        return [one.version for one in self.reports]

    def events(self, *kinds: str) -> list[tuple[str, int]]:
        found = [one for one in self if isinstance(one, WorkerEvent)]
        return sorted((one.kind, one.worker) for one in found if one.kind in kinds or not kinds)


@pytest.fixture
def running(hired: Callable[..., WorkerProcesses]) -> Callable[..., WorkerProcesses]:
    """Return a function that connects a scheme with two workers; they end with the test."""
    return lambda scheme, model: hired(scheme, [mlp(2), mlp(2)], model=model)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_and_workers(kind: type[WeightSyncScheme], running: Any) -> None:
    scheme, told, model = kind(), Told(), mlp(1)
    scheme.add_observer(told)
    procs = running(scheme, model)
    assert eventually(lambda: told.versions == [0])
    assert told.events() == [("joined", 0), ("joined", 1)]
    for _ in range(2):
        scheme.send()
    scheme.send_async()
    assert eventually(lambda: told.versions == [0, 1, 2, 3])
    last = told[-1]
    assert sorted(last.apply_seconds) == sorted(last.stall_seconds) == [0, 1]
    assert list(last.seconds) == ["extract", "encode", "send", "ack"]
    assert (last.failures, last.encoding) == ({}, "dense")
    procs.workers[0].runner.kill()
    wait_until(lambda: told.events("lost") == [("lost", 0)])
    with pytest.raises(SyncFailedError):
        scheme.send()
    assert eventually(lambda: told.versions[-1] == 4)
    assert list(told[-1].failures) == [0]
    scheme.shutdown()
    assert not any(thread.name == "weight_update-observers" for thread in threading.enumerate())


def test_a_lost_worker_fails_one_update_until_it_joins_again(running: Any) -> None:
    scheme, told = SharedMemWeightSyncScheme(), Told()
    procs = running(scheme, mlp(1))
    scheme.add_observer(told)
    for newest in (3, 7):
        procs.workers[-1].runner.kill()
        wait_until(lambda: None in scheme.worker_versions.values())
        for _ in range(3):
            with pytest.raises(SyncFailedError, match="worker 1"):
                scheme.send()
        wait_until(lambda newest=newest: told.versions[-1:] == [newest])  # type: ignore[misc]
        assert [list(one.failures) for one in told.reports[-3:]] == [[1], [], []]
        procs.hire(1, mlp(2)).call("connect")
        scheme.send()
        wait_until(lambda newest=newest: told.versions[-1:] == [newest + 1])  # type: ignore[misc]
        assert (sorted(told.reports[-1].apply_seconds), told.reports[-1].failures) == ([0, 1], {})


def test_a_late_worker(running: Any) -> None:
    scheme, told = SharedMemWeightSyncScheme(timeout=0.5), Told()
    procs = running(scheme, mlp(1))
    remove = scheme.add_observer(told)
    pid = procs.workers[1].runner.pid
    freeze(pid)
    with pytest.raises(SyncFailedError):
        scheme.send()
    assert eventually(lambda: len(told) == 2)
    report, event = told
    assert (sorted(report.apply_seconds), list(report.failures)) == ([0], [1])
    assert (event.kind, event.worker, event.version) == ("late", 1, 1)
    assert "did not apply it within" in event.reason
    remove()
    procs.workers[1].runner.kill()
    wait_until(lambda: scheme.worker_versions[1] is None)
    assert len(told) == 2


def test_a_worker_that_is_lost_after_the_timeout_is_not_late(hired: Any) -> None:
    """The update is longer than a socket's buffer, so writing it ends with the timeout."""
    scheme, told, source = SharedMemWeightSyncScheme(timeout=0.5), Told(), Brittle(1)
    procs = hired(scheme, [Brittle(2), Brittle(3)], model=source)
    scheme.add_observer(told)
    freeze(procs.workers[1].runner.pid)
    source.note = "x" * (3 << 20)
    with pytest.raises(SyncFailedError, match="worker 1"):
        scheme.send()
    wait_until(lambda: told.versions == [1])
    scheme.shutdown()
    assert told.events("lost", "late") == [("lost", 1)]
    procs.workers[1].runner.kill()  # it cannot end by itself


def test_a_busy_worker_delays_no_news(running: Any) -> None:
    """Reports leave it out while newer updates follow; an event tells the version that it applies later."""
    scheme, told = SharedMemWeightSyncScheme(), Told()
    procs = running(scheme, mlp(1))
    scheme.add_observer(told)
    procs.workers[1].call("hold")
    for _ in range(3):
        scheme.send_async()
    wait_until(lambda: told.versions == [1, 2])
    assert [(list(one.apply_seconds), one.failures) for one in told.reports] == [([0], {})] * 2
    assert "ack" not in told.reports[0].seconds
    procs.workers[0].runner.kill()
    wait_until(lambda: told.events("lost") == [("lost", 0)])
    assert told.versions == [1, 2]
    procs.workers[1].call("release")
    wait_until(lambda: told.versions == [1, 2, 3])
    assert (list(told.reports[-1].apply_seconds), list(told.reports[-1].failures)) == ([0, 1], [])
    applied = [one for one in told if isinstance(one, WorkerEvent) and one.kind == "applied"]
    assert (1, 1) in [(one.worker, one.version) for one in applied]


def sent_to_a_busy_worker(running: Any) -> tuple[SharedMemWeightSyncScheme, Told, Any]:
    """Send an update while worker 1 holds; return the scheme, what it told its observer, and processes."""
    scheme, told = SharedMemWeightSyncScheme(), Told()
    procs = running(scheme, mlp(1))
    scheme.add_observer(told)
    procs.workers[1].call("hold")
    scheme.send_async()
    wait_until(lambda: told.events("applied") == [("applied", 0)])
    return scheme, told, procs


def test_a_restarted_worker_is_told_of_once_while_another_is_busy(running: Any) -> None:
    scheme, told = SharedMemWeightSyncScheme(), Told()
    procs = running(scheme, mlp(1))
    scheme.add_observer(told)
    procs.workers[0].runner.kill()
    wait_until(lambda: None in scheme.worker_versions.values())
    restarted = procs.hire(0, mlp(2))
    procs.workers[1].call("hold")
    scheme.send_async()
    restarted.call("connect")
    time.sleep(1.5)  # longer than observers wait for worker 1
    procs.workers[1].call("release")
    wait_until(lambda: told.versions == [1])
    assert told.events("applied") == [("applied", 0), ("applied", 1)]


def test_a_worker_that_stays_busy_delays_only_the_first_news(running: Any) -> None:
    scheme, told, procs = sent_to_a_busy_worker(running)
    began = time.monotonic()
    for version in range(2, 10):
        scheme.send_async()
        wait_until(lambda version=version: told[-1].version == version)  # type: ignore[misc]
    assert time.monotonic() - began < 4.0, "not a second for each"
    wait_until(lambda: told.versions == [*range(1, 9)])
    assert not any(one.failures for one in told.reports)
    procs.workers[1].call("release")
    wait_until(lambda: told.versions == [*range(1, 10)])
    assert sorted(told.reports[-1].apply_seconds) == [0, 1]


def test_the_end_waits_for_a_busy_worker_no_longer_than_a_newer_update(running: Any) -> None:
    scheme, told, procs = sent_to_a_busy_worker(running)
    began = time.monotonic()
    scheme.shutdown()
    assert time.monotonic() - began < 4.0
    assert told.versions == [1]
    assert (list(told.reports[0].apply_seconds), told.reports[0].failures) == ([0], {})
    procs.workers[1].call("release")


@pytest.mark.slow
def test_a_late_worker_is_told_of_once_while_updates_go_on(running: Any) -> None:
    scheme, told = SharedMemWeightSyncScheme(timeout=2.0), Told()
    procs = running(scheme, mlp(1))
    scheme.add_observer(told)
    pid = procs.workers[1].runner.pid
    for _ in range(2):
        told.clear()
        freeze(pid)
        for _ in range(100):
            scheme.send_async()
            time.sleep(0.05)
        assert [list(one.failures) for one in told.reports if one.failures] == [[1]]
        assert told.events("late") == [("late", 1)]
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: ("applied", 1) in told.events())
        scheme.send()


def test_the_first_version_of_a_late_joiner(running: Any) -> None:
    """Observers learn of it without another update."""
    scheme, told = SharedMemWeightSyncScheme(), Told()
    procs = running(scheme, mlp(1))
    scheme.add_observer(told)
    scheme.send()
    procs.hire(5, mlp(2)).call("connect")
    wait_until(lambda: ("applied", 5) in told.events())
    assert told.events() == [("applied", 5), ("joined", 5)]
    assert told[-1].version == 1


def test_all_weights_instead_of_a_patch(running: Any) -> None:
    scheme = SharedMemWeightSyncScheme(WeightStrategy("state_dict", encoding=PatchEncoding()))
    told, model = Told(), mlp(1)
    procs = running(scheme, model)
    scheme.add_observer(told)
    procs.workers[1].call("fill", 7.0)
    with_one_change(model)
    scheme.send()
    assert eventually(lambda: told.versions == [1])
    assert told.events() == [("full_update", 1)]
    scramble(model, 5)
    scheme.send()
    assert eventually(lambda: told.versions == [1, 2])
    assert told.events() == [("full_update", 0), ("full_update", 1), ("full_update", 1)]


def with_one_change(model: Any) -> None:
    next(model.parameters()).data.view(-1)[0] += 1


@pytest.mark.usefixtures("all_observer_errors")
@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
def test_an_observer_that_raises(
    error: type[BaseException], running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheme, told = SharedMemWeightSyncScheme(), Told()

    def broken(event: SyncReport | WorkerEvent) -> None:
        raise error(f"cannot count {event}")

    running(scheme, mlp(1))
    scheme.add_observer(broken)
    scheme.add_observer(told)
    assert scheme.send().version == 1
    assert eventually(lambda: told.versions == [1])
    assert "an observer raised an error" in caplog.text
    assert "cannot count version 1" in caplog.text


def test_an_observer_that_raises_each_time_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_observers._log, "_periods", {})
    observers = Observers()

    class Broken:
        def __call__(self, event: Any) -> None:
            raise ArithmeticError(f"cannot count {event}")

    def refuse(event: Any) -> None:
        raise LookupError(f"cannot find {event}")

    observers.add(Broken())
    observers.add(refuse)
    for worker in range(5):
        observers.tell(WorkerEvent("joined", worker))
    observers.close()
    texts = [record.getMessage().rpartition(".")[2] for record in caplog.records]
    assert texts == ["Broken", "refuse"]
    assert "cannot count worker 0" in caplog.text
    assert "cannot find worker 0" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_of_two_workers(kind: type[WeightSyncScheme], running: Any, tmp_path: Path) -> None:
    scheme, told, began = kind(), Told(), time.time()
    with ChromeTraceObserver(tmp_path / "trace.json") as observer:
        scheme.add_observer(observer)
        scheme.add_observer(told)
        running(scheme, mlp(1))
        for _ in range(3):
            scheme.send()
        scheme.send_async()
        scheme.send()
        assert eventually(lambda: told.versions == [0, 1, 2, 3, 4, 5])
    trace = Trace(tmp_path / "trace.json")
    trace.check()
    assert {"trainer", "worker 0", "worker 1"} == set(trace.tracks.values())
    for version in range(6):
        for worker in ("worker 0", "worker 1"):
            assert list(trace.slices(version, worker, began)) == ["transfer", "swap"]
            (begin, _), (_, end) = trace.slices(version, worker, began).values()
            assert 0 <= begin < end < 1e6 * (time.time() - began)
    assert [start["id"] for start, _ in trace.arrows()] == [
        version for version in range(1, 6) for _ in range(2)
    ]
    assert [event["name"] for event in trace.of("i")] == ["joined", "joined"]


def test_a_receiver_has_no_observers() -> None:
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_receiver(model=mlp(1), worker_idx=0)
    with pytest.raises(LifecycleError, match="is for senders"):
        scheme.add_observer(print)


def test_an_observer_that_was_added_twice() -> None:
    observers, told = Observers(), Told()
    remove, _ = observers.add(told), observers.add(told)
    remove()
    remove()
    assert len(observers.functions) == 1
    observers.close()


def test_closed_observers_leave_their_sources() -> None:
    scheme, told = MemoryWeightSyncScheme(), Told()
    observers = Observers(scheme.add_observer)
    observers.add(told)
    observers.close()
    assert (scheme._process.observers.functions, observers.functions) == ((), ())
    scheme.shutdown()


def test_an_observer_may_close_its_observers() -> None:
    observers = Observers()
    observers.add(lambda _: observers.close())
    observers.tell(WorkerEvent("joined", 0))
    wait_until(lambda: not any(one.name == "weight_update-observers" for one in threading.enumerate()))


def test_an_observer_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="an observer is a function of an event, not str"):
        MemoryWeightSyncScheme().add_observer("updates.csv")  # type: ignore[arg-type]


def test_for_an_observer_that_blocks_not_everything_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_observers, "_MOST_WAITING", 5)
    observers, told, begun, released = Observers(), Told(), threading.Event(), threading.Event()

    def block(event: Any) -> None:
        begun.set()
        assert released.wait(20)
        told.append(event)

    observers.add(block)
    observers.tell(WorkerEvent("joined", 0))
    assert begun.wait(20)
    for worker in range(1, 100):
        observers.tell(WorkerEvent("joined", worker))
    released.set()
    observers.close()
    assert [event.worker for event in told] == [0, 1, 2, 3, 4, 5]
    assert "an observer blocks" in caplog.text
