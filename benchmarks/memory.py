"""Memory of a sender and its workers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Failed, Process
from benchmarks.report import Figure, Table, say
from benchmarks.trainers import LABELS, trainers
from benchmarks.workers import Case

_UPDATES = 5


@dataclass(frozen=True)
class Memory:
    """Proportional set sizes, in bytes.

    Attributes:
        variant: our scheme or TorchRL's.
        model: size of the model.
        processes: number of processes, sender and workers.
        total: of all of them.
        base: of one process that has imported torch and tensordict and does nothing.
    """

    variant: str
    model: float
    processes: int
    total: Figure
    base: int

    @property
    def allowed(self) -> float:
        """Three model sizes and 300 MB for each process."""
        return 3 * self.model + 300e6 * self.processes


def pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes: private pages and its share of shared pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024


def measure_memory(
    variants: Iterable[str], case: Case, *, timeout: float, start_timeout: float
) -> Iterator[Memory]:
    """Measure each variant after several updates, one variant after the other."""
    base = _bare_process()
    for variant in variants:
        say(f"memory: {case.megabytes:g} MB, {case.workers} workers, {LABELS[variant]}")
        with trainers([(variant, case)], start_timeout) as (trainer,):
            try:
                for _ in range(_UPDATES):
                    trainer.ask("update", timeout=timeout)
                total = Figure([sum(pss(pid) for pid in trainer.ask("pids", timeout=timeout))])
            except Failed as error:
                total = Figure(failure=str(error))
        yield Memory(variant, case.megabytes * 1e6, case.workers + 1, total, base)


class _Bare:
    """An object whose process has imported torch and tensordict, and does nothing."""

    def __init__(self) -> None:
        import tensordict  # noqa: F401
        import torch  # noqa: F401

    def close(self) -> None: ...


def _bare_process() -> int:
    bare = Process(_Bare)
    bare.answer()
    size = pss(bare.pid)
    bare.close()
    return size


def memory_table(found: list[Memory]) -> Table:
    """Return a table with one row for each variant."""
    rows = []
    for memory in found:
        beyond, within = "-", "-"
        total = memory.total.median
        if total is not None:
            beyond = f"{(total - memory.processes * memory.base) / memory.model:.2f}"
            within = "yes" if total <= memory.allowed else "no"
        shown = [memory.total.cell(1e-6, 0), beyond, within, f"{memory.allowed / 1e6:.0f}"]
        rows.append([LABELS[memory.variant], memory.processes, *shown])
    return Table(
        f"Memory of all processes, {found[0].model / 1e6:g} MB in 16 tensors",
        f"MB, PSS of sender and workers after {_UPDATES} updates. One process with torch and tensordict "
        f"imported has {found[0].base / 1e6:.0f} MB. *models beyond base*: *total* without these "
        f"{found[0].base / 1e6:.0f} MB of each process, divided by the size of the model. *within*: whether "
        "*total* is at most *allowed*, which is 3 model sizes and 300 MB per process.",
        ["scheme", "processes", "total", "models beyond base", "within", "allowed"],
        rows,
        names=(0, 1),
    )
