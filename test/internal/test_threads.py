"""Threads that the system does not start."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pairs import add_one, same
from torch import nn

from weight_update import SharedMemWeightSyncScheme, SyncFailedError
from weight_update.threads import start_thread


def test_the_limits_of_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    remedy = r"raise .*ulimit -u.*pids-limit"
    with pytest.raises(RuntimeError, match=rf"can't start new thread \(one\): {remedy}"):
        start_thread("one", print)
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(
            RuntimeError, match=rf"can't start new thread \(weight_update-listener\): {remedy}"
        ):
            scheme.connect()


def test_a_receiver_whose_thread_does_not_start_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, start = nn.Linear(2, 2), nn.Linear(2, 2), threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("weight_update-receiver"):
            raise RuntimeError("can't start new thread")
        start(self)

    with SharedMemWeightSyncScheme() as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=source, num_workers=1)
        with copy.copy(sender) as receiver:
            receiver.init_on_receiver(model=target, worker_idx=0)
            with monkeypatch.context() as context:
                context.setattr(threading.Thread, "start", refuse)
                joining = pool.submit(receiver.connect)
                sender.connect()
                with pytest.raises(
                    RuntimeError, match=r"can't start new thread \(weight_update-receiver-0\)"
                ):
                    joining.result()
                with pytest.raises(SyncFailedError, match="worker 0: it left"):
                    sender.send()
            receiver.connect()
            add_one(source)
            sender.send()
            assert same(source, target)
