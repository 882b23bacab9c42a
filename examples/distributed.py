"""One trainer and any number of rollout workers under torchrun.

    torchrun --nproc-per-node 3 examples/distributed.py

Rank 0 trains, and the other ranks compute with its newest weights. On several machines, pass
the address of the trainer's network interface as ``--address``, and torchrun's ``--rdzv-endpoint``:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.5:29400 \
        examples/distributed.py --address 10.0.0.5
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

from weight_update import DistributedWeightSyncScheme, TransportError, WeightStrategy


def make_policy() -> nn.Module:
    """Return a policy, whose first weights differ from rank to rank."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))


def train(options: argparse.Namespace, workers: int) -> None:
    """Change the policy and send it."""
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    with make_scheme(options) as scheme:
        scheme.init_on_sender(model=policy, num_workers=workers)
        scheme.connect()  # waits for all workers
        for _ in range(options.updates):
            loss = policy(torch.randn(32, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheme.send()  # returns when all workers compute with the new weights
        print(f"trainer: {scheme.last_report}", flush=True)
        print(f"trainer: the workers have {scheme.worker_versions}", flush=True)


def work(options: argparse.Namespace, idx: int) -> None:
    """Compute with the newest weights until the trainer is done."""
    policy, passes = make_policy(), 0
    scheme = make_scheme(options)
    scheme.init_on_receiver(model=policy, worker_idx=idx)
    scheme.connect()
    try:
        while True:
            scheme.receive(timeout=0)  # raises when the trainer has left; updates arrive without it
            policy(torch.randn(8, 64))
            passes += 1
    except TransportError:
        print(f"worker {idx}: version {scheme.version} after {passes} forward passes", flush=True)
    scheme.shutdown()


def make_scheme(options: argparse.Namespace) -> DistributedWeightSyncScheme:
    """Return a scheme, from the same arguments on every rank.

    The store of the default process group tells workers the address of the trainer.
    """
    strategy = WeightStrategy(encoding=options.encoding)
    return DistributedWeightSyncScheme(strategy=strategy, address=options.address)


def main() -> None:
    """Train on rank 0, and work on the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--address", default="127.0.0.1", help="of the trainer's network interface")
    parser.add_argument("--encoding", choices=["dense", "bucket", "patch"], default="dense")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    start = time.perf_counter()
    if dist.get_rank() == 0:
        train(options, dist.get_world_size() - 1)
        print(f"trainer: {options.updates} updates in {time.perf_counter() - start:.1f} s", flush=True)
    else:
        work(options, dist.get_rank() - 1)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
