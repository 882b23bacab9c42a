"""Copies of tensors into flat buffers.

A plain copy reads the memory that it writes, unless the caches hold it. The compiled loop of ``copying.c``
does not read it, which makes large copies a third faster. Where it is missing (see
:mod:`weight_update.wire.compiled`), and for tensors that need more than a copy, torch does the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weight_update.progress import Progress
from weight_update.threads import in_threads
from weight_update.wire.compiled import load
from weight_update.wire.fixed import PLAIN, is_plain

Array = npt.NDArray[Any]
_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

SERIAL = 32736
"""Elements that torch copies on one thread; whole vectors, because a remainder converts NaNs differently."""

# Bytes from which the compiled loop is faster than several threads of torch, which may still spin after a
# step of the trainer, and than one.
_LARGE, _LARGE_FOR_ONE = 256 << 20, 8 << 20
_EACH = 32 << 10  # bytes of a tensor, on average; looking at smaller ones takes longer than is gained
_PIECE = 8 << 20  # bytes for one thread at a time
_BATCHES = 64  # between which progress is noted

library: ctypes.CDLL | None = load(Path(__file__).parent, "_copying", 1)
"""The compiled library; None where there is none."""


def copy_tensors(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], title: str, *, serial: bool = False
) -> None:
    """Copy tensors, converted to the dtypes and devices of ``targets``. Torch does not count the writes.

    Args:
        targets: tensors to write into, which overlap no others.
        sources: one tensor of the same shape for each target.
        title: text for the progress, see :class:`~weight_update.progress.Progress`.
        serial: whether to use one thread; those of torch hang in forked processes.
    """
    pairs, total = list(zip(targets, sources, strict=True)), sum(target.nbytes for target in targets)
    threads = 1 if serial else torch.get_num_threads()
    if total < (_LARGE if threads > 1 else _LARGE_FOR_ONE):
        _copy_by_torch(pairs, serial)
        return
    with Progress(title, total) as progress:
        if library is not None and total >= _EACH * len(pairs):
            suiting = [_suits(*pair) for pair in pairs]
            _stream([pair for pair, suits in zip(pairs, suiting, strict=True) if suits], threads, progress)
            pairs = [pair for pair, suits in zip(pairs, suiting, strict=True) if not suits]
        step = -(-len(pairs) // _BATCHES)
        for start in range(0, len(pairs), step or 1):
            batch = pairs[start : start + step]
            _copy_by_torch(batch, serial)
            progress.advance(sum(target.nbytes for target, _ in batch))


def _suits(target: torch.Tensor, source: torch.Tensor) -> bool:
    same = source.dtype is target.dtype and source.shape == target.shape
    return same and type(source) in PLAIN and is_plain(source) and is_plain(target)


def _stream(pairs: _Pairs, threads: int, progress: Progress) -> None:
    """Copy contiguous tensors past the caches."""
    targets = np.array([target.data_ptr() for target, _ in pairs], np.uint64)
    sources = np.array([source.data_ptr() for _, source in pairs], np.uint64)
    sizes = np.array([target.nbytes for target, _ in pairs], np.int64)
    total = int(sizes.sum())

    def copy(start: int) -> None:
        stop = min(start + _PIECE, total)
        _copy(targets, sources, sizes, start, stop, past_caches=True)
        progress.advance(stop - start)

    in_threads(copy, range(0, total, _PIECE), threads)


def _copy_by_torch(pairs: _Pairs, serial: bool) -> None:
    if serial:
        pairs = [part for pair in pairs for part in _split(*pair)]
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        with torch.inference_mode():  # faster than no_grad for many small tensors
            torch._foreach_copy_(targets, sources)


def _split(target: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    size = max(target.numel(), 1) if target.is_cuda else SERIAL
    parts = torch.split(target.view(-1), size), torch.split(source.reshape(-1), size)
    return zip(*parts, strict=True)


def gather(targets: Array, sources: Array, sizes: Array) -> None:
    """Copy small pieces of memory, given by their addresses (uint64) and numbers of bytes (int64)."""
    _copy(targets, sources, sizes, 0, int(sizes.sum()), past_caches=False)


def _copy(targets: Array, sources: Array, sizes: Array, start: int, stop: int, *, past_caches: bool) -> None:
    """Copy the bytes from ``start`` to ``stop``, counted through all pieces."""
    assert library is not None
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes))
    numbers = map(ctypes.c_int64, (len(sizes), start, stop))
    library.wu_copy(*addresses, *numbers, int(past_caches))
