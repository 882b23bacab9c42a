"""Clients of a synchronizer whose host is lost: packets vanish, and no connection is seen to end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from benchmarks.network import Network
from weight_update import ExplorerClient, LinkClosedError, Synchronizer

TIMEOUT = 0.5


def test_every_call_to_a_host_that_is_lost_ends_in_time(network: Network) -> None:
    def timed(call: Callable[[], Any]) -> float:
        began = time.monotonic()
        with contextlib.suppress(LinkClosedError):
            call()
        return time.monotonic() - began

    def there(call: Callable[[], Any]) -> Any:
        with network.inside("one"):
            return call()

    with Synchronizer("memory") as where, ThreadPoolExecutor(8) as threads:
        server = where.serve(network.address["trainer"])

        def join(timeout: float = TIMEOUT) -> Any:
            return ExplorerClient(server, nn.Linear(2, 2), timeout=timeout).blocking

        clients = [threads.submit(there, lambda: join(20.0)).result(30.0) for _ in range(5)]
        for client in clients[:4]:
            client.timeout = TIMEOUT
        network.lose("one")
        calls = [join, clients[0].need_sync, clients[1].sync_weight, clients[2].status, clients[3].close]
        took = list(threads.map(lambda call: there(lambda: timed(call)), calls))
        assert max(took) < 6 * TIMEOUT, took
        network.find("one")
        said = threads.submit(there, clients[4].latest_version)
        assert said.result(20.0) is None, "it goes on"
        for client in clients:
            threads.submit(there, client.close).result(20.0)
