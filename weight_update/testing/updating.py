"""Contract of schemes: updates."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from weight_update.errors import (
    LifecycleError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    UnknownWorkerError,
    UnsupportedSourceError,
    WorkerError,
)
from weight_update.testing.cases import Assemble, SchemeCase, assert_equal
from weight_update.testing.models import Brittle, Stack, Zoo, fingerprint, mlp, scramble
from weight_update.testing.processes import wait_until
from weight_update.testing.workers import Body
from weight_update.wire.schema import WeightSchema

MOMENT = 0.2


WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "missing": ({"0.weight": torch.zeros(8, 4)}, SchemaMismatchError),
    "shape": ({**mlp(2).state_dict(), "0.weight": torch.zeros(1)}, SchemaMismatchError),
    "dtype": ({**mlp(2).state_dict(), "0.weight": torch.zeros(8, 4).int()}, SchemaMismatchError),
    "unexpected": ({**mlp(2).state_dict(), "more": torch.zeros(1)}, SchemaMismatchError),
    "nothing": ({}, SchemaMismatchError),
    "sparse": ({**mlp(2).state_dict(), "0.bias": torch.zeros(8).to_sparse()}, UnsupportedSourceError),
    "meta": (lambda: mlp(2).to("meta"), UnsupportedSourceError),
    "callable of None": (lambda: None, UnsupportedSourceError),
    "list": ([torch.zeros(1)], UnsupportedSourceError),
}
"""Weights that do not fit the model ``mlp(1)``, and the error of each."""


class UpdatingTests(SchemeCase):
    """Tests of ``send``, ``send_async``, ``receive``, ``apply_weights`` and ``hold``."""

    def test_updates_count_up_and_are_exact(self, assemble: Assemble) -> None:
        """Each update is applied bit for bit and has the next number, on both sides."""
        source = Zoo(1)
        procs = assemble(source, [Zoo(2), Zoo(3)])
        for version in range(1, 6):
            scramble(source, version)
            source.note = {"version": version}
            assert procs.scheme.send().version == version
            assert_equal(procs, source)
            assert procs.ask("version") == [version, version]
            assert procs.scheme.version == version
            assert procs.scheme.worker_versions == {0: version, 1: version}

    def test_continue_from(self, assemble: Assemble) -> None:
        """A trainer that was restarted goes on counting, and never goes back."""
        source = mlp(1)
        procs = assemble(source)
        for number, version in ((41, 42), (7, 43)):
            procs.scheme.continue_from(number)
            scramble(source, version)
            assert procs.scheme.send().version == version
            assert procs.ask("version") == [version, version]
            assert_equal(procs, source)

    def test_report(self, assemble: Assemble) -> None:
        """The report says what was sent, in which form, and how long each stage took."""
        source = mlp(1)
        procs = assemble(source)
        report = procs.scheme.send()
        dense = WeightSchema.of(dict(source.named_parameters())).dense_bytes
        assert (report.version, report.encoding) == (1, procs.scheme.strategy.encoding.label)
        assert report.dense_bytes == dense
        assert report.wire_bytes > 0
        assert 0 <= report.changed_fraction <= 1
        assert {"extract", "encode", "send", "ack"} <= set(report.seconds)
        assert all(value >= 0 for value in report.seconds.values())
        for by_worker in (report.apply_seconds, report.stall_seconds):
            assert sorted(by_worker) == [0, 1]
            assert all(0 <= value < 10 for value in by_worker.values())
        assert procs.scheme.last_report is report
        assert "version 1" in str(report)

    def test_trainer_is_not_shared(self, assemble: Assemble) -> None:
        """In-place changes of the trainer reach no worker before they are sent."""
        source = mlp(1)
        procs = assemble(source)
        for version in range(3):
            before = procs.ask("fingerprint")
            scramble(source, version + 10)
            time.sleep(0.05)
            assert procs.ask("fingerprint") == before
            procs.scheme.send()
            assert_equal(procs, source)

    def test_workers_are_not_shared(self, assemble: Assemble) -> None:
        """A worker's own writes stay local, and the next update replaces them."""
        source = mlp(1)
        procs = assemble(source)
        for version in range(6):
            others, trainer = procs.workers[1].call("fingerprint"), fingerprint(source)
            if version < 3:
                procs.workers[0].call("fill", 7.0)
            assert procs.workers[1].call("fingerprint") == others
            assert fingerprint(source) == trainer
            if version != 4:  # one update that brings the same weights again
                scramble(source, version + 10)
            procs.scheme.send()
            assert_equal(procs, source)

    def test_given_weights(self, assemble: Assemble) -> None:
        """``send(weights)`` takes whatever a source may be; the source itself stays what it is."""
        source = mlp(1)
        procs = assemble(source)
        given: list[Any] = [mlp(2), mlp(3).state_dict(), lambda: mlp(4)]
        given.append(procs.scheme.strategy.extract_weights(mlp(5)))
        for seed, weights in enumerate(given, start=2):
            procs.scheme.send(weights)
            assert_equal(procs, mlp(seed))
        assert fingerprint(source) == fingerprint(mlp(1))
        procs.scheme.send()
        assert_equal(procs, source)

    @pytest.mark.parametrize(
        ("worker_ids", "chosen"),
        [
            (0, [0]),
            ([1], [1]),
            ((1, 0), [0, 1]),
            ("cpu", [0, 1]),
            (torch.device("cpu"), [0, 1]),
            (None, [0, 1]),
        ],
    )
    def test_worker_ids(self, assemble: Assemble, worker_ids: Any, chosen: list[int]) -> None:
        """An index, a device or a list chooses workers; the others keep their version."""
        procs = assemble(mlp(1), devices=["cpu", "cpu"])
        report = procs.scheme.send(mlp(2), worker_ids=worker_ids)
        assert_equal(procs, *[mlp(2 if index in chosen else 1) for index in range(2)])
        assert procs.scheme.worker_versions == {index: int(index in chosen) for index in range(2)}
        assert sorted(report.apply_seconds) == chosen
        procs.scheme.send(mlp(3))
        assert_equal(procs, mlp(3))

    def test_per_worker_weights(self, assemble: Assemble) -> None:
        """A dict of worker indices sends different weights, to those it names."""
        procs = assemble(mlp(1))
        procs.scheme.send({0: mlp(2), 1: mlp(3)})
        assert_equal(procs, mlp(2), mlp(3))
        procs.scheme.send({1: mlp(4)})
        assert_equal(procs, mlp(2), mlp(4))
        assert procs.scheme.worker_versions == {0: 1, 1: 2}

    @pytest.mark.parametrize("worker_ids", [2, [0, 5], -1, "cuda:3"])
    def test_unknown_worker(self, assemble: Assemble, worker_ids: Any) -> None:
        """A worker that does not exist is named, and nobody gets anything."""
        procs = assemble(mlp(1), devices=["cpu", "cpu"])
        with pytest.raises(UnknownWorkerError):
            procs.scheme.send(mlp(2), worker_ids=worker_ids)
        assert_equal(procs, mlp(1))
        assert procs.scheme.version == 0

    @pytest.mark.parametrize(("weights", "error"), WRONG.values(), ids=WRONG)
    def test_wrong_weights(self, assemble: Assemble, weights: Any, error: type[Exception]) -> None:
        """Weights that do not fit are an error of ``send``; nothing is sent, all goes on."""
        procs = assemble(mlp(1))
        with pytest.raises(error):
            procs.scheme.send(weights)
        assert_equal(procs, mlp(1))
        assert procs.scheme.version == 0
        assert procs.scheme.send(mlp(2)).version >= 1
        assert_equal(procs, mlp(2))

    def test_tied_weights_that_part(self, assemble: Assemble) -> None:
        """Two names of one tensor stay one: a conjugated view of it is another tensor, not the same."""
        weight = torch.tensor([1 + 2j, 3 - 4j])
        procs = assemble(weights={"a": weight, "b": weight}, models=[None])
        before = procs.workers[0].call("weights")
        with pytest.raises(SchemaMismatchError, match="a and b"):
            procs.scheme.send({"a": weight, "b": weight.conj()})
        assert procs.workers[0].call("weights") == before

    def test_send_async(self, assemble: Assemble) -> None:
        """The handle tells when all have it; the weights may be changed as soon as it is there."""
        source = mlp(1)
        procs = assemble(source)
        scramble(source, 2)
        expected = fingerprint(source)
        procs.workers[0].call("hold")
        handle = procs.scheme.send_async()
        scramble(source, 3)
        assert handle.version == 1
        assert not handle.done()
        wait_until(lambda: procs.scheme.worker_versions[1] == 1)
        with pytest.raises(SyncFailedError) as caught:
            handle.wait(MOMENT)
        assert {index: type(error) for index, error in caught.value.failures.items()} == {0: SyncTimeoutError}
        procs.workers[0].call("release")
        report = handle.wait()
        assert handle.done()
        assert (report.version, sorted(report.apply_seconds)) == (1, [0, 1])
        assert procs.ask("fingerprint") == [expected, expected]

    def test_newest_wins(self, assemble: Assemble) -> None:
        """Versions that a busy worker never began are dropped; waiting for one is waiting for a newer."""
        source = mlp(1)
        procs = assemble(source)
        procs.workers[0].call("hold")
        handles = []
        for version in range(1, 8):
            scramble(source, version)
            handles.append(procs.scheme.send_async())
        procs.workers[0].call("release")
        for handle in handles:
            handle.wait()
        assert procs.scheme.worker_versions == {0: 7, 1: 7}
        assert_equal(procs, source)

    def test_bytes_for_a_busy_worker(self, assemble: Assemble) -> None:
        """They count in the report of the update, once the worker is sent it."""
        procs = assemble(mlp(1))
        procs.workers[0].call("hold")
        first = procs.scheme.send_async(mlp(2))
        second = procs.scheme.send_async(mlp(3), worker_ids=0)
        assert second.report.wire_bytes == 0
        procs.workers[0].call("release")
        assert first.wait().wire_bytes > 0
        assert second.wait().wire_bytes > 0

    def test_without_waiting(self, assemble: Assemble) -> None:
        """``sync=False``: ``send`` returns while workers are busy."""
        source = mlp(1)
        procs = assemble(source, options={"sync": False})
        procs.workers[0].call("hold")
        scramble(source, 2)
        assert procs.scheme.send().version == 1
        assert procs.workers[0].call("version") == 0
        procs.workers[0].call("release")
        assert procs.workers[0].call("receive", 10.0) == fingerprint(source)

    def test_error_of_an_earlier_update(self, assemble: Assemble) -> None:
        """``sync=False``: what went wrong is raised by a later ``send``, which has sent nevertheless."""
        source = Brittle(1)
        procs = assemble(source, [Brittle(2), Brittle(3)], {"sync": False})
        source.note = "poison"
        procs.scheme.send()
        source.note = "fine"
        with pytest.raises(SyncFailedError, match="poison refused"):
            send_until_error(procs.scheme)
        procs.scheme.send_async().wait()
        assert_equal(procs, source)

    def test_receive(self, assemble: Assemble) -> None:
        """``receive`` gives each version that came at most once, and None when none came in time."""
        source = mlp(1)
        procs = assemble(source)
        worker = procs.workers[0]
        start = time.monotonic()
        assert worker.call("receive", 0) is None
        assert worker.call("receive", MOMENT) is None
        assert MOMENT <= time.monotonic() - start < 5.0
        worker.post("receive", 20.0)
        assert worker.busy(MOMENT)
        scramble(source, 2)
        procs.scheme.send()
        assert worker.answer() == fingerprint(source)
        assert worker.call("receive", 0) is None
        for version in (3, 4):
            scramble(source, version)
            procs.scheme.send()
        assert worker.call("receive", None) == fingerprint(source)
        assert worker.call("receive", 0) is None

    def test_receiver_without_model(self, assemble: Assemble) -> None:
        """A receiver without a model keeps the weights for ``receive`` and ``weights``."""
        source = Zoo(1)
        procs = assemble(source, [None])
        worker, strategy = procs.workers[0], procs.scheme.strategy
        for version in range(1, 4):
            assert worker.call("weights") == fingerprint(source, strategy)
            scramble(source, version)
            procs.scheme.send()
            assert worker.call("receive", 0) == fingerprint(source, strategy)
        with pytest.raises(LifecycleError):
            worker.call("apply_weights", dict(mlp(1).state_dict()))

    def test_apply_weights(self, assemble: Assemble) -> None:
        """A receiver may write its model itself; that counts no version, and the next update overwrites."""
        procs = assemble(mlp(1))
        for inplace in (True, False):
            procs.workers[0].call("apply_weights", mlp(2), inplace)
            assert_equal(procs, mlp(2), mlp(1))
            with pytest.raises(SchemaMismatchError):
                procs.workers[0].call("apply_weights", {"0.weight": torch.zeros(1)}, inplace)
            assert_equal(procs, mlp(2), mlp(1))
            assert procs.scheme.worker_versions == {0: procs.scheme.version, 1: procs.scheme.version}
            for _ in range(3):
                procs.scheme.send()
                assert_equal(procs, mlp(1))

    def test_hold(self, assemble: Assemble) -> None:
        """No update lands inside ``hold``; ``send`` waits for its end; other workers do not."""
        source = mlp(1)
        procs = assemble(source)
        procs.workers[0].call("hold")
        handle = procs.scheme.send_async(mlp(2))
        wait_until(lambda: procs.scheme.worker_versions[1] == 1)
        assert_equal(procs, mlp(1), mlp(2))
        assert procs.ask("version") == [0, 1]
        procs.workers[0].call("forward")  # inside hold() of the same thread: not a deadlock
        procs.workers[0].call("release")
        handle.wait()
        assert_equal(procs, mlp(2))

    def test_hold_for_too_long(self, assemble: Assemble) -> None:
        """``send`` names the worker that holds for longer than the timeout; later updates reach it."""
        procs = assemble(mlp(1), options={"timeout": 0.5})
        procs.workers[0].call("hold")
        with pytest.raises(SyncFailedError, match="worker 0") as caught:
            procs.scheme.send(mlp(2))
        assert list(caught.value.failures) == [0]
        assert_equal(procs, mlp(1), mlp(2))
        procs.workers[0].call("release")
        time.sleep(0.6)
        procs.scheme.send(mlp(3))
        assert_equal(procs, mlp(3))

    def test_exception_while_applying(self, assemble: Assemble) -> None:
        """It reaches ``send`` with its traceback; that worker keeps the old version, whole."""
        source = Brittle(1)
        procs = assemble(source, [Brittle(2, refuses="nothing"), Brittle(3)])
        before = procs.workers[1].call("fingerprint")
        scramble(source, 4)
        source.note = "poison"
        with pytest.raises(SyncFailedError, match="worker 1") as caught:
            procs.scheme.send()
        error = caught.value.failures[1]
        assert list(caught.value.failures) == [1]
        assert isinstance(error, WorkerError)
        for part in ("ValueError: poison refused", "Traceback", "in set_extra_state"):
            assert part in str(error)
        assert procs.workers[1].call("fingerprint") == before
        assert procs.workers[0].call("fingerprint") == fingerprint(source)
        assert procs.scheme.worker_versions == {0: 1, 1: 0}
        assert procs.workers[1].call("version") == 0
        source.note = "fine"
        procs.scheme.send()
        assert_equal(procs, source)

    def test_forward_pass_sees_one_version(self, assemble: Assemble) -> None:
        """Updates that come as fast as can be never land inside a forward pass."""
        source = Stack(0.0)
        procs = assemble(source, [Stack(-1.0)])
        procs.workers[0].post("run", watch, 1.0)
        version = 0
        while procs.workers[0].busy():
            version += 1
            with torch.no_grad():
                for layer in source.layers:
                    layer.fill_(version)
            procs.scheme.send()
        passes, mixed, seen = procs.workers[0].answer()
        assert mixed == []
        assert passes > 20
        assert seen > 5


def watch(body: Body, seconds: float) -> tuple[int, list[list[float]], int]:
    """Count forward passes in a worker, collect those that saw two versions, and count versions seen.

    A loaded machine gets up to 20 seconds more for enough passes and versions.
    """
    passes = 0
    mixed: list[list[float]] = []
    seen: set[float] = set()
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end or ((passes <= 20 or len(seen) <= 5) and now < end + 20.0):
        values = body.model(1e-5)
        passes += 1
        seen.update(values)
        if len(set(values)) > 1:
            mixed.append(values)
    return passes, mixed, len(seen)


def send_until_error(scheme: Any) -> None:
    """Send a few times; the error of the first update may take a moment to come back."""
    for _ in range(20):
        scheme.send()
        time.sleep(0.05)
