"""Tensors and helpers for tests of checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from weight_update.synchronizer import CheckpointStore
from weight_update.wire.schema import DTYPES

Tensors = dict[str, torch.Tensor]


def weights(version: int, rows: int = 8) -> Tensors:
    """Return small weights that hold their version."""
    return {
        "a.weight": torch.full((rows, 3), float(version)),
        "a.bias": torch.arange(rows, dtype=torch.bfloat16) + version,
    }


def every_dtype() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, dtype in DTYPES.items():
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (5 * 3 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[f"{name}.some"] = raw.view(dtype).view(5, 3)
        tensors[f"{name}.scalar"] = raw[: dtype.itemsize].clone().view(dtype).view(())
        tensors[f"{name}.empty"] = torch.empty(0, 4, dtype=dtype)
    return tensors


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(_equal(left[name], right[name]) for name in left)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    raw = [torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()).view(-1) for t in (left, right)]
    return torch.equal(*(flat.view(torch.uint8) for flat in raw))


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; return its exit status, negative for the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Deadline:
    """A trap that kills this process right before one of the calls that change a directory."""

    CALLS = ("open", "pwrite", "fsync", "replace", "close", "unlink", "utime")

    def __init__(self, calls: int) -> None:
        self._left = calls
        for name in self.CALLS:
            setattr(os, name, self._counting(getattr(os, name), name))

    def _counting(self, call: Callable[..., object], name: str) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            if self._left == 0:
                if name == "pwrite":  # half of it
                    fd, data, place = args
                    call(fd, data[: len(data) // 2], place)
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            return call(*args, **kwargs)

        return counted


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def versions(store: CheckpointStore) -> list[int]:
    return sorted(int(path.stem) for path in store.directory.glob("*.json"))


def data_files(store: CheckpointStore) -> int:
    return len(list(store.directory.glob("*.safetensors*")))
