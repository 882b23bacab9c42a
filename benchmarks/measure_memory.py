"""Memory of a sender and its workers together, shared pages counted once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing as mp

from benchmarks.groups import GroupFailed, groups
from benchmarks.plan import Plan
from benchmarks.report import Table
from benchmarks.sender import Case
from benchmarks.sides import LABELS

__all__ = ["Memory", "measure_memory", "memory_table"]

_UPDATES = 5


@dataclass(frozen=True)
class Memory:
    """Proportional set sizes, in bytes.

    Attributes:
        side: which library.
        model: size of the model.
        processes: sender and workers.
        total: of all of them; None if the side failed.
        base: of one process that has imported torch and tensordict and does nothing.
        failure: why there is no total.
    """

    side: str
    model: float
    processes: int
    total: int | None
    base: int
    failure: str | None = None

    @property
    def allowed(self) -> float:
        """Three model sizes and 300 MB for each process."""
        return 3 * self.model + 300e6 * self.processes


def pss(pid: int) -> int:
    """Proportional set size of a process in bytes: private pages, and its share of those it shares."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


def measure_memory(plan: Plan) -> list[Memory]:
    """The largest size and number of workers, one side after the other, after several updates."""
    base = _bare_process()
    found = []
    workers = max(plan.workers)
    for side in (side for pair in plan.pairs for side in pair):
        plan.say(f"memory: {plan.largest:g} MB, {workers} workers, {LABELS[side]}")
        with groups([(side, Case(plan.largest, 16, workers))], plan.start_timeout) as (group,):
            total, failure = None, None
            try:
                for _ in range(_UPDATES):
                    group.ask("update", plan.timeout)
                total = sum(pss(pid) for pid in group.pids)
            except GroupFailed as error:
                failure = str(error)
        found.append(Memory(side, plan.largest * 1e6, workers + 1, total, base, failure))
    return found


def _bare_process() -> int:
    ctx = mp.get_context("spawn")
    mine, theirs = ctx.Pipe()
    process = ctx.Process(target=_import_only, args=(theirs,))
    process.start()
    size = pss(mine.recv())
    mine.send(None)
    process.join()
    return size


def _import_only(conn: Connection) -> None:
    import tensordict  # noqa: F401
    import torch  # noqa: F401

    conn.send(os.getpid())
    conn.recv()


def memory_table(found: list[Memory]) -> Table:
    """One row for each side."""
    rows = []
    for memory in found:
        cells = ["-", "-", "-"]
        if memory.total is not None:
            cells = [
                f"{memory.total / 1e6:.0f}",
                f"{(memory.total - memory.processes * memory.base) / memory.model:.2f}",
                "yes" if memory.total <= memory.allowed else "no",
            ]
        cells = [memory.failure or cells[0], *cells[1:]]
        rows.append([LABELS[memory.side], str(memory.processes), *cells, f"{memory.allowed / 1e6:.0f}"])
    return Table(
        f"Memory of all processes, {found[0].model / 1e6:g} MB in 16 tensors",
        f"MB, PSS of sender and workers after {_UPDATES} updates. One process with torch and tensordict "
        f"imported has {found[0].base / 1e6:.0f} MB; what is beyond that in each process, in model sizes. "
        "Allowed: 3 model sizes and 300 MB a process.",
        ["side", "processes", "total", "models beyond base", "within", "allowed"],
        rows,
    )
