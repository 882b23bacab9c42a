"""Update the policies of two worker processes, without collectors.

The trainer sends. Each worker's policy changes in the background, between two forward passes, while the
worker goes on computing. Worker 0 takes updates as they come, so one rollout may use several versions.
Worker 1 holds during each rollout, so one version makes the whole rollout.

    python examples/standalone.py --scheme multiprocess
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from multiprocessing.queues import Queue

import torch
import torch.multiprocessing as mp
from torch import nn

from weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}
WORKERS = 2
UPDATES = 5
ROLLOUT_STEPS = 8
ENV_SECONDS = 0.02  # duration of a step of the environment
LEARN_SECONDS = 0.2  # duration of a step of the trainer


def make_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def checksum(policy: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in policy.parameters())


# -- worker --------------------------------------------------------------------------------------------


def work(scheme: WeightSyncScheme, index: int, results: Queue) -> None:
    torch.set_num_threads(1)  # workers share the cores
    policy = make_policy()
    with scheme:  # shut down at the end
        scheme.init_on_receiver(model=policy, worker_idx=index)
        scheme.connect()  # now the policy has the trainer's weights
        print(f"worker {index}: connected, version {scheme.version}", flush=True)

        while scheme.version < UPDATES - 1:
            versions = rollout(policy, scheme, hold=index == 1)
            print(f"worker {index}: rollout by versions {versions}", flush=True)

        # A worker with nothing to compute can wait for an update.
        while scheme.version < UPDATES:
            scheme.receive(timeout=30.0)
        results.put((index, scheme.version, checksum(policy)))


def rollout(policy: nn.Module, scheme: WeightSyncScheme, hold: bool) -> list[int]:
    """Take a few steps; return the version that chose the action of each."""
    versions = []
    with scheme.hold() if hold else nullcontext():
        for _ in range(ROLLOUT_STEPS):
            # A forward pass holds by itself. This hold makes sure that the version is that of the pass.
            with scheme.hold(), torch.no_grad():
                policy(torch.randn(4))
                versions.append(scheme.version)
            time.sleep(ENV_SECONDS)
    return versions


# -- trainer -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scheme", choices=SCHEMES, default="shared_mem")
    args = parser.parse_args()

    context, policy = mp.get_context("spawn"), make_policy()
    results = context.Queue()
    with SCHEMES[args.scheme](strategy="state_dict") as scheme:
        # Initialize first, then start the workers: the scheme tells them how to connect.
        scheme.init_on_sender(model=policy, num_workers=WORKERS, ctx=context)
        workers = [
            context.Process(target=work, args=(scheme, idx, results), daemon=True) for idx in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        scheme.worker_alive = workers  # connect() then raises at once when one of them dies
        scheme.connect()  # waits until every worker has version 0

        for _ in range(UPDATES - 1):
            learn(policy)
            # Returns as soon as the weights may change again, and does not wait for worker 1 to end its
            # rollout. A worker that cannot keep up gets the newest version and skips those in between.
            update = scheme.send_async()
            time.sleep(LEARN_SECONDS)
            print(
                f"trainer: sent version {update.version}, workers have {scheme.worker_versions}", flush=True
            )

        learn(policy)
        print(f"trainer: {scheme.send()}", flush=True)  # waits for all, and raises if one died or refused it
        for index, version, found in sorted(results.get(timeout=30.0) for _ in workers):
            same = "equal" if found == checksum(policy) else "NOT equal"
            print(f"worker {index}: ended with version {version}, weights {same} to the trainer's")
        for worker in workers:
            worker.join(30.0)


def learn(policy: nn.Module) -> None:
    """Stand in for a step of the optimizer, which no worker sees before it is sent."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


if __name__ == "__main__":
    main()
