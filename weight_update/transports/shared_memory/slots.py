"""Slots: payload memory written by the sender and mapped by receivers.

The sender holds each slot as an anonymous file (``memfd``). The file has no name, so nothing is left behind
however a process ends. Receivers map it copy-on-write: writes of a worker into its own weights stay private,
and are dropped before the slot is used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import resource
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    TransportError,
    UnreachableMemoryError,
)
from weight_update.text import format_megabytes
from weight_update.transports.base import Buffer
from weight_update.transports.shared_memory.child_locks import SlotFile
from weight_update.transports.shared_memory.slot_files import fill, naming_limits, new_file, seal
from weight_update.transports.watched_process import may_run
from weight_update.wire.memory import pin
from weight_update.wire.schema import aligned

_MADV_POPULATE_READ = 22  # Linux 5.14; mmap has no constant for it
_PAGE = mmap.PAGESIZE
_READ_ONLY = 0o400
_KEY_BYTES = 32
_ENTRY = 8  # bytes of one page's entry in /proc/self/pagemap
_PRESENT_OR_SWAPPED, _FILE_OR_SHARED = 0b11 << 6, 1 << 5  # in its last byte
_DONTNEED_LOCKED = 24  # Linux 5.18; mmap has no constant for it
_RELEASED = 1  # in the last byte of a slot's file
_LOOKED_AT = 4
"""Number of slots in use that are checked for each payload."""


class SharedSlot(Buffer):
    """Memory that other processes can open, on the sender's side. ``key`` names it among all processes."""

    fd = -1  # is sent to other processes
    handle = b""  # is needed there in addition to `fd`; empty for host memory

    def __init__(self, tensor: torch.Tensor, key: str) -> None:
        super().__init__(tensor)
        self.key: str = key
        _mine[tensor.data_ptr()] = self


class SharedBuffer(SharedSlot):
    """A slot in host memory, which only its owner can write.

    The descriptor for other processes is read-only. Anonymous memory is also sealed: no process can change
    its size, map it for writing, or write to it through another descriptor.

    After the payload, on a page of their own, the file has the key and one more byte, which is not 0 once the
    slot was released.

    Args:
        directory: see :class:`~weight_update.SharedMemWeightSyncScheme`.

    Raises:
        NotEnoughMemoryError: there is not enough memory; the message says how much is needed.
    """

    def __init__(self, nbytes: int, directory: str | None = None) -> None:
        key = uuid.uuid4().hex
        self._owner = os.getpid()
        size = aligned(nbytes, _PAGE) + _KEY_BYTES + 1
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        needed = f"a shared slot of {format_megabytes(size)}"
        with naming_limits(needed), new_file(key, size, directory) as file:
            writable = file.fileno()
            fill(writable, size, directory)
            self._map: mmap.mmap | None = mmap.mmap(writable, size, flags=flags)
            self._map[-1 - _KEY_BYTES : -1] = key.encode()
            if directory is None:
                seal(writable)
            os.fchmod(writable, _READ_ONLY)
            super().__init__(torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes], key)
            self._file = io.FileIO(f"/proc/self/fd/{writable}")
            self.fd = self._file.fileno()

    def is_read_elsewhere(self) -> bool:
        """Return whether a child of a worker has locked the file."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        except OSError as error:  # if it is another one, the file system has no locks
            return isinstance(error, BlockingIOError)
        return False

    def close(self) -> None:
        """Release the slot; workers that still use it keep its memory until they switch to another one."""
        if self.fd >= 0:
            if self._map is not None and os.getpid() == self._owner:
                self._map[-1] = _RELEASED
            self.fd = -1  # first: a signal handler may raise in close()
            self._file.close()
            self.tensor = self.tensor[:0].clone()  # the mapping ends with the last tensor that uses it
            self._map = None

    def __del__(self) -> None:
        self.close()


_mine: weakref.WeakValueDictionary[int, SharedSlot] = weakref.WeakValueDictionary()


def slot_of(payload: torch.Tensor) -> SharedSlot:
    """Return the slot whose tensor is ``payload``; TransportError if it is not the tensor of a slot."""
    slot = _mine.get(payload.data_ptr())
    if slot is None:
        raise TransportError("this transport sends only payloads from its own allocate()")
    return slot


class SlotMapping:
    """A slot that is open in a receiver, whose memory is ``whole``."""

    owner: int | None = None  # id of the owner's process; None if the link ends when that process does

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = self._shown = whole
        self._before: Callable[[], torch.Tensor | None] = lambda: None  # what was shown before a move

    def first(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes, as one object while ``nbytes`` stays; FormatError if there are fewer."""
        if nbytes > self._whole.numel():
            raise FormatError(
                f"a payload of {nbytes} bytes does not fit into a slot of {self._whole.numel()}"
            )
        if self._shown.numel() != nbytes:
            self._shown = self._whole[:nbytes]
        return self._shown

    @property
    def released(self) -> bool:
        """Whether the sender has released this slot and will not use it again."""
        return False

    def release(self) -> None:
        """Allow the sender to write the slot again: its weights are no longer in use here."""

    def pinned(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the bytes of ``payload``, which lies in this slot, where a GPU reads them fast.

        Nobody may write them.
        """
        return payload


class HostSlotMapping(SlotMapping):
    """A slot in host memory, mapped copy-on-write.

    Pinning such a mapping would copy it. A process that uses a GPU has a second one, which can only be read.

    Raises:
        LinkClosedError: the sender has released the slot, and ``fd`` is another file.
        NotEnoughMemoryError: this process has no memory or no descriptor to map it.
    """

    def __init__(self, key: str, fd: int) -> None:
        size, found = os.fstat(fd).st_size, b""
        with contextlib.suppress(OSError):  # a pipe, for example
            found = os.pread(fd, _KEY_BYTES, max(size - _KEY_BYTES - 1, 0))
        if found != key.encode():
            raise LinkClosedError(f"the sender has released the slot {key}")
        with naming_limits(f"the sender's slot of {format_megabytes(size)}"):
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
            self._file = SlotFile(fd, self._map)
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._read_only = _mapped_read_only(fd, size) if on_gpu else None
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(_MADV_POPULATE_READ)  # otherwise the first forward pass takes the page faults
        super().__init__(self._tensor())
        self._address = self._whole.data_ptr()
        self._faults = 0  # unknown: all pages are private in a process that locks its memory
        self._read_before = False

    @property
    def released(self) -> bool:
        return self._map[-1] != 0

    def _tensor(self) -> torch.Tensor:
        # A file of torch.save() can be read only if the storage has a whole number of elements of any dtype.
        return torch.frombuffer(self._map, dtype=torch.uint8, count=len(self._map) - 1)

    def first(self, nbytes: int) -> torch.Tensor:
        # share_memory(), or a queue of torch.multiprocessing, moves a weight with all tensors of its memory.
        if self._whole.data_ptr() != self._address:
            self._before = weakref.ref(self._shown)
            self._whole = self._shown = self._tensor()
        payload = super().first(nbytes)
        self._file.users += 1
        return payload

    def release(self) -> None:
        """Drop the pages that this process wrote to, so that it sees the sender's next write.

        The first write to a page is a page fault. Without a fault since the last call there are no private
        pages, which saves the search for them: 10 ms a GB. Some sandboxes count no faults.
        """
        self._file.users -= 1
        faults = _page_faults()
        if faults and faults == self._faults:
            return
        self._faults = faults
        if _has_private_pages(self._address, self._whole.numel()):
            try:
                self._map.madvise(mmap.MADV_DONTNEED)  # shows the pages of the file again
            except OSError:  # this process has locked its memory (mlockall)
                self._map.madvise(_DONTNEED_LOCKED)

    def pinned(self, payload: torch.Tensor) -> torch.Tensor:
        again, self._read_before = self._read_before, True
        if self._read_only is None or not again:  # pinning memory that is read only once takes too long
            return payload
        pin(self._read_only, read_only=True)
        return self._read_only[: payload.numel()]


def _mapped_read_only(fd: int, size: int) -> torch.Tensor:
    """Return the bytes of a file, which may change but not be written; writing them ends the process."""
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    memory: Any = (ctypes.c_uint8 * size).from_address(address)  # torch warns of a buffer that is read-only
    memory.mapped = mapped  # the mapping lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)


class SlotTable:
    """The slots that a receiver has opened, by key. :meth:`clear` may be called from any thread.

    A slot stays open until its owner releases it or dies, so that no update has to map a slot again.
    """

    def __init__(self) -> None:
        self._slots: OrderedDict[str, SlotMapping] = OrderedDict()
        self._lock = threading.RLock()  # a signal handler may call clear() while it is held

    def payload(
        self, key: str, nbytes: int, open_mapping: Callable[[], SlotMapping], owner: int | None = None
    ) -> torch.Tensor:
        """Return the first ``nbytes`` bytes of a slot; raise as :meth:`SlotMapping.first`.

        ``open_mapping`` maps a slot that is not open yet; its errors are raised.
        """
        with self._lock:
            found = self._slots.get(key)
            if found is None:
                self._drop_orphans()
                found = self._slots[key] = open_mapping()
                found.owner = owner
            self._drop_released()
            return found.first(nbytes)

    def _drop_released(self) -> None:
        """Close released slots; check a few of the others, in turn from call to call."""
        looked_at = 0
        for key, slot in list(self._slots.items()):
            if slot.released or key not in self._slots:
                self._slots.pop(key, None)
                continue
            self._slots.move_to_end(key)
            looked_at += 1
            if looked_at == _LOOKED_AT:
                return

    def _drop_orphans(self) -> None:
        """Close the slots of processes that died without releasing them."""
        owners = {slot.owner for slot in self._slots.values()}
        gone = {pid for pid in owners if pid is not None and not may_run(pid)}
        for key in [key for key, slot in self._slots.items() if slot.owner in gone]:
            self._slots.pop(key, None)

    def release(self, payload: torch.Tensor) -> None:
        """Note that the weights in ``payload`` are no longer in use here."""
        with self._lock:
            for opened in self._of(payload):
                opened.release()

    def pinned(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the bytes of ``payload`` as :meth:`SlotMapping.pinned` does."""
        with self._lock:
            return next((opened.pinned(payload) for opened in self._of(payload)), payload)

    def _of(self, payload: torch.Tensor) -> list[SlotMapping]:
        slots, place = self._slots.values(), payload.data_ptr()
        return [one for one in slots if one._whole.data_ptr() == place or one._before() is payload]

    def clear(self) -> None:
        """Close all slots that no tensor uses any more."""
        with self._lock:
            self._slots.clear()


def open_slot(pid: int, fd: int, key: str) -> SlotMapping:
    """Map a slot that another process of this host and user owns.

    Raises:
        LinkClosedError: the owner is gone, or has released the slot.
        NotEnoughMemoryError: this process has no memory or no descriptor to map it.
        UnreachableMemoryError: this process may not open it.
    """
    try:
        with naming_limits("a descriptor of the sender's slot"):
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise UnreachableMemoryError(
            f"process {pid} holds the weights in a slot of shared memory that process {os.getpid()} may not "
            f"open ({error}): run both as one user, without setuid() or file capabilities; or use "
            "DistributedWeightSyncScheme, with another host= for each user"
        ) from None
    except OSError as error:
        raise LinkClosedError(
            f"process {pid} of this host, which had the weights, has ended or released them ({error})"
        ) from None
    try:
        return HostSlotMapping(key, opened)
    finally:
        os.close(opened)


def _page_faults() -> int:
    """Return the number of page faults of this process so far, of all threads; 0 if nobody counts them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _has_private_pages(address: int, nbytes: int) -> bool:
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
