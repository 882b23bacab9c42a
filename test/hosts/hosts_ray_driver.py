"""A trainer in a Ray cluster of several hosts: does what it reads, one order a line, and answers in JSON.

Arguments: the address of this host, and the scheme's ``data``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
import torch
from torch import nn

from weight_update import RayWeightSyncScheme, SyncFailedError
from weight_update.wire.memory import digest


@ray.remote(num_cpus=0)
class Player:
    def __init__(self, scheme: RayWeightSyncScheme, idx: int) -> None:
        self.policy, self.scheme = nn.Linear(256, 256), scheme
        scheme.init_on_receiver(model=self.policy, worker_idx=idx)

    def connect(self) -> None:
        self.scheme.connect()

    def weight(self) -> tuple[str, str]:
        with self.scheme.hold():
            return ray.util.get_node_ip_address(), digest(self.policy.weight.detach())


def main(address: str, data: str) -> None:
    ray.init(address=f"{address}:6379", _node_ip_address=address, log_to_driver=False)
    policy = nn.Linear(256, 256)
    scheme = RayWeightSyncScheme(address=address, data=data, timeout=4.0)
    places = [{"trainer": 0.01}, {"one": 0.01}]
    players = [Player.options(resources=where).remote(scheme, idx) for idx, where in enumerate(places)]
    scheme.init_on_sender(model=policy, remote_collectors=players)
    joining = [player.connect.remote() for player in players]
    scheme.connect()
    ray.get(joining)
    for order in sys.stdin:
        print(json.dumps(answer(order.strip(), scheme, policy, players)), flush=True)
    scheme.shutdown()
    ray.shutdown()


def answer(order: str, scheme: RayWeightSyncScheme, policy: nn.Linear, players: list[Any]) -> Any:
    if order == "send":
        torch.nn.init.normal_(policy.weight)
        try:
            return {"version": scheme.send().version}
        except SyncFailedError as error:
            return {"failed": sorted(error.failures)}
    if order == "versions":
        return scheme.worker_versions
    return {"mine": digest(policy.weight.detach()), "theirs": ray.get([p.weight.remote() for p in players])}


if __name__ == "__main__":
    main(*sys.argv[1:])
