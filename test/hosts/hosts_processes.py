"""Workers on hosts: the tools of ``test/faults``, in network namespaces."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from faults_tools import Processes, Remote, connect_all
from torch import nn

from benchmarks.network import Network
from weight_update import DistributedWeightSyncScheme, WeightSyncScheme


class HostsProcesses(Processes):
    """Worker processes on the hosts of a network; the trainer is this process, on the host ``trainer``."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def trainer(self, **options: Any) -> DistributedWeightSyncScheme:
        """Return a scheme that listens on the trainer's address."""
        options = {"address": self.network.address["trainer"], "timeout": 10.0, **options}
        scheme = self.scheme(DistributedWeightSyncScheme, **options)
        assert isinstance(scheme, DistributedWeightSyncScheme)
        return scheme

    def start_on(
        self, host: str, scheme: WeightSyncScheme, idx: int, make_model: Callable[[], Any]
    ) -> Remote:
        """Start a worker on ``host`` that has not joined yet."""

        def make_there() -> Any:
            self.network.enter(host)
            os.environ["WEIGHT_UPDATE_HOST"] = host
            return make_model()

        return self.start(scheme, idx, make_there)

    def launch_on(
        self, hosts: list[str], scheme: WeightSyncScheme, model: nn.Module, make_model: Callable[[], Any]
    ) -> list[Remote]:
        """Initialize, start one worker on each of ``hosts`` and connect all."""
        scheme.init_on_sender(model=model, num_workers=len(hosts))
        return connect_all(
            scheme, [self.start_on(host, scheme, idx, make_model) for idx, host in enumerate(hosts)]
        )
