"""Options for the weights of a sharded trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from weight_update.errors import LifecycleError
from weight_update.strategy.named_weights import Convert

__all__ = ["GatherShards"]


@dataclass(frozen=True)
class GatherShards:
    """Options for gathering the weights of a sharded trainer on one rank, a few at a time.

    Every rank makes the same scheme and calls ``init_on_sender``, ``connect``, ``send`` and ``shutdown``
    alike. The first rank of ``group`` leads: it alone talks to the workers.

    Args:
        group: process group of the trainer's ranks; None for the default process group. Messages that keep
            the ranks in step, and shards on the CPU, travel through a separate group of the same ranks.
        gather: function for weights that are not DTensors. It takes an iterator of ``(name, tensor)`` with
            the tensors of this rank, and returns one of names and whole tensors. It runs on every rank, and
            all ranks ask for the next item together, so it may use collectives; only the leader's items are
            used. None gathers DTensors, and takes the leader's value of all other tensors.
        batch_bytes: number of bytes of weights that are gathered at once, in two batches: one is handed on
            while the other is on its way. A larger tensor is a batch by itself.

    Raises:
        ValueError: ``batch_bytes`` is not a positive number.
    """

    group: dist.ProcessGroup | None = None
    gather: Convert | None = None
    batch_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if not self.batch_bytes > 0:
            raise ValueError(f"batch_bytes is a positive number of bytes: {self.batch_bytes!r}")

    def members(self) -> list[int]:
        """Return the ranks that take part, numbered as in the default process group; the first leads.

        Raises:
            LifecycleError: torch.distributed is not initialized.
        """
        if not dist.is_initialized():
            raise LifecycleError("a sharded trainer needs torch.distributed: call init_process_group() first")
        return [int(rank) for rank in dist.get_process_group_ranks(self.group or dist.group.WORLD)]
