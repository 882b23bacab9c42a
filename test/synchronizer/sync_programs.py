"""Programs that run in processes of their own."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from sync_parts import model_at, step_of

from weight_update import ExplorerClient, Synchronizer, SyncMethod


def explore(address: str, token: str, id: int, steps: int, told: Connection, options: dict[str, Any]) -> None:
    """Explore, and report step, version and weights after each step."""
    model = model_at(-1)
    with ExplorerClient(address, model, id=id, token=token, **options) as client:
        explorer = client.blocking
        told.send(("here", id, None))
        for _ in range(steps):
            explorer.step += 1
            time.sleep(0.005)
            if explorer.need_sync():
                metrics = explorer.sync_weight()
                told.send((explorer.step, metrics, step_of(model)))
    told.send(("done", None, step_of(model)))


def serve(told: Connection) -> None:
    """Serve a synchronizer until the process is ended."""
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        told.send((server.address, server.token))
        time.sleep(1000.0)
