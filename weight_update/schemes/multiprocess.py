"""The scheme for workers that the sender starts with ``multiprocessing``: it uses queues."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch.multiprocessing as mp
from typing_extensions import Unpack

from weight_update.arguments import require_method
from weight_update.errors import LifecycleError
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.schemes.options import SchemeOptions, takes_options_of
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.multiprocess import MPTransport


class MultiProcessWeightSyncScheme(WeightSyncScheme, backend="process"):
    """Scheme whose workers get a queue for updates and a queue for answers.

    An update is one item of the queue, whatever the number of tensors: the item names a flat buffer that the
    worker maps. The queues are passed to a worker with the scheme, as an argument of its process.

    All other arguments are those of :class:`WeightSyncScheme`.

    Args:
        directory: directory of the buffers, as for :class:`SharedMemWeightSyncScheme`.
    """

    @takes_options_of(WeightSyncScheme.__init__)
    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        directory: str | None = None,
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, **options)
        self.directory = directory
        self._queues = _Queues()
        self._sender_pid = 0
        self._start_method = ""

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        ctx = ctx or mp.get_context("spawn")  # its queues suit processes started in any way
        require_method(ctx, "get_start_method", "ctx= a context, as multiprocessing.get_context() returns")
        self._sender_pid = os.getpid()
        self._start_method = ctx.get_start_method()
        self._queues = _new_queues(ctx, workers)
        return super().open_sender(workers, ctx)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if worker_idx not in self._queues:
            known = ", ".join(map(str, self._queues))
            reason = (
                f" (only for {known}): this scheme admits no late joiners; give init_on_sender() all "
                "workers, or use SharedMemWeightSyncScheme, where workers with common weights may join late"
                if known
                else "; pass the scheme to the worker's process after init_on_sender()"
            )
            raise LifecycleError(f"no queues for worker {worker_idx}{reason}")
        down, up, name = self._queues[worker_idx]
        link = MPTransport(down, up, end=end, directory=self.directory, name=name)
        if end == "receiver":
            link.watch(self._sender_pid)
        return link

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, with its queues.

        Raises:
            LifecycleError: the process is being started by another method than that of ``ctx=``.
        """
        if self._start_method == "fork" and get_spawning_popen() is not None:
            raise LifecycleError(
                "init_on_sender(ctx=...) was given a context whose processes are forked, and this worker is "
                "started in another way: start the workers with that context, or leave ctx= out"
            )
        return super().__getstate__()


class _Queues(dict[int, tuple[Any, Any, str]]):
    """Two queues and their name for each worker index."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for a worker that is being started.

        Raises:
            LifecycleError: the queues are pickled in another way.
        """
        if self and get_spawning_popen() is None:
            raise LifecycleError(
                "the queues of this scheme reach a worker only when its process starts: pass the scheme in "
                "Process(args=...), or use SharedMemWeightSyncScheme, which can be pickled in any way"
            )
        return _Queues, (dict(self),)


def _new_queues(ctx: Any, workers: Sequence[int]) -> _Queues:
    """Return queues for ``workers``; the OSError of a system that has none names the cure."""
    try:
        return _Queues((idx, (ctx.Queue(), ctx.Queue(), secrets.token_hex(8))) for idx in workers)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot make queues for {len(workers)} workers ({error.strerror}): multiprocessing needs room "
            "in /dev/shm for them, and descriptors (ulimit -n); or use SharedMemWeightSyncScheme",
        ) from None
