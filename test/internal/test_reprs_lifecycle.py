"""Representations of schemes and servers at every moment of their lives."""

from __future__ import annotations

import contextlib
import copy
import pickle
from threading import Thread
from typing import Any

from torch import nn

from weight_update import MemoryWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme, Synchronizer
from weight_update.synchronizer.rpc import Server


def test_a_scheme_from_its_first_to_its_last_moment() -> None:
    sender = SharedMemWeightSyncScheme()
    assert repr(sender) == "<SharedMemWeightSyncScheme: new>"
    sender.init_on_sender(model_id="policy", model=nn.Linear(2, 2), num_workers=1)
    assert repr(sender) == "<SharedMemWeightSyncScheme: sender of 'policy'>"
    receiver = pickle.loads(pickle.dumps(sender))
    assert repr(receiver) == "<SharedMemWeightSyncScheme: new of 'policy'>"
    receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    assert repr(receiver) == "<SharedMemWeightSyncScheme: receiver 0>"
    joining = Thread(target=receiver.connect)
    joining.start()
    sender.connect()
    joining.join()
    sender.send()
    assert repr(sender) == "<SharedMemWeightSyncScheme: sender of 'policy', version 1>"
    assert repr(receiver) == "<SharedMemWeightSyncScheme: receiver 0, version 1>"
    for scheme in (receiver, sender):
        scheme.shutdown()
        assert repr(scheme).endswith(", version 1, shut down>")
    assert sender.token not in repr(sender)


def test_a_scheme_that_is_half_made() -> None:
    seen = []

    class Early(MemoryWeightSyncScheme):
        def __init__(self) -> None:
            seen.append(repr(self))
            super().__init__()

        def _reset(self) -> None:
            seen.append(repr(self))
            super()._reset()
            seen.append(repr(self))

    copy.copy(Early())
    assert set(seen) == {"<Early: not initialized>", "<Early: new>"}
    without: Any = object.__new__(Early)
    assert repr(without) == "<Early: not initialized>"


def test_a_scheme_that_needs_nothing() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model_id="critic")
    assert repr(scheme) == "<NoWeightSyncScheme: sender of 'critic'>"
    scheme.shutdown()


def test_a_server() -> None:
    assert repr(object.__new__(Server)) == "<Server at None>"
    with Synchronizer("memory") as synchronizer, contextlib.closing(synchronizer.serve()) as server:
        assert repr(server) == f"<Server at {server.address}>"
    assert repr(server) == f"<Server at {server.address}, closed>"
