"""Engines in which generation and updates take turns."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator

import torch

from weight_update.arguments import require_seconds
from weight_update.engines.base import InferenceEngine
from weight_update.errors import LifecycleError, SyncTimeoutError

Weight = tuple[str, torch.Tensor]


class ExclusiveEngine(InferenceEngine):
    """An engine that threads of this process call, and that is never called while it is updated.

    A subclass implements ``load_weights``, and generates inside :meth:`generating`::

        class MyEngine(ExclusiveEngine):
            def load_weights(self, weights):
                self.model.load_weights(weights)

            def generate(self, prompt):
                with self.generating():
                    return self.model.generate(prompt)

    Args:
        loads_in_chunks: as :attr:`~weight_update.InferenceEngine.loads_in_chunks`.
        timeout: seconds that an update waits for generation to end, and generation for an update.

    Attributes:
        version: version of the loaded weights; None before the first, and after an update that failed.
    """

    def __init__(self, *, loads_in_chunks: bool = False, timeout: float = 60.0) -> None:
        self.loads_in_chunks: bool = loads_in_chunks
        self.timeout: float = require_seconds("timeout", timeout)
        self.version: int | None = None
        self._turn = threading.Condition()
        self._taken = False
        self._update_waits = False

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Return a context manager that keeps updates out. An update that waits goes first.

        Raises:
            SyncTimeoutError: an update or other generation took longer than ``timeout`` seconds.
            LifecycleError: an update failed midway, so the weights are a mixture until the next one.
        """
        with self._turn:
            if not self._turn.wait_for(lambda: not (self._taken or self._update_waits), self.timeout):
                raise SyncTimeoutError(
                    f"an update or other generation took longer than {self.timeout:g} s (raise timeout=)"
                )
            if self.version is None:
                raise LifecycleError("this engine has no complete version of the weights; wait for an update")
            self._taken = True
        try:
            yield
        finally:
            self._end_turn()

    def begin_update(self, version: int) -> None:
        """Wait for generation to end, and keep it out.

        Raises:
            SyncTimeoutError: generation took longer than ``timeout`` seconds.
        """
        with self._turn:
            self._update_waits = True
            try:
                if not self._turn.wait_for(lambda: not self._taken, self.timeout):
                    raise SyncTimeoutError(f"generation took longer than {self.timeout:g} s (raise timeout=)")
                self._taken = True
            finally:
                self._update_waits = False
                self._turn.notify_all()

    def finish_update(self, version: int) -> None:
        """Let generation continue. A subclass that overrides this calls it last."""
        self.version = version
        self._end_turn()

    def abort_update(self, version: int) -> None:
        """Make :meth:`generating` raise until an update succeeds."""
        self.version = None
        self._end_turn()

    def _end_turn(self) -> None:
        with self._turn:
            self._taken = False
            self._turn.notify_all()


def by_module(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """Yield lists of weights that follow one another and belong to children of one module.

    An example are the projections of an attention layer. Some loaders make one parameter of several of them,
    and forget those that come with another call.
    """
    for _, group in itertools.groupby(weights, lambda weight: weight[0].rsplit(".", 2)[0]):
        yield list(group)


def batches(groups: Iterable[list[Weight]], limit: int) -> Iterator[list[Weight]]:
    """Yield lists of groups that have at most ``limit`` bytes each; a larger group is a list by itself."""
    batch: list[Weight] = []
    size = 0
    for group in groups:
        nbytes = sum(tensor.nbytes for _, tensor in group)
        if batch and size + nbytes > limit:
            yield batch
            batch, size = [], 0
        batch += group
        size += nbytes
    if batch:
        yield batch
