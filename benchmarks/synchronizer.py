"""How long a synchronization takes by each method, and what each style costs in waiting and in old weights.

::

    python -m benchmarks.synchronizer               # about five minutes on two cores
    python -m benchmarks.synchronizer --quick       # half a minute, to see that it works
    python -m benchmarks.synchronizer --rst docs/benchmark_synchronizer.rst

Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.models import Model, mark, trainer_weights
from benchmarks.plan import numbers, sizes
from benchmarks.report import Figure, Table, machine, to_rst, to_text
from benchmarks.styles import styles_table
from weight_update import ExplorerClient, RunningStatus, Synchronizer, SyncMethod, TrainerClient

__all__ = ["main"]

SIDES = {
    "NCCL": (SyncMethod.NCCL, False),
    "NCCL, a host each": (SyncMethod.NCCL, True),
    "MEMORY": (SyncMethod.MEMORY, False),
    "CHECKPOINT": (SyncMethod.CHECKPOINT, False),
}
_HOST = "WEIGHT_UPDATE_HOST"
_TENSORS = 16
_PATIENCE = 100.0


@dataclass(frozen=True)
class Plan:
    """The options of one run.

    Attributes:
        sizes: of the model, in MB.
        explorers: numbers of explorers.
        turns: of each method at the largest sizes; up to 10 MB four times as many.
        seconds: that each style runs, in each turn.
    """

    sizes: tuple[float, ...] = (1.0, 100.0)
    explorers: tuple[int, ...] = (1, 2, 4)
    turns: int = 9
    seconds: float = 3.0


@dataclass
class Times:
    """Seconds of one method; see the note of the table."""

    delivered: list[float] = field(default_factory=list)
    trainer: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)


class Side:
    """A synchronizer and explorers, each a process, and the trainer's client in this one.

    Args:
        label: of the method in :data:`SIDES`.
        megabytes: size of the model.
        explorers: how many.
        directory: for the files of CHECKPOINT.
    """

    def __init__(self, label: str, megabytes: float, explorers: int, directory: str) -> None:
        self.label, self.times = label, Times()
        self.method, apart = SIDES[label]
        self._ctx = mp.get_context("forkserver")
        self._ctx.set_forkserver_preload([__name__])
        self._host = self._start(_host, self.method, directory)
        where = self._host.recv()
        self._explorers = [self._start(_explore, where, idx, megabytes, apart) for idx in range(explorers)]
        self._weights = trainer_weights(megabytes, _TENSORS)
        self._client = TrainerClient(where[0], self._weights, token=where[1], timeout=_PATIENCE)
        self._trainer = self._client.blocking
        self._await_explorers(RunningStatus.RUNNING)

    def _start(self, body: Any, *args: Any) -> Connection:
        here, there = self._ctx.Pipe()
        self._ctx.Process(target=body, args=(there, *args), daemon=True).start()
        there.close()
        return here

    def _await_explorers(self, status: RunningStatus) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            found = list(self._trainer.status()["explorers"].values())
            if len(found) == len(self._explorers) and set(found) == {status}:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.label}: explorers are {found}, not all {status}")
            time.sleep(0.002)

    def to_those_who_wait(self) -> None:
        """Explorers wait for new weights; the trainer gives them."""
        self._next_step()
        for pipe in self._explorers:
            pipe.send("sync")
        self._await_explorers(RunningStatus.REQUIRE_SYNC)
        start = time.monotonic()
        self._give()
        self.times.trainer.append(time.monotonic() - start)
        self.times.delivered.append(max(end for _, end in self._answers()) - start)

    def to_those_who_come_later(self) -> None:
        """The trainer publishes while nobody waits; then all explorers come at once."""
        self._next_step()
        start = time.monotonic()
        self._give()
        self.times.alone.append(time.monotonic() - start)
        for pipe in self._explorers:
            pipe.send("sync")
        self.times.later.append(max(end - begin for begin, end in self._answers()))

    def _next_step(self) -> None:
        self._trainer.step += 1
        mark(self._weights, float(self._trainer.step))

    def _give(self) -> None:
        said = self._trainer.sync_weight()
        if "reason" in said:
            raise RuntimeError(f"{self.label}: {said['reason']}")

    def _answers(self) -> list[tuple[float, float]]:
        """When the explorers began and ended to synchronize; all of them have the trainer's weights."""
        found = []
        for pipe in self._explorers:
            if not wait([pipe], _PATIENCE):
                raise RuntimeError(f"{self.label}: an explorer does not answer")
            begin, end, marks, said = pipe.recv()
            if set(marks) != {float(self._trainer.step)}:
                raise RuntimeError(f"{self.label}: an explorer has other weights: {said}")
            found.append((begin, end))
        return found

    def close(self) -> None:
        """End all of it."""
        self._client.close()
        for pipe in (*self._explorers, self._host):
            pipe.close()


def _host(pipe: Connection, method: SyncMethod, directory: str) -> None:
    """Body of the synchronizer."""
    where = directory if method is SyncMethod.CHECKPOINT else None
    with Synchronizer(method, "explorer_driven", directory=where) as synchronizer:
        server = synchronizer.serve()
        pipe.send((server.address, server.token))
        with contextlib.suppress(EOFError):
            pipe.recv()


def _explore(pipe: Connection, where: tuple[str, str], idx: int, megabytes: float, apart: bool) -> None:
    """Body of an explorer: synchronize when told to."""
    torch.set_num_threads(1)
    if apart:
        os.environ[_HOST] = f"explorer {idx}"
    model = Model(megabytes, _TENSORS)
    with ExplorerClient(where[0], model, id=idx, token=where[1], timeout=_PATIENCE) as client:
        explorer = client.blocking
        with contextlib.suppress(EOFError):
            while pipe.recv() == "sync":
                explorer.step += 1
                begin = time.monotonic()
                said = explorer.sync_weight()
                pipe.send((begin, time.monotonic(), model.marks(), said))


@contextlib.contextmanager
def _sides(megabytes: float, explorers: int) -> Iterator[list[Side]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as ending:
        sides = []
        for label in SIDES:
            sides.append(Side(label, megabytes, explorers, directory))
            ending.callback(sides[-1].close)
        yield sides


def measure(plan: Plan, megabytes: float, explorers: int) -> dict[str, Times]:
    """All methods in turns; one turn before the first is not counted.

    Raises:
        RuntimeError: a synchronization failed, or an explorer ended with other weights than the trainer.
    """
    print(f"... {megabytes:g} MB to {explorers}", file=sys.stderr, flush=True)
    turns = plan.turns * (4 if megabytes <= 10 else 1)
    with _sides(megabytes, explorers) as sides:
        for turn in range(turns + 1):
            for side in sides:
                side.to_those_who_wait()
                if side.method is not SyncMethod.NCCL:
                    side.to_those_who_come_later()
                if turn == 0:
                    side.times = Times()
    return {side.label: side.times for side in sides}


def methods_table(plan: Plan) -> Table:
    """Latencies of the methods."""
    rows = []
    for megabytes in plan.sizes:
        for explorers in plan.explorers:
            for label, times in measure(plan, megabytes, explorers).items():
                columns = (times.delivered, times.trainer, times.alone, times.later)
                shown = [Figure(tuple(one)).show(1e3, 1) if one else "-" for one in columns]
                rows.append([label, f"{megabytes:g}", str(explorers), *shown])
    note = (
        "Milliseconds, median (least .. most). *Delivered*: explorers wait; from the trainer's call of\n"
        "``sync_weight()`` until the last of them has returned from its own. *Trainer*: how long that\n"
        "call took it. *Nobody waits*: the trainer's call when explorers are busy. *Later*: then all\n"
        "explorers come at once; how long the slowest of them waits. With NCCL both sides must meet, so\n"
        "the last two do not exist. Each side is a process, all on one machine, where NCCL goes through\n"
        "shared memory; in the rows *a host each* explorers believe to be on other hosts, so that gloo\n"
        f"carries the weights through sockets. Files: {_file_system(tempfile.gettempdir())}."
    )
    head = ["method", "MB", "explorers", "delivered", "trainer", "nobody waits", "later"]
    return Table("Methods: how long a synchronization takes", note, head, rows)


def _file_system(directory: str) -> str:
    """Of what kind it is, such as ``ext4``."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    real = os.path.realpath(directory)
    above = [(len(place), kind) for place, kind in mounts if Path(real).is_relative_to(place)]
    return max(above)[1]


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; returns the exit status."""
    plan, rst = _parse(arguments)
    facts = machine(("torch", "tensordict"))
    print("\n".join(facts) + "\n", flush=True)
    tables = []
    for table in (methods_table(plan), styles_table(plan.seconds)):
        print(to_text(table), flush=True)
        tables.append(table)
    if rst is not None:
        rst.write_text(to_rst(facts, tables, by="benchmarks.synchronizer"))
    return 0


def _parse(arguments: list[str] | None) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.synchronizer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sizes", type=sizes, metavar="MB,MB", help="default: 1,100")
    parser.add_argument("--explorers", type=numbers, metavar="N,N", help="default: 1,2,4")
    parser.add_argument("--turns", type=int, help="default: 9; four times that up to 10 MB")
    parser.add_argument("--seconds", type=float, help="that each style runs in each of 3 turns; default: 3")
    parser.add_argument("--quick", action="store_true", help="1 MB, one explorer, 2 turns, 0.5 s")
    parser.add_argument("--rst", type=Path, metavar="FILE", help="write the tables there as well")
    options = parser.parse_args(arguments)
    chosen: dict[str, Any] = {}
    if options.quick:
        chosen = {"sizes": (1.0,), "explorers": (1,), "turns": 2, "seconds": 0.5}
    names = ("sizes", "explorers", "turns", "seconds")
    chosen |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return Plan(**chosen), options.rst


if __name__ == "__main__":
    raise SystemExit(main())
