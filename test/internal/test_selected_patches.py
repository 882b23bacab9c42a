"""Patches of selected weights: what the sender derives from the names is found once, not in each update."""

from __future__ import annotations

import gc

import torch
from pairs import add_one, connect_pair
from torch import nn

from weight_update import MemoryWeightSyncScheme, PatchEncoding, WeightSchema, WeightStrategy


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
