"""Threads that the system does not start."""

from __future__ import annotations

import threading

import pytest

from weight_update.threads import start_thread


def test_the_limits_of_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match=r"can't start new thread \(one\): raise .*ulimit -u.*pids-limit"):
        start_thread("one", print)
