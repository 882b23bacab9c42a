"""Pipelines: versions that travel in chunks while the next chunk is converted."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from marks import quick_for, slow
from pairs import connect_pair
from torch import nn

from weight_update import (
    BucketEncoding,
    ConversionError,
    DistributedWeightSyncScheme,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    UnsupportedSourceError,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.sender.sender import Sender
from weight_update.testing import Apart, WorkerProcesses, Zoo, fingerprint, scramble
from weight_update.testing.processes import freeze, wait_until
from weight_update.testing.workers import Method, Worker

SCHEMES: dict[str, tuple[type[WeightSyncScheme], Method]] = {
    "shared_mem": (SharedMemWeightSyncScheme, "fork"),
    "multiprocess": (MultiProcessWeightSyncScheme, "fork"),
    "distributed": (DistributedWeightSyncScheme, "fork"),
    "distributed, several hosts": (Apart, "fork"),
    "memory": (MemoryWeightSyncScheme, "thread"),
}
EACH = quick_for(SCHEMES, "memory", "shared_mem", "distributed, several hosts")
PROCESSES = ["shared_mem", "distributed, several hosts"]
CHUNK = 4096
LAYERS = 12


def layers(seed: int = 0) -> nn.Sequential:
    """Return a model in which the weight of each layer fills a chunk."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(LAYERS)))


def strategy(limit: int = 2, size: int = CHUNK, **options: Any) -> WeightStrategy:
    return WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=size), max_in_flight=limit, **options
    )


class Doubled:
    """A conversion that can be watched, and told to fail."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails_at: int | None = None
        self.closed = 0

    def __call__(self, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        self.asked = 0
        try:
            for name, tensor in items:
                if self.asked == self.fails_at:
                    raise ZeroDivisionError("the conversion broke")
                self.asked += 1
                yield name, tensor * 2
        finally:
            self.closed += 1


@pytest.fixture
def hire(hired: Callable[..., WorkerProcesses]) -> Callable[..., WorkerProcesses]:
    def build(kind: str, source: Any, target: Any, workers: int = 1, **options: Any) -> WorkerProcesses:
        cls, method = SCHEMES[kind]
        scheme = cls(**{"timeout": 20.0, "connect_timeout": 30.0, **options})
        return hired(scheme, [target] * workers, method, model=source)

    return build


def doubled(model: nn.Module) -> dict[str, str]:
    return fingerprint({name: 2 * value for name, value in model.state_dict().items()})


@pytest.mark.parametrize("limit", quick_for([1, 2, 5], 2))
@pytest.mark.parametrize("kind", EACH)
def test_same_bits(hire: Any, kind: str, limit: int) -> None:
    source, made = Zoo(1), strategy(limit, 256)
    procs = hire(kind, source, Zoo(2), workers=2, strategy=made)
    for seed in range(4):
        assert procs.ask("fingerprint") == [fingerprint(source, made)] * 2
        source.load_state_dict(Zoo(10 + seed).state_dict())
        report = procs.scheme.send()
        assert report.encoding == "bucket"
        assert set(report.seconds) == {"extract", "convert", "encode", "send", "ack"}
        assert procs.scheme.worker_versions == {0: report.version, 1: report.version}
    assert procs.ask("fingerprint") == [fingerprint(source, made)] * 2


@pytest.mark.parametrize("kind", EACH)
def test_converted_weights_in_a_dtype_of_the_receivers(hire: Any, kind: str) -> None:
    source = layers()
    procs = hire(kind, source, layers(5).to(torch.bfloat16), strategy=strategy(2, 5000, convert=Doubled()))
    scramble(source, 3, finite=True)
    procs.scheme.send()
    expected = {name: (2 * value).to(torch.bfloat16) for name, value in source.state_dict().items()}
    assert procs.ask("fingerprint") == [fingerprint(expected)]


def set_timeout(procs: WorkerProcesses, seconds: float) -> None:
    sender = procs.scheme._sender
    sender.timeout = sender._delivery.timeout = seconds


def stop(procs: WorkerProcesses, index: int = 0) -> int:
    pid = procs.workers[index].runner.pid
    freeze(pid)
    return pid


@pytest.mark.parametrize("limit", quick_for([1, 2, 4], 2))
@pytest.mark.parametrize("kind", PROCESSES)
def test_no_more_is_converted_than_may_be_in_flight(hire: Any, kind: str, limit: int) -> None:
    convert = Doubled()
    source = layers()
    procs = hire(kind, source, layers(5), strategy=strategy(limit, convert=convert))
    pid = stop(procs)
    sending = threading.Thread(target=procs.scheme.send)
    sending.start()
    wait_until(lambda: convert.asked >= limit)
    time.sleep(0.2)  # nothing that could be asked for meanwhile is
    assert convert.asked == limit
    os.kill(pid, signal.SIGCONT)
    sending.join(20)
    assert convert.asked == LAYERS
    assert procs.ask("fingerprint") == [doubled(source)]


@pytest.mark.parametrize("kind", ["shared_mem", "memory"])
def test_memory_of_the_sender_is_bounded(hire: Any, kind: str) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def convert(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in items:
            made = tensor + 1
            alive.add(made)
            most = max(most, len(alive))
            yield name, made
            del made

    procs = hire(kind, layers(), layers(5), strategy=strategy(3, convert=convert))
    for _ in range(3):
        procs.scheme.send()
    assert most <= 2  # of a dozen
    slots = procs.scheme._sender._pool._slots
    assert len(slots) <= 3
    assert {slot.buffer.tensor.numel() for slot in slots} == {CHUNK + 64}


@pytest.mark.parametrize("fails_at", quick_for([0, 1, LAYERS - 1], 1))
@pytest.mark.parametrize("kind", EACH)
def test_what_a_conversion_raises_stops_both_ends(hire: Any, kind: str, fails_at: int) -> None:
    convert, source = Doubled(), layers()
    procs = hire(kind, source, layers(5), strategy=strategy(convert=convert))
    before = doubled(source)
    convert.fails_at = fails_at
    scramble(source, 3, finite=True)
    with pytest.raises(ZeroDivisionError, match="the conversion broke"):
        procs.scheme.send()
    assert procs.ask("fingerprint") == [before]
    convert.fails_at = None
    report = procs.scheme.send()
    assert procs.ask("fingerprint") == [doubled(source)]
    assert procs.scheme.worker_versions == {0: report.version}


def test_an_error_of_a_conversion_is_raised_though_the_worker_left_before() -> None:
    leaving: list[WeightSyncScheme] = []

    def convert(items: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in items:
            yield item
            if leaving:
                leaving.pop().shutdown()
                wait_until(lambda: scheme.worker_versions == {0: None})
                raise ZeroDivisionError

    with MemoryWeightSyncScheme(strategy(convert=convert), timeout=20.0) as scheme:
        leaving.append(connect_pair(scheme, layers(), layers(5)))
        with pytest.raises(ZeroDivisionError):
            scheme.send()


@pytest.mark.parametrize("kind", ["memory", slow("distributed, several hosts")])
def test_a_send_right_after_a_failed_one_does_not_wait(hire: Any, kind: str) -> None:
    convert, source = Doubled(), layers()
    procs = hire(kind, source, layers(5), strategy=strategy(convert=convert))
    start = time.monotonic()
    for turn in range(20):
        convert.fails_at = turn % LAYERS
        with pytest.raises(ZeroDivisionError):
            procs.scheme.send()
        convert.fails_at = None
        procs.scheme.send()
    assert time.monotonic() - start < 15.0  # one wait that nobody ends takes 20


@pytest.mark.parametrize("limit", [None, 2])
def test_a_conversion_that_writes_into_the_trainer_is_refused(hire: Any, limit: int | None) -> None:
    writes = False

    def convert(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            yield name, tensor.mul_(0.5) if writes and name.startswith("3.") else tensor

    source = layers()
    made = WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=CHUNK), convert=convert, max_in_flight=limit
    )
    procs = hire("shared_mem", source, layers(5), strategy=made)
    before = fingerprint(source)
    writes = True
    with pytest.raises(ConversionError, match=r"'3.weight' was written to"):
        procs.scheme.send()
    assert procs.ask("fingerprint") == [before]


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (dict, r"pairs of a name and a tensor are wanted; of a dict, return the items\(\)"),
        (lambda items: ((name, tensor, 1) for name, tensor in items), "pairs of a name and a tensor"),
        (lambda items: None, "called first"),
        (lambda items: ((name, 1.0) for name, _ in items), "not a tensor"),
    ],
)
def test_what_is_no_conversion_is_named(convert: Any, said: str) -> None:
    scheme = MemoryWeightSyncScheme(strategy=strategy(convert=convert))
    with pytest.raises(UnsupportedSourceError, match=said):
        scheme.init_on_sender(model=layers(), num_workers=1)


def test_a_list_of_conversions_is_to_be_chained() -> None:
    with pytest.raises(ValueError, match=r"chain\(\)"):
        strategy(convert=[Doubled(), Doubled()])


@pytest.mark.parametrize("change", ["name", "shape", "fewer", "more", "dtype"])
def test_a_conversion_that_gives_something_else_than_before(hire: Any, change: str) -> None:
    wrong = False

    def convert(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            if not wrong or change == "more" or not name.startswith("7."):
                yield name, tensor
            elif change == "name":
                yield "seven", tensor
            elif change == "shape":
                yield name, tensor.flatten()
            elif change == "dtype":
                yield name, tensor.double()
        if wrong and change == "more":
            yield "more", torch.zeros(3)

    source = layers()
    procs = hire("shared_mem", source, layers(5), strategy=strategy(convert=convert))
    before = fingerprint(source)
    wrong = True
    scramble(source, 3, finite=True)
    expected = {"name": "'seven'", "more": "'more'", "fewer": "'8.weight'"}.get(change, "'7.weight'")
    with pytest.raises(SchemaMismatchError, match=expected):
        procs.scheme.send()
    assert procs.ask("fingerprint") == [before]
    wrong = False
    procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source)]


@pytest.mark.parametrize("converting", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (torch.Tensor.to_sparse, r"'7.weight' is a torch.sparse_coo tensor .* to_dense\(\)"),
        (lambda tensor: tensor.to("meta"), "on the meta device, without values to send: 7.weight"),
    ],
    ids=["sparse", "meta"],
)
def test_a_weight_that_cannot_be_sent_is_named(hire: Any, change: Any, said: str, converting: bool) -> None:
    wrong = False

    def changed(items: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            yield name, change(tensor.detach()) if wrong and name == "7.weight" else tensor

    source = layers()
    procs = hire("memory", source, layers(5), strategy=strategy(convert=changed if converting else None))
    before = fingerprint(source)
    wrong = True
    with pytest.raises(UnsupportedSourceError, match=said):
        procs.scheme.send(None if converting else dict(changed(source.state_dict().items())))
    assert procs.ask("fingerprint") == [before]
    wrong = False
    procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source)]


def test_weights_in_another_order(hire: Any) -> None:
    source = layers()
    procs = hire("memory", source, layers(5), strategy=strategy())
    scramble(source, 3, finite=True)
    procs.scheme.send(dict(reversed(source.state_dict().items())))
    assert procs.ask("fingerprint") == [fingerprint(source)]


def test_weights_of_one_worker_that_do_not_fit_change_no_worker(hire: Any) -> None:
    source = layers()
    procs = hire("memory", source, layers(5), 2, strategy=strategy())
    expected = [fingerprint(source)] * 2
    with pytest.raises(SchemaMismatchError, match=r"\(2 differences\):\n.* 11.weight.*\n.* more"):
        procs.scheme.send({0: layers(6), 1: {**layers(7)[:-1].state_dict(), "more": torch.zeros(3)}})
    with pytest.raises(
        SchemaMismatchError, match=r" 0.weight.*: dtype bfloat16(?s:.*) 11.weight.*: dtype bfloat16"
    ):
        procs.scheme.send({0: layers(6), 1: layers(7).bfloat16()})
    assert procs.ask("fingerprint") == expected
    assert set(procs.scheme.worker_versions.values()) == {0}


@pytest.mark.parametrize("kind", quick_for(PROCESSES, "shared_mem"))
def test_a_worker_killed_in_the_middle_is_named_and_the_others_go_on(hire: Any, kind: str) -> None:
    source, convert = layers(), Doubled()
    procs = hire(kind, source, layers(5), workers=2, strategy=strategy(convert=convert))
    pid = stop(procs)
    scramble(source, 3, finite=True)
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send()
    assert set(caught.value.failures) == {0}
    assert procs.workers[1].call("fingerprint") == doubled(source)
    procs.workers.pop(0)
    procs.scheme.send(worker_ids=1)


def test_a_held_worker_is_waited_for_once(hire: Any) -> None:
    """It delays one more send() than the one that it missed, and none after that."""
    source, timeout = layers(1), 1.0
    procs = hire("memory", source, layers(2), workers=2, strategy=strategy(), timeout=timeout)
    procs.workers[0].call("hold")
    seconds = []
    for seed in range(4):
        scramble(source, seed)
        start = time.monotonic()
        with pytest.raises(SyncFailedError, match="worker 0") as caught:
            procs.scheme.send()
        seconds.append(time.monotonic() - start)
        assert set(caught.value.failures) == {0}
        assert procs.workers[1].call("fingerprint") == fingerprint(source)
    assert max(seconds[2:]) < timeout / 2 < seconds[1]
    procs.workers[0].call("release")
    wait_until(lambda: procs.scheme.worker_versions[0] == 1)
    assert set(procs.scheme.send().apply_seconds) == {0, 1}


def test_everybody_is_gone(hire: Any) -> None:
    convert = Doubled()
    procs = hire("shared_mem", layers(), layers(5), strategy=strategy(convert=convert))
    procs.workers.pop().stop()
    with pytest.raises(SyncFailedError):
        procs.scheme.send()
    assert convert.asked <= 2
    assert convert.closed == 3  # for the schema, for the first weights, and now


@pytest.mark.parametrize("kind", quick_for(PROCESSES, "shared_mem"))
def test_one_that_joins_later_gets_weights_with_the_next_send(hire: Any, kind: str) -> None:
    source = layers()
    procs = hire(kind, source, layers(5), workers=2, strategy=strategy())
    procs.workers.pop(0).stop()
    with pytest.raises(SyncFailedError):
        procs.scheme.send()
    back = procs.hire(0, layers(6))
    back.post("connect")
    deadline = time.monotonic() + 20
    while back.busy(0.05) and time.monotonic() < deadline:
        procs.scheme.send(worker_ids=1)
        try:
            procs.scheme.send()
        except SyncFailedError:
            continue
    assert back.answer() is None
    scramble(source, 5)
    procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source)] * 2


def send_until_answered(scheme: WeightSyncScheme, worker: Worker) -> None:
    """Send until a worker has connected: it is sent the first version that begins after it has joined."""
    deadline = time.monotonic() + 20
    while worker.busy(0.05) and time.monotonic() < deadline:
        scheme.send()
    assert not worker.busy(0.05)
    assert worker.answer() is None


def test_all_workers_are_late_joiners(hire: Any) -> None:
    source = layers()
    procs = hire("shared_mem", source, None, workers=0, strategy=strategy())
    assert procs.scheme.send().apply_seconds == {}
    worker = procs.hire(3, layers(5))
    worker.post("connect")
    send_until_answered(procs.scheme, worker)
    scramble(source, 5)
    assert set(procs.scheme.send().apply_seconds) == {3}
    assert worker.call("fingerprint") == fingerprint(source)


def test_a_late_joiner_comes_before_the_workers_that_connect_waits_for() -> None:
    source = layers()
    scheme = SharedMemWeightSyncScheme(strategy=strategy(), timeout=20.0, connect_timeout=30.0)
    scheme.init_on_sender(model=source, num_workers=1)
    connecting = threading.Thread(target=scheme.connect)
    with WorkerProcesses(scheme, "fork") as procs:
        late, initial = procs.hire(3, layers(5)), procs.hire(0, layers(6))
        connecting.start()
        late.post("connect")
        sender = scheme._sender
        assert isinstance(sender, Sender)
        wait_until(lambda: 3 in sender.table and sender.table[3].connections > 0, 20)
        initial.post("connect")
        connecting.join(30)
        assert initial.answer() is None
        send_until_answered(scheme, late)
        assert late.call("fingerprint") == fingerprint(source)


def test_bytes_count_for_workers_that_are_there(hire: Any) -> None:
    source = layers()
    procs = hire("memory", source, None, workers=0, strategy=strategy())
    assert procs.scheme.send().wire_bytes == 0
    worker = procs.hire(3, layers(5))
    worker.post("connect")
    send_until_answered(procs.scheme, worker)
    report = procs.scheme.send()
    assert LAYERS * CHUNK <= report.wire_bytes < 1.1 * LAYERS * CHUNK
    assert report.dense_bytes == sum(one.nbytes for one in source.parameters())


def test_sends_that_nobody_waits_for(hire: Any) -> None:
    source = layers()
    procs = hire("shared_mem", source, layers(5), workers=2, strategy=strategy())
    handles = []
    for seed in range(5):
        scramble(source, seed)
        handles.append(procs.scheme.send_async())
        scramble(source, 50)  # what was sent does not change any more
    scramble(source, 4)
    handles[-1].wait()
    assert all(handle.done() for handle in handles)
    assert procs.ask("fingerprint") == [fingerprint(source)] * 2


@pytest.mark.parametrize("encoding", ["dense", "patch", BucketEncoding(load_instant=False)])
def test_only_what_travels_in_chunks(encoding: Any) -> None:
    with pytest.raises(ValueError, match="encoding='bucket'"):
        WeightStrategy(encoding=encoding, max_in_flight=2)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2"])
def test_max_in_flight_is_a_number_of_chunks(limit: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        WeightStrategy(encoding="bucket", max_in_flight=limit)
