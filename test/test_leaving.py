"""Workers that leave as soon as they have an update do not make that update fail."""

import copy
import threading
import time
from typing import ClassVar

import pytest
from torch import nn

from weight_update import MemoryWeightSyncScheme, SyncFailedError


class Cascade:
    """A context with workers of its own, which delays the answer to an update that is already visible."""

    _weight_sync_schemes: ClassVar = {"another model": None}

    def update_policy_weights_(self, **weights: object) -> None:
        time.sleep(0.2)


class Connected:
    """A sender and a receiver that is connected to it."""

    def __init__(self, context: object = None) -> None:
        self.sender = MemoryWeightSyncScheme(timeout=10.0)
        self.sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        self.receiver = copy.copy(self.sender)
        self.receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0, context=context)
        joining = threading.Thread(target=self.receiver.connect)
        joining.start()
        self.sender.connect()
        joining.join(10.0)


def test_answer_goes_before_goodbye() -> None:
    context = Cascade()
    pair = Connected(context)
    with pair.sender:
        handle = pair.sender.send_async()
        assert pair.receiver.receive(timeout=10.0) is not None
        pair.receiver.shutdown()
        assert handle.wait().apply_seconds[0] >= 0.2


def test_having_applied_outlives_the_worker() -> None:
    pair = Connected()
    with pair.sender:
        handle = pair.sender.send_async()
        assert pair.receiver.receive(timeout=10.0) is not None
        pair.receiver.shutdown()
        wait_until_gone(pair.sender)
        assert handle.done()
        assert list(handle.wait().stall_seconds) == [0]
        assert handle.failures() == {}
        with pytest.raises(SyncFailedError, match="worker 0: it left"):
            pair.sender.send()


def wait_until_gone(sender: MemoryWeightSyncScheme) -> None:
    deadline = time.monotonic() + 10.0
    while sender.worker_versions[0] is not None:
        assert time.monotonic() < deadline, "the sender did not notice that the worker left"
        time.sleep(0.01)
