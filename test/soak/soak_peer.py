"""Ray actors that TorchRL's scheme can update: it calls a method of them."""

from __future__ import annotations

from typing import Any

from weight_update.testing.ray_workers import START_SECONDS, RayWorker, _Runner, _Stage
from weight_update.transports.ray.rendezvous import require_ray


class PeerStage(_Stage):
    """The actor."""

    def _receive_weights_scheme(self) -> None:
        self._body.scheme.receive()


class PeerWorker(RayWorker):
    """The handle of an actor, which gets its scheme after the sender has got the handle.

    Args:
        index: of the worker.
    """

    def __init__(self, index: int) -> None:
        self.index, self._stopped = index, False
        self._pool: list[Any] = []
        self._calls: list[Any] = []
        self.actor = require_ray().remote(PeerStage).options(num_cpus=0).remote()
        self.runner = _Runner(self.actor)

    def begin(self, scheme: Any) -> None:
        """Give the actor a scheme that was initialized on the sender."""
        require_ray().get(self.actor.begin.remote(scheme, self.index), timeout=START_SECONDS)
