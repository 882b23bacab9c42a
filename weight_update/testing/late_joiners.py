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
from weight_update.testing.crew import Crew
from weight_update.testing.joining import times_index
from weight_update.testing.models import mlp, scramble
from weight_update.testing.processes import wait_until
from weight_update.testing.workers import Worker

__all__ = ["LateJoinerContract"]


class LateJoinerContract(SchemeCase):
    """Workers that ``init_on_sender`` was not told of join, leave and come back.

    Attributes:
        returns: whether a worker that left may come back under its index.
    """

    returns: ClassVar[bool] = True

    def test_a_late_joiner_gets_the_current_version(self, assemble: Assemble) -> None:
        """It also gets every later update; the other workers go on as before."""
        source = mlp(1)
        crew = assemble(source)
        scramble(source, 2)
        crew.scheme.send()
        join(crew, 5)
        assert crew.ask("version") == [1, 1, 1]
        assert_equal(crew, source)
        scramble(source, 3)
        report = crew.scheme.send()
        assert_equal(crew, source)
        assert crew.scheme.worker_versions == {0: 2, 1: 2, 5: 2}
        assert set(report.apply_seconds) == {0, 1, 5}

    def test_it_can_be_addressed(self, assemble: Assemble) -> None:
        """``worker_ids`` and weights of its own work once it has joined."""
        crew = assemble(mlp(1))
        with pytest.raises(UnknownWorkerError):
            crew.scheme.send(mlp(2), worker_ids=5)
        join(crew, 5)
        crew.scheme.send(mlp(2), worker_ids=[5])
        assert_equal(crew, mlp(1), mlp(1), mlp(2))
        crew.scheme.send({0: mlp(3), 5: mlp(4)})
        assert_equal(crew, mlp(3), mlp(1), mlp(4))

    def test_a_late_joiner_that_left_is_not_waited_for(self, assemble: Assemble) -> None:
        """It is forgotten; updates go to the workers that are connected."""
        source = mlp(1)
        crew = assemble(source)
        join(crew, 2)
        crew.workers.pop().call("shutdown")
        scramble(source, 2)
        crew.scheme.send()
        assert_equal(crew, source)
        gone(crew, 2)
        assert crew.scheme.worker_versions == {0: 1, 1: 1}
        if self.returns:
            join(crew, 2)
            scramble(source, 3)
            crew.scheme.send()
            assert_equal(crew, source)

    def test_it_leaves_while_an_update_waits_for_it(self, assemble: Assemble) -> None:
        """Leaving is no error: the update is for the workers that are connected."""
        crew = assemble(mlp(1))
        join(crew, 2).call("hold")
        handle = crew.scheme.send_async(mlp(2))
        crew.workers.pop().call("shutdown")
        assert 2 not in handle.wait(20.0).apply_seconds
        assert_equal(crew, mlp(2))

    def test_a_second_receiver_replaces_it(self, assemble: Assemble) -> None:
        """The first receiver learns of it and stops; it does not join again by itself."""
        if not self.returns:
            pytest.skip("an index is used once here")
        source = mlp(1)
        crew = assemble(source)
        first = join(crew, 2)
        crew.workers.remove(first)
        try:
            join(crew, 2)
            with pytest.raises(JoinRefusedError, match="replaced by process"):
                first.call("receive", timeout=20.0)
            scramble(source, 2)
            assert set(crew.scheme.send().apply_seconds) == {0, 1, 2}
            assert_equal(crew, source)
        finally:
            first.stop()

    def test_it_must_fit(self, assemble: Assemble) -> None:
        """A late joiner with another model is refused; no other worker is disturbed."""
        crew = assemble(mlp(1))
        crew.hire(2, mlp(1)[:1])
        with pytest.raises(SchemaMismatchError) as caught:
            crew.workers[2].call("connect")
        assert caught.value.problems
        crew.workers.pop().stop()
        crew.scheme.send(mlp(2))
        assert_equal(crew, mlp(2))

    @pytest.mark.parametrize("own", ["params_map", "device_map_fn"])
    def test_refused_where_each_worker_has_weights_of_its_own(self, assemble: Assemble, own: str) -> None:
        """No weights are common to all workers, so none can be given to a late joiner."""
        if own == "params_map":
            crew = assemble(params_map={0: mlp(1), 1: mlp(2)})
        else:
            crew = assemble(mlp(1), device_map_fn=times_index)
        crew.hire(2, mlp(9))
        with pytest.raises(JoinRefusedError, match="known: 0, 1"):
            crew.workers[2].call("connect")
        crew.workers.pop().stop()
        crew.scheme.send()

    def test_indices_that_do_not_match(self, assemble: Assemble) -> None:
        """A worker that counts from 1 does not stand for worker 0; the error names those that joined."""
        crew = assemble(mlp(1), [], connect=False, num_workers=1, devices=["cpu"])
        crew.hire(1, mlp(2)).post("connect")
        with pytest.raises(SyncTimeoutError, match=r"workers \[0\] .*others did: \[1\]"):
            crew.scheme.connect(timeout=3.0)
        crew.workers[0].answer()
        assert_equal(crew, mlp(1))


class KilledLateJoinerTests(SchemeCase):
    """Tests of late joiners that are processes and get killed."""

    def test_a_late_joiner_that_dies_is_named_once_at_most(self, assemble: Assemble) -> None:
        """Afterwards it is forgotten, until it comes back."""
        source = mlp(1)
        crew = assemble(source)
        join(crew, 2)
        crew.workers[2].runner.kill()
        crew.workers.pop().runner.join()
        scramble(source, 2)
        named: set[int] = set()
        try:
            crew.scheme.send()
        except SyncFailedError as error:
            named = set(error.failures)
        assert named <= {2}
        gone(crew, 2)
        scramble(source, 3)
        crew.scheme.send()
        join(crew, 2)
        assert_equal(crew, source)

    def test_an_update_that_it_missed_names_it(self, assemble: Assemble) -> None:
        """The handle names it as long as it is held, also when the late joiner itself is forgotten."""
        crew = assemble(mlp(1))
        join(crew, 2).call("hold")
        handle = crew.scheme.send_async(mlp(2))
        worker = crew.workers.pop()
        worker.runner.kill()
        worker.runner.join()
        forgotten(crew, 2)
        crew.scheme.send(mlp(3))
        with pytest.raises(SyncFailedError, match="worker 2"):
            handle.wait(20.0)


def join(crew: Crew, index: int) -> Worker:
    """Start a worker and connect it."""
    worker = crew.hire(index, mlp(200 + index))
    worker.call("connect")
    return worker


def forgotten(crew: Crew, index: int) -> None:
    """Wait until the sender has forgotten a worker."""
    sender = crew.scheme._sender
    assert isinstance(sender, Sender)
    table = sender.table
    wait_until(lambda: index not in table)


def gone(crew: Crew, index: int) -> None:
    """Wait until the sender knows that a worker left."""
    wait_until(lambda: index not in crew.scheme.worker_versions)
