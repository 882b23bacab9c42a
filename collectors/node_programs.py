"""The programs of the workers of distributed collectors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torchrl.collectors
from tensordict import TensorDictBase

from collectors.torchrl_names import connect_timeout, join_group

EXAMPLE = "weight_update/example"
"""Key in the group's store of the description of a batch that the trainer can receive."""
STOP = "weight_update/stop"
"""Key in the group's store that ends :func:`run_ahead`."""

_FOREVER = timedelta(days=3650)


def run_on_demand(
    *, rank: int, ip: str, port: int, world_size: int, backend: str, verbose: bool, **options: Any
) -> None:
    """Collect a batch whenever the trainer asks for one."""
    store = join_group(rank, world_size, backend, ip, port, verbose)
    store.set_timeout(_FOREVER)
    collector, order = _make_collector(total_frames=-1, **options), f"NODE_{rank}_in"
    try:
        batches = _checked(collector)
        while store.get(order) == b"continue":
            store.delete_key(order)
            data = next(batches)
            if store.get("TRAINER_status") == b"alive":
                data.isend(dst=0)
    finally:
        collector.shutdown()
    store.set(f"NODE_{rank}_out", b"down")


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
    collector = _make_collector(total_frames=total_frames, **options)
    store = dist.distributed_c10d._get_default_store()
    try:
        for data in _checked(collector):
            if store.check([STOP]):
                break
            data.isend(dst=0)
        store.wait([STOP], _FOREVER)
    finally:
        collector.shutdown()


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
        collector_kwargs = {**collector_kwargs, "return_same_td": True}  # a batch is sent before the next
        if policy_factory is not None:
            policy = None
    return collector_class(
        env_make, policy, policy_factory=policy_factory, split_trajs=False, **options, **collector_kwargs
    )


def describe(batch: TensorDictBase) -> dict[str, str]:
    """Return the shape and dtype of each tensor of a batch."""
    return {str(key): f"{list(one.shape)} {one.dtype}" for key, one in batch.items(True, True)}


def _checked(collector: Any) -> Iterator[TensorDictBase]:
    """Yield batches; raise ValueError if the trainer cannot receive them, as it knows those of worker 0."""
    for number, data in enumerate(collector):
        if number == 0:
            _require_expected(describe(data))
        yield data


def _require_expected(made: dict[str, str]) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.wait([EXAMPLE], _FOREVER)
    expected = json.loads(store.get(EXAMPLE))
    if made != expected:
        different = [name for name in sorted({*made, *expected}) if made.get(name) != expected.get(name)]
        raise ValueError(
            "the first function of create_env_fn gives other batches than that of this worker; all "
            "environments need the same specs. Differences: "
            + ", ".join(f"{one} is {made.get(one)} here, {expected.get(one)} there" for one in different)
        )
