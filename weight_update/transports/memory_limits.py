"""Memory that this process may still use, according to the kernel and to its cgroups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from weight_update.errors import NotEnoughMemoryError
from weight_update.text import format_megabytes


class _Controller(NamedTuple):
    """Files in which a version of the cgroup interface accounts for memory."""

    mounts: tuple[str, ...]  # possible mount points, below /sys/fs/cgroup
    limit: str
    usage: str  # bytes in use, caches included
    reclaimable: tuple[str, ...]  # entries of memory.stat that count caches, dropped when memory is needed


_V1_CACHES = ("total_inactive_file", "total_active_file")
_V1 = _Controller(("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", _V1_CACHES)
_V2_CACHES = ("inactive_file", "active_file", "slab_reclaimable")
_V2 = _Controller(("", "unified"), "memory.max", "memory.current", _V2_CACHES)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still use, or None if unknown.

    Page cache does not count as used, because the kernel drops it when memory is needed. The file system of
    ``root`` holds ``/proc`` and ``/sys``.
    """
    limits = list(left_in_cgroups(root))
    with contextlib.suppress(OSError, ValueError, KeyError):
        limits.append(entries(root / "proc/meminfo")["MemAvailable:"] * 1024)
    return max(min(limits), 0) if limits else None


def require_memory(purpose: str, nbytes: int) -> None:
    """Raise NotEnoughMemoryError if this process may not use so many more bytes for ``purpose``."""
    available = available_memory()
    if available is not None and nbytes > available:
        raise NotEnoughMemoryError(
            f"{purpose} of {format_megabytes(nbytes)} is needed and {format_megabytes(available)} of memory "
            "are available to this process; free memory, or raise the container's memory limit"
        )


def left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes left in each cgroup of this process, and in the cgroups around them."""
    for controller, path in _memberships(root / "proc/self/cgroup"):
        for mount in controller.mounts:
            top = root / "sys/fs/cgroup" / mount
            own = top / path.lstrip("/")
            for directory in [own, *own.parents]:
                if directory.is_relative_to(top):
                    with contextlib.suppress(OSError, ValueError):
                        yield _left_in(directory, controller)


def _memberships(table: Path) -> Iterator[tuple[_Controller, str]]:
    """Yield the cgroups of this process that account for memory; the root cgroups where they are unknown."""
    lines = [":memory:/", "0::/"]
    with contextlib.suppress(OSError):
        lines = table.read_text("utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1, path
        elif not controllers:
            yield _V2, path


def _left_in(directory: Path, controller: _Controller) -> int:
    """Return the bytes left in a cgroup; raise ValueError where it has no limit."""
    limit = int((directory / controller.limit).read_text("utf-8"))
    usage = int((directory / controller.usage).read_text("utf-8"))
    cached = 0
    with contextlib.suppress(OSError, ValueError):
        stat = entries(directory / "memory.stat")
        cached = sum(stat.get(name, 0) for name in controller.reclaimable)
    return limit - max(usage - cached, 0)


def entries(table: Path) -> dict[str, int]:
    """Return the names and numbers in a file of lines ``name number``."""
    rows = (line.split() for line in table.read_text("utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
