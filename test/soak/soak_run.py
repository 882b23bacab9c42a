"""A soak: updates without pause, faults at random moments, and checks all the time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from soak_measure import Sample, growth, median, sample
from soak_sides import PATIENCE, SYNCHRONIZER, Side
from soak_strangers import disturb
from soak_worker import REFUSAL, Board, end_passes, start_passes

from weight_update.testing.processes import freeze
from weight_update.testing.workers import Worker

SLACK = 2.0
"""Seconds that a call may take longer than its timeout, on a machine that others use too."""
HANG = 15.0
"""Seconds beyond that after which a call counts as hanging, and ends the soak."""
_SHORT = 0.15
"""Share of the timeout that a disturbance may last which nobody may notice."""
_GAP = (0.2, 1.5)
"""Seconds between two faults."""
_GUEST = 100
"""Index of the first late joiner."""


class Hired:
    """A worker, and what was done to it.

    Attributes:
        idx: its index.
        row: of the board.
        worker: handle of its process; None while there is none.
        pid: of its process.
        busy: whether a fault lasts.
        clear_at: from this moment on the worker must take every update; infinite while a fault lasts.
        due: newest version that it must have.
    """

    def __init__(self, idx: int, row: int) -> None:
        self.idx, self.row = idx, row
        self.worker: Worker | None = None
        self.pid = 0
        self.busy = True
        self.clear_at = float("inf")
        self.due = -1

    def disturbed_since(self, moment: float) -> bool:
        """Return whether it may have missed something that began at ``moment``."""
        return moment <= self.clear_at


class Sender(threading.Thread):
    """Sends updates, and checks how each of them ends.

    Args:
        soak: the soak that it belongs to.
    """

    def __init__(self, soak: Soak) -> None:
        super().__init__(name="soak-sender", daemon=True)
        self._soak, self._side = soak, soak.side
        self._dice = random.Random(soak.options.seed + 1)
        self.version, self.failed, self.worst = 0, 0, 0.0
        self.since: float | None = None
        self.failures: dict[int, str] = {}
        self.refuser: Hired | None = None
        self.finish = threading.Event()
        self.owed: deque[tuple[float, int, list[int] | None, set[int]]] = deque()

    def run(self) -> None:
        """Send until the soak ends; the last update is for all."""
        try:
            while not self.finish.is_set():
                self._step()
                time.sleep(self._dice.random() * 0.02)
            self.send()
        except Exception:  # noqa: BLE001 - the soak tells it
            self._soak.broken("error", f"the sender raised\n{traceback.format_exc()}")

    def _step(self) -> None:
        hired, self.refuser = self.refuser, None
        if hired is not None:
            self._refuse(hired)
            return
        draw = self._dice.random()
        workers = range(self._soak.options.workers)
        some = self._dice.sample(workers, self._dice.randrange(1, len(workers) + 1)) if draw < 0.1 else None
        self.send(some, self._dice.randrange(2, 6) if draw > 0.9 else 1)

    def send(self, worker_ids: list[int] | None = None, burst: int = 1) -> None:
        """Send one update, or several of which the last one counts."""
        begin = self.since = time.monotonic()
        last, failures = self._side.send(self.version + 1, worker_ids, burst)
        now = time.monotonic()
        self.since, took = None, now - begin
        self.version, self.failures = last, failures
        self.worst, self.failed = max(self.worst, took), self.failed + bool(failures)
        if took > self._soak.send_limit:
            self._soak.broken("slow send", f"send() of version {last} took {took:.1f} s")
        for idx, text in failures.items():
            self._soak.blame(idx, begin, last, text)
        self.owed.append((now, last, worker_ids, set(failures)))

    def _refuse(self, hired: Hired) -> None:
        """Let one worker raise while it applies an update; the error must come here."""
        self.send()
        if hired.idx not in self.failures:
            self._soak.board.set(hired.row, "refuse", 1)
            self.send()
            found = self.failures.get(hired.idx, "nothing")
            if REFUSAL not in found:
                self._soak.broken("silence", f"worker {hired.idx} raised, and send() told {found}")
        self._soak.clear(hired)


class Soak:
    """One soak of one side.

    Args:
        side: how weights travel.
        options: of the command line.
        tell: called with each line of the log.
    """

    def __init__(self, side: Side, options: Any, tell: Callable[[str], None]) -> None:
        self.side, self.options, self._tell = side, options, tell
        self._dice = random.Random(options.seed)
        self._directory = tempfile.TemporaryDirectory()
        self.board = Board(Path(self._directory.name, "board"), options.workers + 1)
        self.hired = {idx: Hired(idx, idx) for idx in range(options.workers)}
        self._guests = count(_GUEST)
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._strangers: list[threading.Thread] = []
        self.faults: Counter[str] = Counter()
        self.problems: list[tuple[str, str]] = []
        self.hung = self.ended = False
        waits = 2 if options.scheme in SYNCHRONIZER else 1  # for explorers, and for the transfer
        self.send_limit = waits * options.timeout + SLACK
        self.sender = Sender(self)
        self._windows: dict[str, list[dict[str, Sample]]] = {"first": [], "last": []}
        self._start = self._told = time.monotonic()
        self.took = 0.0

    # -- the course of it ------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Run to the end, and return the account."""
        seconds = self.options.seconds
        window = min(max(0.05 * seconds, 1.0), 20.0)
        try:
            self._begin()
            self._disturb_for(0.1 * seconds)
            self._window("first", window)
            self._disturb_for(0.9 * seconds - 2 * window)
            self._window("last", window)
            self._judge()
            self._end()
        except Ended:
            pass
        except Exception:  # noqa: BLE001 - told like every other problem
            self.broken("error", f"the soak raised\n{traceback.format_exc()}")
        finally:
            self.took, self.ended = time.monotonic() - self._start, True
            account = self.account()
            self._clean()
        return account

    def _begin(self) -> None:
        self.side.open()
        threads = [threading.Thread(target=self._start_worker, args=(one,)) for one in self.hired.values()]
        self._bounded("init_on_sender() and the start of workers", self._together, threads)
        joined = [threading.Thread(target=self._join, args=(one,)) for one in self.hired.values()]
        for thread in joined:
            thread.start()
        self._bounded("connect()", self.side.connect)
        self.sender.start()
        for thread in joined:
            thread.join(2 * PATIENCE)
        self._heal()

    @staticmethod
    def _together(threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _disturb_for(self, seconds: float) -> None:
        end, next_fault = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            self._look()
            self._undo_until(now)
            if now >= next_fault:
                self._fault()
                next_fault = now + self._dice.uniform(*_GAP)
            time.sleep(0.02)

    def _window(self, name: str, seconds: float) -> None:
        """Let everything heal, then sample what processes hold while nothing happens."""
        self._undo_until(float("inf"))
        while self._strangers:
            self._strangers.pop().join()
        self._heal()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            self._windows[name].append(self._sample())
            time.sleep(min(1.0, seconds / 8))

    def _heal(self) -> None:
        """Wait until every worker takes updates again."""
        deadline, newest = time.monotonic() + PATIENCE, self.sender.version
        while late := self._behind(newest):
            if time.monotonic() > deadline:
                self.broken("not healed", f"{PATIENCE:g} s after the last fault: {late}")
                raise Ended
            self._look()
            time.sleep(0.05)

    def _behind(self, newest: int) -> str:
        if joining := [one.idx for one in self.hired.values() if one.busy]:
            return f"workers {joining} have not joined"
        if late := [one.idx for one in self.hired.values() if self.board.get(one.row, "stamp") < newest]:
            return f"workers {late} do not have version {newest}; failures {self.sender.failures}"
        return f"failures {self.sender.failures}" if self.sender.failures else ""

    def _end(self) -> None:
        self.sender.finish.set()
        self._bounded("the last send()", self.sender.join)
        newest, deadline = self.sender.version, time.monotonic() + PATIENCE
        while any(self.board.get(one.row, "stamp") != newest for one in self.hired.values()):
            if time.monotonic() > deadline:
                has = {one.idx: self.board.get(one.row, "stamp") for one in self.hired.values()}
                self.broken("not healed", f"at the end version {newest} was sent, and workers have {has}")
                break
            time.sleep(0.02)
        ends = [self._end_workers, self._end_sender]
        self._dice.shuffle(ends)
        for end in ends:
            end()

    def _end_workers(self) -> None:
        for one in self.hired.values():
            assert one.worker is not None
            one.worker.call("run", end_passes)
            self._bounded(f"shutdown() of worker {one.idx}", one.worker.call, "shutdown")
            self._bounded(f"the end of worker {one.idx}", one.worker.stop)

    def _end_sender(self) -> None:
        self._bounded("shutdown() of the sender", self.side.scheme.shutdown)

    def _clean(self) -> None:
        """Leave nothing running, whatever happened."""
        for one in self.hired.values():
            self._kill(one)
        closing = threading.Thread(target=self.side.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        self._directory.cleanup()

    # -- checks ----------------------------------------------------------------------------------------

    def broken(self, kind: str, text: str) -> None:
        """Note that a promise is broken."""
        self.problems.append((kind, text))
        if len(self.problems) <= 10:
            self._tell(f"BROKEN {kind}: {text}")

    def blame(self, idx: int, begin: float, version: int, text: str) -> None:
        """Check that a worker named by a failure was really disturbed."""
        one = self.hired.get(idx)
        if idx >= _GUEST or (one is not None and one.disturbed_since(begin)):
            return
        if idx == -1 and self.side.excused(begin):
            return
        who = "nobody" if idx == -1 else f"worker {idx}"
        self.broken("false blame", f"send() of version {version} blamed {who}, who was fine: {text}")

    def _look(self) -> None:
        """Everything that is checked all the time."""
        now = time.monotonic()
        since = self.sender.since
        if since is not None and now - since > self.send_limit + HANG:
            self.hung = True
            self.broken("hang", f"send() has run for {now - since:.0f} s\n{stack_of(self.sender)}")
            raise Ended
        if self.sender.ident is not None and not self.sender.is_alive():
            raise Ended
        self._look_for_late(now)
        if now - self._told > self.options.every:
            self._told = now
            self._tell(self._status(now))

    def _look_for_late(self, now: float) -> None:
        """Whoever was not disturbed must have every update soon after it was sent."""
        owed, limit = self.sender.owed, self.options.timeout + SLACK
        while owed and owed[0][0] + limit < now:
            sent, version, worker_ids, failed = owed.popleft()
            for one in list(self.hired.values()):
                chosen = worker_ids is None or one.idx in worker_ids
                if chosen and one.idx not in failed and -1 not in failed and not one.disturbed_since(sent):
                    self._require(one, version, now - sent)

    def _require(self, one: Hired, version: int, seconds: float) -> None:
        stamp = self.board.get(one.row, "stamp")
        if stamp < version and not one.busy and one.due < version:
            one.due = version
            self.broken("missed", f"worker {one.idx} has version {stamp} {seconds:.1f} s after {version}")

    def _status(self, now: float) -> str:
        held = sample([os.getpid(), *self._pids()])
        return (
            f"{now - self._start:6.0f} s  {self.sender.version} updates ({self.sender.failed} failed), "
            f"{sum(self.faults.values())} faults, {self.board.total('passes'):,} passes, "
            f"{self._broken_passes()} broken, {held['memory'] / 1e6:.0f} MB, "
            f"{held['descriptors']} descriptors, {held['threads']} threads"
        )

    def _broken_passes(self) -> int:
        return sum(self.board.total(kind) for kind in ("torn", "backward", "wrong_version", "errors"))

    def _pids(self) -> list[int]:
        return [one.pid for one in self.hired.values() if one.pid]

    def _sample(self) -> dict[str, Sample]:
        here = [os.getpid()]
        first = self.hired[0].pid
        return {"the trainer": sample(here), "worker 0": sample([first]), "all": sample(here + self._pids())}

    def _judge(self) -> None:
        first, last = self._windows["first"], self._windows["last"]
        for who, processes in (("the trainer", 1), ("worker 0", 1), ("all", 1 + self.options.workers)):
            for text in growth(who, processes, [one[who] for one in first], [one[who] for one in last]):
                self.broken("not flat", text)

    def account(self) -> dict[str, Any]:
        """Return what the soak did and found."""
        passes = {kind: self.board.total(kind) for kind in ("torn", "backward", "wrong_version", "errors")}
        described = []
        with contextlib.suppress(FileNotFoundError):
            described = [json.loads(line) for line in self.board.problems.read_text().splitlines()]
        for kind, number in passes.items():
            if number and not self.side.peer:
                texts = "; ".join(
                    f"worker {one['worker']}: {one['text']}" for one in described if one["kind"] == kind
                )
                self.broken(kind, f"{number} of {self.board.total('passes')} passes: {texts[:1000]}")
        held = {
            name: {who: median([one[who] for one in window]) for who in window[0]} if window else {}
            for name, window in self._windows.items()
        }
        return {
            "scheme": self.options.scheme,
            "hosts": self.options.hosts,
            "encoding": self.options.encoding,
            "compression": self.options.compression,
            "peer": self.options.peer,
            "seed": self.options.seed,
            "seconds": round(self.took, 1),
            "updates": self.sender.version,
            "failed_updates": self.sender.failed,
            "faults": dict(sorted(self.faults.items())),
            "passes": self.board.total("passes"),
            **passes,
            "worst_send_seconds": round(self.sender.worst, 3),
            "timeout": self.options.timeout,
            "hangs": int(self.hung),
            "lost_workers": sum(not one.pid for one in self.hired.values()),
            "held": held,
            "problems": self.problems,
        }

    # -- workers ---------------------------------------------------------------------------------------

    def _start_worker(self, one: Hired) -> None:
        try:
            one.worker = self.side.hire(one.idx)
            self.side.init_worker(one.worker, one.idx)
        except Exception:  # noqa: BLE001 - told like every other problem
            self.broken("lost", f"worker {one.idx} did not start\n{traceback.format_exc()}")

    def _join(self, one: Hired) -> None:
        """Let a started worker connect and compute."""
        try:
            assert one.worker is not None
            self.side.join(one.worker)
            one.worker.answer(PATIENCE)
            arguments = self.board.path, self.options.workers + 1, one.row, self.side.numbered
            one.pid = one.worker.call("run", start_passes, *arguments)
        except Exception:  # noqa: BLE001 - told like every other problem
            if not self.ended:
                self.broken("lost", f"worker {one.idx} did not join\n{traceback.format_exc()}")
            return
        self.clear(one)

    def clear(self, one: Hired) -> None:
        """The fault is over; soon the worker must take every update again."""
        one.clear_at = time.monotonic() + self.options.timeout + SLACK
        one.busy = False

    def _kill(self, one: Hired) -> None:
        worker, one.worker = one.worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(one.pid or worker.runner.pid, signal.SIGKILL)
            with contextlib.suppress(Exception):  # Ray may not know yet
                worker.stop()
        one.pid = 0

    def _bounded(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Make a call that must end."""
        failed: list[str] = []

        def run() -> None:
            try:
                call(*arguments)
            except Exception:  # noqa: BLE001 - told below
                failed.append(traceback.format_exc())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(2 * PATIENCE)
        if thread.is_alive():
            self.hung = True
            self.broken("hang", f"{name} did not return within {2 * PATIENCE:g} s\n{stack_of(thread)}")
            raise Ended
        if failed:
            self.broken("error", f"{name} raised\n{failed[0]}")
            raise Ended

    # -- faults ----------------------------------------------------------------------------------------

    def _fault(self) -> None:
        name = self._dice.choice([one for one in self.side.faults if one not in self.options.without])
        free = [one for one in self.hired.values() if not one.busy and one.idx < _GUEST]
        if name in ("late_joiner", "strangers", "disk_full"):
            done = getattr(self, f"_do_{name}")()
        elif len(free) < 2:  # one worker is always left alone
            return
        else:
            done = getattr(self, f"_do_{name}")(self._dice.choice(free))
        self.faults[name] += done is not False

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heappush(self._undo, (time.monotonic() + seconds, next(self._order), call))

    def _undo_until(self, moment: float) -> None:
        while self._undo and self._undo[0][0] <= moment:
            heappop(self._undo)[2]()

    def _short(self) -> float:
        return self._dice.random() * _SHORT * self.options.timeout

    def _long(self) -> float:
        return self._dice.uniform(1.2, 2.5) * self.options.timeout

    @staticmethod
    def _disturb(one: Hired) -> None:
        one.busy, one.clear_at = True, float("inf")

    def _do_kill(self, one: Hired) -> bool:
        if one.idx == 0:  # it stays for the whole soak, so that what it holds can be compared
            return False
        self._disturb(one)
        self._kill(one)
        self._later(self._dice.random() * 2 * self.options.timeout, lambda: self._restart(one))
        return True

    def _restart(self, one: Hired) -> None:
        def run() -> None:
            self._start_worker(one)
            self._join(one)

        threading.Thread(target=run, daemon=True).start()

    def _stop(self, one: Hired, seconds: float) -> None:
        freeze(one.pid)

        def go_on() -> None:
            os.kill(one.pid, signal.SIGCONT)
            self._ended(one)

        self._later(seconds, go_on)

    def _ended(self, one: Hired) -> None:
        """End a fault; a short one was no disturbance."""
        if one.clear_at == float("inf"):
            self.clear(one)
        one.busy = False

    def _do_stop(self, one: Hired) -> None:
        one.busy = True
        self._stop(one, self._short())

    def _do_long_stop(self, one: Hired) -> None:
        self._disturb(one)
        self._stop(one, self._long())

    def _slow(self, one: Hired, seconds: float) -> None:
        self.board.set(one.row, "delay_ms", int(1e3 * seconds))

        def go_on() -> None:
            self.board.set(one.row, "delay_ms", 0)
            self._ended(one)

        self._later(2 * seconds, go_on)

    def _do_slow(self, one: Hired) -> None:
        one.busy = True
        self._slow(one, self._short())

    def _do_long_slow(self, one: Hired) -> None:
        self._disturb(one)
        self._slow(one, self._long())

    def _do_refuse(self, one: Hired) -> bool:
        if one.disturbed_since(time.monotonic()) or self.sender.refuser is not None:
            return False
        self._disturb(one)
        self.sender.refuser = one
        return True

    def _do_link_down(self, one: Hired) -> None:
        one.busy = True
        self._cut(one, self._short())

    def _do_long_link_down(self, one: Hired) -> None:
        self._disturb(one)
        self._cut(one, self._long())

    def _cut(self, one: Hired, seconds: float) -> None:
        network, host = self.side.network, self.side.host_of(one.idx)
        assert network is not None
        down, up = self._dice.choice([(network.pull, network.plug), (network.lose, network.find)])
        down(host)

        def mend() -> None:
            up(host)
            self._ended(one)

        self._later(seconds, mend)

    def _do_late_joiner(self) -> bool:
        """A worker with an index that was not announced comes, computes and leaves, or is killed."""
        if any(idx >= _GUEST for idx in self.hired):
            return False
        one = Hired(next(self._guests), self.options.workers)
        self.hired[one.idx] = one
        self._restart(one)
        self._later(self._dice.uniform(3.0, 8.0), lambda: self._leave(one))
        return True

    def _leave(self, one: Hired) -> None:
        if one.busy and one.worker is not None:  # it has not joined yet
            self._later(0.5, lambda: self._leave(one))
            return
        self._disturb(one)
        if self._dice.random() < 0.5 and one.worker is not None:
            with contextlib.suppress(Exception):  # it may wait for the sender
                one.worker.call("run", end_passes)
                one.worker.call("shutdown")
        self._kill(one)
        del self.hired[one.idx]

    def _do_strangers(self) -> None:
        arguments = os.getpid(), self.side.scheme, random.Random(self._dice.randrange(1 << 30))
        self._strangers.append(threading.Thread(target=disturb, args=arguments, daemon=True))
        self._strangers[-1].start()

    def _do_disk_full(self) -> bool:
        return self.side.fill_disk(self._later, self._dice.uniform(0.5, 3.0))


class Ended(Exception):
    """The soak cannot go on; why is among the problems."""


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread is."""
    frame = sys._current_frames().get(thread.ident or -1)
    return "" if frame is None else "".join(traceback.format_stack(frame))
