"""A soak: updates without pause, faults at random moments, and checks all the time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from soak_faults import GUEST, Faults, Hired
from soak_measure import LEAST, Sample, give_back, growth, median, sample
from soak_sides import PATIENCE, SYNCHRONIZER, Side
from soak_worker import REFUSAL, Board, end_passes, start_passes

SLACK = 2.0
"""Seconds that a call may take longer than its timeout, on a machine that others use too."""
START = 300.0
"""Seconds in which a process or a Ray actor must have started; that is no affair of the library."""
HANG = 15.0
"""Seconds beyond that after which a call counts as hanging, and ends the soak."""
_GAP = (0.2, 1.5)
"""Seconds between two faults."""
_PARTICULAR = re.compile(r"Actor\(.*?\)|\b[0-9a-f]{16,}\b|\d+(\.\d+)?")
"""Names and numbers in an error, without which errors of one kind are equal."""


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
        self.reasons: Counter[str] = Counter()
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
        waits = (burst - 1) * self._soak.options.timeout  # for free slots
        if took > self._soak.send_limit + waits:
            self._soak.broken("slow send", f"send() of version {last} took {took:.1f} s")
        for idx, text in failures.items():
            self.reasons[self._soak.reason_of(idx, text)] += 1
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
        self._dice = random.Random(options.seed + 2)
        self.faults = Faults(self)
        self._directory = tempfile.TemporaryDirectory()
        self.board = Board(Path(self._directory.name, "board"), options.workers + 1)
        self.hired = {idx: Hired(idx, idx) for idx in range(options.workers)}
        self.problems: list[tuple[str, str]] = []
        self.hung = self.ended = False
        self._shared = options.scheme != "ray" or options.data == "torch"
        waits = 2 if options.scheme in SYNCHRONIZER else 1  # for explorers, and for the transfer
        self.send_limit = waits * options.timeout + SLACK
        self.sender = Sender(self)
        self._late: set[int] = set()
        self.slowest = {"start": 0.0, "join": 0.0}
        self._windows: dict[str, list[dict[str, Sample]]] = {"first": [], "last": []}
        self._start = self._told = time.monotonic()
        self.took = 0.0

    # -- the course of it ------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Run to the end, and return the account."""
        seconds = self.options.seconds
        window = min(max(0.05 * seconds, 1.0), 20.0)
        before = max(0.1 * seconds, min(20.0, seconds / 3))  # until all that is made once has been made
        try:
            self._begin()
            self._disturb_for(before)
            self._window("first", window)
            self._disturb_for(seconds - before - 2 * window)
            self._window("last", window)
            self._judge()
            self._end()
        except Ended:
            pass
        except Exception:  # noqa: BLE001 - told like every other problem
            self.broken("error", f"the soak raised\n{traceback.format_exc()}")
        finally:
            self.took = time.monotonic() - self._start
            account = self.account()
            self.ended = True
            self._clean()
        return account

    def _begin(self) -> None:
        self.side.open()
        threads = [threading.Thread(target=self._start_worker, args=(one,)) for one in self.everyone()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(START)
        if missing := [one.idx for one in self.everyone() if one.worker is None]:
            self.broken("lost", f"workers {missing} did not start within {START:g} s; a slow machine?")
            raise Ended
        joined = [threading.Thread(target=self._join, args=(one,)) for one in self.everyone()]
        for thread in joined:
            thread.start()
        self._bounded("connect()", self.side.connect)
        self.sender.start()
        for thread in joined:
            thread.join(2 * PATIENCE)
        self._heal()

    def _disturb_for(self, seconds: float) -> None:
        end, next_fault = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            self._look()
            self.faults.undo()
            if now >= next_fault:
                self.faults.happen()
                next_fault = now + self._dice.uniform(*_GAP)
            time.sleep(0.02)

    def _window(self, name: str, seconds: float) -> None:
        """Let everything heal, then sample what processes hold while nothing happens."""
        self.faults.stop(PATIENCE)
        self._heal()
        end, samples = time.monotonic() + seconds, self._windows[name]
        while time.monotonic() < end or len(samples) < LEAST:
            self._look()
            samples.append(self._sample())
            time.sleep(min(1.0, seconds / 8))

    def _heal(self) -> None:
        """Wait until every worker takes updates again."""
        newest, starting = self.sender.version, time.monotonic()
        while any(one.starting for one in self.everyone()) and time.monotonic() - starting < START:
            self._look()
            time.sleep(0.05)
        deadline = time.monotonic() + PATIENCE
        while late := self._behind(newest):
            if time.monotonic() > deadline:
                self.broken("not healed", f"{PATIENCE:g} s after the last fault: {late}")
                raise Ended
            self._look()
            time.sleep(0.05)

    def _behind(self, newest: int) -> str:
        if joining := [one.idx for one in self.everyone() if one.busy]:
            return f"workers {joining} have not joined"
        if late := [one.idx for one in self.everyone() if self.board.get(one.row, "stamp") < newest]:
            return f"workers {late} do not have version {newest}; failures {self.sender.failures}"
        return f"failures {self.sender.failures}" if self.sender.failures else ""

    def _end(self) -> None:
        self.sender.finish.set()
        self._bounded("the last send()", self.sender.join)
        newest, deadline = self.sender.version, time.monotonic() + PATIENCE
        while any(self.board.get(one.row, "stamp") != newest for one in self.everyone()):
            if time.monotonic() > deadline:
                has = {one.idx: self.board.get(one.row, "stamp") for one in self.everyone()}
                self.broken("not healed", f"at the end version {newest} was sent, and workers have {has}")
                break
            time.sleep(0.02)
        ends = [self._end_workers, self._end_sender]
        self._dice.shuffle(ends)
        for end in ends:
            end()

    def _end_workers(self) -> None:
        for one in self.everyone():
            assert one.worker is not None
            one.worker.call("run", end_passes)
            self._bounded(f"shutdown() of worker {one.idx}", one.worker.call, "shutdown")
            self._bounded(f"the end of worker {one.idx}", one.worker.stop)

    def _end_sender(self) -> None:
        self._bounded("shutdown() of the sender", self.side.scheme.shutdown)

    def _clean(self) -> None:
        """Leave nothing running, whatever happened."""
        self.sender.finish.set()
        for one in self.everyone():
            self.kill(one)
        closing = threading.Thread(target=self.side.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        self._directory.cleanup()

    # -- checks ----------------------------------------------------------------------------------------

    def broken(self, kind: str, text: str) -> None:
        """Note that a promise is broken; the end of a soak that was cut short breaks none."""
        if self.ended:
            return
        self.problems.append((kind, text))
        if len(self.problems) <= 10:
            self._tell(f"BROKEN {kind}: {text}")

    def reason_of(self, idx: int, text: str) -> str:
        """Return the last fault of a worker and what ``send()`` said of it, without numbers and names."""
        one = self.hired.get(idx)
        fault = one.fault if one is not None else "late_joiner" if idx >= GUEST else "nobody"
        return f"{fault}: {re.sub(_PARTICULAR, '…', text.partition(chr(10))[0])[:100]}"

    def blame(self, idx: int, begin: float, version: int, text: str) -> None:
        """Check that a worker named by a failure was really disturbed."""
        one = self.hired.get(idx)
        gone = one is None and idx >= GUEST
        if gone or (one is not None and one.disturbed_since(begin, self.options.timeout / 2)):
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
            for one in self.everyone():
                chosen = worker_ids is None or one.idx in worker_ids
                if chosen and not {one.idx, -1} & failed and not one.busy and one.clear_at < sent:
                    self._require(one, version, now - sent)

    def _require(self, one: Hired, version: int, seconds: float) -> None:
        stamp = self.board.get(one.row, "stamp")
        if stamp < version and one.idx not in self._late:
            self._late.add(one.idx)  # told once
            self.broken("missed", f"worker {one.idx} has version {stamp} {seconds:.1f} s after {version}")

    def _status(self, now: float) -> str:
        held = sample([os.getpid(), *self._pids()], self._shared)
        return (
            f"{now - self._start:6.0f} s  {self.sender.version} updates ({self.sender.failed} failed), "
            f"{sum(self.faults.counts.values())} faults, {self.board.total('passes'):,} passes, "
            f"{self._broken_passes()} broken, {held['memory'] / 1e6:.0f} MB, "
            f"{held['descriptors']} descriptors, {held['threads']} threads"
        )

    def _broken_passes(self) -> int:
        return sum(self.board.total(kind) for kind in ("torn", "backward", "wrong_version", "errors"))

    def _pids(self) -> list[int]:
        return [one.pid for one in self.everyone() if one.pid]

    def _sample(self) -> dict[str, Sample]:
        give_back()
        here = [os.getpid()]
        first = self.hired[0].pid
        pids = {"the trainer": here, "worker 0": [first], "all": here + self._pids()}
        return {who: sample(some, self._shared) for who, some in pids.items()}

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
            "failures": dict(self.sender.reasons.most_common(20)),
            "faults": dict(sorted(self.faults.counts.items())),
            "passes": self.board.total("passes"),
            **passes,
            "worst_send_seconds": round(self.sender.worst, 3),
            "slowest_start_seconds": round(self.slowest["start"], 1),
            "slowest_join_seconds": round(self.slowest["join"], 1),
            "timeout": self.options.timeout,
            "hangs": int(self.hung),
            "send_errors": sum(kind == "error" for kind, _ in self.problems),
            "lost_workers": sum(not one.pid for one in self.everyone()),
            "held": held,
            "problems": self.problems,
        }

    # -- workers ---------------------------------------------------------------------------------------

    def everyone(self) -> list[Hired]:
        """Return all workers of now; late joiners come and go in other threads."""
        return list(self.hired.values())

    def start(self, one: Hired) -> None:
        """Start a worker and let it join; it is no longer busy then."""
        self._start_worker(one)
        self._join(one)

    def _start_worker(self, one: Hired) -> None:
        one.starting = True
        try:
            with self._timing("start"):
                one.worker = self.side.hire(one.idx)
                self.side.init_worker(one.worker, one.idx)
        except Exception:  # noqa: BLE001 - told like every other problem
            self.broken("lost", f"worker {one.idx} did not start\n{traceback.format_exc()}")
        one.starting = False

    def _join(self, one: Hired) -> None:
        """Let a started worker connect and compute."""
        try:
            assert one.worker is not None
            with self._timing("join"):
                self.side.join(one.worker)
                one.worker.answer(PATIENCE)
            arguments = self.board.path, self.options.workers + 1, one.row, self.side.numbered
            one.pid = one.worker.call("run", start_passes, *arguments)
        except Exception:  # noqa: BLE001 - told like every other problem
            self.broken("lost", f"worker {one.idx} did not join\n{traceback.format_exc()}")
            return
        self.clear(one)

    @contextlib.contextmanager
    def _timing(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.slowest[part] = max(self.slowest[part], time.monotonic() - begin)

    def clear(self, one: Hired) -> None:
        """End a fault: soon the worker must take every update again."""
        one.clear_at = time.monotonic() + self.options.timeout + SLACK
        one.busy = False

    def kill(self, one: Hired) -> None:
        """End the process of a worker, as the kernel does when memory runs out."""
        worker, one.worker = one.worker, None
        if worker is not None:
            with contextlib.suppress(Exception):  # it may be dead, and Ray may not know yet
                if one.pid:
                    os.kill(one.pid, signal.SIGKILL)
                else:
                    worker.runner.kill()
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


class Ended(Exception):
    """The soak cannot go on; why is among the problems."""


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread is."""
    frame = sys._current_frames().get(thread.ident or -1)
    return "" if frame is None else "".join(traceback.format_stack(frame))
