"""Patches of selected weights: what the sender derives from the names is found once, not in each update."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pairs import add_one, connect_pair, same
from torch import nn

from weight_update import MemoryWeightSyncScheme, PatchEncoding, WeightSchema, WeightStrategy
from weight_update.encodings.patch.encoding import PatchTracker
from weight_update.testing.processes import wait_until


def schemas_alive() -> int:
    gc.collect()
    return sum(type(one) is WeightSchema for one in gc.get_objects())


def test_updates_of_selected_weights_leave_no_schemas_behind() -> None:
    """Of many small tensors, the sender remembers which it has checked."""
    trainer, model = (nn.Sequential(*[nn.Linear(2, 2) for _ in range(300)]) for _ in range(2))
    trainer[0].requires_grad_(False)
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(), select="trainable")
    sender = MemoryWeightSyncScheme(strategy)
    receiver = connect_pair(sender, trainer, model)
    counts = []
    for _ in range(8):
        add_one(trainer[1])
        sender.send()
        counts.append(schemas_alive())
    assert torch.equal(trainer[1].weight, model[1].weight)
    receiver.shutdown()
    sender.shutdown()
    assert counts[-1] == counts[3], counts


class Tied(nn.Module):
    """A module with three names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = self.third = nn.Parameter(torch.zeros(100))


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_all_weights_after_an_error_have_the_new_values_of_tied_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = Tied(), Tied()
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(), select=[name])
    sender = MemoryWeightSyncScheme(strategy)
    with sender, connect_pair(sender, trainer, model):
        add_one(trainer)
        with monkeypatch.context() as context:
            context.setattr(PatchTracker, "compare", fail)
            with pytest.raises(RuntimeError, match="no memory"):
                sender.send()
        assert sender.send().encoding == "bucket"
        assert same(trainer, model)


def fail(*_: Any) -> None:
    raise RuntimeError("no memory")


def headed(value: float) -> nn.ModuleDict:
    """Return a model of which training changes only the head."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    for one in model.parameters():
        nn.init.constant_(one, value)
    model["body"].requires_grad_(False)
    return model


def selected(**options: Any) -> MemoryWeightSyncScheme:
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(), select="trainable")
    return MemoryWeightSyncScheme(strategy, timeout=20.0, **options)


@contextlib.contextmanager
def joining_late(sender: MemoryWeightSyncScheme, model: nn.Module) -> Iterator[None]:
    """Have worker 1 join during the block."""
    late = copy.copy(sender)
    late.init_on_receiver(model=model, worker_idx=1)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(late.connect)
        wait_until(lambda: 1 in sender.worker_versions)
        yield
        joining.result()
        late.shutdown()


def test_a_late_joiner_of_another_dtype_gets_the_weights_that_updates_do_not_carry() -> None:
    trainer, first, second, sender = headed(1.001), headed(0.0).bfloat16(), headed(0.0), selected()
    with sender, connect_pair(sender, trainer, first), joining_late(sender, second):
        for _ in range(2):
            with torch.no_grad():
                trainer["head"].weight[0] += 1
            sender.send()
            assert same(trainer, second)
            assert torch.equal(first["head"].weight, trainer["head"].weight.bfloat16())


def test_workers_keep_weights_of_their_own_that_updates_do_not_carry() -> None:
    sources, models, sender = [headed(1.0), headed(2.0)], [headed(0.0), headed(0.0)], selected()
    with sender, ThreadPoolExecutor(2) as pool:
        sender.init_on_sender(params_map=dict(enumerate(sources)))
        receivers = [copy.copy(sender) for _ in models]
        for idx, (receiver, model) in enumerate(zip(receivers, models, strict=True)):
            receiver.init_on_receiver(model=model, worker_idx=idx)
        joining = [pool.submit(receiver.connect) for receiver in receivers]
        sender.connect()
        for one in joining:
            one.result()
        common = headed(3.0)
        for _ in range(2):
            sender.send(common)
            for source, model in zip(sources, models, strict=True):
                assert same(source["body"], model["body"])
                assert same(common["head"], model["head"])
            add_one(common["head"])
        for receiver in receivers:
            receiver.shutdown()


@pytest.mark.parametrize("options", [{"init_sync": False}, {"init_sync_prefixes": ["head"]}])
def test_a_late_joiner_of_another_dtype_was_told_no_digests(options: dict[str, Any]) -> None:
    trainer, strategy = headed(1.0), WeightStrategy("state_dict", encoding=PatchEncoding(**options))
    first, second = copy.deepcopy(trainer).bfloat16(), copy.deepcopy(trainer)
    sender = MemoryWeightSyncScheme(strategy, timeout=5.0)
    with sender, connect_pair(sender, trainer, first), joining_late(sender, second):
        for _ in range(2):
            add_one(trainer)
            sender.send()
            assert same(trainer, second)
