"""shutdown() closes everything, also when one part cannot be closed."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from weight_update import (
    RPCTransport,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    TransportBackend,
)
from weight_update.schemes import rpc_notices
from weight_update.schemes.base import End


class Stubborn(SharedMemTransport):
    """A transport that closes, and then raises."""

    def close(self) -> None:
        super().close()
        raise OSError("no space left on device")


class StubbornScheme(SharedMemWeightSyncScheme):
    """A scheme whose links to worker 0 are stubborn."""

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        links = super().open_sender(workers, ctx)
        links[0].__class__ = Stubborn
        return links

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        link = super().create_transport(worker_idx=worker_idx, end=end)
        link.__class__ = Stubborn
        return link


def test_all_is_closed_though_one_close_raises() -> None:
    before, running = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    scheme = StubbornScheme(timeout=10.0)
    scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=2)
    receivers = [copy.copy(scheme) for _ in range(2)]
    for idx, receiver in enumerate(receivers):
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=idx)
    joining = [threading.Thread(target=receiver.connect) for receiver in receivers]
    for thread in joining:
        thread.start()
    scheme.connect()
    for thread in joining:
        thread.join()
    with pytest.raises(OSError, match="no space left"):
        receivers[0].shutdown()
    with pytest.raises(OSError, match="no space left"):
        scheme.shutdown()
    with pytest.raises(OSError, match="no space left"):
        receivers[1].shutdown()
    assert [thread.name for thread in set(threading.enumerate()) - running if thread.is_alive()] == []
    del scheme, receivers, receiver
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_workers_that_a_sender_leaves_are_not_sent_to_it_again() -> None:
    announced = []

    class Link(RPCTransport):
        def close(self) -> None:
            announced.append("policy" in rpc_notices._posted)
            super().close()

    class Scheme(RPCWeightSyncScheme):
        def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
            return Link(**self.sender_options())

    scheme = Scheme()
    scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    assert "policy" in rpc_notices._posted
    scheme.shutdown()
    assert announced
    assert not any(announced)
