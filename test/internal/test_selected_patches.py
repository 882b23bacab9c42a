"""Patches of selected weights: what the sender derives from the names is found once, not in each update."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pairs import add_one, connect_pair, same
from torch import nn

from weight_update import MemoryWeightSyncScheme, PatchEncoding, WeightSchema, WeightStrategy
from weight_update.encodings.patch.encoding import PatchTracker


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
