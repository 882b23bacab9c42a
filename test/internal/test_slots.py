"""Properties of shared memory slots that the contract suites of the transports do not cover."""

import ctypes
import errno
import fcntl
import itertools
import mmap
import multiprocessing
import operator
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from background import repeating
from faults_tools import slots_mapped_for_reading
from interpreters import run_python
from pairs import connect_pair

from weight_update import BucketEncoding, NotEnoughMemoryError, SharedMemWeightSyncScheme, WeightStrategy
from weight_update.testing.processes import eventually
from weight_update.transports import memory_limits
from weight_update.transports.shared_memory import slots
from weight_update.transports.shared_memory.slots import (
    HostSlotMapping,
    SharedBuffer,
    SlotTable,
    open_slot,
)
from weight_update.transports.watched_process import may_run

_MCL_FUTURE = 2


def test_clearing_while_another_thread_releases():
    """A receiver's thread may release a payload while another thread closes the link."""
    slots = [SharedBuffer(64) for _ in range(4)]
    table = SlotTable()
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with repeating(lambda: table.release(torch.empty(0))):
            for _ in range(300):
                for slot in slots:
                    name(table, slot)
                table.clear()
    finally:
        sys.setswitchinterval(switching)
        for slot in slots:
            slot.close()


def test_an_interrupted_close_closes_no_other_descriptor() -> None:
    """If a signal handler raises, the descriptor's number may have a new owner when the slot is freed."""
    for point in itertools.count(1):
        slot = SharedBuffer(64)
        try:
            sys.setprofile(interrupt_at(point))
            slot.close()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        other = os.open(os.devnull, os.O_RDONLY)
        slot.close()
        del slot
        os.close(other)
    assert point > 3


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("directory", [None, "/dev/shm"])
def test_an_interrupt_while_a_slot_is_made_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, directory: str | None
) -> None:
    """Handlers of signals run when a function begins, and after a call of C."""
    monkeypatch.setattr(memory_limits, "available_memory", lambda: None)  # makes a thousand calls
    before = len(os.listdir("/proc/self/fd"))
    for point in itertools.count(1):
        try:
            sys.setprofile(interrupt_at(point))
            made = SharedBuffer(64, directory)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert len(os.listdir("/proc/self/fd")) == before, f"at point {point}"
    assert point > 20
    made.close()


def interrupt_at(point: int) -> Callable[[FrameType, str, Any], None]:
    """Return a profiler that raises KeyboardInterrupt once."""
    left = point

    def interrupt(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_return")
        if left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_start_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that was not made is freed in silence."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slots.uuid, "uuid4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SharedBuffer(64)


WRITING: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, b"x", 0),
    "truncate": lambda fd: os.ftruncate(fd, 0),
    "grow": lambda fd: os.ftruncate(fd, 1 << 20),
    "map": lambda fd: mmap.mmap(fd, 64),
    "punch": lambda fd: os.posix_fallocate(fd, 1 << 16, 1 << 16),
}


@pytest.fixture(params=["anonymous", "directory"])
def slot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedBuffer]:
    slot = SharedBuffer(64, str(tmp_path) if request.param == "directory" else None)
    slot.tensor.fill_(7)
    yield slot
    slot.close()


@pytest.mark.parametrize("way", WRITING)
def test_the_descriptor_that_is_handed_out_does_not_write(slot: SharedBuffer, way: str) -> None:
    size = os.fstat(slot.fd).st_size
    with pytest.raises(OSError, match=r"Bad file|Invalid|denied|not permitted"):
        WRITING[way](slot.fd)
    assert os.fstat(slot.fd).st_size == size
    assert os.fstat(slot.fd).st_mode & 0o077 == 0
    assert mapped_elsewhere(slot) == {7}
    slot.tensor.fill_(8)
    assert mapped_elsewhere(slot) == {8}


def mapped_elsewhere(slot: SharedBuffer) -> set[int]:
    return set(name(SlotTable(), slot).tolist())


@pytest.mark.parametrize("way", WRITING)
def test_anonymous_memory_is_sealed_against_other_descriptors(way: str) -> None:
    slot = SharedBuffer(64)
    with ExitStack() as stack:
        stack.callback(slot.close)
        fd = os.open(f"/proc/self/fd/{slot.fd}", os.O_RDWR)  # root may, whatever the mode
        stack.callback(os.close, fd)
        with pytest.raises(PermissionError):
            WRITING[way](fd)


def test_a_slot_stays_open_until_it_is_given_up() -> None:
    before = slots_mapped_for_reading()  # by the tests before this one
    slots, table = [SharedBuffer(64) for _ in range(40)], SlotTable()
    payloads = [name(table, slot) for slot in slots]
    assert all(map(operator.is_, [name(table, slot) for slot in slots], payloads))
    for slot in slots[1:]:
        slot.close()
    del payloads
    for _ in range(2):
        name(table, slots[0])
    assert slots_mapped_for_reading() == before + 1
    slots[0].close()


def name(table: SlotTable, slot: SharedBuffer) -> torch.Tensor:
    return table.payload(slot.key, 64, lambda: HostSlotMapping(slot.key, slot.fd))


def test_slots_of_a_process_that_was_killed_are_closed() -> None:
    before = slots_mapped_for_reading()
    table, ours = SlotTable(), SharedBuffer(64)
    parent, child = multiprocessing.Pipe()
    owner = multiprocessing.get_context("fork").Process(target=own_a_slot, args=(child,))
    owner.start()
    key, fd = parent.recv()
    table.payload(key, 64, lambda: open_slot(owner.pid, fd, key), owner=owner.pid)
    assert slots_mapped_for_reading() == before + 1
    owner.kill()
    owner.join()
    name(table, ours)
    assert slots_mapped_for_reading() == before + 1
    ours.close()
    for end in (parent, child):
        end.close()


def own_a_slot(pipe: Connection) -> None:
    slot = SharedBuffer(64)
    pipe.send((slot.key, slot.fd))
    pipe.recv()


def test_a_child_does_not_give_up_the_slots_of_its_parent() -> None:
    slot, table = SharedBuffer(64), SlotTable()
    payload = name(table, slot)
    child = multiprocessing.get_context("fork").Process(target=slot.close)
    child.start()
    child.join()
    assert name(table, slot) is payload
    assert name(table, slot) is payload
    slot.close()


def test_a_slot_in_use_is_not_written_again_while_a_forked_child_lives() -> None:
    slot, free, table = SharedBuffer(64), SharedBuffer(64), SlotTable()
    payload = name(table, slot)
    table.release(name(table, free))
    assert not slot.is_read_elsewhere()
    descriptors = len(os.listdir("/proc/self/fd"))
    end, held = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(held)
        os.read(end, 1)
        os._exit(0)
    table.release(payload)  # the child has it still
    assert (slot.is_read_elsewhere(), free.is_read_elsewhere()) == (True, False)
    for one in (end, held):
        os.close(one)
    os.waitpid(pid, 0)
    assert not slot.is_read_elsewhere()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for buffer in (slot, free):
        buffer.close()


def test_the_system_is_asked_only_for_the_slots_that_an_update_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SharedBuffer] = []
    monkeypatch.setattr(SharedBuffer, "is_read_elsewhere", lambda self: bool(asked.append(self)))
    strategy = WeightStrategy(encoding=BucketEncoding(bucket_size=64))
    source, target = torch.nn.Linear(16, 40), torch.nn.Linear(16, 40)
    with SharedMemWeightSyncScheme(strategy, timeout=20.0) as sender:
        receiver = connect_pair(sender, source, target)
        sender.send()
        asked.clear()
        sender.send()
        assert len(asked) == 43  # buckets; there are more slots
        receiver.shutdown()


def test_a_child_of_a_child_reads_a_slot_longer() -> None:
    slot, table = SharedBuffer(64), SlotTable()
    payload = name(table, slot)
    end, held = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(held)
        if os.fork() == 0:
            os.read(end, 1)
        os._exit(0)
    os.close(end)
    os.waitpid(pid, 0)
    table.release(payload)
    assert slot.is_read_elsewhere()
    os.close(held)
    assert eventually(lambda: not slot.is_read_elsewhere())
    slot.close()


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    slot, table = SharedBuffer(64), SlotTable()
    name(table, slot)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        assert not slot.is_read_elsewhere()
        child = multiprocessing.get_context("fork").Process(target=lambda: None)
        child.start()
        child.join()
        assert child.exitcode == 0
    slot.close()


def test_a_child_keeps_weights_whose_link_was_closed_before_the_fork() -> None:
    slot, table = SharedBuffer(64), SlotTable()
    payload = name(table, slot)
    table.clear()
    end, held = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(held)
        os.read(end, 1)
        os._exit(0)
    assert slot.is_read_elsewhere()
    for one in (end, held):
        os.close(one)
    os.waitpid(pid, 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    del payload
    assert len(os.listdir("/proc/self/fd")) < descriptors
    slot.close()


def test_a_program_that_is_started_keeps_no_slot() -> None:
    slot, table = SharedBuffer(64), SlotTable()
    name(table, slot)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=lambda: None):
        assert not slot.is_read_elsewhere()
    slot.close()


def test_weights_that_were_written_into_where_nobody_counts_page_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in gVisor; the next weights in the slot are the sender's."""
    monkeypatch.setattr(slots, "_page_faults", lambda: 0)
    write_and_read_again()


def write_and_read_again() -> None:
    slot, table = SharedBuffer(64), SlotTable()
    for value in (1, 2, 3):
        slot.tensor.fill_(value)
        payload = name(table, slot)
        assert payload.tolist() == [value] * 64
        payload.fill_(9)
        table.release(payload)
    slot.close()


def test_a_receiver_that_locks_its_memory() -> None:
    """Linux gives it private pages at once, instead of at the first write."""
    libc, unlimited = ctypes.CDLL(None), resource.RLIM_INFINITY
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != unlimited:
        pytest.skip("this process may lock little memory")
    if libc.mlockall(_MCL_FUTURE) != 0:
        pytest.skip("this process may not lock memory")
    try:
        write_and_read_again()
        slot, table = SharedBuffer(64), SlotTable()
        for value in (1, 2):
            slot.tensor.fill_(value)
            payload = name(table, slot)
            assert payload.tolist() == [value] * 64
            table.release(payload)
        slot.close()
    finally:
        libc.munlockall()


def test_no_memory_to_map_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, table = SharedBuffer(64), SlotTable()
    with monkeypatch.context() as patch:
        patch.setattr(slots.mmap, "mmap", _no_memory)
        with pytest.raises(NotEnoughMemoryError, match="could not map the sender's slot"):
            name(table, slot)
        with pytest.raises(NotEnoughMemoryError, match="could not map a shared slot"):
            SharedBuffer(64)
    assert name(table, slot).numel() == 64
    slot.close()


def _no_memory(*args: object, **options: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    ("limit", "most", "command"),
    [(resource.RLIMIT_FSIZE, 1 << 12, "ulimit -f"), (resource.RLIMIT_NOFILE, 3, "ulimit -n")],
    ids=["file size", "open files"],
)
@pytest.mark.parametrize(("nbytes", "text"), [(1 << 20, "1.0 MB"), (64, "4.13 kB")])
def test_limits_of_the_process_are_named(limit: int, most: int, command: str, nbytes: int, text: str) -> None:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, hard))
    try:
        with pytest.raises(NotEnoughMemoryError, match=f"slot of {text} is needed; raise .*{command}"):
            SharedBuffer(nbytes)
    finally:
        resource.setrlimit(limit, (soft, hard))


def test_a_receiver_without_a_descriptor_does_not_call_the_sender_gone() -> None:
    slot, (soft, hard) = SharedBuffer(64), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(NotEnoughMemoryError, match=r"slot is needed; raise .*\(ulimit -n\)"):
            open_slot(os.getpid(), slot.fd, slot.key)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    slot.close()


def test_may_run() -> None:
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    assert may_run(child.pid)
    child.kill()
    assert eventually(lambda: not may_run(child.pid))  # though it is a zombie yet
    child.join()
    assert not may_run(child.pid)
    assert may_run(os.getpid())


def test_a_process_is_watched_until_the_end_of_this_one() -> None:
    """Exit functions, such as a scheme's, still ask whether the other process lives."""
    program = (
        "import os\n"
        "from multiprocessing.util import Finalize\n"
        "from weight_update.transports.watched_process import WatchedProcess\n"
        "other = WatchedProcess(os.getppid())\n"
        "Finalize(other, lambda: print(other.ended), exitpriority=1)\n"
    )
    assert run_python("-c", program).stdout == "False\n"


@pytest.mark.parametrize(
    ("error", "directory", "message"),
    [
        (errno.ENOSPC, True, "{0} is too small: .* MB are free; free space there, .* leave directory= out"),
        (errno.ENOMEM, True, "memory is too small: a shared slot of 4.13 kB is needed; free memory or raise"),
        (
            errno.ENOMEM,
            False,
            "memory is too small: a shared slot of 4.13 kB is needed; free memory or raise",
        ),
    ],
)
def test_what_is_too_small(
    error: int, directory: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cgroup whose limit is reached is not the directory; and no mount has the directory's name."""

    def fail(*_: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(NotEnoughMemoryError, match=f"^{message.format(tmp_path)}") as caught:
        SharedBuffer(100, str(tmp_path) if directory else None)
    assert f"size=... {tmp_path}" not in str(caught.value)
