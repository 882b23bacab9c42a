"""Memory and limits of this process, and the kinds of memory that processes share."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from weight_update.cli.checks.base import BYTE, Finding, fail, ok, problem_of_reader, warn
from weight_update.errors import NotEnoughMemoryError
from weight_update.text import format_size
from weight_update.transports.listener import MAX_PENDING
from weight_update.transports.memory_limits import entries, left_in_cgroups
from weight_update.transports.shared_memory.slots import SharedBuffer

SHM = "/dev/shm"
_ROOT = Path("/")
_LITTLE = 0.1  # of what there is
_BUFFERS = 4  # of model size that a sender has at most while workers are slow
_READ = "import sys; print(open(sys.argv[1], 'rb').read(1)[0])"


def look_at_memory(root: Path = _ROOT) -> Finding:
    """Compare the free memory of the machine with all of it."""
    meminfo = entries(root / "proc/meminfo")
    total, free = meminfo["MemTotal:"] * 1024, meminfo["MemAvailable:"] * 1024
    room = f"room for {_BUFFERS} buffers of a model of {format_size(free // _BUFFERS)}"
    found = f"{format_size(free)} of {format_size(total)} are free: {room}"
    if free < _LITTLE * total:
        return warn(found, "end other programs, or use a smaller model; a sender has two to four buffers")
    return ok(found)


def look_at_cgroup(root: Path = _ROOT) -> Finding:
    """Compare the memory that the limits of cgroups leave with the free memory of the machine."""
    free = entries(root / "proc/meminfo")["MemAvailable:"] * 1024
    left = min(left_in_cgroups(root), default=free)
    if left >= free:
        return ok("no limit below the free memory of the machine")
    found = f"the memory limit leaves {format_size(max(left, 0))}; the machine has {format_size(free)} free"
    if left < _LITTLE * free:
        return warn(found, "raise the limit of the container or job (docker run --memory, Slurm's --mem)")
    return ok(found)


def look_at_memfd() -> Finding:
    """Make shared memory as SharedMemWeightSyncScheme does."""
    cure = "allow memfd_create (Linux 3.17, seccomp profile of the container), or pass directory='/dev/shm'"
    try:
        buffer = SharedBuffer(1)
    except NotEnoughMemoryError as error:
        return fail(str(error), "free memory, or raise the limits (ulimit -v, ulimit -n, container)")
    except OSError as error:
        return fail(str(error), cure)
    with contextlib.closing(buffer):
        buffer.tensor.fill_(BYTE)
        same = os.pread(buffer.fd, 1, 0) == bytes([BYTE])
    return ok("shared memory without a name works") if same else fail("a shared byte differs", cure)


def look_at_shm(directory: str = SHM) -> Finding:
    """Look at the size of a mount for shared memory, and make a file there."""
    cure = f"enlarge it (docker run --shm-size=8g, or mount -o remount,size=8g {directory})"
    needs = "Ray and directory= use it, and so do queues of multiprocessing"
    try:
        SharedBuffer(1, directory).close()
    except (OSError, NotEnoughMemoryError) as error:
        return warn(f"{directory} cannot be used ({error}); {needs}", cure)
    stats = os.statvfs(directory)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{directory}: {format_size(free)} of {format_size(total)} are free"
    if free < _LITTLE * machine:
        return warn(f"{found}, little for a machine of {format_size(machine)}; {needs}", cure)
    return ok(found)


def look_at_descriptors() -> Finding:
    """Compare the limit of open files with what a listener may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    found = f"{soft} files may be open, {used} are"
    if soft - used < MAX_PENDING:
        better = "as root: ulimit -Hn" if hard == soft else f"ulimit -n {hard}"
        return fail(
            f"{found}; connections of workers may need {MAX_PENDING} more",
            f"raise the limit in the shell before the program starts ({better}), or in its service",
        )
    return ok(found)


def look_at_other_processes() -> Finding:
    """Open memory of this process in another process, as workers of MultiProcessWeightSyncScheme do."""
    if not Path("/proc/self/fd").is_dir():
        return fail("/proc is not mounted", "mount it: mount -t proc proc /proc")
    with contextlib.closing(SharedBuffer(1)) as buffer:
        buffer.tensor.fill_(BYTE)
        place = f"/proc/{os.getpid()}/fd/{buffer.fd}"
        problem = problem_of_reader(["-I", "-S", "-c", _READ, place], 5.0)
    if problem:
        return fail(
            f"a process that this one starts cannot open its memory: {problem}",
            "run trainer and workers as the same user in the same pid namespace, mount /proc without "
            "hidepid, or use SharedMemWeightSyncScheme, which needs no /proc",
        )
    return ok("a process that this one starts can open its memory")
