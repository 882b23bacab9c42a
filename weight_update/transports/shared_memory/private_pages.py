"""Private pages of a copy-on-write mapping: they hide what the owner of the file writes there later."""

from __future__ import annotations

import mmap
import os
import resource

_ENTRY = 8  # bytes of one page's entry in /proc/self/pagemap
_PRESENT_OR_SWAPPED, _FILE_OR_SHARED = 0b11 << 6, 1 << 5  # in its last byte
_DONTNEED_LOCKED = 24  # Linux 5.18; mmap has no constant for it


def page_faults() -> int:
    """Return the number of page faults of this process so far, of all threads; 0 if nobody counts them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def has_private_pages(address: int, nbytes: int) -> bool:
    """Return whether pages of a mapping are private, or that is unknown; ``address`` is that of a page."""
    pages = -(-nbytes // mmap.PAGESIZE)
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.pread(pagemap, pages * _ENTRY, address // mmap.PAGESIZE * _ENTRY)
        finally:
            os.close(pagemap)
    except (OSError, MemoryError):
        return True
    # An update may wait for this, so nothing is done for each page.
    kinds = set(raw[_ENTRY - 1 :: _ENTRY])
    return any(kind & _PRESENT_OR_SWAPPED and not kind & _FILE_OR_SHARED for kind in kinds)


def drop_private_pages(mapping: mmap.mmap) -> None:
    """Show the pages of the file again."""
    try:
        mapping.madvise(mmap.MADV_DONTNEED)
    except OSError:  # this process has locked its memory (mlockall)
        mapping.madvise(_DONTNEED_LOCKED)
