"""Contract of schemes that admit late joiners."""

from __future__ import annotations

from typing import ClassVar

import pytest

from weight_update.errors import (
    JoinRefusedError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    UnknownWorkerError,
)
from weight_update.sender.sender import Sender
from weight_update.testing.cases import Assemble, SchemeCase, assert_equal
from weight_update.testing.joining import times_index
from weight_update.testing.models import mlp, scramble
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import WorkerProcesses
from weight_update.testing.workers import Worker


class LateJoinerContract(SchemeCase):
    """Tests of late joiners, which join, leave and come back.

    Attributes:
        returns: whether a worker that left may come back under its index.
    """

    returns: ClassVar[bool] = True

    def test_a_late_joiner_gets_the_current_version(self, assemble: Assemble) -> None:
        """It also gets every later update; the other workers go on as before."""
        source = mlp(1)
        procs = assemble(source)
        scramble(source, 2)
        procs.scheme.send()
        join(procs, 5)
        assert procs.ask("version") == [1, 1, 1]
        assert_equal(procs, source)
        scramble(source, 3)
        report = procs.scheme.send()
        assert_equal(procs, source)
        assert procs.scheme.worker_versions == {0: 2, 1: 2, 5: 2}
        assert set(report.apply_seconds) == {0, 1, 5}

    def test_all_workers_are_late_joiners(self, assemble: Assemble) -> None:
        """A sender of no workers connects at once; those that come later get the newest version."""
        source = mlp(1)
        procs = assemble(source, [])
        assert procs.scheme.worker_versions == {}
        join(procs, 3)
        assert_equal(procs, mlp(1))
        scramble(source, 2)
        assert set(procs.scheme.send().apply_seconds) == {3}
        procs.workers.pop().call("shutdown")
        wait_until_left(procs, 3)
        for seed in (3, 4):  # nobody is there
            scramble(source, seed)
            handle = procs.scheme.send_async()
            assert handle.workers == ()
            assert handle.done()
            assert handle.wait(0.0).apply_seconds == {}
        join(procs, 0)
        join(procs, 1)
        assert procs.ask("version") == [3, 3]
        assert_equal(procs, source)
        procs.scheme.send(mlp(5), worker_ids=1)
        assert_equal(procs, source, mlp(5))
        procs.scheme.send({0: mlp(6)})
        assert_equal(procs, mlp(6), mlp(5))
        with pytest.raises(UnknownWorkerError, match=r"unknown workers.*\[2\] \(known workers: \[0, 1\]"):
            procs.scheme.send(worker_ids=2)
        scramble(source, 7)
        procs.scheme.send()
        assert_equal(procs, source)

    def test_it_can_be_addressed(self, assemble: Assemble) -> None:
        """``worker_ids`` and weights of its own work once it has joined."""
        procs = assemble(mlp(1))
        with pytest.raises(UnknownWorkerError, match=r"known workers: \[0, 1\]; a late joiner is known only"):
            procs.scheme.send(mlp(2), worker_ids=5)
        join(procs, 5)
        procs.scheme.send(mlp(2), worker_ids=[5])
        assert_equal(procs, mlp(1), mlp(1), mlp(2))
        procs.scheme.send({0: mlp(3), 5: mlp(4)})
        assert_equal(procs, mlp(3), mlp(1), mlp(4))

    def test_a_late_joiner_that_left_is_not_waited_for(self, assemble: Assemble) -> None:
        """It is forgotten; updates go to the workers that are connected."""
        source = mlp(1)
        procs = assemble(source)
        join(procs, 2)
        procs.workers.pop().call("shutdown")
        scramble(source, 2)
        procs.scheme.send()
        assert_equal(procs, source)
        wait_until_left(procs, 2)
        assert procs.scheme.worker_versions == {0: 1, 1: 1}
        if self.returns:
            join(procs, 2)
            scramble(source, 3)
            procs.scheme.send()
            assert_equal(procs, source)

    def test_it_leaves_while_an_update_waits_for_it(self, assemble: Assemble) -> None:
        """Leaving is no error: the update is for the workers that are connected."""
        procs = assemble(mlp(1))
        join(procs, 2).call("hold")
        handle = procs.scheme.send_async(mlp(2))
        procs.workers.pop().call("shutdown")
        assert 2 not in handle.wait(20.0).apply_seconds
        assert_equal(procs, mlp(2))

    def test_a_second_receiver_replaces_it(self, assemble: Assemble) -> None:
        """The first receiver learns of it and stops; it does not join again by itself."""
        if not self.returns:
            pytest.skip("an index is used once here")
        source = mlp(1)
        procs = assemble(source)
        first = join(procs, 2)
        procs.workers.remove(first)
        try:
            join(procs, 2)
            with pytest.raises(JoinRefusedError, match="replaced by process"):
                first.call("receive", timeout=20.0)
            scramble(source, 2)
            assert set(procs.scheme.send().apply_seconds) == {0, 1, 2}
            assert_equal(procs, source)
        finally:
            first.stop()

    def test_it_must_fit(self, assemble: Assemble) -> None:
        """A late joiner with another model is refused; no other worker is disturbed."""
        procs = assemble(mlp(1))
        procs.hire(2, mlp(1)[:1])
        with pytest.raises(SchemaMismatchError) as caught:
            procs.workers[2].call("connect")
        assert caught.value.problems
        procs.workers.pop().stop()
        procs.scheme.send(mlp(2))
        assert_equal(procs, mlp(2))

    @pytest.mark.parametrize("own", ["params_map", "device_map_fn"])
    def test_refused_where_each_worker_has_weights_of_its_own(self, assemble: Assemble, own: str) -> None:
        """No weights are common to all workers, so none can be given to a late joiner."""
        if own == "params_map":
            procs = assemble(params_map={0: mlp(1), 1: mlp(2)})
        else:
            procs = assemble(mlp(1), device_map_fn=times_index)
        procs.hire(2, mlp(9))
        with pytest.raises(JoinRefusedError, match="known: 0, 1"):
            procs.workers[2].call("connect")
        procs.workers.pop().stop()
        procs.scheme.send()

    def test_indices_that_do_not_match(self, assemble: Assemble) -> None:
        """A worker that counts from 1 does not stand for worker 0; the error names those that joined."""
        procs = assemble(mlp(1), [], connect=False, num_workers=1, devices=["cpu"])
        procs.hire(1, mlp(2)).post("connect")
        with pytest.raises(SyncTimeoutError, match=r"workers \[0\] .*others did: \[1\]"):
            procs.scheme.connect(timeout=3.0)
        procs.workers[0].answer()
        assert_equal(procs, mlp(1))


class KilledLateJoinerTests(SchemeCase):
    """Tests of late joiners that are processes and get killed."""

    def test_a_late_joiner_that_dies_is_named_once_at_most(self, assemble: Assemble) -> None:
        """Afterwards it is forgotten, until it comes back."""
        source = mlp(1)
        procs = assemble(source)
        join(procs, 2)
        procs.workers[2].runner.kill()
        procs.workers.pop().runner.join()
        scramble(source, 2)
        named: set[int] = set()
        try:
            procs.scheme.send()
        except SyncFailedError as error:
            named = set(error.failures)
        assert named <= {2}
        wait_until_left(procs, 2)
        scramble(source, 3)
        procs.scheme.send()
        join(procs, 2)
        assert_equal(procs, source)

    def test_an_update_that_it_missed_names_it(self, assemble: Assemble) -> None:
        """The handle names it as long as it is held, also when the late joiner itself is forgotten."""
        procs = assemble(mlp(1))
        join(procs, 2).call("hold")
        handle = procs.scheme.send_async(mlp(2))
        worker = procs.workers.pop()
        worker.runner.kill()
        worker.runner.join()
        wait_until_forgotten(procs, 2)
        procs.scheme.send(mlp(3))
        with pytest.raises(SyncFailedError, match="worker 2"):
            handle.wait(20.0)


def join(procs: WorkerProcesses, index: int) -> Worker:
    """Start a worker and connect it."""
    worker = procs.hire(index, mlp(200 + index))
    worker.call("connect")
    return worker


def wait_until_forgotten(procs: WorkerProcesses, index: int) -> None:
    """Wait until the sender has forgotten a worker."""
    sender = procs.scheme._sender
    assert isinstance(sender, Sender)
    table = sender.table
    wait_until(lambda: index not in table)


def wait_until_left(procs: WorkerProcesses, index: int) -> None:
    """Wait until the sender knows that a worker left."""
    wait_until(lambda: index not in procs.scheme.worker_versions)
