"""The programs of the workers of distributed collectors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torchrl.collectors

from collectors.torchrl_names import connect_timeout, join_group, run_collector

STOP = "weight_update/stop"
"""Key in the group's store that ends :func:`run_ahead`."""

_FOREVER = timedelta(days=3650)


def run_on_demand(
    *, rank: int, ip: str, port: int, world_size: int, backend: str, verbose: bool, **options: Any
) -> None:
    """Collect a batch whenever the trainer asks for one, by TorchRL's own program.

    TorchRL's worker gives up after ten seconds without a request; this one waits as long as the trainer
    lives.
    """
    store = join_group(rank, world_size, backend, ip, port, verbose)
    store.set_timeout(_FOREVER)
    run_collector(_store=store, verbose=verbose, weight_sync_schemes=None, **options)


def run_ahead(
    *,
    rank: int,
    ip: str,
    port: int,
    world_size: int,
    backend: str,
    collector_class: Any,
    num_workers: int,
    env_make: Any,
    policy: Any,
    policy_factory: Any,
    frames_per_batch: int,
    total_frames: int,
    collector_kwargs: dict[str, Any],
) -> None:
    """Collect batches, at most one more than the trainer has taken, then wait for :data:`STOP`."""
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=connect_timeout),
        init_method=f"tcp://{ip}:{port}",
    )
    if issubclass(collector_class, torchrl.collectors.MultiCollector):
        env_make = [env_make] * num_workers
        if policy_factory is not None:  # updates pass through a policy of this process to its workers
            policy = (policy_factory[0] if isinstance(policy_factory, Sequence) else policy_factory)()
    elif num_workers != 1:
        raise ValueError(f"{collector_class.__name__} runs one environment, not {num_workers}")
    elif policy_factory is not None:
        policy = None
    collector = collector_class(
        env_make,
        policy,
        policy_factory=policy_factory,
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        split_trajs=False,
        **collector_kwargs,
    )
    _serve(collector)


def _serve(collector: Any) -> None:
    store = dist.distributed_c10d._get_default_store()
    try:
        for data in collector:
            if store.check([STOP]):
                break
            data.isend(dst=0)
        store.wait([STOP], _FOREVER)
    finally:
        collector.shutdown()
