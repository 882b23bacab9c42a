"""Faults that a soak inflicts on workers, and takes back after a while."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from soak_strangers import disturb
from soak_worker import end_passes

from weight_update.testing.processes import freeze
from weight_update.testing.workers import Worker

if TYPE_CHECKING:
    from soak_run import Soak

LATE_JOINER = 100
"""Index of the first late joiner."""
_SHORT = 0.15
"""Share of the timeout that a fault may last if nobody may notice it."""
_WITHOUT_WORKER = ("late_joiner", "strangers", "disk_full")


class SoakWorker:
    """A worker, and what was done to it.

    Attributes:
        idx: its index.
        row: its row of the board.
        worker: handle of its process; None while there is none.
        pid: of its process; 0 before it computes.
        starting: whether a process for it is being started.
        busy: whether a fault lasts.
        fault: name of the last one.
        since: when that began.
        clear_at: from this moment on the worker must take every update; infinite while a fault lasts.
        down_at: when its link failed; the first failure of several that TCP has not recovered from.
        back_at: when TCP has recovered from the last failure at the latest.
    """

    def __init__(self, idx: int, row: Any) -> None:
        self.idx, self.row = idx, row
        self.worker: Worker | None = None
        self.pid = 0
        self.starting = False
        self.busy, self.since = True, time.monotonic()
        self.fault = "late_joiner" if idx >= LATE_JOINER else "start"
        self.clear_at = float("inf")
        self.down_at = self.back_at = 0.0

    def touch(self, harmless: bool = False) -> None:
        """Begin a fault; nobody may notice one that is ``harmless``."""
        self.busy, self.since = True, time.monotonic()
        self.clear_at = self.clear_at if harmless else float("inf")

    def disturbed_since(self, moment: float, patience: float) -> bool:
        """Return whether it may have missed something that began at ``moment``.

        A harmless fault that lasts longer than ``patience``, on a slow machine, is no longer harmless.
        """
        return moment <= self.clear_at or (self.busy and time.monotonic() - self.since > patience)


class Faults:
    """The faults of a soak, each of which begins and ends.

    Args:
        soak: the soak that it belongs to.

    Attributes:
        counts: by the name of the fault.
    """

    def __init__(self, soak: Soak) -> None:
        self._soak, self._driver, self._timeout = soak, soak.driver, soak.options.timeout
        self._dice = random.Random(soak.options.seed)
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._indices = count(), count(LATE_JOINER)
        self._calm = threading.Event()
        self._threads: list[threading.Thread] = []
        self.counts: Counter[str] = Counter()

    def happen(self) -> None:
        """Begin one fault, of a worker without one if it is a fault of workers; leave one worker alone."""
        without = self._soak.options.without
        name = self._dice.choice([name for name in self._driver.faults if name not in without])
        free = [one for one in self._soak.present() if not one.busy and one.idx < LATE_JOINER]
        if name not in _WITHOUT_WORKER and len(free) < 2:
            return
        arguments = [] if name in _WITHOUT_WORKER else [self._dice.choice(free)]
        for one in arguments:
            one.fault = name
        self.counts[name] += getattr(self, f"_do_{name}")(*arguments) is not False

    def undo(self) -> None:
        """Undo what has lasted long enough."""
        while self._undo and self._undo[0][0] <= time.monotonic():
            heappop(self._undo)[2]()

    def stop(self, patience: float) -> None:
        """Undo everything."""
        while self._undo:
            heappop(self._undo)[2]()
        self._calm.set()
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._calm.clear()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heappush(self._undo, (time.monotonic() + seconds, next(self._order), call))

    def _apart(self, call: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=call, args=arguments, daemon=True))
        self._threads[-1].start()

    def _begin(self, one: SoakWorker) -> float:
        """Begin the fault of a worker; return its seconds, too few to be noticed or more than the timeout."""
        long = one.fault.startswith("long_")
        one.touch(harmless=not long)
        share = self._dice.uniform(1.2, 2.5) if long else self._dice.random() * _SHORT
        return share * self._timeout

    def _over(self, one: SoakWorker) -> None:
        """End a fault; one that nobody had to notice leaves no excuse, unless it lasted too long."""
        if one.clear_at == float("inf") or time.monotonic() - one.since > self._timeout / 2:
            self._soak.clear(one)
        one.busy = False

    # -- to processes ----------------------------------------------------------------------------------

    def _do_kill(self, one: SoakWorker) -> bool:
        if one.idx == 0:  # it stays for the whole soak, so that what it holds can be compared
            return False
        one.touch()
        self._soak.kill(one)
        pause = self._dice.random() * 2 * self._timeout
        self._later(pause, lambda: self._apart(self._soak.start, one))
        return True

    def _do_stop(self, one: SoakWorker) -> None:
        seconds = self._begin(one)
        freeze(one.pid)

        def go_on() -> None:
            os.kill(one.pid, signal.SIGCONT)
            self._over(one)

        self._later(seconds, go_on)

    _do_long_stop = _do_stop

    def _do_late_joiner(self) -> bool:
        """Start a late joiner that computes, and then leaves or is killed."""
        if any(one.idx >= LATE_JOINER for one in self._soak.present()):
            return False
        one = SoakWorker(next(self._indices), self._soak.board[-1])
        self._soak.workers[one.idx] = one
        self._apart(self._visit, one, self._dice.uniform(2.0, 6.0), self._dice.random() < 0.5)
        return True

    def _visit(self, one: SoakWorker, seconds: float, killed: bool) -> None:
        self._soak.start(one)
        if not one.busy:
            self._calm.wait(seconds)
            one.touch()
            if not killed and one.worker is not None:
                with contextlib.suppress(Exception):  # it is killed below
                    one.worker.call("run", end_passes)
                    one.worker.call("shutdown")
        self._soak.kill(one)
        del self._soak.workers[one.idx]

    # -- to forward passes -----------------------------------------------------------------------------

    def _do_slow(self, one: SoakWorker) -> None:
        seconds = self._begin(one)
        one.row.delay_ms = int(1e3 * seconds)

        def go_on() -> None:
            one.row.delay_ms = 0
            self._over(one)

        self._later(2 * seconds, go_on)

    _do_long_slow = _do_slow

    def _do_refuse(self, one: SoakWorker) -> bool:
        if one.disturbed_since(time.monotonic(), self._timeout) or self._soak.sender.refuser is not None:
            return False
        one.touch()
        self._soak.sender.refuser = one
        return True

    # -- to the network and the disk -------------------------------------------------------------------

    def _do_link_down(self, one: SoakWorker) -> None:
        network, host = self._driver.network, self._driver.host_of(one.idx)
        assert network is not None
        if one.back_at < time.monotonic():
            one.down_at = time.monotonic()
        # A short fault loses packets: after a cable was out for 0.2 s, TCP waits 1.2 s.
        seconds = self._begin(one)
        losing = one.fault == "link_down" or self._dice.random() < 0.5
        down, up = (network.lose, network.find) if losing else (network.pull, network.plug)
        down(host)

        def mend() -> None:
            up(host)
            self._over(one)
            lasted = time.monotonic() - one.down_at
            one.back_at = time.monotonic() + lasted  # TCP doubles its pauses: it may try again so late
            one.clear_at += lasted

        self._later(seconds, mend)

    _do_long_link_down = _do_link_down

    def _do_strangers(self) -> None:
        dice = random.Random(self._dice.randrange(1 << 30))
        self._apart(disturb, os.getpid(), self._driver.scheme, dice)

    def _do_disk_full(self) -> bool:
        return self._driver.fill_disk(self._later, self._dice.uniform(0.5, 3.0))
