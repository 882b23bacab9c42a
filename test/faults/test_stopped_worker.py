"""A worker that was stopped (SIGSTOP) delays nobody for longer than the timeout, and catches up."""

from __future__ import annotations

import signal
import time

import pytest
from faults_kinds import quick_over
from faults_tools import (
    Processes,
    Stripes,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    report,
    version_of,
)

from weight_update import (
    GroupSyncFailedError,
    SyncFailedError,
    WeightStrategy,
    group_schemes,
    send_together,
)

LIMIT = 2.0


def newest(worker) -> float:
    return worker.call(report)[0]["newest"]


@quick_over("shared_mem")
def test_named_within_the_timeout_and_current_after_it_goes_on(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=LIMIT), Stripes(24, 4096)
    workers = procs.launch(scheme, model, lambda: Stripes(24, 4096), 3)
    for worker in workers:
        worker.call(compute)
    workers[1].signal(signal.SIGSTOP)
    for version in (1, 2):
        start = time.monotonic()
        with pytest.raises(SyncFailedError, match="worker 1") as caught:
            scheme.send(fill(model, version))
        assert time.monotonic() - start < 2 * LIMIT
        assert set(caught.value.failures) == {1}
        assert [workers[idx].call(version_of) for idx in (0, 2)] == [version, version]
    workers[1].signal(signal.SIGCONT)
    assert eventually(lambda: newest(workers[1]) == 2, 10.0)
    scheme.send(fill(model, 3))
    assert eventually(lambda: [newest(worker) for worker in workers] == [3, 3, 3], 10.0)
    for worker in workers:
        assert_whole(worker.call(end_compute))


class LongExtraState(Stripes):
    """A model whose extra state is longer than what sockets and pipes keep."""

    def __init__(self) -> None:
        super().__init__(2, 64)
        self.text = "x" * (3 << 20)

    def get_extra_state(self) -> str:
        return self.text

    def set_extra_state(self, state: str) -> None:
        self.text = state


@pytest.mark.parametrize("max_in_flight", [None, pytest.param(2, marks=pytest.mark.slow)])
@quick_over("shared_mem")
def test_a_long_extra_state_delays_no_other_worker(kind, procs: Processes, max_in_flight) -> None:
    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=max_in_flight)
    scheme, model = procs.scheme(kind, strategy=strategy, timeout=30.0), LongExtraState()
    workers = procs.launch(scheme, model, LongExtraState, 3)
    for worker in workers:
        worker.call(compute)
    workers[0].signal(signal.SIGSTOP)
    start = time.monotonic()
    for version in (1, 2) if max_in_flight is None else (1,):  # a pipeline waits before its next version
        scheme.send_async(fill(model, version))
        assert eventually(lambda at=version: [newest(one) for one in workers[1:]] == [at, at], 10.0)
    assert time.monotonic() - start < 15
    workers[0].signal(signal.SIGCONT)
    assert scheme.send(fill(model, 3)).version == version + 1
    for worker in workers:
        assert_whole(worker.call(end_compute))


@quick_over("distributed")
def test_stopped_before_it_joins(kind, procs: Processes) -> None:
    from faults_tools import join

    from weight_update import SyncTimeoutError

    scheme, model = procs.scheme(kind, timeout=LIMIT), fill(Stripes(8, 64), 0)
    scheme.init_on_sender(model=model, num_workers=2)
    workers = [procs.start(scheme, idx, lambda: Stripes(8, 64)) for idx in range(2)]
    workers[1].signal(signal.SIGSTOP)
    for worker in workers:
        worker.begin(join)
    with pytest.raises(SyncTimeoutError, match=r"\[1\]"):
        scheme.connect(timeout=LIMIT)
    assert workers[0].result() == 0
    assert scheme.send(fill(model, 1), worker_ids=[0]).version == 1
    workers[1].signal(signal.SIGCONT)
    workers[1].result(10.0)  # it comes late, and is let in
    assert scheme.send(fill(model, 2)).apply_seconds.keys() == {0, 1}
    assert [worker.call(version_of) for worker in workers] == [2, 2]


@quick_over("shared_mem")
def test_the_models_of_a_group_share_one_time_limit(kind, procs: Processes) -> None:
    schemes = [procs.scheme(kind, timeout=2.0) for _ in range(3)]
    group_schemes(schemes)
    for scheme in schemes:
        (worker,) = procs.launch(scheme, Stripes(2, 64), lambda: Stripes(2, 64), 1)
        worker.signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(GroupSyncFailedError) as caught:
        send_together(dict.fromkeys(schemes))
    assert time.monotonic() - start < 4.0
    by_scheme = caught.value.by_scheme
    assert {scheme: set(failures) for scheme, failures in by_scheme.items()} == {one: {0} for one in schemes}
