"""Signals that arrive in the main thread of a worker, at chosen and at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faults_tools import (
    START,
    Layer,
    Processes,
    Stripes,
    Worker,
    eventually,
    fill,
    flows_on,
    join,
    leave,
    sending,
    wait_version,
)
from marks import quick_for, random_interrupts
from torch import nn

from weight_update import SharedMemWeightSyncScheme, WeightSyncError, WeightSyncScheme

SECONDS = 2.0
PROMPT = 15.0
"""Seconds: more than any call here takes on a busy machine, and fewer than a timeout of the library."""


class Counted(Stripes):
    """A module whose extra state takes a moment to set."""

    def __init__(self) -> None:
        super().__init__(24, 64)
        self.number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, number: int) -> None:
        time.sleep(0.002)
        self.number = number


class Signalled(Counted):
    """A module that sends its process a signal while its extra state is being set to 2."""

    number_of_signal = signal.SIGINT

    def set_extra_state(self, number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), self.number_of_signal)
            time.sleep(0.3)
        self.number = number


class Terminated(Signalled):
    number_of_signal = signal.SIGTERM


class Interrupted(nn.Module):
    """A module whose forward pass is interrupted once, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = Layer(8), 0

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            signal.raise_signal(signal.SIGINT)
        return self.layer(seen)


@contextlib.contextmanager
def passes(me: Worker) -> Iterator[Callable[[], torch.Tensor]]:
    yield lambda: me.model(START)


@contextlib.contextmanager
def holds(me: Worker) -> Iterator[Callable[[], torch.Tensor]]:
    def look() -> torch.Tensor:
        with me.scheme.hold():
            seen = START
            for block in me.model.blocks:
                seen = block(seen)
            return seen

    yield look


@contextlib.contextmanager
def guarded(me: Worker) -> Iterator[Callable[[], torch.Tensor]]:
    yield me.scheme.guarded(lambda: me.model(START))


WAYS = [passes, holds, guarded]


def interrupted_at_random(me: Worker, way: Any, seed: int, seconds: float) -> dict[str, Any]:
    """Compute for a while and be interrupted all the time; an interrupt may come at any instruction."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    interrupts, torn = 0, []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with way(me) as look, torch.no_grad():
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
                while time.monotonic() < end:
                    low, high = look().tolist()
                    if low != high:
                        torn.append((low, high))
                signal.setitimer(signal.ITIMER_REAL, 0)  # or it came already
            except KeyboardInterrupt:
                interrupts += 1
    return {"interrupts": interrupts, "torn": torn[:5], "threads": [t.name for t in threading.enumerate()]}


@random_interrupts
@pytest.mark.parametrize("way", quick_for(WAYS, passes))
def test_interrupts_at_random_moments(procs: Processes, way: Any) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), Counted()
    (worker,) = procs.launch(scheme, model, Counted, 1)
    with sending(scheme, model):
        seen = worker.call(interrupted_at_random, way, seed, SECONDS)
        assert flows_on(scheme)
    assert seen["torn"] == []
    assert seen["interrupts"] > 20
    assert "weight_update-receiver-0" in seen["threads"]
    worker.call(leave, timeout=PROMPT)


def leave_when_an_update_waits(me: Worker) -> bool:
    """Leave ``hold()``, so that the update lands; return whether an interrupt came."""
    try:
        with me.scheme.hold():
            assert eventually(lambda: bool(me.scheme._receiver.gate._updates))
        assert wait_version(me, 2) == 2
    except KeyboardInterrupt:
        return True
    return False


def seen_by_a_pass(me: Worker) -> list[float]:
    return me.model(START).tolist()


def test_an_interrupt_during_the_switch(procs: Processes) -> None:
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), Signalled()
    (worker,) = procs.launch(scheme, model, Signalled, 1)
    for version in (1, 2, 3):
        model.number = version
        if version == 2:
            worker.begin(leave_when_an_update_waits)
            time.sleep(0.1)
        scheme.send(fill(model, version))
        if version == 2:
            assert worker.result() is True
        assert worker.call(seen_by_a_pass) == [version, version]
    worker.call(leave, timeout=PROMPT)


def interrupted_once(me: Worker) -> None:
    with pytest.raises(KeyboardInterrupt):
        me.model(START)


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_in_the_middle_of_a_forward_pass(procs: Processes, again: bool) -> None:
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), Interrupted()
    (worker,) = procs.launch(scheme, model, Interrupted, 1)
    worker.call(interrupted_once)
    if again:
        assert worker.call(seen_by_a_pass) == [0.0, 0.0]
    scheme.send(fill(model, 1))
    assert worker.call(seen_by_a_pass) == [1.0, 1.0]
    worker.call(leave, timeout=PROMPT)


def join_interrupted(me: Worker) -> tuple[bool, set[float], int]:
    me.scheme.init_on_receiver(model=me.model, worker_idx=me.idx)
    try:
        me.scheme.connect()
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    return interrupted, set(me.model(START).tolist()), me.model.number


def test_an_interrupt_while_the_first_weights_are_applied(procs: Processes) -> None:
    scheme, model = procs.scheme(SharedMemWeightSyncScheme), fill(Signalled(), 2)
    model.number = 2
    scheme.init_on_sender(model=model, num_workers=1)
    worker = procs.start(scheme, 0, Signalled)
    worker.begin(join_interrupted)
    connecting = threading.Thread(target=_try_connect, args=(scheme,))
    connecting.start()
    assert worker.result() == (True, {2.0}, 2)
    worker.kill()
    connecting.join(PROMPT)
    assert not connecting.is_alive()


def _try_connect(scheme: WeightSyncScheme) -> None:
    with contextlib.suppress(WeightSyncError):  # the worker may or may not have joined
        scheme.connect(timeout=PROMPT)


def shut_down_when_terminated(me: Worker) -> None:
    def end(*_: object) -> None:
        me.scheme.shutdown()
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, end)


def compute_for_ever(me: Worker) -> None:
    with torch.no_grad():
        while True:
            me.model(START)


def test_shutdown_in_a_signal_handler_during_the_switch(procs: Processes) -> None:
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), Terminated()
    (worker,) = procs.launch(scheme, model, Terminated, 1)
    worker.call(shut_down_when_terminated)
    worker.begin(compute_for_ever)
    model.number = 2
    try:
        scheme.send(fill(model, 2))
    except Exception as error:  # noqa: BLE001 - it may leave before or after it has answered
        assert "worker 0" in str(error)  # noqa: PT017
    worker.process.join(PROMPT)
    assert worker.process.exitcode == 7


@random_interrupts
@pytest.mark.slow
def test_shutdown_in_a_signal_handler_at_random_moments(procs: Processes) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), Counted()
        (worker,) = procs.launch(scheme, model, Counted, 1)
        worker.call(shut_down_when_terminated)
        worker.begin(compute_for_ever)
        handles = [scheme.send_async(fill(model, version)) for version in range(1, 5)]
        time.sleep(rng.uniform(0.0, 0.02))
        worker.signal(signal.SIGTERM)
        worker.process.join(PROMPT)
        assert worker.process.exitcode == 7
        del handles
        scheme.shutdown()


class Reentrant(nn.Module):
    """A module that computes and holds while its extra state is being set."""

    scheme: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.number = Layer(8), 0

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.layer(seen)

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, number: int) -> None:
        self.number = number
        self(START)
        if self.scheme is not None:
            with self.scheme.hold():
                self(START)


def join_and_hold_inside(me: Worker) -> None:
    join(me)
    me.model.scheme = me.scheme


def test_holding_and_computing_while_extra_state_is_set(procs: Processes) -> None:
    scheme, model = procs.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), Reentrant()
    scheme.init_on_sender(model=model, num_workers=1)
    worker = procs.start(scheme, 0, Reentrant)
    worker.begin(join_and_hold_inside)
    scheme.connect(timeout=PROMPT)
    worker.result()
    for version in (1, 2):
        model.number = version
        scheme.send(fill(model, version))
    assert eventually(lambda: scheme.worker_versions == {0: 2})
    worker.call(leave, timeout=PROMPT)
