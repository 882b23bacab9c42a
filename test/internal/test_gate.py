"""The gate: no update lands while a forward pass runs, and no forward pass runs during an update."""

from __future__ import annotations

import contextvars
import copy
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from background import repeating
from torch import nn

from weight_update import LifecycleError, SyncTimeoutError
from weight_update.receiver.gate import Gate, shared_gate

WAIT = 10.0


class Inside:
    """A thread that is inside a gate until :meth:`end` is called."""

    def __init__(self, gate: Gate) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(gate,), daemon=True)
        self.thread.start()
        assert self.entered.wait(WAIT)

    def _run(self, gate: Gate) -> None:
        with gate.hold():
            self.entered.set()
            self.leave.wait(WAIT)

    def end(self) -> None:
        self.leave.set()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


def test_runs_at_once_when_nobody_is_inside() -> None:
    done: list[int] = []
    Gate().run(lambda: done.append(1))
    assert done == [1]


def test_returns_the_seconds_of_the_action_alone() -> None:
    gate, took = Gate(), []
    inside = Inside(gate)
    update = threading.Thread(target=lambda: took.append(gate.run(lambda: time.sleep(0.05))))
    begin = time.monotonic()
    update.start()
    update.join(0.3)
    assert not took
    inside.end()
    update.join(WAIT)
    assert 0.05 <= took[0] < time.monotonic() - begin - 0.25  # the wait for the forward pass is not counted


def test_waits_for_the_end_of_a_forward_pass_and_is_not_run_by_the_thread_that_leaves() -> None:
    gate, ran_in = Gate(), []
    inside = Inside(gate)
    update = threading.Thread(target=gate.run, args=(lambda: ran_in.append(threading.get_ident()),))
    update.start()
    update.join(0.1)
    assert update.is_alive()
    assert not ran_in
    inside.end()
    update.join(WAIT)
    assert ran_in == [update.ident]  # an error or an interrupt of one never reaches the other


def test_nesting_counts() -> None:
    gate = Gate()
    done: list[int] = []
    with gate.hold():
        with gate.hold():
            update = threading.Thread(target=gate.run, args=(lambda: done.append(1),))
            update.start()
        time.sleep(0.05)
        assert not done
    update.join(WAIT)
    assert done == [1]


def test_sections_may_end_in_another_order_than_they_began() -> None:
    gate, done = Gate(), []
    outer = gate.enter()
    gate.enter()
    gate.leave(outer)
    with pytest.raises(LifecycleError, match="inside hold"):
        gate.run(lambda: done.append(1))
    gate.leave()  # the inner one
    gate.run(lambda: done.append(2), timeout=1.0)
    assert done == [2]


def test_threads_that_overlap_without_pause_do_not_starve_an_update() -> None:
    gate = Gate()

    def compute() -> None:
        with gate.hold():
            time.sleep(0.002)

    with repeating(*[compute] * 4):
        for _ in range(20):
            gate.run(lambda: None, timeout=WAIT)


def test_threads_that_share_a_hold_do_not_starve_an_update() -> None:
    gate = Gate()
    hold = gate.hold()

    def compute() -> None:
        with hold:
            time.sleep(0.002)

    with repeating(*[compute] * 4):
        for _ in range(20):
            gate.run(lambda: None, timeout=WAIT)
    gate.run(lambda: None, timeout=1.0)


def test_of_threads_that_share_a_hold_each_ends_its_own() -> None:
    gate = Gate()
    hold, entered, leave = gate.hold(), threading.Event(), threading.Event()

    def compute() -> None:
        with hold:
            entered.set()
            assert leave.wait(WAIT)

    first = threading.Thread(target=compute)
    first.start()
    assert entered.wait(WAIT)
    with hold:
        leave.set()
        first.join(WAIT)
        with pytest.raises(LifecycleError, match="inside hold"):
            gate.run(lambda: None, timeout=1.0)
    gate.run(lambda: None, timeout=1.0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_update_has_the_state_of_its_caller(mode: Callable[[], Any]) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def state() -> tuple[Any, ...]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), variable.get()

    seen: list[tuple[Any, ...]] = []
    with mode():
        Gate().run(lambda: seen.append(state()))
        assert seen == [state()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_has_the_cuda_stream_of_its_caller() -> None:
    seen: list[torch.cuda.Stream] = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        Gate().run(lambda: seen.append(torch.cuda.current_stream()))
    assert seen == [stream]


def test_timeout_gives_up_and_leaves_nothing_behind() -> None:
    gate, done = Gate(), []
    inside = Inside(gate)
    with pytest.raises(SyncTimeoutError, match=r"longer than 0\.05"):
        gate.run(lambda: done.append(1), timeout=0.05)
    inside.end()
    assert not done
    gate.run(lambda: done.append(2), timeout=WAIT)
    assert done == [2]


def test_a_timeout_names_an_update_that_is_running() -> None:
    """An engine that loads weights for long, in a group whose schemes share the gate, is an example."""
    gate, runs, end = Gate(), threading.Event(), threading.Event()

    def load() -> None:
        runs.set()
        end.wait(WAIT)

    other = threading.Thread(target=gate.run, args=(load,))
    other.start()
    assert runs.wait(WAIT)
    with pytest.raises(SyncTimeoutError, match=r"^another update took longer than 0\.05 s$"):
        gate.run(lambda: None, timeout=0.05)
    end.set()
    other.join(WAIT)


def test_those_that_waited_for_an_update_go_on_when_it_gives_up() -> None:
    gate = Gate()
    inside, later = Inside(gate), threading.Thread(target=gate.hold().__enter__, daemon=True)
    begin = threading.Timer(0.1, later.start)
    begin.start()
    with pytest.raises(SyncTimeoutError):
        gate.run(lambda: None, timeout=0.4)
    begin.join(WAIT)
    later.join(WAIT)
    assert not later.is_alive()
    inside.end()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_an_update_does_not_compute() -> None:
    gate, begun, may_end = Gate(), threading.Event(), threading.Event()

    def compute() -> None:
        with (
            pytest.raises(LifecycleError, match=r"a mixture of two versions; fork inside hold\(\)"),
            gate.hold(),
        ):
            pass
        gate.run(lambda: None)  # a whole update
        with gate.hold():
            pass

    def update() -> None:
        begun.set()
        assert may_end.wait(WAIT)

    updating = threading.Thread(target=gate.run, args=(update,))
    updating.start()
    assert begun.wait(WAIT)
    assert works_in_a_child(compute)
    may_end.set()
    updating.join(WAIT)
    with gate.hold():
        waiting = threading.Thread(target=gate.run, args=(lambda: None,))
        waiting.start()
        assert works_in_a_child(gate.hold().__enter__)
    waiting.join(WAIT)
    assert works_in_a_child(gate.hold().__enter__)


def works_in_a_child(call: Callable[[], object]) -> bool:
    """Return whether ``call`` raises nothing in a forked child."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("runs", [False, True], ids=["waits", "runs"])
def test_a_signal_handler_may_hold_where_it_interrupts_the_gate(runs: bool) -> None:
    gate, started, applied, seen = Gate(), threading.Event(), list[int](), list[int]()

    def apply() -> None:
        started.set()
        time.sleep(0.2)
        applied.append(1)

    def interrupted() -> None:  # in enter() or leave(), whose lock the update needs
        with gate._lock, gate.hold():
            seen.append(len(applied))

    inside = None if runs else Inside(gate)
    update = threading.Thread(target=gate.run, args=(apply,), daemon=True)
    update.start()
    while not (started.is_set() if runs else gate._updates):
        time.sleep(0.001)
    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert seen == [int(runs)]
    if inside is not None:
        inside.end()
    update.join(WAIT)
    assert applied == [1]


def test_a_hold_may_wait_for_a_forward_pass_of_another_thread() -> None:
    gate, applied = Gate(), list[int]()
    update = threading.Thread(target=gate.run, args=(lambda: applied.append(1),), daemon=True)

    def found_in_hold() -> list[int]:
        with gate.hold():
            return list(applied)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # a thread that ran before the hold
        with gate.hold():
            update.start()
            while not gate._updates:
                time.sleep(0.001)
            pool.submit(lambda: gate.leave(gate.enter())).result(WAIT)
            later = pool.submit(found_in_hold)
            assert not applied
        assert later.result(WAIT) == [1], "holds would starve updates"
        update.join(WAIT)


def test_an_exception_reaches_the_updater_not_the_forward_pass() -> None:
    gate = Gate()

    def fail() -> None:
        raise ValueError("no")

    inside = Inside(gate)
    caught: list[BaseException] = []

    def update() -> None:
        try:
            gate.run(fail)
        except ValueError as error:
            caught.append(error)

    updater = threading.Thread(target=update)
    updater.start()
    inside.end()
    updater.join(WAIT)
    assert [str(error) for error in caught] == ["no"]


def test_an_update_from_inside_is_an_error() -> None:
    gate = Gate()
    with gate.hold(), pytest.raises(LifecycleError):
        gate.run(lambda: None)


def test_an_update_from_inside_another_gate() -> None:
    gate, other, done = Gate(), Gate(), []
    with other.hold():
        with gate.hold():
            pass
        gate.run(lambda: done.append(1))
        with pytest.raises(LifecycleError, match="without enter"):
            gate.leave()
    assert done == [1]


class Failing(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in forward")


def test_a_forward_pass_that_raises_leaves_the_gate() -> None:
    gate, module = Gate(), Failing()
    gate.guard(module)
    with pytest.raises(RuntimeError, match="in forward"):
        module(torch.ones(1))
    done: list[int] = []
    gate.run(lambda: done.append(1), timeout=1.0)
    assert done == [1]


def test_a_forward_pass_inside_hold_does_not_end_it() -> None:
    gate, module = Gate(), nn.Linear(2, 2)
    gate.guard(module)
    done: list[int] = []
    with gate.hold():
        module(torch.ones(1, 2))
        with pytest.raises(LifecycleError, match="inside hold"):
            gate.run(lambda: done.append(1))
    gate.run(lambda: done.append(2), timeout=1.0)
    assert done == [2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_guarded_module_is_not_guarded(duplicate: object) -> None:
    gate, module = Gate(), nn.Linear(2, 2)
    undo = gate.guard(module)
    twin = duplicate(module)  # type: ignore[operator]
    entered: list[int] = []
    gate.enter = lambda *_: entered.append(1)  # type: ignore[method-assign]
    gate.leave = lambda: None  # type: ignore[method-assign]
    twin(torch.ones(1, 2))
    assert not entered
    module(torch.ones(1, 2))
    assert entered == [1]
    undo()
    module(torch.ones(1, 2))
    assert entered == [1]


def test_a_group_shares_one_gate() -> None:
    first = shared_gate("a name")
    assert shared_gate("a name") is first
    assert shared_gate("another") is not first
    assert shared_gate(None) is not shared_gate(None)
