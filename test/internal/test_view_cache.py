"""Views into buffers that are used again and again live as long as their encoder, not as the buffers."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from pairs import add_one, connect_pair
from torch import nn

from weight_update import (
    BucketEncoding,
    DenseEncoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    WeightSchema,
    WeightStrategy,
)
from weight_update.encodings.base import Encoder
from weight_update.encodings.dense import ViewCache


def schemas_alive() -> int:
    gc.collect()
    return sum(type(one) is WeightSchema for one in gc.get_objects())


@pytest.mark.parametrize("encoding", [DenseEncoding(), BucketEncoding()])
def test_a_buffer_does_not_keep_the_views_of_an_encoder(encoding: DenseEncoding | BucketEncoding) -> None:
    tensors = [torch.rand(2, 8) for _ in range(5)]
    schema = WeightSchema.of({f"w{i}": tensor for i, tensor in enumerate(tensors)})
    buffers = {size: torch.zeros(size, dtype=torch.uint8) for size in encoding.payload_sizes(schema)}
    before = schemas_alive()
    for _ in range(3):
        encoding.encoder(schema).encode(tensors, buffers.__getitem__)
    assert schemas_alive() == before


def test_views_are_dropped_with_their_buffer_or_cache_without_garbage_collection() -> None:
    schema = WeightSchema.of({"w": torch.zeros(4)})
    cache, buffers = ViewCache(schema), [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    gc.disable()
    try:
        first, second = (weakref.ref(cache.views(buffer)[0]) for buffer in buffers)
        del buffers[0]
        assert first() is None
        assert second() is not None
        del cache
        assert second() is None
    finally:
        gc.enable()


def test_a_signal_handler_that_raises_while_a_buffer_ends_keeps_no_views() -> None:
    """The next buffer may have the same id, and would be filled through the views of this one."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    schema = WeightSchema.of({"w": torch.zeros(4)})
    cache, buffer = ViewCache(schema), torch.zeros(16, dtype=torch.uint8)
    view = weakref.ref(cache.views(buffer)[0])
    former = sys.gettrace()
    sys.settrace(interrupt)  # it interrupts each function of Python that is called
    del buffer
    sys.settrace(former)
    assert view() is None


def test_full_updates_instead_of_patches_leave_nothing_behind() -> None:
    """Training in float32 changes almost all elements, so each update carries all weights."""
    trainer, model = nn.Linear(4, 3), nn.Linear(4, 3)
    sender = MemoryWeightSyncScheme(WeightStrategy("state_dict", encoding=PatchEncoding()))
    receiver = connect_pair(sender, trainer, model)
    counts = []
    for _ in range(8):
        add_one(trainer)
        assert sender.send().encoding == PatchEncoding().whole.label
        counts.append(schemas_alive())
    receiver.shutdown()
    sender.shutdown()
    assert counts[-1] == counts[3], counts


def test_full_updates_instead_of_patches_share_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    encoder = BucketEncoding.encoder

    def counted(self: BucketEncoding, schema: WeightSchema) -> Encoder:
        made.append(schema)
        return encoder(self, schema)

    trainer, model = nn.Linear(4, 3), nn.Linear(4, 3)
    sender = MemoryWeightSyncScheme(WeightStrategy("state_dict", encoding=PatchEncoding()))
    receiver = connect_pair(sender, trainer, model)
    monkeypatch.setattr(BucketEncoding, "encoder", counted)
    for _ in range(5):
        add_one(trainer)
        assert sender.send().encoding == PatchEncoding().whole.label
    receiver.shutdown()
    sender.shutdown()
    assert len(made) <= 1
    assert torch.equal(trainer.weight, model.weight)
