"""Every call of a client ends in time, also when the synchronizer's host is stopped or swallows packets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sync_parts import model_at
from sync_programs import serve
from test_processes import COMING, FORKSERVER

from weight_update import ExplorerClient, LinkClosedError, Synchronizer, SyncMethod, TrainerClient

TIMEOUT = 0.5
SOON = 8 * TIMEOUT  # other programs run on this machine, too


def timed(call: Callable[[], Any], took: dict[str, float], name: str) -> threading.Thread:
    """Do a call in a thread of its own, and note how long it took; that it fails is expected."""

    def run() -> None:
        began = time.monotonic()
        try:
            call()
        except LinkClosedError:
            pass
        finally:
            took[name] = time.monotonic() - began

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


CALLS: dict[str, Callable[[Any], Any]] = {
    "need_sync": lambda client: client.need_sync(),
    "sync_weight": lambda client: client.sync_weight(),
    "status": lambda client: client.status(),
    "latest_version": lambda client: client.latest_version(),
    "notify": lambda client: client.notify("require_sync"),
    "give_up": lambda client: client.give_up(),
    "close": lambda client: client.close(),
}


def test_a_host_that_is_stopped_ends_every_call_in_time() -> None:
    told, theirs = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        assert told.poll(COMING)
        address, token = told.recv()
        trainer = TrainerClient(address, model_at(0), token=token).blocking
        clients = {name: ExplorerClient(address, model_at(-1), token=token).blocking for name in CALLS}
        for client in (*clients.values(), trainer):
            client.timeout = TIMEOUT
        os.kill(process.pid, signal.SIGSTOP)
        took: dict[str, float] = {}
        calls = [timed(lambda n=name: CALLS[n](clients[n]), took, name) for name in CALLS]
        calls.append(
            timed(
                lambda: ExplorerClient(address, model_at(-1), token=token, timeout=TIMEOUT), took, "a new one"
            )
        )
        calls.append(timed(trainer.need_sync, took, "the trainer's need_sync"))
        calls.append(timed(trainer.sync_weight, took, "the trainer's sync_weight"))
        for call in calls:
            call.join(SOON)
        late = [call for call in calls if call.is_alive()]
        assert not late, took
        assert all(seconds < SOON for seconds in took.values()), took
    finally:
        process.kill()
        process.join(10.0)
    for client in (*clients.values(), trainer):
        client.close()


def test_a_host_that_swallows_packets_is_given_up_in_time() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        where = deaf.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:  # the queue is full: connections that come now are not answered
            sock.setblocking(False)
            sock.connect_ex(where)
        began = time.monotonic()
        with pytest.raises(LinkClosedError, match="no synchronizer"):
            ExplorerClient(f"{where[0]}:{where[1]}", model_at(-1), token="any", timeout=TIMEOUT)
        assert time.monotonic() - began < SOON
        for sock in waiting:
            sock.close()


def test_a_host_that_lives_may_take_longer_than_the_timeout() -> None:
    """While a transfer is under way the answer comes late, and that is no reason to give up."""
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        with ExplorerClient(server, model_at(-1), timeout=1.0) as client:
            slow = where.coordinator._calls["explorer_needs"]

            def slowly(**args: Any) -> Any:
                time.sleep(2.2)
                return slow(**args)

            where.coordinator._calls["explorer_needs"] = slowly
            began = time.monotonic()
            assert not client.blocking.need_sync()
            assert time.monotonic() - began >= 2.2
