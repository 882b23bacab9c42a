"""An error in a worker reaches the trainer, and no update is ever half applied."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from faults_kinds import quick_over
from faults_tools import (
    WAIT,
    Processes,
    Remote,
    Stripes,
    Worker,
    WorkerRaised,
    assert_whole,
    compute,
    end_compute,
    eventually,
    fill,
    hold,
    join,
    let_go,
    slots_mapped_for_reading,
    version_of,
    wait_version,
)
from pairs import connect_pair
from torch import nn

from weight_update import (
    PatchEncoding,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightStrategy,
    WeightSyncScheme,
    WorkerEvent,
)
from weight_update.receiver.receiver import Receiver
from weight_update.testing.processes import wait_until


class Fussy(nn.Module):
    """A module that refuses extra state whose number is in ``refused``."""

    refused: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, number: int) -> None:
        if number in self.refused:
            raise ArithmeticError(f"the number {number} is not welcome")
        self.number = number


class Fussier(Fussy):
    refused = (2,)


def numbered(model: Fussy, number: int) -> Fussy:
    fill(model, number)
    model.number = number
    return model


def start_two(
    kind: type[WeightSyncScheme], procs: Processes, **options
) -> tuple[WeightSyncScheme, list[Remote]]:
    """Connect worker 0, which takes every version, and worker 1, which refuses version 2."""
    scheme = procs.scheme(kind, timeout=10.0, **options)
    scheme.init_on_sender(model=numbered(Fussy(), 0), num_workers=2)
    workers = [procs.start(scheme, 0, Fussy), procs.start(scheme, 1, Fussier)]
    for worker in workers:
        worker.begin(join)
    scheme.connect(timeout=WAIT)
    for worker in workers:
        worker.result()
    return scheme, workers


def weights_only(me: Worker) -> set[float]:
    with me.scheme.hold():
        return {float(v) for p in me.model.parameters() for v in p.detach().aminmax()}


def test_an_error_is_not_lost_behind_newer_sends(kind, procs: Processes) -> None:
    """Version 2 fails after version 3 was sent already; 3 is fine, and 2 is still reported."""
    scheme, (easy, fussy) = start_two(kind, procs, sync=False)
    model = Fussy()
    scheme.send(numbered(model, 1))
    assert eventually(lambda: scheme.worker_versions == {0: 1, 1: 1})  # else 2 waits, and 3 replaces it
    fussy.call(hold)
    scheme.send(numbered(model, 2))
    scheme.send(numbered(model, 3))
    fussy.call(let_go)
    assert fussy.call(wait_version, 3) == 3
    assert eventually(lambda: scheme.worker_versions[1] == 3)
    with pytest.raises(SyncFailedError, match="not welcome"):
        scheme.send(numbered(model, 4))
    assert easy.call(wait_version, 4) == 4
    scheme.send(numbered(model, 5))


def test_each_error_of_asynchronous_sends_is_raised(kind, procs: Processes) -> None:
    scheme, (_, fussy) = start_two(kind, procs, sync=False)
    model = Fussy()
    fussy.call(hold)
    for _ in range(2):
        scheme.send(numbered(model, 2))
    fussy.call(let_go)
    assert eventually(lambda: len(scheme._sender.table[1].failures) == 2)
    for version in 1, 2:
        with pytest.raises(SyncFailedError, match="not welcome") as caught:
            scheme.send(numbered(model, 3))
        assert caught.value.report.version == version
    scheme.send(numbered(model, 4))


def test_a_handle_whose_version_was_replaced_by_one_that_fails(kind, procs: Processes) -> None:
    scheme, (_, fussy) = start_two(kind, procs)
    model = Fussy()
    fussy.call(hold)
    handles = [scheme.send_async(numbered(model, number)) for number in (2, 5, 2)]
    fussy.call(let_go)
    start = time.monotonic()
    for handle in handles:
        with pytest.raises(SyncFailedError, match="not welcome"):
            handle.wait(8.0)
        assert handle.done()
    assert (
        time.monotonic() - start < 4.0
    )  # the version in between was dropped, so send() must not wait for it


@quick_over("shared_mem")
def test_the_first_weights_fail(kind, procs: Processes) -> None:
    scheme = procs.scheme(kind, timeout=10.0)
    model = numbered(Fussy(), 2)
    scheme.init_on_sender(model=model, num_workers=1)
    worker = procs.start(scheme, 0, Fussier)
    worker.begin(join)
    with pytest.raises(SyncFailedError, match="not welcome"):
        scheme.connect(timeout=10.0)
    with pytest.raises(WorkerRaised, match="not welcome"):
        worker.result()
    worker.begin(_join_again)
    numbered(model, 3)
    scheme.connect(timeout=10.0)
    assert worker.result() is not None
    assert worker.call(weights_only) == {3.0}


def _join_again(me: Worker) -> int | None:
    time.sleep(0.3)  # the sender connects again first; until then it serves the refused weights
    me.scheme.connect(timeout=10.0)
    return me.scheme.version


@quick_over("shared_mem")
def test_a_late_goodbye_does_not_fail_the_next_connect(kind, procs: Processes) -> None:
    """The sender connects again before it reads that the worker left because of the refused weights."""
    scheme = procs.scheme(kind, timeout=10.0)
    model = numbered(Fussy(), 2)
    scheme.init_on_sender(model=model, num_workers=1)
    worker = procs.start(scheme, 0, Fussier)
    worker.begin(_leave_late_and_join_again)
    with pytest.raises(SyncFailedError, match="not welcome"):
        scheme.connect(timeout=10.0)
    numbered(model, 3)
    scheme.connect(timeout=10.0)
    assert worker.result() == 1
    assert worker.call(weights_only) == {3.0}


def test_a_refused_worker_that_ends_late_does_not_fail_the_next_connect(kind, procs: Processes) -> None:
    """A worker that was refused keeps its connection until its process ends, and another takes its place."""
    scheme = procs.scheme(kind, timeout=10.0)
    scheme.init_on_sender(model=Fussy(), num_workers=1)
    refused = procs.start(scheme, 0, lambda: nn.Linear(3, 5))
    refused.begin(join)
    with pytest.raises(SchemaMismatchError):
        scheme.connect(timeout=10.0)
    successor = procs.start(scheme, 0, Fussy)

    def replace() -> None:
        time.sleep(0.3)
        refused.kill()
        time.sleep(0.3)
        successor.begin(join)

    replacing = threading.Thread(target=replace)
    replacing.start()
    scheme.connect(timeout=20.0)
    replacing.join()
    assert successor.result() == scheme.version


def _leave_late_and_join_again(me: Worker) -> int | None:
    say_goodbye = Receiver._say_goodbye

    def late(self: Receiver) -> None:
        time.sleep(1.0)
        say_goodbye(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receiver, "_say_goodbye", late)
        with pytest.raises(ArithmeticError):
            join(me)
    return _join_again(me)


@quick_over("shared_mem")
def test_send_does_not_wait_for_a_worker_whose_connect_failed(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=20.0), numbered(Fussy(), 2)
    steady, former = procs.launch(scheme, model, Fussy, 2)
    former.kill()
    worker = procs.start(scheme, 1, Fussier)
    events: list[WorkerEvent] = []
    scheme.add_observer(lambda event: events.append(event) if isinstance(event, WorkerEvent) else None)
    with pytest.raises(WorkerRaised, match="not welcome"):
        worker.call(join)
    told = "it left after an error: ArithmeticError"  # after the event of the process that was killed
    wait_until(lambda: any(event.kind == "lost" and told in event.reason for event in events), 10.0)
    start = time.monotonic()
    message = "worker 1: it left after an error: ArithmeticError: the number 2 is not welcome"
    with pytest.raises(SyncFailedError, match=message):
        scheme.send(numbered(model, 3))
    assert time.monotonic() - start < 10.0
    assert worker.call(_join_again) == 1
    scheme.send(numbered(model, 4))
    assert [one.call(weights_only) for one in (steady, worker)] == [{4.0}, {4.0}]


# -- an error after the switch: the worker reads the new memory although it failed ---------------------


class Counting:
    """A context that fails when some updates are reported to it, after they became visible."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        self.failing, self.calls = failing, 0

    def increment_version(self) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise ArithmeticError("cannot count that far")


def join_with_context(me: Worker, failing: tuple[int, ...]) -> None:
    me.context = Counting(failing)
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    me.scheme.context = me.context
    me.scheme.connect()


@quick_over("shared_mem")
def test_memory_of_an_update_that_failed_late_is_not_written_again(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=10.0), Stripes(24, 1 << 14)
    scheme.init_on_sender(model=model, num_workers=1)
    worker = procs.start(scheme, 0, lambda: Stripes(24, 1 << 14))
    worker.begin(join_with_context, tuple(range(3, 60, 2)))
    scheme.connect(timeout=WAIT)
    worker.result()
    worker.call(compute)
    failed = 0
    for version in range(1, 101):
        try:
            scheme.send(fill(model, version))
        except SyncFailedError as error:
            assert "cannot count" in str(error)  # noqa: PT017 - some sends fail, some do not
            failed += 1
    assert failed > 10
    assert worker.call(version_of) == 100
    assert_whole(worker.call(end_compute))


# -- weights that do not fit ---------------------------------------------------------------------------


class Refusing(nn.Linear):
    """A module that raises while it applies an update, until :attr:`refuses` is reset."""

    refuses = False

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise RuntimeError("refused")


def test_a_worker_that_refuses_the_update_it_joins_again_with_stays() -> None:
    source, target = Refusing(4, 4), Refusing(4, 4)
    sender = SharedMemWeightSyncScheme("state_dict", timeout=20.0)
    with sender, connect_pair(sender, source, target):
        target.refuses = True
        sender._sender.table[0].link.disconnect()
        wait_until(lambda: "refused" in outcome(sender))
        target.refuses = False
        wait_until(lambda: outcome(sender) == "applied")
        assert torch.equal(target.weight, source.weight)


def outcome(scheme: WeightSyncScheme) -> str:
    """Send; return "applied" or the error."""
    try:
        scheme.send()
    except SyncFailedError as error:
        return str(error)
    return "applied"


def test_refused_updates_keep_no_memory() -> None:
    """Memory is freed without the collector of reference cycles, which may not run for minutes."""
    source, target = Refusing(128, 128), Refusing(128, 128)
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding())
    sender = SharedMemWeightSyncScheme(strategy, timeout=20.0)
    with sender, connect_pair(sender, source, target):
        before = slots_mapped_for_reading()
        gc.disable()
        try:
            for count in range(1, 61):  # patches of different sizes lie in slots of their own
                target.refuses = count % 2 == 1
                with torch.no_grad():
                    source.weight[: count % 30 + 1] += 1
                outcome(sender)
            assert slots_mapped_for_reading() - before < 25
        finally:
            gc.enable()
