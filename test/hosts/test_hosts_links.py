"""Links that go down and come back, and addresses that cannot be reached."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
from faults_tools import (
    Remote,
    Stripes,
    Worker,
    WorkerRaised,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    version_of,
    within,
)
from hosts_processes import HostsProcesses
from marks import slow

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    SyncFailedError,
    TransportError,
    WeightStrategy,
)
from weight_update.transports import signed_stream

LIMIT = 1.0
CHAIN_LIMIT = 6.0
"""Timeout for payloads along a chain of hosts: a host without progress is skipped after a quarter of it."""
BACK = {"pull": "plug", "lose": "find"}
SIZES = {"small": ((8, 64), LIMIT), "large": ((8, 1 << 18), CHAIN_LIMIT)}  # one travels with its signal


@pytest.mark.parametrize("how", [slow("pull"), "lose"])
@pytest.mark.parametrize(("size", "limit"), [slow(*SIZES["small"]), SIZES["large"]], ids=SIZES)
def test_a_link_that_fails_and_comes_back(procs: HostsProcesses, size, limit: float, how: str) -> None:
    scheme, model = procs.trainer(timeout=limit), Stripes(*size)
    workers = procs.launch_on(["one", "two"], scheme, model, lambda: Stripes(*size))
    for worker in workers:
        worker.call(compute)
    for version in range(1, 6):
        scheme.send(fill(model, version))
    getattr(procs.network, how)("one")
    for version in (6, 7):
        with within(limit + 1), pytest.raises(SyncFailedError, match="worker 0") as caught:
            scheme.send(fill(model, version))
        assert set(caught.value.failures) == {0}
        assert workers[1].call(version_of) == version
    getattr(procs.network, BACK[how])("one")
    assert eventually(lambda: workers[0].call(version_of) == 7, 20.0)
    for version in (8, 9):
        assert scheme.send(fill(model, version)).apply_seconds.keys() == {0, 1}
        assert [worker.call(version_of) for worker in workers] == [version, version]
    for worker in workers:
        assert_whole(worker.call(end_compute))


@pytest.mark.slow
def test_send_to_the_only_host_ends_in_time(procs: HostsProcesses) -> None:
    """The payload fits into the buffers of the kernel, and no answer comes."""
    scheme, model = procs.trainer(timeout=2.0), Stripes(8, 3 << 10)
    procs.launch_on(["one"], scheme, model, lambda: Stripes(8, 3 << 10))
    for version in range(1, 21):  # so that the buffers grow
        scheme.send(fill(model, version))
    procs.network.lose("one")
    with within(3.0), pytest.raises(SyncFailedError, match=r"worker 0: .* cannot be reached"):
        scheme.send(fill(model, 21))


@pytest.mark.slow
def test_a_link_that_fails_while_its_worker_joins_again(procs: HostsProcesses) -> None:
    scheme, model = procs.trainer(timeout=4.0), Stripes(8, 1 << 17)
    [worker] = procs.launch_on(["one"], scheme, model, lambda: Stripes(8, 1 << 17))
    scheme.send(fill(model, 1))
    procs.network.shape("one", "16mbit")  # the weights take two seconds
    scheme._sender.table[0].link.disconnect()
    time.sleep(0.7)
    procs.network.lose("one")
    time.sleep(6.0)
    with pytest.raises(SyncFailedError, match="worker 0"):
        scheme.send(fill(model, 2))
    procs.network.find("one")
    assert eventually(lambda: worker.call(version_of) == 2, 25.0)


@pytest.mark.slow
def test_weights_that_take_longer_than_an_attempt_to_join_again(procs: HostsProcesses) -> None:
    size = (8, 7 << 17)
    scheme, model = procs.trainer(timeout=30.0), Stripes(*size)
    [worker] = procs.launch_on(["one"], scheme, model, lambda: Stripes(*size))
    scheme.send(fill(model, 1))
    procs.network.shape("one", "16mbit")  # the weights take 14 seconds
    scheme._sender.table[0].link.disconnect()
    with contextlib.suppress(SyncFailedError):  # the worker may be away at this moment
        scheme.send(fill(model, 2))
    assert eventually(lambda: worker.call(version_of) == 2, 60.0)


@pytest.mark.slow
def test_each_bucket_is_sent_once_over_slow_links(procs: HostsProcesses) -> None:
    """The second host has the end of a bucket half a second after the first, which waits for it."""
    size, strategy = (4, 1 << 19), WeightStrategy(encoding=BucketEncoding(2 << 20))
    scheme, model = procs.trainer(timeout=30.0, strategy=strategy), Stripes(*size)
    procs.launch_on(["one", "two"], scheme, model, lambda: Stripes(*size))
    for host in ("trainer", "one", "two"):
        procs.network.shape(host, "16mbit")
    before = scheme.network_bytes
    scheme.send(fill(model, 1))
    assert scheme.network_bytes - before == pytest.approx(4 * (4 << 19), rel=0.01)  # with padding


@pytest.mark.slow
def test_hosts_that_cannot_reach_each_other(procs: HostsProcesses) -> None:
    """The sender reaches both: each gets the update, and stays connected."""
    scheme, model = procs.trainer(timeout=4.0), Stripes(8, 1 << 17)
    workers = procs.launch_on(["one", "two"], scheme, model, lambda: Stripes(8, 1 << 17))
    procs.network.hide("one", "two")
    procs.network.hide("two", "one")
    for version in (1, 2, 3):
        assert scheme.send(fill(model, version)).apply_seconds.keys() == {0, 1}
        assert [worker.call(version_of) for worker in workers] == [version, version]


def join_there(me: Worker, options: dict[str, Any], timeout: float = 10.0) -> int | None:
    """Join with a scheme of the worker's own."""
    me.scheme = DistributedWeightSyncScheme(**options)
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    me.scheme.connect(timeout=timeout)
    return me.scheme.version


def alone(procs: HostsProcesses, host: str) -> Remote:
    return procs.start_on(host, DistributedWeightSyncScheme(), 0, lambda: Stripes(8, 64))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pull", "lose"])
def test_join_without_a_way_to_the_sender(procs: HostsProcesses, how: str) -> None:
    scheme, model = procs.trainer(timeout=LIMIT), Stripes(8, 64)
    scheme.init_on_sender(model=model, num_workers=1)
    worker = alone(procs, "one")
    getattr(procs.network, how)("one")
    where = {"address": scheme.address, "port": scheme.port, "token": scheme.token}
    expected = f"LinkClosedError: no sender at {scheme.address}:{scheme.port} within 1.5 s"
    with within(2.5), pytest.raises(WorkerRaised, match=expected):
        worker.call(join_there, where, 1.5)
    getattr(procs.network, BACK[how])("one")
    worker.begin(join_there, where)
    scheme.connect(timeout=10.0)
    assert worker.result() == 0


def test_sender_on_loopback(procs: HostsProcesses) -> None:
    scheme = procs.trainer(address="127.0.0.1")
    scheme.init_on_sender(model=Stripes(8, 64), num_workers=1)
    with within(2.0), pytest.raises(WorkerRaised, match=r"refused.*give it address="):
        alone(procs, "one").call(join_there, {"port": scheme.port}, 1.0)


def test_address_of_another_host(procs: HostsProcesses) -> None:
    scheme = procs.trainer(address=procs.network.address["one"])
    with pytest.raises(OSError, match=r"10\.77\.0\.2.*interface of this machine"):
        scheme.init_on_sender(model=Stripes(8, 64), num_workers=1)


@pytest.mark.slow
def test_a_worker_that_comes_before_the_sender(procs: HostsProcesses) -> None:
    where = {"address": procs.network.address["trainer"], "port": 29577, "token": "secret"}
    worker = alone(procs, "one")
    worker.begin(join_there, where)
    time.sleep(0.5)
    scheme = procs.scheme(DistributedWeightSyncScheme, **where)
    scheme.init_on_sender(model=Stripes(8, 64), num_workers=1)
    scheme.connect(timeout=10.0)
    assert worker.result() == 0


# -- the trainer goes and comes ------------------------------------------------------------------------

HOME = {"address": "10.77.0.1", "port": 29577, "token": "secret"}


def train(me: Worker, value: float) -> None:
    me.scheme = DistributedWeightSyncScheme(**HOME, timeout=5.0)
    me.scheme.init_on_sender(model=fill(me.model, value), num_workers=1)
    me.scheme.connect(timeout=10.0)


def await_end(me: Worker) -> str:
    """Receive until an exception is raised."""
    try:
        while me.scheme.receive(timeout=20.0) is not None:
            pass
    except TransportError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing came"


def followed(procs: HostsProcesses) -> tuple[Remote, Remote]:
    """Return a trainer, and a worker on another host that receives from it until it ends."""
    trainer, worker = alone(procs, "trainer"), alone(procs, "one")
    trainer.begin(train, 1.0)
    worker.call(join_there, HOME)
    trainer.result()
    worker.begin(await_end)
    return trainer, worker


def join_again(me: Worker) -> float:
    me.scheme.shutdown()
    join_there(me, HOME)
    return float(next(iter(me.model.parameters())).detach().max())


@pytest.mark.parametrize("way", ["killed", slow("killed while its link fails")])
def test_trainer_restarted_on_the_same_port(procs: HostsProcesses, way: str) -> None:
    first, worker = followed(procs)
    if way != "killed":
        procs.network.lose("trainer")
    first.kill()
    if way != "killed":
        time.sleep(0.5)
        procs.network.find("trainer")
    assert "LinkClosedError" in worker.result()
    second = alone(procs, "trainer")
    second.begin(train, 2.0)
    assert worker.call(join_again) == 2.0
    second.result()


def fork(me: Worker) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(30.0)
        os._exit(0)
    return child


def test_trainer_killed_while_a_forked_child_lives(procs: HostsProcesses) -> None:
    trainer, worker = followed(procs)
    child = trainer.call(fork)
    try:
        trainer.signal(signal.SIGKILL)
        with within(5.0):
            assert "LinkClosedError" in worker.result()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_trainer_whose_machine_vanishes(procs: HostsProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """No packet reports the loss."""
    monkeypatch.setattr(signed_stream, "_VANISHED_SECONDS", 3)
    trainer, worker = followed(procs)
    procs.network.lose("trainer")
    trainer.kill()
    with within(6.0):
        assert "LinkClosedError" in worker.result()
