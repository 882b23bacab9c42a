"""Fault tests of this folder with workers that share no memory with the sender, and further ones."""

from __future__ import annotations

import os

import pytest
import torch
from faults_tools import Apart, Processes, Stripes, Worker, fill, hold, join, let_go, version_of, weights_of
from test_kills import (  # noqa: F401 - they are collected here, too
    test_killed_in_the_middle_of_large_sends,
    test_killed_while_idle,
    test_killed_while_it_applies,
    test_sender_killed_at_any_moment,
    test_workers_in_the_report,
)
from test_slow_receiver import test_held_worker_costs_bounded_memory  # noqa: F401
from test_stopped_worker import test_named_within_the_timeout_and_current_after_it_goes_on  # noqa: F401

from weight_update import DistributedWeightSyncScheme, SyncFailedError

pytestmark = pytest.mark.slow  # the same tests run over Distributed on one host by default


@pytest.fixture
def kind() -> type[DistributedWeightSyncScheme]:
    """Return the scheme that replaces those of the original tests."""
    return Apart


def receive(me: Worker, timeout: float) -> set[float] | None:
    """Return the values of all received weights."""
    weights = me.scheme.receive(timeout)
    if weights is None:
        return None
    return {float(value) for one in weights.values(True, True) for value in one.detach().aminmax()}


def test_a_late_update_is_not_taken_for_the_next(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=0.5), Stripes(24, 4096)
    (worker,) = procs.launch(scheme, model, lambda: Stripes(24, 4096), 1)
    assert worker.call(receive, 0.1) is None
    scheme.send(fill(model, 1))
    assert worker.call(receive, 5.0) == {1.0}
    worker.call(hold)
    with pytest.raises(SyncFailedError, match="worker 0"):
        scheme.send(fill(model, 2))
    assert worker.call(receive, 0.1) is None
    handle = scheme.send_async(fill(model, 3))
    worker.call(let_go)
    handle.wait(5.0)
    assert worker.call(receive, 5.0) == {3.0}
    assert worker.call(receive, 0.1) is None
    assert worker.call(version_of) == 3


def test_bfloat16_to_a_worker_in_float32(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=10.0), Stripes(4, 1 << 16).bfloat16()
    (worker,) = procs.launch(scheme, model, lambda: Stripes(4, 1 << 16), 1)
    torch.manual_seed(0)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
        scheme.send()
        found = worker.call(weights_of)
        for name, value in model.state_dict().items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value.float())


def leave_without_a_word(me: Worker) -> None:
    os._exit(0)


def test_a_worker_that_exits_without_shutdown(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=3.0), Stripes(4, 64)
    workers = procs.launch(scheme, model, lambda: Stripes(4, 64), 2)
    workers[1].begin(leave_without_a_word)
    workers[1].process.join(5.0)
    with pytest.raises(SyncFailedError, match="worker 1"):
        scheme.send(fill(model, 1))
    fresh = procs.start(scheme, 1, lambda: Stripes(4, 64))
    assert fresh.call(join) == 1
    assert scheme.send(fill(model, 2)).apply_seconds.keys() == {0, 1}
