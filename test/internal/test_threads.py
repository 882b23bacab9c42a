"""Threads that the system does not start, and waits of threads that a signal handler ends."""

from __future__ import annotations

import copy
import inspect
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from pairs import add_one, connect_pair, same
from torch import nn

from weight_update import MemoryWeightSyncScheme, SharedMemWeightSyncScheme, SyncFailedError, WeightStrategy
from weight_update.threads import InterruptibleCondition, in_threads, start_thread

WAIT = 10.0


def test_the_limits_of_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_work_for_threads_that_do_not_start_is_done_by_the_others(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_some(self: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    assert in_threads(lambda number: number + 1, range(100), 4) == [*range(1, 101)]
    assert len(started) == allowed


def test_after_an_error_no_further_work_is_begun() -> None:
    begun, failed = list[int](), threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            failed.set()
            raise KeyError("number 1")
        assert failed.wait(WAIT)
        time.sleep(0.05)  # until the others know

    with pytest.raises(KeyError, match="number 1"):
        in_threads(work, range(100), 4)
    done = len(begun)
    assert done <= 8
    time.sleep(0.1)
    assert len(begun) == done


def test_an_interrupted_caller_waits_for_the_threads_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    main, working, ended = threading.current_thread(), threading.Event(), list[int]()

    def work(number: int) -> None:
        if threading.current_thread() is main:
            assert working.wait(WAIT)
            raise KeyboardInterrupt
        working.set()
        time.sleep(0.1)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(100), 2)
    assert len(ended) == 1


def test_a_patch_is_applied_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    source = nn.Linear(1024, 1024)
    target = copy.deepcopy(source)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    sender = MemoryWeightSyncScheme(WeightStrategy(encoding="patch"))
    with sender, connect_pair(sender, source, target), monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with torch.no_grad():
                source.weight.view(-1)[::3] += 1
            assert sender.send().encoding == "patch"
            assert same(source, target)


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_lack_of_threads_while_ctrl_c_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert in_threads(abs, [-1, -2, -3], 2) == [1, 2, 3]


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


def test_a_wait_that_ctrl_c_ends_before_it_begins_holds_the_lock() -> None:
    lines, first = inspect.getsourcelines(threading.Condition.wait)
    (released,) = (first + i for i, line in enumerate(lines) if "gotit = False" in line)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if (
            frame.f_code is threading.Condition.wait.__code__
            and event == "line"
            and frame.f_lineno == released
        ):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    changed = InterruptibleCondition(lock := threading.RLock())
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt), lock:
            changed.wait(WAIT)
    finally:
        sys.settrace(before)
    assert lock.acquire(blocking=False)
    lock.release()
