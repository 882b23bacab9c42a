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
        group: process group of the trainer's ranks; None for the default process group. The messages that
            keep the ranks in step, and shards in CPU memory, travel through another group with the same
            ranks.
        gather: gather function for weights that are not DTensors. It takes an iterator of ``(name, tensor)``
            with the tensors of this rank, and yields names and whole tensors. It runs on every rank, and all
            ranks ask for the next item together, so it may use collectives; only its items on the leader are
            used. None gathers DTensors, and takes the leader's value of all other tensors.
        batch_bytes: bytes of weights that are gathered at once, in two batches: one that is handed on, and
            one on its way. A larger tensor is a batch by itself.

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
        """Return the numbers, in the default process group, of the ranks that take part; the first leads.

        Raises:
            LifecycleError: torch.distributed is not initialized.
        """
        if not dist.is_initialized():
            raise LifecycleError("a sharded trainer needs torch.distributed: call init_process_group() first")
        return [int(rank) for rank in dist.get_process_group_ranks(self.group or dist.group.WORLD)]
