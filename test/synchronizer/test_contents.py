"""The weights that each method carries: parts, extra state, ties, shards and conversions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import quick_for
from sync_parts import Waiting, connected, exchange, model_at, set_to, step_of, synchronizer
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from weight_update import (
    PatchEncoding,
    SchemaMismatchError,
    Synchronizer,
    SyncMethod,
    SyncStyle,
    TrainerClient,
    UnsupportedSourceError,
    WeightStrategy,
)

EVERY = list(SyncMethod)


class Counting(nn.Linear):
    """A layer whose extra state is a number, beside a head."""

    def __init__(self, seen: int) -> None:
        super().__init__(2, 2)
        self.seen, self.head = seen, nn.Linear(2, 2)
        set_to(self, seen)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def sync_once(method: SyncMethod, path: Path, source: nn.Module, model: nn.Module, **options: Any) -> None:
    clients = connected(method, SyncStyle.EXPLORER_DRIVEN, path, source, model, **options)
    with clients as (_, trainer, explorer):
        explorer.step = 1
        exchange(trainer, explorer)


@pytest.mark.parametrize("method", EVERY)
def test_extra_state_of_modules_travels(method: SyncMethod, tmp_path: Path) -> None:
    model = Counting(-1)
    sync_once(method, tmp_path, Counting(5), model)
    assert (model.seen, step_of(model)) == (5, 5)


@pytest.mark.parametrize("method", quick_for(EVERY, SyncMethod.NCCL, SyncMethod.CHECKPOINT))
def test_a_part_of_the_weights_travels_and_the_rest_is_left_alone(method: SyncMethod, tmp_path: Path) -> None:
    model, strategy = Counting(-1), WeightStrategy(select=["head"])
    sync_once(method, tmp_path, Counting(5), model, strategy=strategy)
    assert step_of(model.head) == 5
    assert model.weight.tolist() == [[-1.0, -1.0]] * 2


@pytest.mark.parametrize("method", EVERY)
def test_the_trainer_alone_selects_and_converts(method: SyncMethod, tmp_path: Path) -> None:
    def converted(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"inner.{name}", 2 * tensor) for name, tensor in items)

    strategy = WeightStrategy("state_dict", select=["0.weight"], convert=converted)
    model = nn.ModuleDict({"inner": model_at(-1)})
    sync_once(method, tmp_path, model_at(5), model, strategy=strategy)
    assert {name: value.unique().item() for name, value in model.state_dict().items()} == {
        "inner.0.weight": 10,
        "inner.0.bias": -1,
        "inner.1.weight": -1,
        "inner.1.bias": -1,
    }


def test_a_file_has_converted_weights_with_max_in_flight_too(tmp_path: Path) -> None:
    def negated(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, -tensor) for name, tensor in items)

    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=1, convert=negated)
    model = model_at(-1)
    sync_once(SyncMethod.CHECKPOINT, tmp_path, model_at(5), model, strategy=strategy)
    assert step_of(model) == -5


@pytest.mark.parametrize("method", [SyncMethod.NCCL, SyncMethod.MEMORY])
def test_max_in_flight_without_files_is_refused(method: SyncMethod, tmp_path: Path) -> None:
    """Such a sender keeps no weights for explorers that join, which would wait for the next update."""
    strategy = WeightStrategy("state_dict", encoding="bucket", max_in_flight=1)
    with (
        synchronizer(method, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
        pytest.raises(ValueError, match="max_in_flight keeps no weights for explorers that join"),
    ):
        TrainerClient(where, model_at(5), strategy=strategy)
    if method is SyncMethod.MEMORY:
        with pytest.raises(ValueError, match="max_in_flight keeps no weights"):
            Synchronizer(method, strategy=strategy)


@pytest.mark.parametrize(
    "options", [{"init_sync": False}, {"init_sync_prefixes": ["0"]}, {"init_sync_prefixes": []}]
)
def test_changes_of_weights_that_the_synchronizer_does_not_have_are_refused(options: dict[str, Any]) -> None:
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(**options))
    text = "the synchronizer needs all weights at first"
    with pytest.raises(ValueError, match=text):
        Synchronizer(SyncMethod.MEMORY, strategy=strategy)
    with Synchronizer(SyncMethod.MEMORY) as where, pytest.raises(ValueError, match=text):
        TrainerClient(where, model_at(5), strategy=strategy)


def test_shards_are_not_written_to_a_file(tmp_path: Path) -> None:
    def counted(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        calls.append(1)
        return items

    calls: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weights = {"weight": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])}
        with (
            synchronizer(SyncMethod.CHECKPOINT, SyncStyle.EXPLORER_DRIVEN, tmp_path) as where,
            TrainerClient(where, weights, strategy=WeightStrategy(convert=counted)) as trainer,
            pytest.raises(UnsupportedSourceError, match=r"sharded \(DTensor\), and a file has whole ones"),
        ):
            trainer.blocking.sync_weight()
    finally:
        dist.destroy_process_group()
    assert not calls


class TwoLayers(nn.Module):
    def __init__(self, value: float, *, tied: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.b.weight = self.a.weight
        set_to(self, value)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    for method in EVERY:
        model = TwoLayers(-1)
        sync_once(method, tmp_path / method.value, TwoLayers(4), model)
        assert step_of(model) == 4
        assert model.a.weight.data_ptr() == model.b.weight.data_ptr()


@pytest.mark.parametrize("method", EVERY)
def test_an_explorer_that_ties_what_the_trainer_does_not_says_so(method: SyncMethod, tmp_path: Path) -> None:
    source, model = TwoLayers(4, tied=False), TwoLayers(-1)
    set_to(source.b, 5)
    with connected(method, SyncStyle.EXPLORER_DRIVEN, tmp_path, source, model) as (_, trainer, explorer):
        explorer.step = 1
        waiting = Waiting(explorer)
        waiting.be_served_by(trainer)
        with pytest.raises(SchemaMismatchError, match=r"a\.weight and b\.weight: tied in"):
            waiting.result()
    assert step_of(model) == -1
