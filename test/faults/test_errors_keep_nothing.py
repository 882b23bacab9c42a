"""Errors that were handled keep no memory, although the garbage collector may not run for minutes.

An error refers to the frames it came through, and these to all their local variables, such as payloads and
process groups. If one of the frames refers to the error in turn, only the garbage collector frees them.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_tools import Processes, Worker, eventually, fill, join, leave, version_of
from marks import slow
from torch import nn

import weight_update
from weight_update import (
    DistributedWeightSyncScheme,
    LinkClosedError,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    WeightSyncScheme,
)
from weight_update.testing import Apart

PACKAGE = Path(weight_update.__file__).parent


class Picky(nn.Module):
    """Refuses weights that are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100_000))

    def get_extra_state(self) -> torch.Tensor:
        return self.weight.detach()[:1].clone()

    def set_extra_state(self, first: Any) -> None:
        if first < 0:
            raise ArithmeticError("negative weights")


class Tall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 100_000))


@pytest.fixture(
    params=[
        SharedMemWeightSyncScheme,
        slow(MultiProcessWeightSyncScheme),
        slow(DistributedWeightSyncScheme),
        slow(Apart),
    ]
)
def scheme(procs: Processes, request: pytest.FixtureRequest) -> WeightSyncScheme:
    return procs.scheme(request.param, timeout=5.0)


def test_errors_of_the_sender(procs: Processes, scheme: WeightSyncScheme) -> None:
    model = Picky()
    with errors_that_keep_their_frames() as kept:
        workers = procs.launch(scheme, model, Picky, 3)
        assert fails(scheme, fill(model, -1.0)) == {0, 1, 2}
        workers[1].kill()
        assert fails(scheme, fill(model, 1.0)) == {1}
        wrong = procs.start(scheme, 1, Tall)
        wrong.begin(join)
        assert eventually(wrong.answered)
        wrong.kill()
        workers[1] = procs.start(scheme, 1, Picky)
        workers[1].call(join)
        workers[2].call(leave)
        assert fails(scheme, fill(model, 2.0)) == {2}
        scheme.shutdown()
    assert kept == []


def test_errors_of_a_worker(procs: Processes, scheme: WeightSyncScheme) -> None:
    model = Picky()
    (worker,) = procs.launch(scheme, model, Picky, 1)
    worker.call(begin_to_look)
    assert fails(scheme, fill(model, -1.0)) == {0}
    scheme.send(fill(model, 1.0))
    cut(scheme)
    assert eventually(lambda: sent(scheme, fill(model, 2.0)))
    assert worker.call(version_of) == scheme.version
    scheme.shutdown()
    assert worker.call(errors_until_the_end) == []


def test_a_frame_that_refers_to_its_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_errors_keep_nothing.PACKAGE", Path(__file__).parent)
    with errors_that_keep_their_frames() as kept, contextlib.suppress(ValueError):
        raise_a_local_variable()
    assert len(kept) == 1
    assert "raise_a_local_variable" in kept[0]


def raise_a_local_variable() -> None:
    error = ValueError("kept")
    raise error


def fails(scheme: WeightSyncScheme, model: nn.Module) -> set[int]:
    """Return the workers that fail to apply an update."""
    try:
        scheme.send(model)
    except SyncFailedError as error:
        return set(error.failures)
    return set()


def sent(scheme: WeightSyncScheme, model: nn.Module) -> bool:
    return not fails(scheme, model)


def cut(scheme: WeightSyncScheme) -> None:
    """Cut the connection of the only worker, which joins again."""
    scheme._sender.table[0].link.disconnect()


LOOKING = contextlib.ExitStack()
"""Entered and left by calls to a worker."""


def begin_to_look(worker: Worker) -> None:
    worker.kept = LOOKING.enter_context(errors_that_keep_their_frames())


def errors_until_the_end(worker: Worker) -> list[str]:
    try:
        while worker.scheme.receive(timeout=10.0) is not None:
            pass
    except LinkClosedError:
        pass
    worker.scheme.shutdown()
    LOOKING.close()
    return list(worker.kept)


@contextlib.contextmanager
def errors_that_keep_their_frames() -> Iterator[list[str]]:
    """Return a list that gets the errors of the context to which frames of the library refer."""
    kept: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield kept
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for found in gc.garbage:
            if isinstance(found, Exception):
                frames = [
                    where for where in traceback.walk_tb(found.__traceback__) if refers(where[0], found)
                ]
                kept += [f"{found!r} in {frame.f_code.co_name}, line {line}" for frame, line in frames]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def refers(frame: Any, error: Exception) -> bool:
    """Return whether a local variable of the library refers to ``error``, or an attribute or item of it."""
    path = Path(frame.f_code.co_filename)
    if PACKAGE not in path.parents or PACKAGE / "testing" in path.parents:
        return False
    return any(found is error for value in frame.f_locals.values() for found in [value, *parts_of(value)])


def parts_of(value: Any) -> list[Any]:
    if type(value) in (list, tuple, set):
        return list(value)
    if type(value) is dict:
        return list(value.values())
    return [] if isinstance(value, Exception) else list(getattr(value, "__dict__", {}).values())
