"""Workers forked after the trainer used OpenMP: whatever starts such threads there hangs for ever."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import (
    BucketEncoding,
    DenseEncoding,
    PatchEncoding,
    WeightStrategy,
    WeightSyncScheme,
)

ENCODINGS = {
    "dense": DenseEncoding(),
    "bucket": BucketEncoding(bucket_size=1 << 20),
    "bucket, kept": BucketEncoding(bucket_size=1 << 20, load_instant=False),
    "patch": PatchEncoding(),
    "patch, relative": PatchEncoding(values="relative"),
    "patch, no init": PatchEncoding(init_sync=False),
}


def follow(scheme: WeightSyncScheme, model: nn.Module, pipe: Any) -> None:
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect()
    while pipe.recv():
        pipe.send(model.weight.detach().numpy().tobytes())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_workers_do_not_hang(kind: type[WeightSyncScheme], encoding: str) -> None:
    ctx, threads = mp.get_context("fork"), torch.get_num_threads()
    torch.set_num_threads(2)
    source, target = nn.Linear(400, 1000), nn.Linear(400, 1000)
    target.load_state_dict(source.state_dict())
    torch.ones(1 << 20).mul_(2.0)  # starts the threads
    scheme = kind(strategy=WeightStrategy(encoding=ENCODINGS[encoding]), timeout=10.0, connect_timeout=10.0)
    ours, theirs = ctx.Pipe()
    with scheme:
        scheme.init_on_sender(model=source, num_workers=1, ctx=ctx)
        worker = ctx.Process(target=follow, args=(scheme, target, theirs), daemon=True)
        worker.start()
        try:
            scheme.connect()
            for count in (5, 400_000, 5):  # a little, all, a little
                with torch.no_grad():
                    source.weight.view(-1)[:count].add_(1.0)
                scheme.send()
                ours.send(True)
                assert ours.recv() == source.weight.detach().numpy().tobytes()
        finally:
            worker.kill()
            worker.join()
            torch.set_num_threads(threads)
