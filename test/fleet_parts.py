"""A fleet for tests: a trainer, and engines that are forked from one process that has imported torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import torch
from cli_parts import call, document
from torch import nn

from weight_update import DistributedWeightSyncScheme, SyncFailedError, WeightSyncScheme
from weight_update.observers import PrometheusObserver
from weight_update.testing.processes import wait_until
from weight_update.testing.workers import RemoteObject

MODEL_BYTES = 1 << 20
LIMIT = 60.0
"""Seconds in which a fleet has to get an update, on a busy machine."""
Watched = dict[int, tuple[bool, int, int]]
"""Whether it is connected, version and lag by worker index."""
_KEPT = ("WorkerState", "SendHandle", "SyncReport", "Transport", "Connection", "Stream")
_POLL_SECONDS = 0.01
HOLD, HOLDS = 1, 2
"""Order to an engine to stay inside hold(), and its answer; 0 ends it."""


class Model(nn.Module):
    """A model of 1 MB, all of whose elements are the number of its version."""

    def __init__(self) -> None:
        super().__init__()
        bias = 256
        self.weight = nn.Parameter(torch.zeros(MODEL_BYTES // 4 - bias), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(bias), requires_grad=False)

    def fill(self, version: int) -> None:
        for one in self.parameters():
            one.fill_(version)

    def is_version(self, version: int | None) -> bool:
        return all(bool(one.min() == one.max() == version) for one in self.parameters())


def new_board(size: int) -> np.recarray[Any, Any]:
    """Return a number of each kind for each engine, in memory that forked processes share."""
    row = np.dtype([(name, np.int64) for name in ("pid", "index", "version", "hold", "torn", "failed")])
    return np.frombuffer(mmap.mmap(-1, size * row.itemsize), row).view(np.recarray)


class Launcher:
    """Starts and kills engines; lives in a process with a single thread."""

    def __init__(self, kind: type[WeightSyncScheme], board: Any) -> None:
        self._kind, self._board = kind, board
        self._options: dict[str, Any] = {}

    def configure(self, **options: Any) -> None:
        """Set the arguments of the engines' schemes."""
        self._options = options

    def start(self, place: int, index: int) -> None:
        """Start an engine that joins as worker ``index``."""
        board = self._board
        board.index[place], board.version[place], board.hold[place] = index, -1, 0
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._serve(place, index, parent)
            except BaseException as error:  # noqa: BLE001 - the test reads the number
                board.failed[place] += 1
                print(f"engine {index}: {error!r}", flush=True)
            finally:
                os._exit(0)
        board.pid[place] = pid

    def _serve(self, place: int, index: int, parent: int) -> None:
        model, board = Model(), self._board
        scheme = self._kind(**self._options)
        scheme.init_on_receiver(model=model, worker_idx=index)
        scheme.connect()
        while os.getppid() == parent:
            with scheme.hold():
                version = scheme.version
                board.torn[place] += not model.is_version(version)
                board.version[place] = version
                while board.hold[place] and os.getppid() == parent:
                    if board.hold[place] == HOLD:
                        board.hold[place] = HOLDS
                    time.sleep(_POLL_SECONDS)
            scheme.receive(timeout=1.0)

    def kill(self, place: int) -> None:
        """Kill an engine."""
        pid = int(self._board.pid[place])
        self._board.pid[place] = 0
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def end(self) -> None:
        """Kill all engines."""
        for place in np.flatnonzero(self._board.pid):
            self.kill(int(place))


Usage = Counter[str]
"""Memory of the trainer, and its numbers of descriptors, threads, lines of metrics and objects by class."""


class Fleet:
    """A trainer that starts without engines, and then has ``count``."""

    def __init__(self, kind: type[WeightSyncScheme], count: int, stack: ExitStack) -> None:
        self.board = new_board(count)
        self.launcher = RemoteObject(Launcher, kind, self.board, name="launcher")
        stack.callback(self.launcher.stop)
        self.metrics = stack.enter_context(PrometheusObserver())
        self.model, self.version, self._indices = Model(), 0, count
        self.killed: set[int] = set()
        self.scheme: Any = stack.enter_context(kind(sync=False, token="fleet"))
        self.scheme.init_on_sender(model=self.model, num_workers=0)
        self.scheme.add_observer(self.metrics)
        self.scheme.connect()
        where = {"address": self.scheme.address, "token": "fleet"}
        if isinstance(self.scheme, DistributedWeightSyncScheme):
            where["port"] = self.scheme.port
        self.launcher.call("configure", **where)
        for place in range(count):
            self.launcher.call("start", place, place)
        wait_until(lambda: len(self.scheme.worker_versions) == count, LIMIT)

    def restart(self, place: int, *, fresh: bool) -> None:
        """Kill an engine and start it again, under an index that no engine had if it is ``fresh``."""
        index = int(self.board.index[place])
        self.killed.add(index)
        self.launcher.call("kill", place)
        if fresh:
            index = self._indices = self._indices + 1
        self.launcher.call("start", place, index)

    def hold(self, place: int) -> None:
        """Have an engine stay inside ``hold()``, with this version or the one before."""
        self.board.hold[place] = HOLD
        self.send()  # it does not wait for the next one
        wait_until(lambda: self.board.hold[place] == HOLDS, LIMIT)

    def send(self) -> None:
        """Send the next version; a killed engine that misses it is no error of the test."""
        self.version += 1
        self.model.fill(self.version)
        try:
            self.scheme.send()
        except SyncFailedError as error:
            if not error.failures.keys() <= self.killed:
                raise

    def reach(self, *, but: tuple[int, ...] = ()) -> None:
        """Wait until all engines have the newest version, but those at some places."""
        places = [place for place in range(len(self.board.pid)) if place not in but]
        wait_until(lambda: bool((self.board.version[places] == self.version).all()), LIMIT)

    def usage(self) -> Usage:
        """Return the present usage of the trainer."""
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with urllib.request.urlopen(self.metrics.url, timeout=LIMIT) as reply:
            metrics = len(reply.read().splitlines())
        me = psutil.Process()
        used = Counter(type(one).__name__ for one in gc.get_objects() if type(one).__name__.endswith(_KEPT))
        used.update(memory=me.memory_info().rss, fds=me.num_fds(), threads=me.num_threads(), metrics=metrics)
        return used

    def watched(self) -> Watched:
        """Return the workers that ``weight-update watch`` lists; a late one is connected."""
        rows = document(call("watch", self.metrics.url, "--once", "--json"))["workers"]
        return {row["worker"]: (row["state"] != "lost", row["version"], row["lag"]) for row in rows}
