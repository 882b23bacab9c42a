"""The memory of tensors: byte views, identity, digest, and waiting for GPU work that writes it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def await_stream(tensor: torch.Tensor) -> None:
    """Wait for all work that this thread has queued on the GPU of ``tensor``, if it is on one."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


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


def memory_identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal for two tensors exactly if they are the same view of the same memory.

    The key of an empty tensor is None. The key of a tensor without memory of its own is its id; it is meta,
    sparse or nested.
    """
    if tensor.numel() == 0:
        return None
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
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
