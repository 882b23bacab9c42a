"""The standalone program of TorchRL's documentation on weight synchronization; only its imports differ.

Its worker computes until it sees the weights of the last epoch, where the original goes on for ever.
"""

import os

import torch
import torch.nn as nn
from tensordict import TensorDict
from torch import multiprocessing as mp

from weight_update import SharedMemWeightSyncScheme

EPOCHS = 10


def worker_fn(scheme, worker_idx):
    model = nn.Linear(4, 2)

    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker_idx)

    scheme.connect(worker_idx=worker_idx)

    while True:
        output = model(torch.zeros(4))
        if bool((output == EPOCHS).all()):
            break
    # One write with its newline: print() makes two, between which the other worker may write.
    os.write(1, f"worker {worker_idx} ends at version {scheme.version}\n".encode())


def main():
    policy = nn.Linear(4, 2)
    scheme = SharedMemWeightSyncScheme()

    scheme.init_on_sender(
        model_id="policy",
        weights=TensorDict.from_module(policy),
        devices=[torch.device("cpu")] * 2,
        num_workers=2,
    )

    workers = [mp.Process(target=worker_fn, args=(scheme, i)) for i in range(2)]
    for w in workers:
        w.start()

    scheme.connect()

    for epoch in range(EPOCHS):
        with torch.no_grad():
            policy.bias.fill_(epoch + 1)
        scheme.send()

    scheme.shutdown()
    for w in workers:
        w.join()
    print("exit codes", [w.exitcode for w in workers])


if __name__ == "__main__":
    main()
