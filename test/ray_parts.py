"""Classes and functions that Ray's workers import in the Ray tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from interpreters import RAY_PYTHON, start_template
from torch import nn

from weight_update import RayWeightSyncScheme, WeightSyncError
from weight_update.testing import Body, fingerprint, mlp

WAIT = 60.0


@contextmanager
def small_cluster(*folders: Path, megabytes: int = 100, forks: bool = False) -> Iterator[None]:
    """Run a Ray of four CPUs, whose workers can import the files of ``folders``.

    With ``forks``, workers are forks of the template, which start sooner. They do not end as Ray's own do.
    """
    if forks:
        start_template()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(map(str, folders)))
        ray.init(
            num_cpus=4,
            runtime_env={"py_executable": RAY_PYTHON} if forks else None,
            include_dashboard=False,
            object_store_memory=megabytes << 20,
            log_to_driver=False,
            logging_level="error",
        )
        yield
        ray.shutdown()


def update_until_error(collector: Any) -> None:
    """Update until that fails: an actor that is killed may take one more update before it ends."""
    for _ in range(100):
        collector.update_policy_weights_()
        time.sleep(0.01)


class JoiningActor:
    """An actor that joins in its constructor, and so joins again when Ray restarts it."""

    def __init__(self, scheme: RayWeightSyncScheme, idx: int) -> None:
        torch.set_num_threads(1)
        self.scheme, self.model = scheme, mlp(100 + idx)
        scheme.init_on_receiver(model=self.model, worker_idx=idx)
        scheme.connect()

    def state(self) -> tuple[int | None, dict[str, str]]:
        with self.scheme.hold():
            return self.scheme.version, fingerprint(self.model, self.scheme.strategy)

    def busy(self, seconds: float) -> None:
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()


class Trainer:
    """A sender that is an actor itself."""

    def __init__(self, scheme: RayWeightSyncScheme) -> None:
        self.scheme = scheme
        scheme.init_on_sender(model=mlp(1), num_workers=1)

    def connect(self) -> None:
        self.scheme.connect()


class Owner:
    """An actor that puts an object into Ray's store, which is lost when the actor dies."""

    def put(self, value: Any) -> list[Any]:
        return [ray.put(value)]


def wide() -> nn.Module:
    """20 MB."""
    return nn.Linear(1000, 5000, bias=False)


def pid_of(body: Body) -> int:
    return os.getpid()


def slots_of(body: Body) -> int:
    """Return the number of the sender's slots in which parameters of the model lie."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    addresses = [parameter.data_ptr() for parameter in body.model.parameters()]
    found = set()
    for line in maps:
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if "memfd:weight_update-" in line and any(start <= address < stop for address in addresses):
            found.add(line.split()[-2] if line.endswith("(deleted)") else line.split()[-1])
    return len(found)


def writable(body: Body) -> bool:
    """Return whether the model's memory is writable, unlike the memory of Ray's store."""
    with torch.no_grad():
        for parameter in body.model.parameters():
            parameter.add_(0)
    return all(parameter.detach().numpy().flags.writeable for parameter in body.model.parameters())


def wait_for_more(body: Body) -> Any:
    """Return the error of a worker whose sender ends."""
    try:
        while body.scheme.receive(30.0) is not None:
            pass
    except WeightSyncError as error:
        return type(error).__name__
    return "nothing"
