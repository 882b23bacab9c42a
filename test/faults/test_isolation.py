"""The trainer's weights and each worker's are their own: only send() moves values, bit for bit."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable

import pytest
import torch
from faults_tools import WAIT, Processes, Remote, Worker, state_of, wait_version, weights_of
from torch import nn

from weight_update import WeightSyncScheme


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 8))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


def step(model: nn.Module) -> None:
    """One in-place optimizer step with the batch statistics that come with it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.randn(16, 64))
    for parameter in model.parameters():  # backward() fails in a forked process with a torch built for CUDA
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def train_passes(me: Worker) -> None:
    me.model.train()
    for _ in range(5):
        me.model(torch.randn(32, 64))  # moves the running statistics of the batch norm in place


def optimizer_steps(me: Worker) -> None:
    with me.scheme.hold():
        me.model.train()
        for _ in range(3):
            step(me.model)


def check_all(workers: list[Remote], version: int, expected: dict[str, torch.Tensor]) -> None:
    for worker in workers:
        assert worker.call(wait_version, version) == version
        assert_same(worker.call(weights_of), expected)


@pytest.fixture
def pair(kind: type[WeightSyncScheme], procs: Processes) -> tuple[WeightSyncScheme, nn.Module, list[Remote]]:
    scheme, model = procs.scheme(kind, timeout=WAIT), make_model()
    return scheme, model, procs.launch(scheme, model, make_model, 2)


@pytest.mark.parametrize("write", [train_passes, optimizer_steps])
def test_what_a_worker_writes_stays_its_own_and_is_forgotten(pair, write) -> None:
    scheme, model, workers = pair
    writer, reader = workers
    for version in range(1, 6):  # slots alternate: each holds a written version two and three updates later
        before = state_of(model)
        writer.call(write)
        changed = writer.call(weights_of)
        assert any(not torch.equal(changed[name], before[name]) for name in before)
        assert_same(state_of(model), before)
        assert_same(reader.call(weights_of), before)
        step(model)
        scheme.send()
        check_all(workers, version, state_of(model))


def test_a_worker_that_left_keeps_its_weights(pair) -> None:
    scheme, model, (leaver, stayer) = pair
    step(model)
    scheme.send()
    kept = state_of(model)
    leaver.call(_leave)
    for version in range(2, 6):
        step(model)
        scheme.send(worker_ids=[1])
        check_all([stayer], version, state_of(model))
        assert_same(leaver.call(_plain_weights), kept)


def _leave(me: Worker) -> None:
    me.scheme.shutdown()


def _plain_weights(me: Worker) -> dict[str, torch.Tensor]:
    return state_of(me.model)


def test_a_faulty_worker_cannot_write_into_slots(pair) -> None:
    """A worker can write neither by its own descriptor nor by one of the sender's process."""
    scheme, model, (faulty, sibling) = pair
    before = state_of(model)
    attempts, succeeded = faulty.call(attack_slots, os.getpid())
    assert attempts >= 2
    assert succeeded == []
    assert_same(sibling.call(weights_of), before)
    step(model)
    scheme.send()
    check_all([faulty, sibling], 1, state_of(model))


def attack_slots(me: Worker, sender: int) -> tuple[int, list[str]]:
    """Try to write into each slot; return how many there were to try, and the attempts that worked."""
    attempts, succeeded = 0, []
    for process in ("self", sender):
        for fd in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{fd}"
            with contextlib.suppress(OSError):
                if "memfd:weight_update-" not in os.readlink(path):
                    continue
                attempts += 1
                opened = os.open(path, os.O_RDWR)
                succeeded += [f"{how} {path}" for how, act in ATTACKS.items() if _works(act, opened)]
                os.close(opened)
    return attempts, succeeded


ATTACKS: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, b"\xff" * 64, 0),
    "map": lambda fd: mmap.mmap(fd, 64)[0],
    "truncate": lambda fd: os.ftruncate(fd, 1 << 30),  # larger: a smaller one would end the test's process
}


def _works(act: Callable[[int], object], fd: int) -> bool:
    try:
        act(fd)
    except OSError:
        return False
    return True
