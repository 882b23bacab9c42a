"""Updates wait for the thread that runs the model, and are loaded in it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest

from weight_update import LifecycleError, SyncTimeoutError
from weight_update.receiver.uninterrupted import run_uninterrupted
from weight_update.serving.vllm.loader import ModelLoader
from weight_update.serving.vllm.receiving import LeadingCalls, VLLMReceiver
from weight_update.serving.vllm.turns import Turns
from weight_update.testing.processes import wait_until

WAIT = 20.0


def nothing() -> None: ...


def load(turns: Turns, version: int) -> int:
    turns.admit(version)
    thread: int = turns.run(threading.get_ident)
    turns.settle(version)
    return thread


def test_loading_runs_in_the_thread_that_serves() -> None:
    turns = Turns()
    with ThreadPoolExecutor() as threads:
        loaded = [threads.submit(load, turns, 4)]
        assert turns.serve(4, WAIT, nothing) == 4
        assert loaded[0].result(WAIT) == threading.get_ident()
        assert turns.serve(4, WAIT, nothing) == 4  # it is in force


def test_versions_up_to_the_named_one_are_loaded_in_one_call() -> None:
    turns = Turns()
    with ThreadPoolExecutor() as threads:
        loaded = threads.submit(lambda: [load(turns, version) for version in (2, 3)])
        assert turns.serve(3, WAIT, nothing) == 3
        loaded.result(WAIT)


def test_a_newer_version_is_refused_and_waits() -> None:
    turns = Turns()
    with ThreadPoolExecutor() as threads:
        loaded = threads.submit(load, turns, 5)
        with pytest.raises(LifecycleError, match="call update_weights with version 5"):
            turns.serve(4, WAIT, nothing)
        assert turns.serve(None, WAIT, nothing) == 5
        loaded.result(WAIT)


def test_a_newer_version_that_waits_does_not_spoil_the_named_one() -> None:
    """The sender may send version 5 as soon as this worker has answered that it has version 4."""
    turns = Turns()
    turns.settle(4)
    with ThreadPoolExecutor() as threads, contextlib.closing(turns):
        waiting = threads.submit(load, turns, 5)
        wait_until(lambda: turns._waiting == 5, WAIT)
        assert turns.serve(4, WAIT, nothing) == 4
        assert turns.serve(5, WAIT, nothing) == 5
        waiting.result(WAIT)


def test_closing_ends_a_call_that_waits() -> None:
    turns = Turns()
    with ThreadPoolExecutor() as threads:
        serving = threads.submit(turns.serve, 1, WAIT, nothing)
        wait_until(lambda: turns._owner is not None, WAIT)
        turns.close()
        with pytest.raises(LifecycleError, match="shut its weight transfer down"):
            serving.result(WAIT / 2)


class Calls(LeadingCalls):
    """Calls of a server, which refuses an update as long as another one has not ended."""

    def __init__(self, starts: bool) -> None:
        self.starts, self.open = starts, False

    def begin(self, version: int) -> None:
        assert not self.open
        self.open = True
        if not self.starts:
            raise RuntimeError("start_weight_update took too long")

    def check(self) -> None:
        """Find no answer yet."""

    def abort(self, whole: bool) -> None:
        self.open = False


@pytest.mark.parametrize("starts", [False, True])
def test_a_server_takes_the_update_after_one_that_did_not_begin(starts: bool) -> None:
    turns, calls = Turns(), Calls(starts)

    def broken() -> None:
        raise RuntimeError("the loader broke")

    loader = cast("ModelLoader", SimpleNamespace(abort=broken))
    receiver = VLLMReceiver(loader, turns, in_chunks=False, calls=calls)
    with ThreadPoolExecutor() as threads, contextlib.closing(turns):
        begun = threads.submit(receiver.begin_update, 1)
        threads.submit(turns.serve, 1, WAIT, nothing)
        with pytest.raises(RuntimeError, match=r"took too long|loader broke"):
            begun.result(WAIT)
    assert not calls.open


def test_errors_reach_both_threads() -> None:
    turns = Turns()

    def fail() -> None:
        turns.admit(1)
        try:
            turns.run(lambda: 1 // 0)
        except ZeroDivisionError as error:
            turns.settle(None, error)
            raise

    with ThreadPoolExecutor() as threads:
        failed = threads.submit(fail)
        with pytest.raises(ZeroDivisionError):
            turns.serve(1, WAIT, nothing)
        with pytest.raises(ZeroDivisionError):
            failed.result(WAIT)
        assert turns.version is None


def test_waits_end() -> None:
    turns = Turns()
    with pytest.raises(SyncTimeoutError, match=r"version 1 did not arrive within 0\.01 s"):
        turns.serve(1, 0.01, nothing)
    with pytest.raises(SyncTimeoutError, match="no update arrived"):
        turns.serve(None, 0.01, nothing)
    with pytest.raises(LifecycleError, match="ended before its update was loaded"):
        turns.run(nothing)
    with pytest.raises(OSError, match="gone"):
        turns.admit(1, gone)
    with pytest.raises(OSError, match="gone"):
        turns.serve(1, WAIT, gone)
    turns.close()
    with pytest.raises(LifecycleError, match="shut its weight transfer down"):
        turns.admit(1)


def gone() -> None:
    raise OSError("gone")


def test_one_thread_may_do_both() -> None:
    turns = Turns()
    assert not turns.is_inline
    with turns.inline():
        assert turns.is_inline
        assert load(turns, 7) == threading.get_ident()
        with ThreadPoolExecutor() as threads:  # as the receiver's own thread, which vLLM has to ask
            assert not threads.submit(lambda: turns.is_inline).result(WAIT)
    assert not turns.is_inline
    assert turns.serve(7, WAIT, nothing) == 7


def test_a_switch_that_signals_cannot_interrupt_is_of_the_thread_that_waits_for_it() -> None:
    """vLLM's workers connect in their main thread; the receiver then loads weights in another one."""
    turns = Turns()
    loaded: list[int] = []

    def switch() -> float:
        loaded.append(load(turns, 7))
        return 0.0

    with turns.inline():
        run_uninterrupted(switch, leave=turns.close)
    assert loaded != [threading.get_ident()]
    assert turns.version == 7
