"""A worker as a program of its own: ``hosts_worker.py ADDRESS PORT INDEX``, its token from the environment.

It tells each version that it has, with a digest of its weights, as a line of JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

from weight_update import DistributedWeightSyncScheme, TransportError
from weight_update.wire.memory import digest


def main() -> None:
    """Follow the trainer until it leaves."""
    address, port, index = sys.argv[1:]
    torch.set_num_threads(1)
    model = nn.Linear(256, 256)
    with DistributedWeightSyncScheme(address=address, port=int(port)) as scheme:
        scheme.init_on_receiver(model=model, worker_idx=int(index))
        scheme.connect()
        try:
            while True:
                with scheme.hold():
                    found = {"version": scheme.version, "weight": digest(model.weight.detach())}
                print(json.dumps(found), flush=True)
                scheme.receive(timeout=30.0)
        except TransportError as error:
            print(json.dumps({"end": str(error)}), flush=True)


if __name__ == "__main__":
    main()
