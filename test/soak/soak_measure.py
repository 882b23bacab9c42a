"""Memory, descriptors and threads of processes, and whether they stay flat."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

SHARE, BYTES, COUNT = 0.10, 16 << 20, 4
"""Growth that counts as flat: of memory 10 % and 16 MiB, of descriptors and threads four in each process."""
SLOTS = 16
"""Growth of the descriptors of slots that counts as flat, in each process.

The sender keeps the last patches for chains, and how many it has depends on the updates just before.
"""
CONNECTION = {"descriptors": 5, "threads": 4}
"""Descriptors and threads of a connection to another host, which has one ``epoll``; counted in a soak."""
CONNECTIONS = 2
"""Growth of connections that counts as flat, in each process: a worker at an end of a chain has fewer."""
LEAST = 3
"""Samples of a window."""

Sample = dict[str, int]


def give_back() -> None:
    """Return the memory that this process has freed to the kernel.

    glibc keeps it, in an arena for each of many threads: what a process holds would grow until each arena has
    seen the largest need. Memory that is still in use, which is what a leak leaves, stays.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def sample(pids: Iterable[int], shared: bool = True) -> Sample:
    """Return what processes hold together; the dead hold nothing.

    Args:
        pids: of the processes.
        shared: whether shared memory counts. Ray's object store keeps
            every page that was once used.
    """
    total = {"memory": 0, "descriptors": 0, "slots": 0, "connections": 0, "threads": 0}
    for pid in pids:
        try:
            here = Path("/proc", str(pid))
            one = {
                "memory": _memory(here, shared),
                "descriptors": len(os.listdir(here / "fd")),
                "slots": _count(here, "/memfd:weight_update"),
                "connections": _count(here, "anon_inode:[eventpoll]"),
                "threads": len(os.listdir(here / "task")),
            }
        except OSError:
            continue
        total = {name: total[name] + one[name] for name in total}
    return total


def _memory(process: Path, shared: bool) -> int:
    """Return the proportional set size: a page that n processes share counts 1/n for each."""
    lines = [line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:]]
    sizes = {line[0]: 1024 * int(line[1]) for line in lines}
    return sizes.get("Pss:", 0) - (0 if shared else sizes.get("Pss_Shmem:", 0))


def _count(process: Path, target: str) -> int:
    """Return the number of descriptors that refer to ``target``, or to a name that begins so."""
    found = 0
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed by now
            found += os.readlink(fd).startswith(target)
    return found


def median(samples: list[Sample]) -> Sample:
    """Return the median of each quantity."""
    if not samples:
        return {}
    return {name: int(statistics.median(one[name] for one in samples)) for name in samples[0]}


def growth(who: str, processes: int, first: list[Sample], last: list[Sample]) -> list[str]:
    """Return a sentence for each quantity that is not flat between two windows."""
    before, after = median(first), median(last)
    for held in (before, after):
        held["descriptors"] -= held["slots"]
        for name, count in CONNECTION.items():
            held[name] -= count * held["connections"]
    allowed = {
        "memory": before["memory"] * (1 + SHARE) + BYTES,
        "descriptors": before["descriptors"] + COUNT * processes,
        "slots": before["slots"] + SLOTS * processes,
        "connections": before["connections"] + CONNECTIONS * processes,
        "threads": before["threads"] + COUNT * processes,
    }
    return [
        f"{name} of {who} grew from {before[name]:,} to {after[name]:,}"
        for name in before
        if after[name] > allowed[name]
    ]
