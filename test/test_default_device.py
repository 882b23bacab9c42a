"""Programs that call torch.set_default_device(): memory of this package does not move to that device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    Encoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from weight_update.encodings import DenseEncoding

ENCODINGS: dict[str, Callable[[], Encoding]] = {
    "dense": DenseEncoding,
    "buckets": lambda: BucketEncoding(bucket_size=1 << 16),
    "patch": PatchEncoding,
    "patch, compressed": lambda: PatchEncoding(compression="ans"),
    "patch, rows and columns": lambda: PatchEncoding(layout="coo", delta_encoding=False),
}


def elsewhere(action: Callable[[], None]) -> threading.Thread:
    """Run ``action`` in another thread, where the default device of torch is not the CPU either."""

    def run() -> None:
        with torch.device("meta"):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme, DistributedWeightSyncScheme]
)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_are_sent_and_received(encoding: str, kind: type[WeightSyncScheme]) -> None:
    source, target = nn.Linear(300, 200), nn.Linear(300, 200)
    strategy = WeightStrategy("state_dict", encoding=ENCODINGS[encoding]())
    sender = kind(strategy=strategy, timeout=20.0, connect_timeout=20.0)
    with torch.device("meta"):
        sender.init_on_sender(model=source, num_workers=1)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=target, worker_idx=0)
    joining = elsewhere(receiver.connect)
    with sender, receiver, torch.device("meta"):
        sender.connect()
        joining.join()
        for turn in range(3):
            with torch.no_grad():
                source.weight[turn::50] += 1.0
            sender.send()
            assert torch.equal(source.weight, target.weight)
