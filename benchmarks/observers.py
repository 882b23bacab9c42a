"""Cost of observers, and of none."""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import Options
from benchmarks.report import Figure, Table, machine, ratio, say, show_ratio
from benchmarks.targets import target, targets_table
from benchmarks.updates import Weights, connected, require_same
from weight_update import SharedMemWeightSyncScheme, SyncReport
from weight_update.observers import (
    ChromeTraceObserver,
    CsvObserver,
    LogObserver,
    PrometheusObserver,
    TensorBoardObserver,
    TorchRLLoggerObserver,
)
from weight_update.report import Event, Observer

QUICK = "20 updates of each scheme"

NONE, AGAIN, REMOVED = "none", "none, a second scheme", "one was added and removed"
_TENSORS, _ELEMENTS = 16, 31_250  # 1 MB of bfloat16
_SECONDS = 10.0
"""Seconds after which an observer counts as stuck."""


class Variant:
    """A scheme with one observer, or none.

    Attributes:
        name: name of the observer.
        scheme: the scheme.
        send: seconds of each ``send()``.
        observe: seconds of each call of the observer, in its thread.
        observer: the observer; None if there is none.
        failure: reason why it could not be made.
    """

    def __init__(self, name: str, make: Callable[[], Observer] | None = None) -> None:
        self.name, self.scheme = name, SharedMemWeightSyncScheme()
        self.send: list[float] = []
        self.observe: list[float] = []
        self.failure: str | None = None
        self.observer: Any = None
        self._called = threading.Event()
        if make is not None:
            try:
                self.observer = make()
            except ImportError as error:
                self.failure = str(error)
            else:
                self.scheme.add_observer(self._observe)

    def update(self, weights: Weights) -> None:
        """Send ``weights``, and wait until the observer has returned, so that it disturbs no other scheme."""
        start = time.perf_counter()
        self.scheme.send(weights=weights)
        self.send.append(time.perf_counter() - start)
        if self.observer is not None:
            if not self._called.wait(_SECONDS):
                raise RuntimeError(f"{self.name}: the observer was not called within {_SECONDS:g} s")
            self._called.clear()

    def _observe(self, event: Event) -> None:
        start = time.perf_counter()
        self.observer(event)
        if isinstance(event, SyncReport) and event.version > 0:  # 0 is that of connect()
            self.observe.append(time.perf_counter() - start)
            self._called.set()


def _nothing(event: Event) -> None:
    """Do nothing."""


def _log(file: Path) -> Observer:
    logger = logging.Logger("weight_update")
    logger.addHandler(logging.FileHandler(file))
    return LogObserver(logger)


def _torchrl(folder: Path) -> Observer:
    from torchrl.record.loggers.csv import CSVLogger

    return TorchRLLoggerObserver(CSVLogger("run", log_dir=str(folder)))


@contextlib.contextmanager
def variants(folder: Path) -> Iterator[list[Variant]]:
    """Yield a scheme for each observer, and three without; close the observers afterwards."""
    makers: dict[str, Callable[[], Any] | None] = {
        NONE: None,
        REMOVED: None,
        AGAIN: None,
        "a function that does nothing": lambda: _nothing,
        "LogObserver, to a file": lambda: _log(folder / "log"),
        "CsvObserver": lambda: CsvObserver(folder / "table.csv"),
        "ChromeTraceObserver": lambda: ChromeTraceObserver(folder / "trace.json"),
        "PrometheusObserver": PrometheusObserver,
        "TensorBoardObserver": lambda: TensorBoardObserver(folder / "board"),
        "TorchRLLoggerObserver, to CSV files": lambda: _torchrl(folder),
    }
    with contextlib.ExitStack() as stack:
        found = [Variant(name, make) for name, make in makers.items()]
        for one in found:
            if one.name == REMOVED:
                one.scheme.add_observer(_nothing)()
            if isinstance(one.observer, contextlib.AbstractContextManager):
                stack.enter_context(one.observer)
        yield found


def measure(updates: int) -> list[Variant]:
    """Send 1 MB by each scheme to its worker, in turns. The order of a turn is random."""
    random = torch.Generator().manual_seed(0)
    live = {
        f"{index}.weight": torch.randn(_ELEMENTS, generator=random).to(torch.bfloat16)
        for index in range(_TENSORS)
    }
    warmup = max(1, updates // 10)
    with tempfile.TemporaryDirectory() as folder, variants(Path(folder)) as found:
        measured = [one for one in found if one.failure is None]
        with connected([one.scheme for one in measured], live) as receivers:
            for turn in range(warmup + updates):
                live["0.weight"].fill_(turn)
                for index in torch.randperm(len(measured), generator=random).tolist():
                    measured[index].update(live)
            require_same(receivers, live, [one.name for one in measured])
    for one in measured:
        del one.send[:warmup], one.observe[:warmup]
    return found


def add_options(known: Options) -> None:
    known.add("--updates", 1000, "of each scheme", quick=20)


def facts(options: argparse.Namespace) -> list[str]:
    return machine()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    say(f"{options.updates} updates of each scheme")
    found = measure(options.updates)
    sends = {one.name: Figure(one.send, one.failure) for one in found}
    observes = {one.name: Figure(one.observe, "-") for one in found}
    rows = [
        [name, send.cell(1e6, 0), show_ratio(send, sends[NONE]), observes[name].cell(1e6, 0)]
        for name, send in sends.items()
    ]
    yield Table(
        "SharedMem, 1 MB in 16 tensors to 1 worker, with observers",
        "Microseconds, median (min .. max). *send()*: from the call to its return, when the worker has "
        f"applied the update. *of none*: divided by the first row. The row *{AGAIN}* shows the noise. "
        "*observer*: one call of the observer, in its thread.",
        ["observer of the scheme", "send()", "of none", "observer"],
        rows,
    )
    removed, none = sends[REMOVED], sends[NONE]
    fastest = min(removed.values) / min(none.values)
    judged = target("1 MB, an observer added and removed, of none", ratio(removed, none), fastest)
    yield targets_table([judged])
