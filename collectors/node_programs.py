"""The programs of the workers of distributed collectors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchrl.collectors
from tensordict import TensorDictBase

from collectors.torchrl_names import connect_timeout, join_group

STOP = "weight_update/stop"
"""Key in the group's store that ends :func:`run_ahead`."""

LAYOUT = "weight_update/layout"
"""Key of the layout that the trainer expects of each batch; see :func:`layout_of`."""

_FOREVER = timedelta(days=3650)


def run_on_demand(
    *, rank: int, ip: str, port: int, world_size: int, backend: str, verbose: bool, **options: Any
) -> None:
    """Collect a batch whenever the trainer asks for one, as TorchRL's program does, for as long as it lives.

    TorchRL's worker gives up after ten seconds without a request.
    """
    orders, order = join_group(rank, world_size, backend, ip, port, verbose), f"NODE_{rank}_in"
    orders.set_timeout(_FOREVER)
    collector = _make_collector(total_frames=-1, **options)
    try:
        while orders.get(order) == b"continue":
            orders.delete_key(order)
            data = collector.next()
            if orders.get("TRAINER_status") == b"alive":
                _send(data)
    finally:
        collector.shutdown()


def run_ahead(
    *, rank: int, ip: str, port: int, world_size: int, backend: str, total_frames: int, **options: Any
) -> None:
    """Collect batches, at most one more than the trainer has taken, then wait for :data:`STOP`."""
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=connect_timeout),
        init_method=f"tcp://{ip}:{port}",
    )
    collector, store = _make_collector(total_frames=total_frames, **options), group_store()
    try:
        for data in collector:
            if store.check([STOP]):
                break
            _send(data)
        store.wait([STOP], _FOREVER)
    finally:
        collector.shutdown()


def group_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def layout_of(batch: TensorDictBase) -> str:
    """Return a line for each tensor of a batch: its key, size and dtype."""
    tensors = {key: value for key, value in batch.items(True, True) if isinstance(value, torch.Tensor)}
    return "\n".join(f"{key}: {value.numel()} x {value.dtype}" for key, value in tensors.items())


def _make_collector(
    *,
    collector_class: Any,
    num_workers: int,
    env_make: Any,
    policy: Any,
    policy_factory: Any,
    collector_kwargs: dict[str, Any],
    **options: Any,
) -> Any:
    if issubclass(collector_class, torchrl.collectors.MultiCollector):
        env_make = [env_make] * num_workers
        if policy_factory is not None:  # updates pass through a policy of this process to its workers
            policy = (policy_factory[0] if isinstance(policy_factory, Sequence) else policy_factory)()
    elif num_workers != 1:
        raise ValueError(f"{collector_class.__name__} runs one environment, not {num_workers}")
    else:
        collector_kwargs["return_same_td"] = True  # each batch was sent before the next one is collected
        policy = None if policy_factory is not None else policy
    return collector_class(
        env_make, policy, policy_factory=policy_factory, split_trajs=False, **options, **collector_kwargs
    )


def _send(batch: TensorDictBase) -> None:
    """Send a batch; raise ValueError if it does not fit the trainer's memory for it.

    With such a batch, torch.distributed ends the trainer's process, or mixes up the values.
    """
    store = group_store()
    store.wait([LAYOUT], _FOREVER)
    there, here = store.get(LAYOUT).decode().splitlines(), layout_of(batch).splitlines()
    if different := sorted({*there} ^ {*here}):
        lines = [f"\n  {line} ({'this worker' if line in here else 'worker 0'})" for line in different]
        raise ValueError(
            "the batches of this worker differ from those of worker 0; give all workers environments of the "
            f"same specs:{''.join(lines)}"
        )
    batch.isend(dst=0)
