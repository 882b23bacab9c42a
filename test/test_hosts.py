"""Workers on other hosts: one transfer to each host, along a chain, and failures in it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from marks import quick_for
from torch import nn

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    PatchEncoding,
    SyncFailedError,
    WeightStrategy,
)
from weight_update.errors import LinkClosedError, NotEnoughMemoryError
from weight_update.schemes import remote
from weight_update.testing import Apart, ApartInTwos, Body, WorkerProcesses, fingerprint, mlp
from weight_update.testing.processes import eventually, freeze, wait_until
from weight_update.testing.worker_processes import context_of, start_workers
from weight_update.testing.workers import Worker
from weight_update.transports.distributed import connection
from weight_update.transports.distributed.relay.host_relay import HostRelay
from weight_update.transports.distributed.relay.router import Router, _Payload
from weight_update.transports.distributed.transfer import BLOCK, Checksum, joint_hex
from weight_update.transports.signed_stream import SignedStream

NUMEL = 3_000_000
NBYTES = 4 * NUMEL
TIMEOUT = 8.0

Hire = Callable[..., WorkerProcesses]


class Large(nn.Module):
    """A model whose weights exceed the buffers of a socket."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((NUMEL,), value))
        self.bias = nn.Parameter(torch.full((1000,), value))


@pytest.fixture
def hire(hired: Hire) -> Iterator[Hire]:
    running: list[WorkerProcesses] = []

    def build(
        cls: type[DistributedWeightSyncScheme], count: int, encoding: Any = "dense", **options: Any
    ) -> WorkerProcesses:
        options.setdefault("timeout", TIMEOUT)
        scheme = cls(strategy=WeightStrategy(encoding=encoding), **options)
        running.append(hired(scheme, [Large(-1.0)] * count, model=Large(0.0), connect=False))
        connecting = threading.Thread(target=scheme.connect)
        connecting.start()
        for worker in running[-1].workers:
            worker.call("connect")  # in this order: the first of a host becomes its relay
        connecting.join()
        return running[-1]

    yield build
    for procs in running:
        for worker in procs.workers:
            send_signal(worker, signal.SIGCONT)


several_connections = pytest.mark.parametrize(
    "connections", quick_for([1, 3], 1), ids=["one connection", "three connections"]
)


def send_signal(worker: Worker, number: int) -> None:
    if number == signal.SIGSTOP:
        freeze(worker.runner.pid)
    elif worker.runner.is_alive():
        os.kill(worker.runner.pid, number)


def value_of(worker: Worker) -> float:
    return worker.call("run", read_value)


def read_value(body: Body) -> float:
    with body.scheme.hold(), torch.no_grad():
        low, high = body.model.weight.aminmax()
        assert low == high == body.model.bias[0], (low, high)
        return float(low)


def has(worker: Worker, value: float, within: float = 20.0) -> bool:
    return eventually(lambda: value_of(worker) == value, within)


@several_connections
def test_once_a_host_and_once_from_the_sender(hire: Hire, connections: int) -> None:
    procs = hire(ApartInTwos, 4, connections=connections)
    scheme = procs.scheme
    assert scheme.network_bytes <= 2 * (NBYTES + 4096)  # each host by itself, as it joined
    for value in (1.0, 2.0, 3.0):
        before = scheme.network_bytes
        report = scheme.send(Large(value))
        assert [value_of(worker) for worker in procs.workers] == [value] * 4
        assert scheme.network_bytes - before == report.wire_bytes


def test_siblings_map_the_same_memory(hire: Hire) -> None:
    procs = hire(ApartInTwos, 2)
    procs.scheme.send(Large(1.0))
    ours = [set(worker.call("run", mapped_slots)) for worker in procs.workers]
    assert ours[0] & ours[1]


def mapped_slots(body: Body) -> list[str]:
    with open("/proc/self/maps", encoding="ascii") as file:
        return [line.split()[4] for line in file if "weight_update-" in line]


def test_a_small_payload_goes_to_a_relay_only_if_its_host_has_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relayed: list[int] = []
    deliver = Router.deliver

    def delivered(self: Router, payload: torch.Tensor, *rest: Any) -> bytes:
        relayed.append(payload.numel())
        return deliver(self, payload, *rest)

    monkeypatch.setattr(Router, "deliver", delivered)
    scheme = ApartInTwos(timeout=TIMEOUT)
    model = nn.Linear(200, 200)
    scheme.init_on_sender(model=model, num_workers=1, ctx=context_of("fork"))
    with WorkerProcesses(scheme) as procs:

        def send() -> None:
            before = scheme.network_bytes
            report = scheme.send()
            assert scheme.network_bytes - before == report.wire_bytes > 0
            assert [worker.call("run", of_model) for worker in procs.workers] == [fingerprint(model)] * len(
                procs.workers
            )

        procs.hire(0, nn.Linear(200, 200))
        procs.connect()
        send()
        assert relayed == []
        procs.hire(1, nn.Linear(200, 200)).call("connect")
        relayed.clear()
        send()
        assert len(relayed) == 2
        procs.workers.pop().call("shutdown")
        relayed.clear()
        wait_until(lambda: len(scheme.worker_versions) == 1, 5.0)
        send()
        assert relayed == []


def of_model(body: Body) -> str:
    with body.scheme.hold():
        return fingerprint(body.model)


@pytest.mark.parametrize("encoding", quick_for(["patch", "bucket", "kept bucket"], "patch"))
def test_patches_and_buckets_travel_once_too(hire: Hire, encoding: str) -> None:
    made = {
        "patch": PatchEncoding(),
        "bucket": BucketEncoding(bucket_size=8 << 20),
        "kept bucket": BucketEncoding(bucket_size=8 << 20, load_instant=False),
    }[encoding]
    procs = hire(ApartInTwos, 4, made)
    source = Large(0.0)
    for step in range(4):
        with torch.no_grad():
            source.weight[step::50] += 1
        before = procs.scheme.network_bytes
        report = procs.scheme.send(source)
        assert procs.ask("fingerprint") == [fingerprint(source)] * 4
        assert procs.scheme.network_bytes - before == report.wire_bytes
    assert report.encoding == made.label


def test_only_hosts_that_are_to_get_it(hire: Hire) -> None:
    procs = hire(Apart, 3)
    before = procs.scheme.network_bytes
    report = procs.scheme.send(Large(1.0), worker_ids=[0, 2])
    assert procs.scheme.network_bytes - before == report.wire_bytes
    assert [value_of(worker) for worker in procs.workers] == [1.0, 0.0, 1.0]
    procs.scheme.send(Large(2.0))
    assert [value_of(worker) for worker in procs.workers] == [2.0] * 3


def test_send_async_does_not_wait_for_a_host_that_does_not_read(hire: Hire) -> None:
    procs = hire(Apart, 2)
    freeze(procs.workers[0].runner.pid)
    start = time.monotonic()
    handle = procs.scheme.send_async(Large(1.0))
    assert time.monotonic() - start < TIMEOUT / 2
    assert not handle.done()
    os.kill(procs.workers[0].runner.pid, signal.SIGCONT)
    handle.wait()
    assert [value_of(worker) for worker in procs.workers] == [1.0] * 2


def test_whatever_goes_wrong_in_a_thread_that_sends_is_told(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    procs = hire(Apart, 2)

    def broken(*_: Any) -> None:
        raise ArithmeticError("nobody thought of this")

    monkeypatch.setattr(procs.scheme._sender.table[0].link, "send_chunk", broken)
    with pytest.raises(SyncFailedError, match="nobody thought of this") as caught:
        procs.scheme.send(Large(1.0))
    assert set(caught.value.failures) == {0}
    assert value_of(procs.workers[1]) == 1.0


class ApartInThrees(Apart):
    per_host = 3


def test_a_worker_that_joins_maps_what_its_host_holds(hire: Hire) -> None:
    procs = hire(ApartInThrees, 2)
    procs.scheme.send(Large(1.0))
    before = procs.scheme.network_bytes
    procs.hire(2, Large(-1.0)).call("connect")
    assert value_of(procs.workers[2]) == 1.0
    assert procs.scheme.network_bytes == before


def test_a_worker_joins_though_the_one_that_has_the_weights_dies_meanwhile(hire: Hire) -> None:
    procs = hire(ApartInTwos, 1)
    procs.scheme.send(Large(1.0))
    late = procs.hire(1, Large(-1.0))
    late.call("run", kill_holder)
    late.call("connect")
    assert value_of(late) == 1.0


def kill_holder(body: Body) -> None:
    """Have this worker kill the one whose copy of the weights it is about to map."""
    open_slot = connection.open_slot

    def kill_first(pid: int, fd: int, key: str) -> Any:
        connection.open_slot = open_slot
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}/fd/{fd}"))
        return open_slot(pid, fd, key)

    connection.open_slot = kill_first


@pytest.mark.parametrize("victim", quick_for([0, 1], 0), ids=["relay", "sibling"])
def test_killed_before_an_update(hire: Hire, victim: int) -> None:
    procs = hire(ApartInTwos, 2)
    send_signal(procs.workers[victim], signal.SIGKILL)
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send(Large(1.0))
    assert set(caught.value.failures) == {victim}
    assert value_of(procs.workers[1 - victim]) == 1.0


@several_connections
def test_relay_killed_in_the_middle(hire: Hire, connections: int) -> None:
    procs = hire(ApartInTwos, 2, connections=connections)
    send_signal(procs.workers[0], signal.SIGSTOP)  # so that it is the middle
    kill_later(procs.workers[0])
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send(Large(1.0))
    assert set(caught.value.failures) == {0}
    assert value_of(procs.workers[1]) == 1.0


def kill_later(worker: Worker) -> None:
    """Kill the worker in half a second, while the caller is busy."""
    pid = worker.runner.pid
    if os.fork() == 0:
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def test_stopped_relay_is_given_up_for_a_sibling(hire: Hire) -> None:
    procs = hire(ApartInTwos, 2)
    send_signal(procs.workers[0], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send(Large(1.0))
    assert time.monotonic() - start < TIMEOUT
    assert set(caught.value.failures) == {0}
    assert value_of(procs.workers[1]) == 1.0
    send_signal(procs.workers[0], signal.SIGCONT)
    assert has(procs.workers[0], 1.0)
    procs.scheme.send(Large(2.0))
    assert [value_of(worker) for worker in procs.workers] == [2.0] * 2


@several_connections
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_middle_of_a_chain(hire: Hire, end: str, connections: int) -> None:
    procs = hire(Apart, 3, connections=connections, timeout=4.0)
    procs.scheme.send(Large(1.0))
    send_signal(procs.workers[1], signal.SIGSTOP)
    if end == "killed":
        kill_later(procs.workers[1])
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send(Large(2.0))
    assert set(caught.value.failures) == {1}
    assert [value_of(procs.workers[index]) for index in (0, 2)] == [2.0] * 2
    if end == "killed":
        procs.workers[1].runner.join()
        procs.workers[1] = Worker(procs.scheme, 1, "fork")
        procs.workers[1].call("init", Large(-1.0))
        procs.workers[1].call("connect")
    send_signal(procs.workers[1], signal.SIGCONT)
    assert has(procs.workers[1], 2.0)
    wait_until(lambda: procs.scheme.worker_versions[1] == 2)  # else it would be sent the next version later
    before = procs.scheme.network_bytes
    report = procs.scheme.send(Large(3.0))
    assert [value_of(worker) for worker in procs.workers] == [3.0] * 3
    assert procs.scheme.network_bytes - before == report.wire_bytes  # the chain is whole again


@pytest.mark.slow
def test_others_stay_connected_when_a_host_does_not_answer(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    procs = hire(Apart, 3, timeout=1.6)
    procs.scheme.send(Large(1.0))
    joins: list[Any] = []  # a worker that is cut off joins again at once
    for index in (0, 2):
        monkeypatch.setattr(procs.scheme._sender.table[index].link, "on_join_request", joins.append)
    send_signal(procs.workers[1], signal.SIGSTOP)
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send(Large(2.0))
    assert set(caught.value.failures) == {1}
    assert [value_of(procs.workers[index]) for index in (0, 2)] == [2.0] * 2
    assert joins == []


@pytest.mark.slow
def test_a_sibling_that_holds_delays_nobody(hire: Hire) -> None:
    procs = hire(ApartInTwos, 4)
    for holding in (0, 1):  # the relay, too
        procs.workers[holding].call("hold")
        others = [index for index in range(4) if index != holding]
        for value in (1.0, 2.0, 3.0):
            start = time.monotonic()
            procs.scheme.send(Large(value), worker_ids=others)
            assert time.monotonic() - start < TIMEOUT / 2
        procs.workers[holding].call("release")


def test_one_that_left_keeps_its_weights_whole(hire: Hire) -> None:
    """Its model still points at memory that other workers of the host get new versions in."""
    procs = hire(ApartInTwos, 2)
    procs.scheme.send(Large(1.0))
    procs.workers[1].call("shutdown")
    for value in (2.0, 3.0, 4.0, 5.0, 6.0):
        procs.scheme.send(Large(value), worker_ids=0)
    assert procs.workers[1].call("run", read_freely) == (1.0, 1.0)


def read_freely(body: Body) -> tuple[float, float]:
    low, high = body.model.weight.detach().aminmax()
    return float(low), float(high)


@pytest.mark.slow
def test_replicas_do_not_pile_up(hire: Hire) -> None:
    procs = hire(ApartInTwos, 2, PatchEncoding())
    source = Large(0.0)
    inherited = procs.ask("run", open_slots)
    for step in range(25):
        with torch.no_grad():
            source.weight[: 100_000 * (step + 1)] += 1  # another size of patch each time
        procs.scheme.send(source)
    counts = procs.ask("run", open_slots)
    assert max(now - before for now, before in zip(counts, inherited, strict=True)) <= 14


def open_slots(body: Body) -> int:
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2)
    return sum("weight_update-" in link for link in _existing(links))


def _existing(links: Iterator[str]) -> Iterator[str]:
    while True:
        try:
            yield next(links)
        except StopIteration:
            return
        except FileNotFoundError:  # the one that lists
            continue


def test_death_of_a_worker_with_a_tiny_model_is_noticed() -> None:
    scheme = Apart(timeout=TIMEOUT)
    with start_workers(scheme, [mlp(2)], model=mlp(1)) as procs:
        procs.workers[0].runner.kill()
        wait_until(lambda: scheme.worker_versions[0] is None, 5.0)


def test_death_of_a_worker_before_it_connects_for_payloads_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected, run = context_of("fork").Event(), HostRelay._run

    def die(relay: HostRelay) -> None:
        if multiprocessing.parent_process() is not None and connected.wait(30.0):
            os.kill(os.getpid(), signal.SIGKILL)
        run(relay)

    monkeypatch.setattr(HostRelay, "_run", die)
    scheme = Apart(timeout=TIMEOUT)
    with start_workers(scheme, [mlp(2)], model=mlp(1)):
        connected.set()
        wait_until(lambda: scheme.worker_versions[0] is None, 5.0)


def test_a_connection_for_payloads_that_breaks_at_once_is_closed_and_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[SignedStream] = []
    send_json = SignedStream.send_json

    def fail_once(self: SignedStream, value: Any, *args: Any) -> None:
        if value.get("do") == "take payloads" and not failed:
            failed.append(self)
            raise LinkClosedError("the sender was busy")
        send_json(self, value, *args)

    monkeypatch.setattr(SignedStream, "send_json", fail_once)
    scheme = Apart(timeout=TIMEOUT)
    with start_workers(scheme, [Large(1.0)], "thread", model=Large(0.0)) as procs:
        scheme.send(Large(2.0))
        assert [value_of(worker) for worker in procs.workers] == [2.0]
    assert [one.stream.sock.fileno() for one in failed] == [-1]


@pytest.mark.parametrize("end", ["sender", "worker"])
def test_a_forked_child_leaves_the_chain_alone(hire: Hire, end: str) -> None:
    procs = hire(Apart, 2)
    procs.scheme.send(Large(1.0))
    statuses = [fork_and_end(None)] if end == "sender" else procs.ask("run", fork_and_end)
    assert set(statuses) == {0}
    for value in (2.0, 3.0, 4.0):
        procs.scheme.send(Large(value))
        assert [value_of(worker) for worker in procs.workers] == [value] * 2


def fork_and_end(body: Body | None) -> int:
    del body
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_nccl_without_cuda_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="use backend='gloo'"):
        DistributedWeightSyncScheme(backend="nccl")


def test_several_connections_are_for_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "require_backend", lambda backend: None)  # there may be no CUDA
    with pytest.raises(ValueError, match="connections= is for backend='gloo'; omit it"):
        DistributedWeightSyncScheme(backend="nccl", connections=2)


@pytest.mark.parametrize("connections", [0, 65, 2.0, None])
def test_numbers_of_connections(connections: Any) -> None:
    with pytest.raises(ValueError, match="connections is an integer from 1 to 64"):
        DistributedWeightSyncScheme(connections=connections)


def test_a_worker_makes_as_many_connections_as_the_sender_says() -> None:
    scheme = Apart(timeout=TIMEOUT, connections=3)
    with start_workers(scheme, [Large(1.0)], "thread", model=Large(0.0)) as procs:
        scheme.send(Large(2.0))
        assert [value_of(worker) for worker in procs.workers] == [2.0]
        (remote_end,) = scheme.listener.router._remotes
        assert len(remote_end.relay_client._stream.get(0.0).streams) == 3


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="known: 'gloo', 'nccl'"):
        DistributedWeightSyncScheme(backend="mpi")


# -- parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 2047, 2048, 2049, BLOCK, BLOCK + 13])
def test_checksum_finds_any_single_bit(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    expected = checksum(data)
    places = range(size) if size < 64 else [*torch.randint(0, size, (8,)).tolist(), 0, size - 1]
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(data) != expected
            data[place] ^= 1 << bit
    assert checksum(data) == expected


def test_checksum_finds_blocks_that_changed_places() -> None:
    blocks = torch.randint(0, 256, (2, BLOCK), dtype=torch.uint8)
    assert checksum(blocks.flatten()) != checksum(blocks.flip(0).flatten())


def checksum(data: torch.Tensor) -> str:
    total = Checksum()
    for start in range(0, data.numel(), BLOCK):
        total.add(data[start : start + BLOCK])
    return joint_hex([total])


def test_the_checksum_does_not_depend_on_the_pieces() -> None:
    data = torch.randint(0, 256, (BLOCK + 5000,), dtype=torch.uint8)
    total = Checksum()
    for piece in data.split(BLOCK // 4):
        total.add(piece)
    assert joint_hex([total]) == checksum(data)


@pytest.mark.slow
def test_a_host_without_memory_for_a_while(hire: Hire) -> None:
    """Its workers report it and keep their version; other hosts get the update; all get the next one."""
    procs = hire(ApartInTwos, 4)
    for worker in procs.workers[:2]:
        worker.call("run", have_no_memory, True)
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send(Large(1.0))
    assert set(caught.value.failures) == {0, 1}
    assert all("NotEnoughMemoryError: too small" in str(one) for one in caught.value.failures.values())
    assert [value_of(worker) for worker in procs.workers] == [0.0, 0.0, 1.0, 1.0]
    for worker in procs.workers[:2]:
        worker.call("run", have_no_memory, False)
    procs.scheme.send(Large(2.0))
    assert [value_of(worker) for worker in procs.workers] == [2.0] * 4


def have_no_memory(body: Body, on: bool) -> None:
    """Refuse memory for copies of the sender's slots from now on, or no longer."""
    if on:
        body.replica, HostRelay._replica = HostRelay._replica, _too_small
    else:
        HostRelay._replica = body.replica


def _too_small(self: HostRelay, slot: str, nbytes: int) -> Any:
    raise NotEnoughMemoryError("too small")


def test_a_payload_that_cannot_wait_for_the_usual_chain_takes_an_idle_worker() -> None:
    usual, other = (Mock(host="there", lost=None) for _ in range(2))
    router = Router()
    router.add(usual)
    router.add(other)
    router._busy[usual] = _Payload(1)

    def wake() -> None:
        with router._changed:
            router._changed.notify_all()

    threading.Timer(0.1, wake).start()  # after the deadline
    with router._changed:
        assert router._await_turn(_Payload(1), other, time.monotonic() + 0.05) == [other]
