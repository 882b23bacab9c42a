"""Messages about workers that join, are refused, leave, die and are replaced."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_parts import Notebook
from marks import slow
from pairs import connect_pair
from torch import nn

from weight_update import (
    DistributedWeightSyncScheme,
    MemoryWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    UnsupportedSourceError,
    WeightChunk,
    WeightStrategy,
    WeightSyncScheme,
    WorkerEvent,
)
from weight_update.errors import JoinRefusedError, LinkClosedError
from weight_update.sender import joining as joining_module
from weight_update.sender.groups.delta import DeltaGroup
from weight_update.sender.joining import liveness
from weight_update.sender.sender import Sender
from weight_update.sender.workers import ReceiverId
from weight_update.testing import mlp
from weight_update.testing.late_joiners import join, wait_until_forgotten, wait_until_left
from weight_update.testing.models import Brittle
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import context_of, start_workers
from weight_update.transports.shared_memory.transport import SharedMemTransport
from weight_update.wire.frames import Kind

KINDS = pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, slow(DistributedWeightSyncScheme)])


def receiver_of(scheme: WeightSyncScheme, token: str) -> WeightSyncScheme:
    """Return a scheme that finds the sender of ``scheme`` and shows ``token``."""
    where: dict[str, Any] = {"address": scheme.address}  # type: ignore[attr-defined]
    if isinstance(scheme, DistributedWeightSyncScheme):
        where["port"] = scheme.port
    return type(scheme)(token=token, connect_timeout=3.0, **where)


def try_to_join(scheme: WeightSyncScheme, index: int, model: nn.Module, told: dict[int, Exception]) -> None:
    try:
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        told[index] = error


@contextlib.contextmanager
def joining(*receivers: tuple[WeightSyncScheme, int, nn.Module]) -> Iterator[dict[int, Exception]]:
    """Have receivers try to join; yield the errors that they are told, complete afterwards."""
    told: dict[int, Exception] = {}
    threads = [threading.Thread(target=try_to_join, args=(*one, told)) for one in receivers]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        for thread in threads:
            thread.join()
        for scheme, _, _ in receivers:
            scheme.shutdown()


@KINDS
def test_workers_that_asked_before_a_connect_that_fails_learn_why(
    kind: type[WeightSyncScheme], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener admits their connections only once connect() is called, and connect() fails at once."""
    monkeypatch.setattr(joining_module, "_ARRIVAL_SECONDS", 5.0)  # the machine may be busy
    with kind(connect_timeout=60.0) as scheme:
        scheme.init_on_sender(model=nn.Linear(4, 2, device="meta"), num_workers=1)
        receiver = pickle.loads(pickle.dumps(scheme))
        with joining((receiver, 0, nn.Linear(4, 2))) as told:
            if kind is SharedMemWeightSyncScheme:
                assert select.select([scheme.listener._sock], [], [], 20.0)[0]  # type: ignore[union-attr]
            else:
                time.sleep(1.0)  # the worker waits for the sender's announcement
            with pytest.raises(UnsupportedSourceError):
                scheme.connect()
        receiver.shutdown()
    assert isinstance(told[0], JoinRefusedError)
    assert "connect() failed in the trainer: UnsupportedSourceError: on the meta device" in str(told[0])


@KINDS
def test_connect_names_the_refusals_it_saw(kind: type[WeightSyncScheme]) -> None:
    with kind() as scheme:
        scheme.init_on_sender(params_map={0: mlp(1), 1: mlp(2)})
        token = scheme.token
        receivers = (
            (receiver_of(scheme, "another"), 0, mlp(3)),
            (receiver_of(scheme, token), 7, mlp(3)),
        )
        with (
            pytest.raises(SyncTimeoutError, match=r"workers \[0, 1\]") as caught,
            joining(*receivers) as told,
        ):
            scheme.connect(timeout=1.0)
        if kind is SharedMemWeightSyncScheme:
            assert "token" in str(caught.value)
        else:  # the sender does not hear of a worker to which its rendezvous proves another token
            assert "has another token" in str(told[0])
        assert "unknown worker index 7 (known: 0, 1)" in str(caught.value)
        assert "have they called connect()?" not in str(caught.value)


def test_a_sender_that_is_gone_is_named_readably() -> None:
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        receiver = receiver_of(scheme, scheme.token)
    with joining((receiver, 0, mlp(3))) as told:
        pass
    assert f"no sender at '@{scheme.address[1:]}'" in str(told[0])
    assert "perhaps because its connect_timeout has passed" in str(told[0])
    assert "another network namespace, as of a container, or address= is not the" in str(told[0])


@pytest.mark.parametrize("mark", ["\0", "@", ""])
def test_addresses_without_a_null_character(mark: str) -> None:
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        given = mark + scheme.address[1:]
        receiver = SharedMemWeightSyncScheme(address=given, token=scheme.token)
        with joining((receiver, 0, mlp(3))) as told:
            scheme.connect(timeout=20.0)
    assert told == {}


@pytest.mark.parametrize("watched", [False, True])
def test_connect_says_how_to_learn_of_workers_that_die(watched: bool) -> None:
    with SharedMemWeightSyncScheme(connect_timeout=0.1) as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        scheme.worker_alive = (lambda _: True) if watched else None
        with pytest.raises(SyncTimeoutError, match=r"have they called connect\(\)\?") as caught:
            scheme.connect()
    assert ("scheme.worker_alive" in str(caught.value)) != watched
    assert ("raise connect_timeout=" in str(caught.value)) == watched


@KINDS
def test_connect_names_a_late_joiner_that_does_not_fit(kind: type[WeightSyncScheme]) -> None:
    """A worker that counts from 1, with another model, is an example."""
    with kind() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        with (
            joining((receiver_of(scheme, scheme.token), 1, mlp(3)[:1])),
            pytest.raises(SyncTimeoutError, match=r"workers \[0\]") as caught,
        ):
            scheme.connect(timeout=1.0)
        assert "refused" in str(caught.value)
        assert "missing in worker 1" in str(caught.value)


def test_a_late_joiner_admitted_during_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed like all others; no worker is admitted afterwards."""
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=mlp(1), num_workers=1)
    admit, sender = scheme.late_joiner_links(), scheme._sender
    assert isinstance(sender, Sender)
    late: list[SharedMemTransport] = []
    monkeypatch.setattr(sender, "_recall", lambda: late.append(admit(5)))
    sender.close()
    monkeypatch.undo()
    with pytest.raises(LinkClosedError):
        late[0].recv_chunk(timeout=0.0)
    with pytest.raises(JoinRefusedError, match="shut down"):
        admit(6)
    scheme.shutdown()


def test_the_index_of_a_late_joiner_of_this_process_that_left() -> None:
    with MemoryWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=0)
        scheme.connect()
        assert isinstance(scheme._sender, Sender)
        table = scheme._sender.table
        for version in 1, 2:
            with copy.copy(scheme) as receiver:
                receiver.init_on_receiver(model=mlp(2), worker_idx=5)
                receiver.connect()
                assert scheme.send().version == version
            wait_until(lambda: 5 not in table)


def test_senders_may_have_no_workers_yet() -> None:
    with MemoryWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=0)
        scheme.connect()
        assert [scheme.send().version, scheme.send(worker_ids=[]).version] == [1, 2]


def test_a_worker_that_sends_a_frame_of_the_sender_joins_again() -> None:
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme, connect_pair(scheme, mlp(1), mlp(2)) as receiver:
        worker = scheme._sender.table[0]
        before = worker.connections
        receiver._receiver.link.send_chunk(WeightChunk(Kind.COMMIT, {"version": 0}), 1.0)
        wait_until(lambda: worker.joined and worker.connections > before)
        assert scheme.send().apply_seconds.keys() == {0}


def test_an_engine_gets_updates_after_it_joined_again() -> None:
    source, engine = mlp(1), Notebook()
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme, connect_pair(scheme, source, engine):
        worker = scheme._sender.table[0]
        before = worker.connections
        worker.link.disconnect()
        wait_until(lambda: worker.version == 0 and worker.connections > before)
        scheme.send(mlp(3))
        assert scheme.worker_versions == {0: 1}
        for name, value in mlp(3).named_parameters():
            assert torch.equal(engine.loaded[name], value)


def test_a_worker_that_once_failed_may_leave() -> None:
    source, told = Brittle(1), list[Any]()
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme:
        scheme.add_observer(told.append)
        with connect_pair(scheme, source, Brittle(2)):
            source.note = "poison"
            with pytest.raises(SyncFailedError, match="poison refused"):
                scheme.send()
        wait_until(lambda: scheme.worker_versions == {0: None})
        wait_until(lambda: "left" in [one.kind for one in told if isinstance(one, WorkerEvent)])


def test_one_thread_reads_from_a_worker_after_several_connects() -> None:
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        for _ in range(2):
            with pytest.raises(SyncTimeoutError):
                scheme.connect(timeout=0.1)
        with connect_pair(scheme, mlp(1), mlp(2)):
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("weight_update-worker-0") == 1


@pytest.mark.parametrize("is_its_own_cause", [False, True])
def test_a_worker_comes_back_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, is_its_own_cause: bool
) -> None:
    """Lack of memory for its weights, which PyTorch reports as a RuntimeError, is an example."""

    def failing(group: DeltaGroup) -> None:
        monkeypatch.undo()
        error = RuntimeError("there is no memory")
        raise error from (error if is_its_own_cause else None)

    with SharedMemWeightSyncScheme(WeightStrategy(encoding="patch")) as scheme:
        with connect_pair(scheme, mlp(1), mlp(2)):
            scheme.send()
        monkeypatch.setattr(DeltaGroup, "prepare", failing)
        told: dict[int, Exception] = {}
        with receiver_of(scheme, scheme.token) as receiver:
            try_to_join(receiver, 0, mlp(3), told)  # its connect() tries again
        assert told == {}


class LockProbe(logging.Handler):
    """A handler that notes whether another thread can take a lock while a record is written."""

    def __init__(self, lock: threading.Condition) -> None:
        super().__init__()
        self._lock = lock
        self.free: list[bool] = []

    def emit(self, record: logging.LogRecord) -> None:
        thread = threading.Thread(target=self._probe)
        thread.start()
        thread.join()

    def _probe(self) -> None:
        self.free.append(self._lock.acquire(timeout=0.5))
        if self.free[-1]:
            self._lock.release()


def test_observers_hear_of_a_worker_whose_replacement_ends_before_it_is_welcomed() -> None:
    told: list[Any] = []
    with SharedMemWeightSyncScheme() as scheme:
        receiver = connect_pair(scheme, mlp(1), mlp(2))
        scheme.add_observer(told.append)
        sender = scheme._sender
        assert isinstance(sender, Sender)
        (state,) = sender.table
        state.replaced = True
        sender._delivery.lose(state, LinkClosedError("it was replaced"))
        sender._delivery.lose(state, LinkClosedError("its process ended"))
        sender._delivery.lose(state, LinkClosedError("its process ended"))
        receiver.shutdown()
    assert [(one.kind, one.reason) for one in told] == [("lost", "its process ended")]


def test_a_slow_log_does_not_hold_the_sender_up(caplog: pytest.LogCaptureFixture) -> None:
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        sender = scheme._sender
        assert isinstance(sender, Sender)
        (state,) = sender.table
        state.joined, state.receiver = True, ReceiverId("former", 1)
        header = {
            "token": scheme.token,
            "worker": 0,
            "pid": 2,
            "version": None,
            "schema": None,
            "error": None,
            "instance": "new",
        }
        probe = LockProbe(sender.table.changed)
        log = logging.getLogger("weight_update")
        log.addHandler(probe)
        try:
            with caplog.at_level(logging.INFO, "weight_update"):
                sender.admission.screen(state, WeightChunk(Kind.HELLO, header))
                state.replaced = False
                sender._delivery.lose(state, LinkClosedError("the other end is gone"))
        finally:
            log.removeHandler(probe)
    assert probe.free == [True, True]


def test_connect_tells_of_a_worker_that_gave_up_before() -> None:
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        receiver = copy.copy(scheme)
        receiver.init_on_receiver(model=mlp(2), worker_idx=0)
        with pytest.raises(SyncTimeoutError, match="has it called connect"):
            receiver.connect(timeout=0.2)
        receiver.shutdown()
        with pytest.raises(
            SyncTimeoutError, match=r"it has ended, or its connect\(\) has timed out, or it is no worker$"
        ):
            scheme.connect(timeout=0.5)


def exit_at_once() -> None:
    os._exit(1)


@pytest.mark.parametrize("form", ["list", slow("mapping")])
@pytest.mark.parametrize("started", [True, False])
def test_connect_notices_a_process_that_has_ended_or_was_not_started(form: str, started: bool) -> None:
    process = context_of("fork").Process(target=exit_at_once)
    if started:
        process.start()
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        scheme.worker_alive = [process] if form == "list" else {0: process}
        message = r"its process ended before .*, unless it was not started or did not call connect\(\)$"
        with pytest.raises(SyncFailedError, match=message):
            scheme.connect(timeout=30.0)
    if started:
        process.join()


@pytest.mark.parametrize(
    ("lives", "reason"),
    [
        (lambda: True, r"it is stopped, or in hold\(\) or a long forward pass, or takes long to apply it"),
        (
            lambda: False,
            r"its process has ended \(scheme\.worker_alive\), and the transport did not report it",
        ),
        (lambda: [][0], "it is stopped, or in hold"),
    ],
    ids=["alive", "ended", "unknown"],
)
@pytest.mark.parametrize("kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme])
def test_send_tells_a_process_that_ended_from_a_slow_worker(
    kind: type[WeightSyncScheme], lives: Callable[[], bool], reason: str
) -> None:
    """The transport does not notice it: here, the worker only holds its weights."""
    connected = False
    with kind(timeout=20.0) as scheme:
        scheme.worker_alive = lambda _: lives() if connected else True
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        with connect_pair(scheme, mlp(1), mlp(2)) as receiver:
            connected = True
            with receiver.hold(), pytest.raises(SyncFailedError, match=f"within 0.1 s: {reason}"):
                scheme.send_async().wait(0.1)


def test_worker_alive_may_tell_of_the_process_before_a_restart() -> None:
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme:
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        with connect_pair(scheme, mlp(1), mlp(2)):
            scheme.send()
        scheme._sender.table[0].alive = lambda _: False
        with receiver_of(scheme, scheme.token) as receiver:
            receiver.init_on_receiver(model=mlp(3), worker_idx=0)
            receiver.connect()
            with receiver.hold(), pytest.raises(SyncFailedError, match="it is stopped, or in hold"):
                scheme.send_async().wait(0.1)


def test_worker_alive_still_tells_of_a_process_that_has_joined_again() -> None:
    ended = False
    with SharedMemWeightSyncScheme(timeout=20.0) as scheme:
        scheme.worker_alive = lambda _: not ended
        scheme.init_on_sender(model=mlp(1), num_workers=1)
        with connect_pair(scheme, mlp(1), mlp(2)) as receiver:
            worker = scheme._sender.table[0]
            before = worker.connections
            worker.link.disconnect()
            wait_until(lambda: worker.joined and worker.connections > before)
            ended = True
            with receiver.hold(), pytest.raises(SyncFailedError, match="its process has ended"):
                scheme.send_async().wait(0.1)


def test_liveness_of_subprocesses() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lives = liveness([process])
    assert lives is not None
    assert lives(0)
    assert lives(1)  # unknown
    process.communicate(b"\n")
    assert not lives(0)
    with pytest.raises(TypeError, match="not 17"):
        liveness([17])
    assert liveness(None) is None


@KINDS
def test_log(kind: type[WeightSyncScheme], caplog: pytest.LogCaptureFixture) -> None:
    scheme = kind(timeout=10.0)
    with (
        caplog.at_level(logging.INFO, "weight_update"),
        start_workers(scheme, [mlp(2)], model=mlp(1)) as procs,
    ):
        first = join(procs, 5)
        second = join(procs, 5)
        pids = [worker.runner.pid for worker in (procs.workers[0], first, second)]
        second.call("shutdown")
        wait_until_left(procs, 5)
        third = join(procs, 6)
        third.runner.kill()
        wait_until_forgotten(procs, 6)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines[:5] == [
        f"worker 0 (process {pids[0]}) joined",
        f"worker 5 (process {pids[1]}) joined",
        f"worker 5: process {pids[2]} replaces process {pids[1]}",
        f"worker 5 (process {pids[2]}) joined",
        f"worker 5 (process {pids[2]}) left",
    ]
    assert lines[5] == f"worker 6 (process {third.runner.pid}) joined"
    assert lines[6].startswith(f"worker 6 (process {third.runner.pid}) was lost: ")
