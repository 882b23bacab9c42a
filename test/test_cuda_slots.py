"""Slots on a GPU, as far as that can be tested without one.

What must be the GPU's is here PyTorch's own sharing of CPU memory: ``CudaHandle.of`` and ``CudaHandle.open``.
Records with handles, references, and how receivers leave are the real ones, between real processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import quick_for
from torch import nn

from weight_update import (
    BucketEncoding,
    FormatError,
    NotEnoughMemoryError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    UnreachableMemoryError,
    WeightStrategy,
)
from weight_update.testing import Body, WorkerProcesses, Zoo, fingerprint, mlp, scramble
from weight_update.testing.processes import freeze
from weight_update.transports.shared_memory import cuda_slots
from weight_update.transports.shared_memory.cuda_slots import CudaBuffer, CudaHandle

HANDLE = CudaHandle("GPU-5d1f", "00ff" * 16, 512, 4096)
KINDS: dict[str, WeightStrategy] = {
    "dense": WeightStrategy("state_dict"),
    "buckets, kept": WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=512, load_instant=False)
    ),
    "buckets": WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=256)),
    "two in flight": WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=256), max_in_flight=2),
}

# -- options and handles ---------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_sender_says_so() -> None:
    scheme = SharedMemWeightSyncScheme(slot_device="cuda")
    with pytest.raises(ValueError, match="leave slot_device out"):
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    assert not scheme.initialized_on_sender


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot_device": "cpu"}, "known: None, cuda"),
        ({"slot_device": "cuda", "directory": "/dev/shm"}, "not both"),
        ({"slot_device": "cuda", "strategy": WeightStrategy(encoding="patch")}, "'dense' or 'bucket'"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedMemWeightSyncScheme(**options)


def test_a_handle_arrives_as_it_was() -> None:
    assert CudaHandle.from_bytes(HANDLE.to_bytes()) == HANDLE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",
        b"[]",
        b"{}",
        b"[" * 100_000,
        HANDLE.to_bytes().replace(b"512", b"-1"),
        HANDLE.to_bytes().replace(b"512", b"true"),
        HANDLE.to_bytes().replace(b"4096", b"4096.0"),
        HANDLE.to_bytes().replace(b"4096", b'"4096"'),
        HANDLE.to_bytes().replace(b"00ff", b"0xff"),
        HANDLE.to_bytes().replace(b'"GPU-5d1f"', b"0"),
        HANDLE.to_bytes().replace(b"{", b'{"more": 1, '),
    ],
)
def test_what_is_no_handle_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="handle of a CUDA slot"):
        CudaHandle.from_bytes(data)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_the_worker_does_not_see() -> None:
    with pytest.raises(UnreachableMemoryError, match="CUDA_VISIBLE_DEVICES"):
        HANDLE.open()


# -- with CPU memory in the place of the GPU's -----------------------------------------------------

Hire = Callable[..., WorkerProcesses]


def share(whole: torch.Tensor) -> CudaHandle:
    fd, nbytes = whole.untyped_storage()._share_fd_cpu_()
    return CudaHandle("CPU", f"/proc/{os.getpid()}/fd/{fd}".encode().hex(), 0, nbytes)


def open_shared(handle: CudaHandle) -> torch.UntypedStorage:
    fd = os.open(bytes.fromhex(handle.segment), os.O_RDWR | os.O_CLOEXEC)
    storage = torch.UntypedStorage._new_shared_fd_cpu(fd, handle.nbytes)
    os.close(fd)
    return storage


@pytest.fixture
def hire(monkeypatch: pytest.MonkeyPatch, hired: Hire) -> Hire:
    monkeypatch.setattr("weight_update.schemes.shared_mem.cuda_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr("weight_update.sender.sender._PARTING_SECONDS", 1.0)
    monkeypatch.setattr(CudaHandle, "of", share)
    monkeypatch.setattr(CudaHandle, "open", open_shared)

    def build(source: nn.Module, target: nn.Module, kind: str = "dense", workers: int = 1) -> WorkerProcesses:
        scheme = SharedMemWeightSyncScheme(
            KINDS[kind], slot_device="cuda", timeout=20.0, connect_timeout=20.0
        )
        return hired(scheme, [target] * workers, model=source, connect=False)

    return build


def slots_of(procs: WorkerProcesses) -> list[CudaBuffer]:
    slots = [slot.buffer for slot in procs.scheme._sender._pool._slots]
    assert all(type(slot) is CudaBuffer for slot in slots)
    return slots


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weight_update-ipc-memory"]


def all_given_back(memory: list[weakref.ref[Any]], seconds: float) -> bool:
    """Return whether all memory is freed in time."""
    deadline = time.monotonic() + seconds
    for thread in keepers():
        thread.join(max(0.0, deadline - time.monotonic()))
    return all(ref() is None for ref in memory)


def borrowed(body: Body) -> int:
    """Return the number of slots that this process has open."""
    del body
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
    return found


@pytest.mark.parametrize("kind", quick_for(KINDS, "dense", "buckets, kept"))
def test_same_bits(hire: Hire, kind: str) -> None:
    source = Zoo(1)
    procs = hire(source, Zoo(2), kind, workers=2)
    procs.connect()
    strategy = KINDS[kind]
    for seed in range(4):
        assert procs.ask("fingerprint") == [fingerprint(source, strategy)] * 2
        source.load_state_dict(Zoo(10 + seed).state_dict())
        procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source, strategy)] * 2
    assert slots_of(procs)


@pytest.mark.parametrize("kind", quick_for(KINDS, "dense", "buckets, kept"))
def test_weights_stay_when_the_sender_goes_and_its_memory_is_free(hire: Hire, kind: str) -> None:
    source = mlp(1)
    procs = hire(source, mlp(2), kind, workers=2)
    pipes = procs.ask("run", borrowed)
    procs.connect()
    procs.scheme.send()
    memory = [weakref.ref(slot._whole) for slot in slots_of(procs)]
    before = procs.ask("pointers")
    procs.scheme.shutdown()
    assert procs.ask("fingerprint") == [fingerprint(source)] * 2
    assert all_given_back(memory, 5.0)
    assert procs.ask("run", borrowed) == pipes
    after = procs.ask("pointers")
    moved = [old["0.weight"] != new["0.weight"] for old, new in zip(before, after, strict=True)]
    assert moved == [kind in ("dense", "buckets, kept")] * 2


@pytest.mark.parametrize("kind", quick_for(["dense", "buckets"], "dense"))
def test_a_worker_in_hold_keeps_its_memory_until_it_is_out(hire: Hire, kind: str) -> None:
    source = mlp(1)
    procs = hire(source, mlp(2), kind)
    procs.connect()
    (worker,) = procs.workers
    memory = [weakref.ref(slot._whole) for slot in slots_of(procs)]
    held = fingerprint(source)
    worker.call("hold")
    scramble(source, 3)
    procs.scheme.send_async()
    procs.scheme.shutdown()
    assert worker.call("fingerprint") == held
    assert not all_given_back(memory, 0.1)
    worker.call("release")
    assert all_given_back(memory, 5.0)
    assert worker.call("fingerprint") == fingerprint(source)


def test_a_worker_that_leaves_takes_its_weights_along(hire: Hire) -> None:
    source = mlp(1)
    procs = hire(source, mlp(2), workers=2)
    pipes = procs.ask("run", borrowed)
    procs.connect()
    procs.scheme.send()
    leaving, staying = procs.workers
    kept = fingerprint(source)
    leaving.call("shutdown")
    assert leaving.call("run", borrowed) == pipes[0]
    for seed in range(4):
        scramble(source, seed)
        procs.scheme.send(worker_ids=1)
        assert leaving.call("fingerprint") == kept
        assert staying.call("fingerprint") == fingerprint(source)


def test_inside_hold_a_worker_may_leave_too(hire: Hire) -> None:
    source = mlp(1)
    procs = hire(source, mlp(2))
    pipes = procs.ask("run", borrowed)
    procs.connect()
    (worker,) = procs.workers
    worker.call("hold")
    worker.call("shutdown")
    assert worker.call("run", borrowed) == pipes[0]
    assert worker.call("fingerprint") == fingerprint(source)


@pytest.mark.parametrize("kind", quick_for(KINDS, "dense", "buckets, kept"))
def test_memory_of_a_worker_that_is_killed_is_given_back(hire: Hire, kind: str) -> None:
    source = mlp(1)
    procs = hire(source, mlp(2), kind, workers=2)
    procs.connect()
    victim = procs.workers.pop(0)
    os.kill(victim.runner.pid, signal.SIGKILL)
    victim.runner.join(10.0)
    for seed in range(4):
        scramble(source, seed)
        with contextlib.suppress(SyncFailedError):
            procs.scheme.send()
        assert procs.workers[0].call("fingerprint") == fingerprint(source)
    memory = [weakref.ref(slot._whole) for slot in slots_of(procs)]
    procs.scheme.shutdown()
    assert all_given_back(memory, 5.0)


@pytest.mark.slow
def test_a_stopped_worker_keeps_its_memory_until_it_ends(hire: Hire) -> None:
    procs = hire(mlp(1), mlp(2))
    procs.connect()
    (worker,) = procs.workers
    memory = [weakref.ref(slot._whole) for slot in slots_of(procs)]
    freeze(worker.runner.pid)
    start = time.monotonic()
    procs.scheme.shutdown()
    assert time.monotonic() - start < 5.0
    assert not all_given_back(memory, 0.1)
    os.kill(worker.runner.pid, signal.SIGKILL)
    assert all_given_back(memory, 5.0)


def test_memory_that_a_worker_cannot_reach_is_told_to_both_sides(
    hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handle: CudaHandle) -> torch.UntypedStorage:
        raise UnreachableMemoryError("no such GPU here")

    monkeypatch.setattr(CudaHandle, "open", fails)
    procs = hire(mlp(1), mlp(2))
    errors = procs.try_connect()
    assert isinstance(errors[0], UnreachableMemoryError)
    with pytest.raises(SyncFailedError, match="no such GPU here"):
        raise errors[None]


def test_both_ends_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHandle, "of", share)
    buffer = CudaBuffer(100, torch.device("cpu"))
    opened = cuda_slots.CudaSlotMapping(buffer.key, buffer.handle, buffer.fd)
    assert opened.first(100).data_ptr() == buffer.tensor.data_ptr()
    assert opened.first(100) is opened.first(100)
    memory = weakref.ref(buffer._whole)
    buffer.close()
    assert memory() is not None
    del opened
    assert memory() is None
    assert not keepers()


def test_a_process_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(CudaHandle, "of", share)
    monkeypatch.setattr(CudaHandle, "open", open_shared)
    buffer = CudaBuffer(100, torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", fail)
        patch.setattr(os, "pipe2", fail)
        with pytest.raises(NotEnoughMemoryError, match=r"slot is needed; raise .*\(ulimit -n\)"):
            cuda_slots.CudaSlotMapping("another process's", buffer.handle, buffer.fd)
        with pytest.raises(NotEnoughMemoryError, match=r"slot on a GPU is needed; raise .*\(ulimit -n\)"):
            CudaBuffer(100, torch.device("cpu"))
    buffer.close()


def test_a_device_that_the_sender_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"slot_device=.cuda:1.: this process sees 1 CUDA device$"):
        cuda_slots.cuda_device("cuda:1")
