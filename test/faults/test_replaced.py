"""A process that joins under an index in use replaces the process that has the index, for good."""

from __future__ import annotations

import logging
import signal
import socket
import struct
import time
from contextlib import closing

import pytest
from faults_tools import (
    SOCKET_KINDS,
    Processes,
    Remote,
    Stripes,
    Worker,
    WorkerRaised,
    eventually,
    fill,
    join,
    join_from_another_host,
    small,
    version_of,
)
from marks import quick_for

from weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SyncFailedError,
    WeightChunk,
    WeightSyncScheme,
)
from weight_update.transports.distributed.rendezvous import find_sender
from weight_update.transports.handshake import prove_token
from weight_update.transports.signed_stream import call
from weight_update.transports.socket_stream import SocketStream, deadline_of
from weight_update.wire.frames import Kind

LIMIT = 1.0


def await_end(me: Worker, timeout: float) -> str:
    """Return the error that ends the receiver."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            me.scheme.receive(timeout=0.1)
        except Exception as error:  # noqa: BLE001 - the test reads it
            return f"{type(error).__name__}: {error}"
    return "none"


def start_pair(kind: str, procs: Processes) -> tuple[WeightSyncScheme, Stripes, list[Remote]]:
    """Return a connected sender and the workers 0 and 1."""
    cls, options = SOCKET_KINDS[kind]
    scheme, model = procs.scheme(cls, timeout=LIMIT, **options), fill(small(), 0)
    scheme.init_on_sender(model=model, num_workers=2)
    workers = [procs.start(scheme, idx, small) for idx in range(2)]
    for worker in workers:
        worker.begin(join_from_another_host)
    scheme.connect(timeout=20.0)
    for worker in workers:
        worker.result()
    return scheme, model, workers


@pytest.mark.parametrize("kind", quick_for(SOCKET_KINDS, "shared_mem"))
def test_a_hung_worker_that_was_replaced_stays_out(kind: str, procs: Processes) -> None:
    scheme, model, (other, hung) = start_pair(kind, procs)
    hung.signal(signal.SIGSTOP)
    with pytest.raises(SyncFailedError, match="worker 1"):
        scheme.send(fill(model, 1))
    fresh = procs.start(scheme, 1, small)
    assert fresh.call(join_from_another_host) == 1
    hung.signal(signal.SIGCONT)
    error = hung.call(await_end, 15.0)
    assert error.startswith("JoinRefusedError"), error
    assert f"replaced by process {fresh.pid}" in error
    for version in (2, 3):
        scheme.send(fill(model, version))
        assert [worker.call(version_of) for worker in (other, fresh)] == [version, version]
    assert hung.call(version_of) != 3


@pytest.mark.parametrize("kind", [name for name in SOCKET_KINDS if name != "another host"])
def test_a_worker_that_does_not_fit_replaces_nobody(kind: str, procs: Processes) -> None:
    scheme, model, workers = start_pair(kind, procs)
    stranger = procs.start(scheme, 1, lambda: Stripes(10, 64))
    with pytest.raises(WorkerRaised, match="SchemaMismatchError"):
        stranger.call(join)
    scheme.send(fill(model, 1))
    assert [worker.call(version_of) for worker in workers] == [1, 1]


JOINS = ["nothing", "a join request", "half a frame", "no HELLO"]


def join_and_die(scheme: DistributedWeightSyncScheme, where: str, says: str) -> None:
    """Join as a process that knows the token, and die before the first frame is complete, or is a HELLO."""
    sender = find_sender(scheme.address, scheme.port, scheme.token, 5.0)
    deadline = deadline_of(5.0)
    schema = next(state.schema for state in scheme._sender.table if state.idx == 1)
    header = {"token": "", "worker": 1, "pid": 99_999, "version": None, "schema": schema.to_header()}
    header |= {"error": None, "instance": "another", "again": False}
    hello = WeightChunk(Kind.HELLO, header).encode()
    said = {
        "a HELLO": hello,
        "half a frame": hello[:-5],
        "no HELLO": WeightChunk(Kind.GOODBYE, {}).encode(),
    }.get(says, b"")
    if where == "this host":
        address = f"\0{sender.local}"
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        with closing(SocketStream(sock)) as stream:
            prove_token(stream, scheme.token, f"shared memory {address}", deadline)
            stream.send(said, deadline)
        return
    with closing(
        call(scheme.address, sender.port, scheme.token, f"sender {sender.name}", deadline)
    ) as signed:
        if says != "nothing":
            signed.send_json({"do": "join", "name": "a name", "host": "another"}, 5.0)
        if said:
            signed.send(struct.pack("<II", len(said), 0) + said, deadline)


@pytest.mark.parametrize("says", quick_for(JOINS, "half a frame"))
@pytest.mark.parametrize("where", ["this host", "another host"])
def test_a_worker_that_dies_while_it_joins_replaces_nobody(
    procs: Processes, where: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheme, model, workers = start_pair("distributed", procs)
    scheme.listener.refusals.clear()
    join_and_die(scheme, where, says)
    assert eventually(lambda: list(scheme.listener.refusals), 5.0)
    rejoined = f"worker 1 (process {workers[1].pid}) joined"
    with caplog.at_level(logging.INFO, "weight_update"):
        next(state for state in scheme._sender.table if state.idx == 1).link.disconnect()
        assert eventually(lambda: rejoined in caplog.messages, 5.0), "the healthy worker is out"
    scheme.send(fill(model, 1))
    assert [worker.call(version_of) for worker in workers] == [1, 1]


def test_queues_are_read_by_one_process(procs: Processes) -> None:
    """A stopped process holds the locks of its queues, so a second process is refused until it ends."""
    scheme, model = procs.scheme(MultiProcessWeightSyncScheme, timeout=LIMIT), fill(small(), 0)
    (first,) = procs.launch(scheme, model, small, 1)
    second = procs.start(scheme, 0, small)
    with pytest.raises(WorkerRaised, match=rf"JoinRefusedError: process {first.pid} uses the queues"):
        second.call(join)
    for version in (1, 2, 3):
        scheme.send(fill(model, version))
        assert first.call(version_of) == version
    first.kill()
    third = procs.start(scheme, 0, small)
    assert third.call(join) == 3
    scheme.send(fill(model, 4))
    assert third.call(version_of) == 4
