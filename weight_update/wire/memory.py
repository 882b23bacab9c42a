"""The memory of tensors: byte views, identity, digest, pinning, and waiting for GPU work that writes it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

_WORTH_PINNING = 16 << 20  # bytes; a GPU copies less than that in a millisecond or two anyway
_READ_ONLY = 8  # cudaHostRegisterReadOnly

_tried: set[int] = set()  # addresses of live memory that was pinned, or that the system refused to pin


def await_stream(tensor: torch.Tensor) -> None:
    """Wait for all work that this thread has queued on the GPU of ``tensor``, if it is on one."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def await_gpu(tensor: torch.Tensor) -> None:
    """Wait for all work that any thread has queued on the GPU of ``tensor``, if it is on one."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def pin(memory: torch.Tensor, *, read_only: bool = False) -> None:
    """Pin the memory that a tensor lies in until it is freed, if this process uses a GPU.

    A GPU copies from and to it 3 to 6 times faster. Small memory stays as it is, and so does memory that the
    system refuses to pin, which is tried once. ``read_only`` says that this process may not write to it.
    """
    if not torch.cuda.is_initialized() or memory.is_cuda:  # type: ignore[no-untyped-call]
        return
    storage = memory.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if nbytes < _WORTH_PINNING or address in _tried or memory.is_pinned():
        return
    gpu, flags = gpu_in_use(), _READ_ONLY if read_only else 0
    register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
    pinned_on = gpu if _call(gpu, register, address, nbytes, flags) else None
    _tried.add(address)
    weakref.finalize(storage, _forget, address, pinned_on, os.getpid()).atexit = False


def _forget(address: int, pinned_on: int | None, owner: int) -> None:
    _tried.discard(address)
    if pinned_on is not None and os.getpid() == owner:  # a forked process has no CUDA
        _call(pinned_on, torch.cuda.cudart().cudaHostUnregister, address)  # type: ignore[no-untyped-call]


def gpu_in_use() -> int:
    """Return the first GPU that this process uses already, or else the current one.

    CUDA, which must be initialized, takes memory of every GPU for which it is called. The current GPU of a
    new thread is the first one.
    """
    in_use = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return next(filter(in_use, range(torch.cuda.device_count())), torch.cuda.current_device())


def _call(gpu: int, function: Callable[..., int], *arguments: int) -> bool:
    """Call a function of the CUDA runtime with ``gpu`` as the current one; return whether it succeeded."""
    with torch.cuda.device(gpu):
        if int(function(*arguments)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # CUDA remembers the error, and the next kernel raises it
            torch.zeros(1, device="cuda")
    return False


def digest(tensor: torch.Tensor) -> str:
    """Return a digest (BLAKE2b, 128 bits, in hex) of the bytes of a tensor."""
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row; a contiguous CPU tensor is not copied."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous whatever its stride
    return byte_view(flat.view(torch.uint8))


def byte_view(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D uint8 CPU tensor, without a copy."""
    return memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]  # arrays are buffers


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory of its own: not if it is empty, meta, sparse or a wrapper."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.data_ptr() != 0


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, but its storage was resized to 0 bytes."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def memory_identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal for two tensors exactly if they are the same view of the same memory.

    The key of an empty tensor is None. The key of a tensor without memory of its own is its id.
    """
    if tensor.numel() == 0:
        return None
    if not has_memory(tensor):
        return "no memory", id(tensor)
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
