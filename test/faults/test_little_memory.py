"""Too little shared memory is an error at initialization, and the message names the cure."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import multiprocessing
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_kinds import quick_over
from faults_tools import (
    START,
    Processes,
    Stripes,
    Worker,
    eventually,
    fill,
    hold,
    let_go,
    version_of,
    wait_version,
)
from pairs import connect_pair

from weight_update import (
    BucketEncoding,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NotEnoughMemoryError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightStrategy,
)
from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.receiver.receiver import Receiver
from weight_update.receiver.staging import Staging
from weight_update.transports import memory_limits
from weight_update.transports.shared_memory import slots
from weight_update.transports.shared_memory.transport import SlotStream
from weight_update.wire.frames import Kind, WeightChunk


def one_megabyte() -> Stripes:
    return Stripes(4, 1 << 16)


def half_a_megabyte() -> Stripes:
    return Stripes(4, 25_000)  # two slots fit into 1 MiB, three do not


def test_a_mount_that_is_too_small(kind, procs: Processes, small_mount: Path) -> None:
    scheme = procs.scheme(kind, directory=str(small_mount))
    with pytest.raises(NotEnoughMemoryError, match=r"1\.0 MB") as caught:
        scheme.init_on_sender(model=one_megabyte(), num_workers=1)
    assert str(small_mount) in str(caught.value)
    assert "remount,size=" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert not scheme.initialized_on_sender
    use(procs, scheme)


def use(procs: Processes, scheme) -> None:
    """Check that the scheme works with a model that fits."""
    model = half_a_megabyte()
    (worker,) = procs.launch(scheme, model, half_a_megabyte, 1)
    for version in range(1, 4):
        scheme.send(fill(model, version))
    assert worker.call(version_of) == 3


def use_both_slots(procs: Processes, kind, mount: Path, timeout: float):
    """Have a worker hold one slot and lack the update in the other; a third one does not fit in."""
    scheme, model = procs.scheme(kind, directory=str(mount), timeout=timeout), half_a_megabyte()
    (worker,) = procs.launch(scheme, model, half_a_megabyte, 1)
    worker.call(hold)
    scheme.send_async(fill(model, 1))
    return scheme, model, worker


@quick_over("shared_mem")
def test_no_room_for_a_third_slot(kind, procs: Processes, small_mount: Path) -> None:
    """Two slots are reserved: asynchronous sends wait for one of them instead of failing."""
    scheme, model, worker = use_both_slots(procs, kind, small_mount, 20.0)
    worker.begin(_let_go_soon)
    scheme.send_async(fill(model, 2))
    worker.result()
    assert worker.call(wait_version, 2, 10.0) == 2


@quick_over("shared_mem")
def test_no_room_for_a_third_slot_in_time(kind, procs: Processes, small_mount: Path) -> None:
    scheme, model, worker = use_both_slots(procs, kind, small_mount, 1.0)
    with pytest.raises(NotEnoughMemoryError, match=r"remount,size=.*; workers did not release any in time"):
        scheme.send_async(fill(model, 2))
    worker.call(let_go)


def _let_go_soon(me) -> None:
    import time

    time.sleep(0.5)
    let_go(me)


def test_too_little_anonymous_memory(kind, procs: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = procs.scheme(kind)
    with monkeypatch.context() as patch:
        patch.setattr(memory_limits, "available_memory", lambda: 900_000)
        with pytest.raises(NotEnoughMemoryError, match=r"1\.0 MB .* 0\.9 MB"):
            scheme.init_on_sender(model=one_megabyte(), num_workers=1)
        assert not scheme.initialized_on_sender
    use(procs, scheme)


def test_a_directory_that_does_not_exist(kind, procs: Processes) -> None:
    scheme = procs.scheme(kind, directory="/nowhere")
    with pytest.raises(OSError, match="/nowhere"):
        scheme.init_on_sender(model=half_a_megabyte(), num_workers=1)
    scheme.directory = None
    use(procs, scheme)


@pytest.mark.slow
def test_no_room_for_queues() -> None:
    """A container's /dev/shm of 64 MB may be full of other programs' files."""
    ctx = multiprocessing.get_context("spawn")
    ours, theirs = ctx.Pipe()
    worker = ctx.Process(target=_init_with_full_shm, args=(theirs,))
    worker.start()
    theirs.close()
    found = ours.recv()
    worker.join()
    if found is None:
        pytest.skip("this machine does not let us mount another /dev/shm")
    number, reason, initialized = found
    assert number == errno.ENOSPC
    assert re.search("queues for 2 workers.*No space left.*/dev/shm.*SharedMemWeightSyncScheme", reason)
    assert not initialized


def _init_with_full_shm(pipe: Any) -> None:
    import ctypes
    import subprocess

    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
    alone = ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    private = alone and subprocess.run(["mount", "--make-rprivate", "/"], check=False).returncode == 0
    if not private or subprocess.run(mount, check=False).returncode != 0:
        pipe.send(None)
        return
    Path("/dev/shm/other").write_bytes(bytes(4096))
    scheme = MultiProcessWeightSyncScheme()
    try:
        scheme.init_on_sender(model=half_a_megabyte(), num_workers=2)
    except OSError as error:
        pipe.send((error.errno, str(error), scheme.initialized_on_sender))


ENCODINGS = {"dense": "dense", "bucket": BucketEncoding(bucket_size=4 << 20)}


@quick_over("shared_mem")
@pytest.mark.parametrize("encoding", ["dense", pytest.param("bucket", marks=pytest.mark.slow)])
def test_a_worker_without_memory_for_a_while(kind, procs: Processes, encoding: str) -> None:
    """A worker without memory is named, keeps its version, and takes the next update that fits."""
    scheme = procs.scheme(kind, timeout=20.0, strategy=WeightStrategy(encoding=ENCODINGS[encoding]))
    model = large()
    short, other = procs.launch(scheme, model, large, 2)
    short.call(limit_memory)
    with pytest.raises(SyncFailedError, match="worker 0") as caught:
        scheme.send(fill(model, 1))
    assert set(caught.value.failures) == {0}
    assert "NotEnoughMemoryError" in str(caught.value.failures[0])
    assert short.call(values_of) == (0, {0.0})
    assert other.call(values_of) == (1, {1.0})
    short.call(end_limit)
    for version in (2, 3, 4):
        scheme.send(fill(model, version))
        assert short.call(values_of) == (version, {float(version)})


@quick_over("shared_mem")
def test_a_worker_without_descriptors_for_a_while(kind, procs: Processes) -> None:
    """A worker at its limit of open files is named, with the limit, and takes the next update that it can."""
    scheme, model = procs.scheme(kind, timeout=20.0), half_a_megabyte()
    short, other = procs.launch(scheme, model, half_a_megabyte, 2)
    limits = short.call(limit_descriptors)
    with pytest.raises(SyncFailedError, match=r"worker 0: NotEnoughMemoryError.*ulimit -n") as caught:
        scheme.send(fill(model, 1))
    assert set(caught.value.failures) == {0}
    assert short.call(values_of) == (0, {0.0})
    assert other.call(values_of) == (1, {1.0})
    short.call(end_descriptor_limit, limits)
    scheme.send(fill(model, 2))
    assert short.call(values_of) == (2, {2.0})


def limit_descriptors(me: Worker) -> tuple[int, int]:
    """Leave this process one descriptor, which a slot arrives with; a mapping takes another one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(number) for number in os.listdir("/proc/self/fd")}  # one of them was listdir's own
    most = next(number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    return limits


def end_descriptor_limit(me: Worker, limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def large() -> Stripes:
    return Stripes(2, 5 << 20)  # more than C's allocator ever serves from memory that it holds


def limit_memory(me: Worker) -> None:
    """Leave this process no block of memory that is much larger than 1 MB."""
    gc.collect()  # garbage of earlier tests, which this process inherited, would make room later
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (2 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    me.hoard = []
    for megabytes in (64, 16, 4, 2):  # blocks that C's allocator still holds
        with contextlib.suppress(RuntimeError):
            while True:
                me.hoard.append(torch.empty(megabytes << 20, dtype=torch.uint8))


def end_limit(me: Worker) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    me.hoard = []


def values_of(me: Worker) -> tuple[int, set[float]]:
    """Return the version and the set of all values."""
    with me.scheme.hold():
        return me.scheme.version, set(me.model(START).tolist())


@pytest.mark.parametrize("encoding", ["dense", "bucket", "patch"])
def test_no_memory_to_receive_into(procs: Processes, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """If weights are copied as they arrive, an allocation that fails costs one update."""
    scheme = procs.scheme(MemoryWeightSyncScheme, timeout=20.0, strategy=WeightStrategy(encoding=encoding))
    model, mine = half_a_megabyte(), half_a_megabyte()
    receiver = connect_pair(scheme, model, mine)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "allocate", _refuse)
        with pytest.raises(SyncFailedError, match="NotEnoughMemoryError"):
            scheme.send(fill(model, 1))
    assert receiver.version == 0
    scheme.send(fill(model, 2))
    assert set(mine(START).tolist()) == {2.0}
    receiver.shutdown()


@pytest.mark.parametrize("options", [{}, {"encoding": "patch"}], ids=["dense", "patch"])
def test_a_worker_with_a_lower_limit_than_a_buffer(
    procs: Processes, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The kernel would kill it when it writes there."""
    scheme = procs.scheme(MemoryWeightSyncScheme, timeout=20.0, strategy=WeightStrategy(**options))
    model, mine = one_megabyte(), one_megabyte()
    message = r"a buffer for weights of 1\.0 MB is needed and 0\.9 MB of memory are available to this process"
    with monkeypatch.context() as patch:
        patch.setattr(memory_limits, "available_memory", lambda: 900_000)
        with pytest.raises(SyncFailedError, match=message):
            connect_pair(scheme, model, mine)


def test_a_sender_that_does_not_read_of_a_shortage_in_time(
    procs: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver joins again, and its thread does not end."""
    scheme = procs.scheme(SharedMemWeightSyncScheme, timeout=20.0)
    model, mine = half_a_megabyte(), half_a_megabyte()
    receiver = connect_pair(scheme, model, mine)
    send = SlotStream.send

    def fail(*_: object) -> None:
        raise NotEnoughMemoryError("a file descriptor is needed")

    def send_late(stream: SlotStream, chunk: WeightChunk, timeout: float | None) -> None:
        if chunk.kind is Kind.FAILED:
            patch.undo()
            raise SyncTimeoutError("the other end does not read")
        send(stream, chunk, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(slots.SlotTable, "payload", fail)
        patch.setattr(SlotStream, "send", send_late)
        scheme.send_async(fill(model, 1))
        assert eventually(lambda: set(mine(START).tolist()) == {1.0}, 15.0)
    receiver.shutdown()


HELLO, WELCOME = (Receiver, "_greet"), (Staging, "begin_with")
SHORTAGES: dict[str, tuple[tuple[type, str], Exception, dict[str, Any]]] = {
    "memory": (HELLO, MemoryError(), {}),
    "thread": (HELLO, RuntimeError("can't start new thread"), {}),
    "reader": (
        HELLO,
        LinkClosedError("no thread could be started to read the store (can't start new thread)"),
        {},
    ),
    "welcome": (WELCOME, MemoryError(), {}),
    "welcome without a version": (WELCOME, MemoryError(), {"encoding": "bucket", "max_in_flight": 2}),
}


@pytest.mark.parametrize(("step", "shortage", "options"), SHORTAGES.values(), ids=SHORTAGES)
def test_no_memory_to_join_again(
    procs: Processes,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[type, str],
    shortage: Exception,
    options: dict[str, Any],
) -> None:
    """The receiver tries again while memory is short, instead of ending for good."""
    scheme = procs.scheme(SharedMemWeightSyncScheme, timeout=20.0, strategy=WeightStrategy(**options))
    model, mine = half_a_megabyte(), half_a_megabyte()
    receiver = connect_pair(scheme, model, mine)
    (state,) = scheme._sender.table
    failed = threading.Event()

    def fail(*args: object) -> None:
        failed.set()
        raise shortage

    with receiver:
        with monkeypatch.context() as patch:
            patch.setattr(*step, fail)
            receiver._receiver.link.disconnect()
            assert failed.wait(5.0)
            assert eventually(lambda: not state.joined, 5.0)

        def sent() -> bool:
            """Return whether the worker got an update: a join that began before may still fail."""
            with contextlib.suppress(SyncFailedError):
                return scheme.send(fill(model, 1)).version > 0
            return False

        assert eventually(lambda: state.joined and sent(), 10.0), receiver._receiver.error
        assert set(mine(START).tolist()) == {1.0}


def _refuse(*args: object, **options: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000 bytes.")
