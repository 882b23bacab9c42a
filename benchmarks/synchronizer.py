"""Latency of a synchronization by each method; waiting and staleness by each style."""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from benchmarks.options import Options
from benchmarks.processes import Place, Process, close_all
from benchmarks.report import Cell, Figure, Table, file_system, machine, say
from benchmarks.workers import Model, fill, mark
from weight_update import ExplorerClient, RunningStatus, Synchronizer, SyncMethod, TrainerClient

QUICK = "1 MB, one explorer, 2 turns, 0.5 s"

SETTINGS: dict[str, dict[str, Any]] = {
    "FIXED, interval 4": {"style": "fixed", "sync_interval": 4},
    "FIXED, interval 4, offset 4": {"style": "fixed", "sync_interval": 4, "sync_offset": 4},
    "EXPLORER_DRIVEN, interval 4": {"style": "explorer_driven", "sync_interval": 4},
    "TRAINER_DRIVEN, interval 4": {"style": "trainer_driven", "sync_interval": 4},
    "FULLY_ASYNC, interval 1, staleness 8": {"style": "fully_async", "max_staleness": 8},
}
METHODS = (SyncMethod.NCCL, SyncMethod.MEMORY)
_TURNS = 3
_TRAINER_STEP = 0.02
_EXPLORER_STEPS = (0.018, 0.030)  # on average; each is between a half and one and a half of it
_ROOM = 16  # so far two explorers may be ahead with an interval and an offset of 4
_LOOK = 0.005


@dataclass
class Loop:
    """One trainer and two explorers, threads that sleep instead of computing.

    An explorer's step makes one sample; a trainer's step takes two.

    Args:
        method: method of the synchronizer.
        fields: other fields of its plan.
        seconds: duration of the run.

    Attributes:
        shares: fraction of the time that a thread spent on an activity, by ``(thread, activity)``.
        ages: age of each sample, in trainer steps since the weights that made it.
        steps: number of steps of the trainer.
    """

    method: SyncMethod
    fields: dict[str, Any]
    seconds: float
    shares: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    ages: list[int] = field(default_factory=list)
    steps: int = 0

    def run(self) -> None:
        """Run until the time is over."""
        self._samples: queue.Queue[int] = queue.Queue(_ROOM)
        self._over = threading.Event()
        with Synchronizer(self.method, **self.fields) as where:
            threads = [
                threading.Thread(target=self._explore, args=(where, f"explorer {idx}", pace), daemon=True)
                for idx, pace in enumerate(_EXPLORER_STEPS)
            ]
            for thread in threads:
                thread.start()
            self._train(where)
            for thread in threads:
                thread.join(20.0)

    @contextmanager
    def _noting(self, who: str, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.shares[who, what] += (time.monotonic() - start) / self.seconds

    def _train(self, where: Synchronizer) -> None:
        model = _model(0)
        with TrainerClient(where, model, timeout=5.0) as client:
            me, end = client.blocking, time.monotonic() + self.seconds
            while time.monotonic() < end:
                taken: list[int] = []
                while len(taken) < 2 and time.monotonic() < end:
                    self._synchronize("trainer", me)
                    with self._noting("trainer", "starves"), suppress(queue.Empty):
                        taken.append(self._samples.get(timeout=_LOOK))
                self.ages += [me.step - made_at for made_at in taken]
                time.sleep(_TRAINER_STEP)
                me.step += 1
                _set(model, me.step)
                self._synchronize("trainer", me)
            self.steps = me.step
            self._over.set()

    def _explore(self, where: Synchronizer, who: str, pace: float) -> None:
        model, luck = _model(0), random.Random(who)
        with ExplorerClient(where, model, timeout=5.0) as client:
            me = client.blocking
            while not self._over.is_set():
                with client.hold():
                    sample = int(model.weight[0])
                    time.sleep(pace * luck.uniform(0.5, 1.5))
                while not self._over.is_set() and not self._hand_over(who, sample):
                    self._synchronize(who, me)  # the trainer may wait for it
                me.step += 1
                self._synchronize(who, me)

    def _hand_over(self, who: str, sample: int) -> bool:
        with self._noting(who, "waits for room"), suppress(queue.Full):
            self._samples.put(sample, timeout=_LOOK)
            return True
        return False

    def _synchronize(self, who: str, me: Any) -> None:
        with self._noting(who, "synchronizes"):
            if me.need_sync():
                me.sync_weight()


def _model(step: int) -> Any:
    model = nn.Linear(1, 250_000, bias=False)  # 1 MB
    _set(model, step)
    return model


def _set(model: Any, step: int) -> None:
    with torch.no_grad():
        model.weight.fill_(step)


def styles_table(seconds: float) -> Table:
    """Run every style by two methods, in turns, and return their table."""
    loops: dict[tuple[str, SyncMethod], list[Loop]] = defaultdict(list)
    for turn in range(_TURNS):
        say(f"styles, turn {turn + 1} of {_TURNS}")
        for name, fields in SETTINGS.items():
            for method in METHODS:
                loop = Loop(method, fields, seconds)
                loop.run()
                loops[name, method].append(loop)
    rows = [[name, method.name, *_row(some)] for (name, method), some in loops.items()]
    slow, fast = _EXPLORER_STEPS[1], _EXPLORER_STEPS[0]
    note = (
        "Trainer and explorers are threads that sleep instead of computing. A step of the trainer takes "
        f"{_TRAINER_STEP * 1e3:.0f} ms\n"
        f"and two samples. A step of an explorer makes one sample, in {fast * 1e3:.0f} or {slow * 1e3:.0f} ms"
        " on average; each step takes\n"
        f"50 to 150 % of that. The sample buffer holds {_ROOM} samples. The model has 1 MB. Median "
        "(min .. max) "
        f"of\n{_TURNS} turns of {seconds:g} s. *mean age*, *oldest*: age, in trainer steps, of the "
        "weights with which a sample was\nmade, at the time at which the trainer uses the sample. The other "
        "columns are shares of time: the\ntrainer *starves* (waits for samples) or *synchronizes*; "
        "explorers, on average, *synchronize* or\nwait for *room* in the buffer."
    )
    head = ["style", "method", "steps/s", "mean age", "oldest", "starves %", "synchronizes %"]
    head += ["explorers synchronize %", "room %"]
    return Table("Styles: who waits, and how old weights are", note, head, rows, names=(0, 1))


def _row(loops: list[Loop]) -> list[Cell]:
    explorers = [f"explorer {idx}" for idx in range(len(_EXPLORER_STEPS))]

    def share(what: str, *threads: str) -> Cell:
        return Figure([mean(loop.shares[who, what] for who in threads) for loop in loops]).cell(100, 0)

    return [
        Figure([loop.steps / loop.seconds for loop in loops]).cell(digits=1, more_is_better=True),
        Figure([mean(loop.ages) for loop in loops]).cell(digits=1),
        Figure([max(loop.ages) for loop in loops]).cell(digits=0),
        share("starves", "trainer"),
        share("synchronizes", "trainer"),
        share("synchronizes", *explorers),
        share("waits for room", *explorers),
    ]


WAYS = {
    "NCCL": (SyncMethod.NCCL, False),
    "NCCL, a host each": (SyncMethod.NCCL, True),
    "MEMORY": (SyncMethod.MEMORY, False),
    "CHECKPOINT": (SyncMethod.CHECKPOINT, False),
}
TIMES = ("delivered", "trainer", "nobody waits", "later")
"""Columns of the table of methods, whose note explains them."""

_TENSORS = 16
_PATIENCE = 100.0


class Processes:
    """A synchronizer and explorers, each a process, and the trainer's client in this one.

    Args:
        label: key of the method in :data:`WAYS`.
        megabytes: size of the model.
        explorers: number of explorers.
        directory: directory for the files of CHECKPOINT.

    Attributes:
        seconds: measurements for each of :data:`TIMES`.
    """

    def __init__(self, label: str, megabytes: float, explorers: int, directory: str) -> None:
        self.label = label
        self.seconds: dict[str, list[float]] = {what: [] for what in TIMES}
        self.method, apart = WAYS[label]
        mp.get_context("forkserver").set_forkserver_preload([__name__])
        self._host = Process(_Host, self.method, directory, start="forkserver")
        self._host.answer(_PATIENCE)
        address, token = self._host.ask("address", timeout=_PATIENCE)
        self._explorers = []
        for idx in range(explorers):
            place = Place(host=f"explorer {idx}" if apart else None)
            arguments = (_Explorer, address, token, idx, megabytes)
            self._explorers.append(Process(*arguments, start="forkserver", place=place))
        self._weights = fill(Model(megabytes, _TENSORS))
        self._client = TrainerClient(address, self._weights, token=token, timeout=_PATIENCE)
        self._trainer = self._client.blocking
        for process in self._explorers:
            process.answer(_PATIENCE)
        self._await_explorers(RunningStatus.RUNNING)

    def _await_explorers(self, status: RunningStatus) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            found = list(self._trainer.status()["explorers"].values())
            if len(found) == len(self._explorers) and set(found) == {status}:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.label}: explorers are {found}, not all {status}")
            time.sleep(0.002)

    def serve_waiting(self) -> None:
        """Let explorers wait for new weights, and the trainer give them."""
        self._next_step()
        for process in self._explorers:
            process.send("synchronize")
        self._await_explorers(RunningStatus.REQUIRE_SYNC)
        start = time.monotonic()
        self._give()
        self.seconds["trainer"].append(time.monotonic() - start)
        self.seconds["delivered"].append(max(end for _, end in self._answers()) - start)

    def serve_later(self) -> None:
        """Publish while nobody waits; then let all explorers ask at once."""
        self._next_step()
        start = time.monotonic()
        self._give()
        self.seconds["nobody waits"].append(time.monotonic() - start)
        for process in self._explorers:
            process.send("synchronize")
        self.seconds["later"].append(max(end - begin for begin, end in self._answers()))

    def _next_step(self) -> None:
        self._trainer.step += 1
        mark(self._weights, float(self._trainer.step))

    def _give(self) -> None:
        said = self._trainer.sync_weight()
        if "reason" in said:
            raise RuntimeError(f"{self.label}: {said['reason']}")

    def _answers(self) -> list[tuple[float, float]]:
        """Return when each explorer began and ended to synchronize; all have the trainer's weights."""
        found = []
        for process in self._explorers:
            begin, end, marks, said = process.answer(_PATIENCE)
            if set(marks) != {float(self._trainer.step)}:
                raise RuntimeError(f"{self.label}: an explorer has other weights: {said}")
            found.append((begin, end))
        return found

    def close(self) -> None:
        """End all of it."""
        self._client.close()
        close_all([*self._explorers, self._host])


class _Host:
    """A synchronizer that serves clients in other processes."""

    def __init__(self, method: SyncMethod, directory: str) -> None:
        where = directory if method is SyncMethod.CHECKPOINT else None
        self._synchronizer = Synchronizer(method, "explorer_driven", directory=where)
        self._server = self._synchronizer.serve()

    def address(self) -> tuple[str, str]:
        """Return the address of the server, and its token."""
        return self._server.address, self._server.token

    def close(self) -> None:
        self._synchronizer.close()


class _Explorer:
    """An explorer that synchronizes when told to."""

    def __init__(self, address: str, token: str, idx: int, megabytes: float) -> None:
        torch.set_num_threads(1)
        self._model = Model(megabytes, _TENSORS)
        self._client = ExplorerClient(address, self._model, id=idx, token=token, timeout=_PATIENCE)

    def synchronize(self) -> tuple[float, float, tuple[float, float], Any]:
        """Return when it began and ended, the marks of the weights, and the service's answer."""
        explorer = self._client.blocking
        explorer.step += 1
        begin = time.monotonic()
        said = explorer.sync_weight()
        return begin, time.monotonic(), self._model.marks(), said

    def close(self) -> None:
        self._client.close()


def measure(turns: int, megabytes: float, explorers: int) -> list[Processes]:
    """Measure all methods in turns, four times as many up to 10 MB; the first turn warms up.

    Raises:
        RuntimeError: a synchronization failed, or an explorer ended with other weights than the trainer.
        Failed: a process died or does not answer.
    """
    say(f"{megabytes:g} MB to {explorers}")
    turns *= 4 if megabytes <= 10 else 1
    with tempfile.TemporaryDirectory() as directory, ExitStack() as ending:
        ways = []
        for label in WAYS:
            ways.append(Processes(label, megabytes, explorers, directory))
            ending.callback(ways[-1].close)
        for turn in range(turns + 1):
            for way in ways:
                way.serve_waiting()
                if way.method is not SyncMethod.NCCL:
                    way.serve_later()
                if turn == 0:
                    way.seconds = {what: [] for what in TIMES}
    return ways


def methods_table(sizes: Sequence[float], explorers: Sequence[int], turns: int) -> Table:
    """Return a table of the latencies of the methods."""
    rows = [
        [way.label, f"{megabytes:g}", count, *(Figure(way.seconds[what], "-").cell(1e3, 1) for what in TIMES)]
        for megabytes in sizes
        for count in explorers
        for way in measure(turns, megabytes, count)
    ]
    note = (
        "Milliseconds, median (min .. max). In *delivered* and *trainer*, explorers already wait.\n"
        "*delivered*: time from the trainer's call of ``sync_weight()`` until the last explorer's call has\n"
        "returned. *trainer*: time of the trainer's call. *nobody waits*: time of the trainer's call while\n"
        "explorers are busy. *later*: time of the slowest explorer's call, when all explorers call at once\n"
        "after that. NCCL needs both sides at the same time, so\n"
        "it has no figures in the last two columns. Trainer, synchronizer and each explorer are processes\n"
        "on one machine, where NCCL uses shared memory. In the rows *a host each*, explorers have\n"
        "different host names, so the weights cross sockets. "
        f"File system: {file_system(tempfile.gettempdir())}."
    )
    head = ["method", "MB", "explorers", *TIMES]
    return Table("Methods: how long a synchronization takes", note, head, rows, names=(0, 1, 2))


def add_options(known: Options) -> None:
    known.add("--sizes", (1.0, 100.0), "MB", quick=(1.0,))
    known.add("--explorers", (1, 2, 4), "numbers of explorers", quick=(1,))
    known.add("--turns", 9, "four times that up to 10 MB", quick=2)
    known.add("--seconds", 3.0, "that each style runs in each of 3 turns", quick=0.5)


def facts(options: argparse.Namespace) -> list[str]:
    return machine()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    yield methods_table(options.sizes, options.explorers, options.turns)
    yield styles_table(options.seconds)
