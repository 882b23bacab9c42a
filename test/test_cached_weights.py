"""Forward passes through caches of PyTorch that hold values of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import PATHS, add_one, connect_pair
from torch import nn

from weight_update import MemoryWeightSyncScheme, WeightStrategy


@pytest.mark.parametrize("path", PATHS)
def test_autocast_casts_new_weights_after_an_update(path: str) -> None:
    """Autocast keeps its casts of the weights until the outermost block ends."""
    layers = 150 if path == "flat buffer" else 1
    source = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    options = dict(PATHS[path])
    strategy = WeightStrategy(encoding=options.pop("encoding", "dense"))
    with MemoryWeightSyncScheme(strategy, **options) as scheme:
        target = copy.deepcopy(source)
        given = torch.ones(1, 3)
        with connect_pair(scheme, source, target), torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                output = target(given)
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    assert torch.equal(output, source(given))
                add_one(source)
                scheme.send()
