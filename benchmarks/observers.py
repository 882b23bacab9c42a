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

import torch

from benchmarks.report import Figure, Table, chosen, machine, ratio, say, show_ratio
from benchmarks.targets import target, targets_table
from benchmarks.updates import Place, Weights, connected, require_same
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
        failure: reason why there is no observer.
    """

    def __init__(self, name: str, make: Callable[[], Observer] | None = None) -> None:
        self.name, self.scheme = name, SharedMemWeightSyncScheme()
        self.send: list[float] = []
        self.observe: list[float] = []
        self.failure: str | None = None
        self._observer: Observer | None = None
        self._called = threading.Event()
        if make is not None:
            try:
                self._observer = make()
            except ImportError as error:
                self.failure = str(error)
            else:
                self.scheme.add_observer(self._observe)

    def update(self, weights: Weights) -> None:
        """Send ``weights``, and wait until the observer has returned, so that it disturbs no other scheme."""
        start = time.perf_counter()
        self.scheme.send(weights=weights)
        self.send.append(time.perf_counter() - start)
        if self._observer is not None:
            if not self._called.wait(_SECONDS):
                raise RuntimeError(f"{self.name}: the observer was not called within {_SECONDS:g} s")
            self._called.clear()

    def forget(self) -> None:
        """Forget the updates so far, which warmed up."""
        self.send.clear()
        self.observe.clear()

    def _observe(self, event: Event) -> None:
        assert self._observer is not None
        start = time.perf_counter()
        self._observer(event)
        if isinstance(event, SyncReport) and event.version > 0:  # 0 is that of connect()
            self.observe.append(time.perf_counter() - start)
            self._called.set()


def _nothing(event: Event) -> None:
    """Do nothing."""


def _logger(file: Path) -> logging.Logger:
    logger = logging.Logger("weight_update")
    logger.addHandler(logging.FileHandler(file))
    return logger


@contextlib.contextmanager
def variants(folder: Path) -> Iterator[list[Variant]]:
    """Yield a scheme for each observer, and three without; close the observers afterwards."""
    with contextlib.ExitStack() as stack:

        def torchrl() -> Observer:
            from torchrl.record.loggers.csv import CSVLogger

            return TorchRLLoggerObserver(CSVLogger("run", log_dir=str(folder)))

        removed = Variant(REMOVED)
        removed.scheme.add_observer(_nothing)()
        yield [
            Variant(NONE),
            removed,
            Variant(AGAIN),
            Variant("a function that does nothing", lambda: _nothing),
            Variant("LogObserver, to a file", lambda: LogObserver(_logger(folder / "log"))),
            Variant("CsvObserver", lambda: stack.enter_context(CsvObserver(folder / "table.csv"))),
            Variant(
                "ChromeTraceObserver",
                lambda: stack.enter_context(ChromeTraceObserver(folder / "trace.json")),
            ),
            Variant("PrometheusObserver", lambda: stack.enter_context(PrometheusObserver())),
            Variant(
                "TensorBoardObserver", lambda: stack.enter_context(TensorBoardObserver(folder / "board"))
            ),
            Variant("TorchRLLoggerObserver, to CSV files", torchrl),
        ]


def measure(updates: int) -> list[Variant]:
    """Send 1 MB by each scheme to its worker, in turns. The order of a turn is random."""
    random = torch.Generator().manual_seed(0)
    live = {
        f"{index}.weight": torch.randn(_ELEMENTS, generator=random).to(torch.bfloat16)
        for index in range(_TENSORS)
    }
    with tempfile.TemporaryDirectory() as folder, variants(Path(folder)) as found:
        measured = [one for one in found if one.failure is None]
        with connected([one.scheme for one in measured], live, [Place()]) as receivers:
            for turn in range(-max(1, updates // 10), updates):
                if turn == 0:
                    for one in measured:
                        one.forget()
                live["0.weight"].fill_(turn)
                for index in torch.randperm(len(measured), generator=random).tolist():
                    measured[index].update(live)
            require_same(receivers, live, [one.name for one in measured])
    return found


def add_options(known: argparse.ArgumentParser) -> None:
    known.add_argument("--updates", type=int, metavar="N", help="of each scheme; default: 1000")


def facts(options: argparse.Namespace) -> list[str]:
    del options
    return machine(["torch", "tensordict"])


def tables(options: argparse.Namespace) -> Iterator[Table]:
    updates = chosen(options, ["updates"], {"updates": 20}).get("updates", 1000)
    say(f"{updates} updates of each scheme")
    found = measure(updates)
    sends = {one.name: Figure(tuple(one.send), one.failure) for one in found}
    observes = {one.name: Figure(tuple(one.observe), "-") for one in found}
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
