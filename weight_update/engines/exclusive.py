"""Generation and updates take turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch

from weight_update.engines.base import InferenceEngine
from weight_update.errors import LifecycleError, SyncTimeoutError

__all__ = ["ExclusiveEngine", "batches"]


class ExclusiveEngine(InferenceEngine):
    """An engine that is called by threads of this process, and never while it is updated.

    A subclass writes :meth:`load_weights`, and generates inside :meth:`generating`.

    Args:
        loads_in_chunks: see :attr:`InferenceEngine.loads_in_chunks`.
        timeout: seconds that an update waits for generation to end, and generation for an update.

    Attributes:
        version: of the weights that are loaded; None before the first, and after an update that failed.
    """

    def __init__(self, *, loads_in_chunks: bool = False, timeout: float = 60.0) -> None:
        self.loads_in_chunks, self.timeout = loads_in_chunks, timeout
        self.version: int | None = None
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """No update begins inside this context.

        Raises:
            SyncTimeoutError: an update took longer than ``timeout`` seconds.
            LifecycleError: an update failed midway, so the weights are a mixture; the next one mends it.
        """
        if not self._turn.acquire(timeout=self.timeout):
            raise SyncTimeoutError(f"an update took longer than {self.timeout:g} s (raise timeout=)")
        try:
            if self.version is None:
                raise LifecycleError("this engine has no whole version of the weights; wait for an update")
            yield
        finally:
            self._turn.release()

    def begin_update(self, version: int) -> None:
        """Wait for generation to end, and keep it out.

        Raises:
            SyncTimeoutError: it took longer than ``timeout`` seconds.
        """
        if not self._turn.acquire(timeout=self.timeout):
            raise SyncTimeoutError(f"generation took longer than {self.timeout:g} s (raise timeout=)")

    def finish_update(self, version: int) -> None:
        """Let generation go on. Subclasses that do more call this last."""
        self.version = version
        self._turn.release()

    def abort_update(self, version: int) -> None:
        """Let :meth:`generating` raise until an update succeeds."""
        del version
        self.version = None
        self._turn.release()


def batches(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Some weights at a time: as many as have ``limit`` bytes together, and at least one."""
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch
