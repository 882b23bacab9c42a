"""The contract of every scheme: three groups of tests with real workers."""

from __future__ import annotations

import threading
import time

import pytest

from weight_update.errors import LifecycleError, LinkClosedError, SyncFailedError, TransportError
from weight_update.sender.sender import Sender
from weight_update.testing.cases import Assemble, SchemeCase, assert_equal
from weight_update.testing.joining import JoiningTests
from weight_update.testing.models import mlp
from weight_update.testing.processes import eventually
from weight_update.testing.updating import UpdatingTests
from weight_update.testing.worker_processes import WorkerProcesses, context_of
from weight_update.transports import TransportBackend


class LifecycleTests(SchemeCase):
    """Tests of ``shutdown``, on either side."""

    def test_shutdown_of_the_sender(self, assemble: Assemble) -> None:
        """It may be called twice; workers keep their weights and are told."""
        procs = assemble(mlp(1))
        for _ in range(2):
            procs.scheme.shutdown()
            with pytest.raises(LifecycleError):
                procs.scheme.send()
        assert_equal(procs, mlp(1))
        assert procs.ask("version") == [0, 0]
        for worker in procs.workers:
            with pytest.raises(TransportError):
                worker.call("receive", 10.0)
            worker.call("forward")

    def test_shutdown_of_a_worker(self, assemble: Assemble) -> None:
        """A worker that left is named by ``send``; the others get the update; it keeps its weights."""
        procs = assemble(mlp(1))
        for _ in range(2):
            procs.workers[0].call("shutdown")
        with pytest.raises(SyncFailedError, match="worker 0") as caught:
            procs.scheme.send(mlp(2))
        assert {index: type(error) for index, error in caught.value.failures.items()} == {0: LinkClosedError}
        assert_equal(procs, mlp(1), mlp(2))
        procs.scheme.send(mlp(3), worker_ids=1)
        assert_equal(procs, mlp(1), mlp(3))
        with pytest.raises((LifecycleError, TransportError)):
            procs.workers[0].call("receive", 0)

    def test_a_worker_that_is_killed(self, assemble: Assemble) -> None:
        """``send`` names it within its timeout; the others get each update, and a new process replaces it."""
        if self.method not in ("fork", "forkserver", "spawn"):
            pytest.skip("workers are no processes of this machine")
        procs = assemble(mlp(1), options={"timeout": 3.0})
        killed = procs.workers.pop(0)
        killed.runner.kill()
        killed.runner.join()
        for seed in (2, 3):
            start = time.monotonic()
            with pytest.raises(SyncFailedError, match="worker 0") as caught:
                procs.scheme.send(mlp(seed))
            assert time.monotonic() - start < 13.0, "send() took longer than its timeout of 3 s"
            assert list(caught.value.failures) == [0]
            assert_equal(procs, mlp(seed))
        killed.stop()
        if not links_of(procs)[0].capabilities.allows_rejoin:
            return
        procs.hire(0, mlp(4)).call("connect")
        assert_equal(procs, mlp(3))
        procs.scheme.send(mlp(5))
        assert_equal(procs, mlp(5))

    def test_with_statement(self) -> None:
        """Leaving the context shuts down, connected or not."""
        with self.make_scheme() as scheme:
            scheme.init_on_sender(model=mlp(1), num_workers=1, ctx=context_of(self.method))
        with pytest.raises(LifecycleError):
            scheme.send()
        with self.make_scheme():
            pass

    def test_no_thread_is_left(self, assemble: Assemble) -> None:
        """All threads of the library end with ``shutdown``."""
        before = set(threading.enumerate())
        procs = assemble(mlp(1))
        procs.scheme.send(mlp(2))
        assert ours(before)
        procs.__exit__()
        eventually(lambda: not ours(before))
        assert ours(before) == []

    def test_two_schemes_side_by_side(self, assemble: Assemble) -> None:
        """Schemes of one process do not meet."""
        first, second = assemble(mlp(1)), assemble(mlp(2))
        first.scheme.send(mlp(3))
        assert_equal(first, mlp(3))
        assert_equal(second, mlp(2))
        first.scheme.shutdown()
        second.scheme.send(mlp(4))
        assert_equal(second, mlp(4))


class SchemeContract(JoiningTests, UpdatingTests, LifecycleTests):
    """Tests of one scheme; subclass it and implement ``make_scheme``.

    Set ``method`` to ``"thread"`` for a scheme whose receivers live in the sender's process.
    """


def links_of(procs: WorkerProcesses) -> dict[int, TransportBackend]:
    """Return the sender's end of each link, by the worker's index."""
    sender = procs.scheme._sender
    assert isinstance(sender, Sender)
    return {worker.idx: worker.link for worker in sender.table}


def ours(before: set[threading.Thread]) -> list[str]:
    """Return the names of new threads of this library."""
    new = set(threading.enumerate()) - before
    return sorted(thread.name for thread in new if thread.name.startswith("weight_update"))
