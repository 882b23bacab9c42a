"""The end of a process group of two, whenever it comes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreters import run_python

from weight_update.errors import LinkClosedError
from weight_update.transports.distributed.relay import nccl
from weight_update.transports.distributed.relay.gloo import PointToPointGroup
from weight_update.transports.distributed.signed_queue import find_store, open_store
from weight_update.transports.distributed.store import Store
from weight_update.transports.rendezvous import SignedRendezvous

HERE = "127.0.0.1"


@pytest.fixture
def ends() -> Iterator[tuple[PointToPointGroup, PointToPointGroup]]:
    """The two ends of a group, not connected."""
    server = open_store(HERE)
    client = find_store(HERE, server.port, 5.0)
    yield end_of(server, 0), end_of(client, 1)
    client.close()
    server.close()


def end_of(store: Store, rank: int) -> PointToPointGroup:
    return PointToPointGroup(store, "group", "token", rank, HERE)


def in_thread(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


def is_refused(end: PointToPointGroup) -> None:
    with pytest.raises(LinkClosedError):
        end.connect()


def tries(end: PointToPointGroup) -> None:
    with contextlib.suppress(LinkClosedError):
        end.connect()


def test_an_end_that_watches_late_learns_that_the_other_has_gone(
    ends: tuple[PointToPointGroup, PointToPointGroup],
) -> None:
    """It closes the connection itself; an operation of the other end is still under way."""
    here, there = ends
    other = in_thread(there.connect)
    here.connect()
    other.join(10.0)

    def read() -> None:
        with pytest.raises(LinkClosedError):
            there.recv(torch.empty(4096, dtype=torch.uint8), 60.0)

    reader = in_thread(read)
    there.on_loss(lambda: None)
    here.close()
    time.sleep(0.2)  # the other end takes it down
    watcher = in_thread(here.watch, lambda: None)
    for thread in (reader, watcher):
        thread.join(5.0)
        assert not thread.is_alive()


def test_close_ends_the_wait_for_an_end_that_does_not_come(
    ends: tuple[PointToPointGroup, PointToPointGroup],
) -> None:
    waiting = in_thread(is_refused, ends[0])
    time.sleep(0.2)
    ends[0].close()
    waiting.join(2.0)
    assert not waiting.is_alive()


@pytest.mark.parametrize("attempt", range(8))  # which end listens is decided by chance; only it would wait
def test_close_ends_the_wait_for_an_end_that_gives_up(
    ends: tuple[PointToPointGroup, PointToPointGroup], monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    here, there = ends
    wait, gives_up = SignedRendezvous.wait, threading.Event()

    def give_up(rendezvous: SignedRendezvous, keys: list[str], timeout: Any) -> None:
        if rendezvous is there._rendezvous:
            gives_up.set()
            raise LinkClosedError("it gave up")
        wait(rendezvous, keys, timeout)

    monkeypatch.setattr(SignedRendezvous, "wait", give_up)
    waiting, giving_up = in_thread(tries, here), in_thread(is_refused, there)
    assert gives_up.wait(5.0)
    giving_up.join(5.0)
    time.sleep(0.3)  # the other end connects
    here.close()
    waiting.join(3.0)
    assert not waiting.is_alive()


def test_an_end_that_was_closed_does_not_connect(ends: tuple[PointToPointGroup, PointToPointGroup]) -> None:
    ends[0].close()
    start = time.monotonic()
    is_refused(ends[0])
    assert time.monotonic() - start < 2


LATE_ENDS = """
import threading, time
from weight_update.errors import LinkClosedError
from weight_update.transports.distributed.relay import nccl
from weight_update.transports.distributed.relay.gloo import PointToPointGroup
from weight_update.transports.distributed.signed_queue import find_store, open_store
from weight_update.transports.rendezvous import SignedRendezvous

stores = [open_store("127.0.0.1")]
stores.append(find_store("127.0.0.1", stores[0].port, 5.0))
wait, late = SignedRendezvous.wait, {}

def wait_longer(rendezvous, keys, timeout):
    wait(rendezvous, keys, timeout)
    time.sleep(late.get(rendezvous._outbox.name, 0.0))

def connect(end):
    try:
        end.connect()
    except LinkClosedError as error:
        time.sleep(0.3)  # with the error, whose frames refer to all that they made
    end.release()

SignedRendezvous.wait = wait_longer
threads = []
for number in range(16):
    late[f"group {number}/1"] = 0.48 + 0.01 * number  # gloo waits for half of the second below
    for rank in range(2):
        end = PointToPointGroup(stores[rank], f"group {number}", "token", rank, "127.0.0.1", 1.0)
        threads.append(threading.Thread(target=connect, args=(end,)))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all ended")
"""


def test_an_end_that_comes_when_the_other_has_just_given_up() -> None:
    result = run_python("-c", LATE_ENDS)
    assert (result.returncode, result.stdout) == (0, "all ended\n"), result.stderr


def test_a_group_whose_nccl_fails_keeps_no_connection(
    ends: tuple[PointToPointGroup, PointToPointGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may lack CUDA, so the constructor of NCCL's group is one that raises."""

    def unavailable(*_: Any) -> None:
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(nccl, "require_nccl", lambda: None)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", unavailable, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _, there = ends
    here = nccl.NcclGroup(there._store, "group", "token", 0, HERE)
    lost = threading.Event()
    other = in_thread(there.connect)
    with pytest.raises(LinkClosedError, match="no NCCL connection"):
        here.connect()
    other.join()
    there.watch(lost.set)
    assert lost.wait(10.0)
