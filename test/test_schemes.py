"""The schemes keep their contract."""

from typing import Any

import pytest
from interpreters import use_template_for_forkserver
from marks import slow
from torch import nn

from weight_update import (
    DistributedWeightSyncScheme,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from weight_update.testing import Apart, ApartInTwos, SchemeContract, WorkerProcesses, mlp, scramble
from weight_update.testing.cases import assert_equal
from weight_update.testing.worker_processes import context_of
from weight_update.transports.distributed import connection as connection


class TestSharedMem(SchemeContract):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return SharedMemWeightSyncScheme(**options)


@pytest.mark.smoke  # the link of SharedMem, signalled in another way
class TestMultiProcess(SchemeContract):
    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return MultiProcessWeightSyncScheme(**options)


class TestDistributed(SchemeContract):
    """Workers on the sender's host, which map its memory."""

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(**options)


@pytest.mark.smoke  # test_hosts.py has what is special
class TestDistributedAcrossHosts(SchemeContract):
    """Workers on one host each; all payloads, even small ones, go down a chain of hosts."""

    @pytest.fixture(autouse=True)
    def nothing_inline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "INLINE_BYTES", 0)

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return Apart(**options)


@pytest.mark.slow
class TestDistributedOnAnotherHost(TestDistributedAcrossHosts):
    """Two workers on one host that is not the sender's."""

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return ApartInTwos(**options)


@pytest.mark.smoke  # the links are those of Distributed; test_rpc.py has what is special
class TestRPC(SchemeContract):
    """Workers that find the sender by the scheme; ``test_rpc`` has workers in an RPC world."""

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return RPCWeightSyncScheme(**options)


@pytest.mark.smoke
class TestMemory(SchemeContract):
    method = "thread"

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return MemoryWeightSyncScheme(**options)


@pytest.mark.parametrize("make", [SharedMemWeightSyncScheme, slow(MultiProcessWeightSyncScheme)])
@pytest.mark.parametrize("method", ["forkserver", slow("spawn")])
def test_spawned_workers(make: type[WeightSyncScheme], method: Any) -> None:
    """Workers that get the scheme pickled, and share nothing with the trainer."""
    source = mlp(1)
    scheme = make()
    use_template_for_forkserver()
    scheme.init_on_sender(model=source, num_workers=1, ctx=context_of(method))
    with WorkerProcesses(scheme, method) as procs:
        procs.hire(0, mlp(2))
        procs.connect()
        for version in range(3):
            assert_equal(procs, source)
            scramble(source, version)
            scheme.send()
        assert_equal(procs, source)


def test_no_scheme_does_nothing() -> None:
    sender, receiver, model = NoWeightSyncScheme(), NoWeightSyncScheme(), nn.Linear(2, 2)
    sender.init_on_sender(model=model, num_workers=3, anything="else")
    receiver.init_on_receiver(model=model, worker_idx=0)
    assert (sender.initialized_on_sender, receiver.initialized_on_receiver) == (True, True)
    for side in (sender, receiver):
        side.connect()
    report = sender.send(nn.Linear(3, 3), worker_ids=[0])
    assert (report.version, report.wire_bytes) == (0, 0)
    assert receiver.receive(timeout=None) is None
    sender.shutdown()
