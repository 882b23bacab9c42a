"""A trainer that is sharded with FSDP2, and rollout workers that each hold the whole model.

    torchrun --nproc-per-node 4 examples/fsdp_trainer.py

The first ranks (``--trainers``, 2 by default) train one transformer together, and each has a part
of it. The other ranks are workers. All trainers call ``send()``. The weights are gathered a few at a time
while they are sent, so no rank holds all of them. Only rank 0 talks to the workers.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    GatherShards,
    TransportError,
    WeightStrategy,
)

VOCABULARY, WIDTH = 64, 48


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.log_softmax(self.head(x), -1)


def make_scheme(group: dist.ProcessGroup | None = None) -> DistributedWeightSyncScheme:
    """Return a scheme, the same on every rank; only the trainers need to give ``group``."""
    strategy = WeightStrategy(
        encoding=BucketEncoding(bucket_size=256 << 10),
        max_in_flight=2,  # a bucket is sent while the next one is filled
        gather=GatherShards(group),
    )
    return DistributedWeightSyncScheme(strategy=strategy)


def train(updates: int, workers: int, group: dist.ProcessGroup) -> None:
    """Run one rank of the trainer; all ranks of ``group`` call this."""
    torch.manual_seed(0)
    policy = Transformer()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    with make_scheme(group) as scheme:
        scheme.init_on_sender(model=policy, num_workers=workers)
        scheme.connect()
        for _ in range(updates):
            tokens = torch.randint(0, VOCABULARY, (8, 17))
            loss = nn.functional.nll_loss(policy(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheme.send()  # on every rank
        held = sum(weight.to_local().numel() for weight in policy.parameters())
        total = sum(weight.numel() for weight in policy.parameters())
        print(f"trainer {dist.get_rank()}: holds {held:,} of {total:,} weights", flush=True)
        if dist.get_rank(group) == 0:
            print(f"trainer 0: {scheme.last_report}", flush=True)
        print(f"trainer {dist.get_rank()}: the workers have {scheme.worker_versions}", flush=True)


def work(idx: int) -> None:
    """Compute with the newest weights until the trainer is done."""
    policy, passes = Transformer().eval(), 0
    scheme = make_scheme()
    scheme.init_on_receiver(model=policy, worker_idx=idx)
    scheme.connect()
    try:
        while True:
            scheme.receive(timeout=0)  # raises when the trainer has left; updates arrive without it
            with torch.no_grad():
                policy(torch.randint(0, VOCABULARY, (2, 16)))
            passes += 1
    except TransportError:
        print(f"worker {idx}: version {scheme.version} after {passes} forward passes", flush=True)
    scheme.shutdown()


def main() -> None:
    """Train on the first ranks, and work on the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size() - options.trainers
    group = dist.new_group(list(range(options.trainers)))  # every rank takes part in this
    if rank < options.trainers:
        train(options.updates, workers, group)
    else:
        work(rank - options.trainers)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
