"""Contract of schemes that let in workers beyond the first number."""

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
    """Workers that nobody counted in ``init_on_sender`` join, leave and come back.

    Attributes:
        returns: whether one that left may come back under its index.
    """

    returns: ClassVar[bool] = True

    def test_a_late_joiner_gets_the_current_version(self, assemble: Assemble) -> None:
        """And every update from then on; the others go on as before."""
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
        """By ``worker_ids`` and by weights of its own, once it is here."""
        crew = assemble(mlp(1))
        with pytest.raises(UnknownWorkerError):
            crew.scheme.send(mlp(2), worker_ids=5)
        join(crew, 5)
        crew.scheme.send(mlp(2), worker_ids=[5])
        assert_equal(crew, mlp(1), mlp(1), mlp(2))
        crew.scheme.send({0: mlp(3), 5: mlp(4)})
        assert_equal(crew, mlp(3), mlp(1), mlp(4))

    def test_nobody_waits_for_one_that_left(self, assemble: Assemble) -> None:
        """It is no longer known; updates go to those who are here."""
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
        """This is no error: the update is for the workers that are present."""
        crew = assemble(mlp(1))
        join(crew, 2).call("hold")
        handle = crew.scheme.send_async(mlp(2))
        crew.workers.pop().call("shutdown")
        assert 2 not in handle.wait(20.0).apply_seconds
        assert_equal(crew, mlp(2))

    def test_a_second_one_replaces_it(self, assemble: Assemble) -> None:
        """The first learns that and stops; it does not join again by itself."""
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
        """A late joiner with another model is refused; nobody else is disturbed."""
        crew = assemble(mlp(1))
        crew.hire(2, mlp(1)[:1])
        with pytest.raises(SchemaMismatchError) as caught:
            crew.workers[2].call("connect")
        assert caught.value.problems
        crew.workers.pop().stop()
        crew.scheme.send(mlp(2))
        assert_equal(crew, mlp(2))

    @pytest.mark.parametrize("own", ["params_map", "device_map_fn"])
    def test_refused_where_each_has_its_own(self, assemble: Assemble, own: str) -> None:
        """Nobody knows which version a late joiner is to have then."""
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
        """A worker that counts from 1 is no substitute for worker 0, and the error says who came."""
        crew = assemble(mlp(1), [], connect=False, num_workers=1, devices=["cpu"])
        crew.hire(1, mlp(2)).post("connect")
        with pytest.raises(SyncTimeoutError, match=r"workers \[0\] .*others did: \[1\]"):
            crew.scheme.connect(timeout=3.0)
        crew.workers[0].answer()
        assert_equal(crew, mlp(1))


class KilledLateJoinerTests(SchemeCase):
    """Tests for workers that are processes."""

    def test_one_that_dies_is_named_once_at_most(self, assemble: Assemble) -> None:
        """Then it is forgotten, until it comes back."""
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
        """They live as long as the handle, also after the sender has dropped the late joiner."""
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
    roll = sender.roll
    wait_until(lambda: index not in roll)


def gone(crew: Crew, index: int) -> None:
    """Wait until the sender knows that a worker left."""
    wait_until(lambda: index not in crew.scheme.worker_versions)
