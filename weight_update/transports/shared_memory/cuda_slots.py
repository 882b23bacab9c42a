"""Slots in GPU memory, which other processes open by CUDA IPC.

PyTorch shares and opens the memory (``torch/multiprocessing/reductions.py``,
``torch/csrc/StorageSharing.cpp``). Its pickles and its reference counter are not used: a reader that is
killed never decrements that counter, so its memory would be lost. :mod:`.ipc_refcount` counts instead.

Nothing here orders CUDA streams. The sender's encoder waits until a payload is written, and a receiver until
a payload is read, before either notifies the other.
"""

from __future__ import annotations

import json
import os
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.errors import FormatError, NotEnoughMemoryError, TransportError, UnreachableMemoryError
from weight_update.text import format_megabytes, plural
from weight_update.transports.shared_memory.ipc_refcount import IpcReferences, owner_released
from weight_update.transports.shared_memory.slot_files import naming_limits
from weight_update.transports.shared_memory.slots import SharedSlot, SlotMapping

_NO_COUNTER = b"/weight_update-no-counter"  # no such shared memory exists, so PyTorch counts nothing
_SEGMENTS = "; if expandable_segments is set in PYTORCH_CUDA_ALLOC_CONF, take it out"


def cuda_device(name: str | torch.device) -> torch.device:
    """Return the CUDA device of that name, with its index; ValueError if this process has no such device."""
    device = torch.device(name)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise ValueError(
            f"slot_device={str(name)!r} needs a CUDA device in the sender's process, and torch sees none; "
            "leave slot_device out to keep slots in host memory"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= found:
        raise ValueError(f"slot_device={str(name)!r}: this process sees {plural(found, 'CUDA device')}")
    return torch.device("cuda", index)


@dataclass(frozen=True)
class CudaHandle:
    """Location of memory on a GPU, as another process of this machine can find it."""

    device: str  # UUID of the GPU; its index may differ between processes
    segment: str  # CUDA's handle of the allocation, in hex
    offset: int  # first byte in the allocation
    nbytes: int

    @classmethod
    def of(cls, whole: torch.Tensor) -> CudaHandle:
        """Return the handle of a tensor that fills its storage; call it once for each tensor.

        Raises:
            TransportError: the memory cannot be shared.
        """
        storage = whole.untyped_storage()
        try:
            _, segment, nbytes, offset, counter, place, _, _ = storage._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TransportError(f"CUDA cannot share memory of {whole.device}: {error}{_SEGMENTS}") from None
        torch.UntypedStorage._release_ipc_counter(  # type: ignore[no-untyped-call]
            counter, place, device=whole.device
        )
        return cls(_uuid_of(whole.device.index), segment.hex(), offset, nbytes)

    def open(self) -> torch.UntypedStorage:
        """Open the memory, in another process than its owner; UnreachableMemoryError if that fails."""
        index = _index_of(self.device)
        segment = bytes.fromhex(self.segment)
        try:
            return torch.UntypedStorage._new_shared_cuda(
                index, segment, self.nbytes, self.offset, _NO_COUNTER, 0, b"", False
            )
        except RuntimeError as error:
            raise UnreachableMemoryError(
                f"CUDA cannot open the sender's slot on {self.device}: {error}{_SEGMENTS}"
            ) from None

    def to_bytes(self) -> bytes:
        """Return the handle as JSON, for :meth:`from_bytes`."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CudaHandle:
        """Return the handle in ``data``; raise FormatError if it is none."""
        try:
            fields: dict[str, Any] = json.loads(data)
            handle = cls(**fields)
            bytes.fromhex(handle.segment)
            good = isinstance(handle.device, str) and min(handle.offset, handle.nbytes) >= 0
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"not the handle of a CUDA slot: {error}") from None
        if not good or {type(handle.offset), type(handle.nbytes)} != {int}:
            raise FormatError(f"not the handle of a CUDA slot: {fields!r:.200}")
        return handle


class CudaBuffer(SharedSlot):
    """A slot on a GPU, on the sender's side.

    After :meth:`close` its memory is freed as soon as no other process has it open. Its ``device`` needs an
    index.

    Raises:
        NotEnoughMemoryError: the device has no room for it, or this process has no descriptor.
        TransportError: CUDA cannot share memory of this device.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            whole = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            needed, reason = format_megabytes(nbytes), str(error).partition(".")[0]
            raise NotEnoughMemoryError(
                f"a slot of {needed} is needed on {device}: {reason}; use "
                "encoding='bucket' with max_in_flight=2, or leave slot_device out"
            ) from None
        self.handle = CudaHandle.of(whole).to_bytes()
        self._whole = whole
        with naming_limits("a pipe for a slot on a GPU"):
            self._references = IpcReferences()
        super().__init__(whole[:nbytes], uuid.uuid4().hex)
        self.fd = self._references.fd
        _made_here[self.key] = self

    def close(self) -> None:
        self.fd = -1
        self._references.close(self._whole)
        self.tensor = self._whole = torch.empty(0, dtype=torch.uint8)


_made_here: weakref.WeakValueDictionary[str, CudaBuffer] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_made_here.clear)


class CudaSlotMapping(SlotMapping):
    """A slot on a GPU, opened in a receiver. Writes into it are visible to all processes.

    A copy of ``fd`` stays open as long as a tensor uses the memory.

    Raises:
        FormatError: ``handle`` is not a handle.
        NotEnoughMemoryError: this process has no descriptor.
        UnreachableMemoryError: this process cannot open the memory.
    """

    def __init__(self, key: str, handle: bytes, fd: int) -> None:
        self._reference_fd: int | None = None
        self._own_buffer = _made_here.get(key)
        if self._own_buffer is not None:  # CUDA does not open what the same process made
            super().__init__(self._own_buffer._whole)
            return
        storage = CudaHandle.from_bytes(handle).open()
        with naming_limits("a descriptor of the sender's slot"):
            self._reference_fd = os.dup(fd)
        closing = weakref.finalize(storage, os.close, self._reference_fd)
        closing.atexit = False  # kernels may still run; the end of the process closes it
        super().__init__(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

    @property
    def released(self) -> bool:
        if self._reference_fd is not None:
            return owner_released(self._reference_fd)
        return self._own_buffer is None or self._own_buffer.fd < 0


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(device: str) -> int:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(found):
        if _uuid_of(index) == device:
            return index
    raise UnreachableMemoryError(
        f"the sender's slots lie on GPU {device}, which is not one of the {found} that this worker sees: add "
        "that GPU to the worker's CUDA_VISIBLE_DEVICES, or leave slot_device out on the sender"
    )
