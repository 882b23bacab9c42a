"""Pages of a copy-on-write mapping that belong to this process alone."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import weakref

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no constant for it
_PAGE = mmap.PAGESIZE
_ENTRY = 8  # bytes of one page's entry in /proc/self/pagemap
_PRESENT_OR_SWAPPED, _FILE_OR_SHARED = 0b11 << 6, 1 << 5  # in its last byte


class PrivatePages:
    """The private pages of one mapping: those that this process wrote to, and those it copied for a child.

    A forked child has the mapping too, but does not tell the sender which slot it uses. The sender would
    write new weights into the slot while the child computes with it. Before a fork, all pages of a mapping in
    use are therefore copied, at most once for each update. The kernel then keeps both processes' weights
    as they were at the fork.

    Args:
        mapping: memory of a file, mapped with ``mmap.ACCESS_COPY``.
        payload: the bytes of ``mapping`` that are copied before a fork; whole pages, from its start.
    """

    def __init__(self, mapping: mmap.mmap, payload: torch.Tensor) -> None:
        self._map, self._payload = mapping, payload
        self._faults = _page_faults()
        self._users, self._copied = 0, False
        _all.add(self)

    def use(self) -> None:
        """Note that an update of this process lies in the mapping, until :meth:`drop` for that update."""
        if self._copied:  # by a fork during an earlier update, so the copies may be older than the slot
            self._drop()
        self._users += 1  # the update before may be dropped only after this

    def drop(self) -> None:
        """Drop the private pages, so that this process sees the sender's next write.

        The first write to a page is a page fault. Without a fault since the last call there are no private
        pages, which saves the search for them: 10 ms a GB.
        """
        self._users = max(0, self._users - 1)
        self._drop()

    def _drop(self) -> None:
        self._copied = False
        faults = _page_faults()
        if faults == self._faults:
            return
        self._faults = faults
        if self._exist():
            self._map.madvise(mmap.MADV_DONTNEED)

    def keep(self) -> None:
        """Copy all pages of the payload that are not private yet, if the mapping is in use."""
        if not self._users or self._copied or not self._payload.numel():
            return
        self._copied = True
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, 0, self._payload.numel())
        except (OSError, ValueError):
            self._payload[::_PAGE] += 0  # an older kernel: write what is there

    def _exist(self) -> bool:
        pages = -(-self._payload.numel() // _PAGE)
        try:
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                raw = os.pread(pagemap, pages * _ENTRY, self._payload.data_ptr() // _PAGE * _ENTRY)
            finally:
                os.close(pagemap)
        except (OSError, MemoryError):
            return True
        # An update may wait for this, so nothing is done for each page.
        kinds = set(raw[_ENTRY - 1 :: _ENTRY])
        return any(kind & _PRESENT_OR_SWAPPED and not kind & _FILE_OR_SHARED for kind in kinds)


def _page_faults() -> int:
    """Return the number of page faults of this process so far, of all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


_all: weakref.WeakSet[PrivatePages] = weakref.WeakSet()


def _keep_all() -> None:
    for pages in list(_all):
        with contextlib.suppress(MemoryError):  # the child of a process without memory ends soon anyway
            pages.keep()


# In the child once more: between the copy and the fork, an update may have come in another slot.
os.register_at_fork(before=_keep_all, after_in_child=_keep_all)
