"""Threads that the system does not start."""

from __future__ import annotations

import threading

import pytest
from torch import nn

from weight_update import SharedMemWeightSyncScheme
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


def test_ctrl_c_in_the_start_of_a_thread_is_no_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of the start, it has Python release a lock that is not held."""

    def interrupted(thread: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_thread("one", print)
