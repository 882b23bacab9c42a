"""Worlds of torch.distributed.rpc whose processes fail, join or leave."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import rpc_parts as parts
from marks import slow
from rpc_parts import World, in_world

from weight_update import LifecycleError, RPCWeightSyncScheme, SyncFailedError, SyncTimeoutError
from weight_update.testing import fingerprint, mlp
from weight_update.testing.processes import freeze


def test_outside_of_a_world() -> None:
    scheme = RPCWeightSyncScheme()
    scheme.init_on_receiver(model=mlp(1), worker_idx=0)
    with pytest.raises(LifecycleError, match="init_rpc"):
        scheme.connect()


class Place:
    """A context, with which ``connect()`` joins in the background."""


@pytest.mark.slow
def test_receive_waits_once_for_the_join_and_the_update() -> None:
    sender = RPCWeightSyncScheme(token="token")
    sender.init_on_sender(model=mlp(1), num_workers=1)
    receiver, place = RPCWeightSyncScheme(port=sender.port, token="token"), Place()
    receiver.init_on_receiver(model=mlp(2), context=place, worker_idx=0)
    receiver.connect()
    admit = threading.Timer(1.0, sender.connect)
    admit.start()
    try:
        began = time.monotonic()
        assert receiver.receive(timeout=1.5) is None  # the first weights are no update
        assert time.monotonic() - began < 2.2
        assert receiver.version == sender.version
    finally:
        admit.join()
        receiver.shutdown()
        sender.shutdown()


@pytest.mark.slow
@in_world()
def test_a_call_that_does_not_return(world: World) -> None:
    scheme = world.sender(mlp(1), called=True, timeout=1.5)
    world.connect(scheme, mlp(2))
    world.run(0, parts.make_trouble, "sleep")
    began = time.monotonic()
    with pytest.raises(SyncFailedError, match="worker 0"):
        scheme.send(mlp(3))
    assert time.monotonic() - began < 10
    assert world.seen() == [fingerprint(mlp(3))] * 2
    world.run(0, parts.make_trouble, None)
    time.sleep(0.5)  # until RPC has given it up
    scheme.send(mlp(4))
    assert world.seen() == [fingerprint(mlp(4))] * 2
    world.run(0, parts.make_trouble, "sleep")
    scheme.send_async(mlp(5))
    time.sleep(0.3)
    began = time.monotonic()
    scheme.shutdown()
    assert time.monotonic() - began < 5


# -- coming and going ----------------------------------------------------------------------------------


@in_world(spares=1)
def test_a_worker_is_killed_and_another_process_takes_its_place(world: World) -> None:
    scheme = world.sender(mlp(1), called=True, token="secret")
    world.connect(scheme, mlp(2))
    scheme.send(mlp(3))
    world.workers[0].runner.kill()
    world.workers[0].runner.join()
    with pytest.raises(SyncFailedError, match="worker 0") as caught:
        scheme.send(mlp(4))
    assert list(caught.value.failures) == [0]
    assert world.seen(only=[1]) == [fingerprint(mlp(4))]
    link = {"port": scheme.port, "token": "secret", "worker_idx": 0}
    assert world.run(2, parts.join, mlp(2), "policy", link) == 2
    assert world.seen(only=[1, 2]) == [fingerprint(mlp(4))] * 2
    for seed in (5, 6):
        assert scheme.send(mlp(seed)).version == seed - 2
        assert world.seen(only=[1, 2]) == [fingerprint(mlp(seed))] * 2
    assert [len(world.run(index, parts.calls_of)) for index in (1, 2)] == [4, 0]


@in_world()
def test_a_stopped_worker_holds_nobody_up(world: World) -> None:
    scheme = world.sender(mlp(1), called=True, timeout=1.0)
    world.connect(scheme, mlp(2))
    pid = world.run(0, parts.pid_of)
    freeze(pid)
    for seed in (3, 4):
        with pytest.raises(SyncFailedError, match="worker 0") as caught:
            scheme.send(mlp(seed))
        assert list(caught.value.failures) == [0]
        assert world.seen(only=[1]) == [fingerprint(mlp(seed))]
    os.kill(pid, signal.SIGCONT)
    scheme.send_async(mlp(5)).wait(20.0)
    assert world.seen() == [fingerprint(mlp(5))] * 2


@pytest.mark.slow
@in_world(spares=2, dynamic=True)
def test_a_world_that_grows(world: World) -> None:
    scheme = world.sender(mlp(1))
    world.connect(scheme, mlp(2))
    scheme.send(mlp(3))
    world.admit(2)
    assert world.run(2, parts.join, mlp(2), "policy", {}) == 1
    scheme.send(mlp(4))
    assert world.seen(only=[0, 1, 2]) == [fingerprint(mlp(4))] * 3
    for function in (parts.leave_scheme, parts.leave_world):  # in order; then another process takes its name
        world.run(2, function)
    scheme.send(mlp(5))
    world.admit(3, place=2)
    assert world.run(3, parts.join, mlp(2), "policy", {"worker_idx": 2}) == 3
    scheme.send(mlp(6))
    assert world.seen(only=[0, 1, 3]) == [fingerprint(mlp(6))] * 3


# -- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["rpc", "scheme"])
@pytest.mark.parametrize("waiting", [False, slow(True)], ids=["connected", "still asking"])
@in_world()
def test_order_of_the_end(world: World, first: str, waiting: bool) -> None:
    scheme = world.sender(mlp(1), called=True)
    if waiting:
        world.post_join(mlp(2), model_id="never announced", connect_timeout=2.0)
        time.sleep(0.3)
    else:
        world.connect(scheme, mlp(2))
        scheme.send(mlp(3))
    began = time.monotonic()
    if waiting:
        for worker in world.workers:
            with pytest.raises(SyncTimeoutError):
                worker.answer()
    ends = [world.leave, scheme.shutdown] if first == "rpc" else [scheme.shutdown, world.leave]
    for end in ends:
        end()
    assert time.monotonic() - began < 15


@in_world()
def test_shutdown_ends_the_question_for_the_sender(world: World) -> None:
    began = time.monotonic()
    assert world.run(0, parts.ask_and_leave) == "LinkClosedError: this end was closed"
    assert time.monotonic() - began < 15


@in_world()
def test_updates_go_on_when_rpc_has_ended(world: World) -> None:
    called, silent = (world.sender(mlp(1), called=flag, model_id=str(flag)) for flag in (True, False))
    for scheme in (called, silent):
        world.connect(scheme, mlp(2), model_id=str(scheme is called))
    world.leave()
    silent.send(mlp(3))
    assert world.seen("False") == [fingerprint(mlp(3))] * 2
    with pytest.raises(SyncFailedError, match="could not be called through RPC") as caught:
        called.send(mlp(4))
    assert [str(error).count("could not be called") for error in caught.value.failures.values()] == [1, 1]
    assert world.seen("True") == [fingerprint(mlp(4))] * 2


_kept: list[RPCWeightSyncScheme] = []


@in_world()
def test_exit_without_shutdown(world: World) -> None:
    scheme = world.sender(mlp(1), called=True)
    world.connect(scheme, mlp(2))
    scheme.send(mlp(3))
    world.schemes.clear()
    _kept.append(scheme)  # until the interpreter ends, which the decorator waits for
