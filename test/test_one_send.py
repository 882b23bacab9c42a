"""The files that one update passes through, as docs/architecture.rst tells them."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from faults_tools import Processes, Stripes, Worker, fill

import weight_update
from weight_update import DistributedWeightSyncScheme, SharedMemWeightSyncScheme
from weight_update.testing.apart import Apart
from weight_update.transports.distributed.relay import router

LIBRARY = Path(weight_update.__file__).parent
TESTING = LIBRARY / "testing"  # the harness of the worker
GUIDE = Path(__file__).parent.parent / "docs" / "architecture.rst"


class Visited:
    """The files of the library whose functions are called, in all threads that start later."""

    def __init__(self) -> None:
        self.files: set[str] | None = None
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if (
            event == "call"
            and self.files is not None
            and LIBRARY in file.parents
            and TESTING not in file.parents
        ):
            self.files.add(file.relative_to(LIBRARY).as_posix())

    def take(self) -> set[str]:
        files, self.files = self.files or set(), None
        return files


@contextmanager
def visits() -> Iterator[Visited]:
    before = threading.getprofile(), sys.getprofile()
    try:
        yield Visited()
    finally:
        threading.setprofile(before[0])
        sys.setprofile(before[1])


NUMEL = 16 << 10  # two layers of it are more than what travels in the message of a frame


class TracedModel(Stripes):
    """A model of a worker that is traced from its creation."""

    def __init__(self) -> None:
        self.visited = Visited()
        super().__init__(2, NUMEL)


def begin(me: Worker) -> None:
    me.model.visited.files = set()


def end(me: Worker) -> set[str]:
    return me.model.visited.take()


def count(kind: type) -> tuple[int, int]:
    """Return the files that one synchronous send visits in both processes, and in the trainer alone."""
    with closing(Processes()) as processes, visits() as sender:
        scheme, model = processes.scheme(kind), Stripes(2, NUMEL)
        (worker,) = processes.launch(scheme, model, TracedModel, 1)
        for version in range(1, 3):
            scheme.send(fill(model, version))
        worker.call(begin)
        sender.files = set()
        scheme.send(fill(model, 3))
        files, there = sender.take(), worker.call(end)
    return len(files | there), len(files)


def told(pattern: str) -> tuple[int, ...]:
    """Return the numbers that the guide tells."""
    found = re.search(pattern, " ".join(GUIDE.read_text().split()))
    assert found
    return tuple(int(number) for number in found.groups())


def test_a_send_over_shared_memory_passes_through_few_files() -> None:
    files = count(SharedMemWeightSyncScheme)
    assert files == told(r"update passes through (\d+) files, (\d+) of them in the trainer")
    assert files[0] <= 20


def test_a_send_over_torch_distributed_to_the_same_host() -> None:
    both, _ = count(DistributedWeightSyncScheme)
    assert (both,) == told(r"same kind of Unix socket; the update passes through (\d+) files")


def test_a_send_over_torch_distributed_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "DIRECT_BYTES", 0)
    both, _ = count(Apart)
    assert (both,) == told(r"an update that goes through a host relay passes through (\d+) files")


def wake_ups() -> dict[str, int]:
    """Return how often each thread of this process waited so far, by name."""
    found = {}
    for thread in threading.enumerate():
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        found[thread.name] = int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
    return found


UPDATES = 30


def test_a_send_wakes_no_other_thread_of_the_trainer() -> None:
    with closing(Processes()) as processes:
        scheme, model = processes.scheme(SharedMemWeightSyncScheme), Stripes(2, NUMEL)
        processes.launch(scheme, model, lambda: Stripes(2, NUMEL), 2)
        scheme.send(fill(model, 1))
        time.sleep(0.5)  # threads that were woken earlier wait again
        before = wake_ups()
        for version in range(2, UPDATES):
            scheme.send(fill(model, version))
        after = wake_ups()
    others = [name for name in before if name.startswith("weight_update-worker-")]
    assert len(others) == 2
    assert [after[name] - before[name] for name in others] == [0, 0]
    assert after["MainThread"] - before["MainThread"] < 4 * UPDATES
