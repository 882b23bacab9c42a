"""The programs of the workers of distributed collectors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torchrl.collectors
from tensordict import TensorDictBase

from collectors.torchrl_names import join_group

EXAMPLE = "weight_update/example"
"""Key in the group's store of the description of a batch that the trainer can receive."""

_FOREVER = timedelta(days=3650)


def run_on_demand(
    *, rank: int, ip: str, port: int, world_size: int, backend: str, verbose: bool, **options: Any
) -> None:
    """Collect a batch whenever the trainer asks for one."""
    store = join_group(rank, world_size, backend, ip, port, verbose)
    store.set_timeout(_FOREVER)
    collector, order = make_collector(**options), f"NODE_{rank}_in"
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


def make_collector(
    *, collector_class: Any, num_workers: int, env_make: Any, collector_kwargs: dict[str, Any], **options: Any
) -> Any:
    """Create the collector of a worker; see :meth:`~collectors.launched.Launched._inner_arguments`."""
    if issubclass(collector_class, torchrl.collectors.MultiCollector):
        env_make = [env_make] * num_workers
    elif num_workers != 1:
        raise ValueError(f"{collector_class.__name__} runs one environment, not {num_workers}")
    else:
        collector_kwargs = {**collector_kwargs, "return_same_td": True}  # a batch is sent before the next
    return collector_class(env_make, total_frames=-1, split_trajs=False, **options, **collector_kwargs)


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
