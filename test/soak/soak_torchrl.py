"""The driver of TorchRL's own schemes, which a soak gives the same faults."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torchrl.weight_update as library
from soak_drivers import ALWAYS, Driver
from soak_worker import Stamped, fill
from tensordict import TensorDict

from collectors.nodes import free_port
from weight_update.testing.ray_workers import BodyActor, RayWorker, new_actor
from weight_update.testing.workers import Body, Worker

SCHEMES = {
    "shared_mem": library.SharedMemWeightSyncScheme,
    "multiprocess": library.MultiProcessWeightSyncScheme,
    "distributed": library.DistributedWeightSyncScheme,
    "ray": library.RayWeightSyncScheme,
}
"""TorchRL's schemes that can be used without its collectors."""


class TorchRLDriver(Driver):
    """The methods by which a soak uses one of TorchRL's schemes."""

    peer = True
    numbered = False
    model_class = Stamped

    def __init__(self, options: Namespace) -> None:
        if options.scheme not in SCHEMES:
            raise SystemExit(f"--peer torchrl runs {', '.join(SCHEMES)}, not {options.scheme}")
        super().__init__(options)
        self.faults = [*ALWAYS, "strangers"]
        self._workers: dict[int, RayWorker] = {}  # that wait for the scheme, which knows their actors

    def make_scheme(self) -> Any:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return SCHEMES[self.options.scheme]()

    def init_on_sender(self) -> None:
        workers = self.options.workers
        extra: dict[str, Any] = {}
        if self.options.scheme == "ray":
            self._workers = {idx: _new_worker(idx) for idx in range(workers)}
            extra = {"remote_collectors": [one.actor for one in self._workers.values()]}
        elif self.options.scheme != "distributed":
            extra = {
                "ctx": torch.multiprocessing.get_context("forkserver"),
                "devices": [torch.device("cpu")] * workers,
            }
        self.scheme.init_on_sender(model_id="policy", model=self.source, num_workers=workers, **extra)

    def start_worker(self, idx: int) -> Worker:
        if self.options.scheme != "ray":
            return super().start_worker(idx)
        worker = self._workers.pop(idx, None) or _new_worker(idx)  # of a new one the scheme does not learn
        worker.begin(self.scheme)
        return worker

    def init_worker(self, worker: Worker, idx: int) -> None:
        worker.call("run", init_on_receiver, self.make_model, self._number(idx))

    def join(self, worker: Worker) -> None:
        worker.post("connect", worker_idx=self._number(worker.index))

    def _number(self, idx: int) -> int:
        """Return the index of a worker in TorchRL; of ``distributed`` it is a rank, and the trainer has 0."""
        return idx + (self.options.scheme == "distributed")

    def send(self, version: int, worker_ids: list[int] | None, burst: int) -> tuple[int, dict[int, str]]:
        """Send one update to all workers."""
        del worker_ids, burst
        self.scheme.send(weights=TensorDict.from_module(fill(self.source, version)).data)
        return version, {}


class TorchRLActor(BodyActor):
    """A Ray actor with the method that TorchRL's scheme calls."""

    def _receive_weights_scheme(self) -> None:
        self.body.scheme.receive()


def _new_worker(idx: int) -> RayWorker:
    return RayWorker(None, idx, new_actor(TorchRLActor))


def init_on_receiver(body: Body, make_model: Callable[[], Stamped], worker_idx: int) -> None:
    """Have a worker call ``init_on_receiver`` of TorchRL."""
    body.model = make_model()
    body.context = Namespace(policy=body.model, worker_idx=worker_idx)  # the scheme has a weak reference
    body.scheme.init_on_receiver(model_id="policy", context=body.context, worker_idx=worker_idx)
