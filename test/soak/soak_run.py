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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from soak_drivers import PATIENCE, SYNCHRONIZER, Driver
from soak_faults import LATE_JOINER, Faults, SoakWorker
from soak_measure import LEAST, Sample, give_back, growth, median, sample
from soak_sender import Sender
from soak_worker import BROKEN, end_passes, open_board, start_passes

SLACK = 2.0
"""Seconds that a call may take longer than its timeout, on a machine that others use too."""
START = 300.0
"""Seconds in which a process or a Ray actor must have started; that is no affair of the library."""
HANG = 15.0
"""Seconds beyond that after which a call counts as hanging, and ends the soak."""
_DESCRIBED = ("scheme", "hosts", "encoding", "compression", "peer", "seed", "timeout")
"""Options that the account repeats."""
_GAP = (0.2, 1.5)
"""Seconds between two faults."""
_PARTICULAR = re.compile(r"Actor\(.*?\)|\b[0-9a-f]{16,}\b|\d+(\.\d+)?")
"""Names and numbers in an error, without which errors of one kind are equal."""


class Soak:
    """One soak of one scheme.

    Args:
        driver: of the scheme.
        options: of the command line.
        tell: called with each line of the log.
    """

    def __init__(self, driver: Driver, options: Any, tell: Callable[[str], None]) -> None:
        self.driver, self.options, self._tell = driver, options, tell
        self._dice = random.Random(options.seed + 2)
        self.faults = Faults(self)
        self._directory = tempfile.TemporaryDirectory()
        self._board_path = Path(self._directory.name, "board")
        self.board = open_board(self._board_path, options.workers + 1)
        self.workers = {idx: SoakWorker(idx, self.board[idx]) for idx in range(options.workers)}
        self.problems: list[tuple[str, str]] = []
        self.ended = False
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
        self.driver.open()
        for thread in self._for_each(self._start_worker):
            thread.join(START)
        if missing := [one.idx for one in self.present() if one.worker is None]:
            self._give_up("lost", f"workers {missing} did not start within {START:g} s; a slow machine?")
        joining = self._for_each(self._join)
        self._bounded("connect()", self.driver.connect)
        self.sender.start()
        for thread in joining:
            thread.join(2 * PATIENCE)
        self._heal()

    def _for_each(self, call: Callable[[SoakWorker], None]) -> list[threading.Thread]:
        """Begin a call for each worker, in a thread each."""
        threads = [threading.Thread(target=call, args=(one,)) for one in self.present()]
        for thread in threads:
            thread.start()
        return threads

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
        while any(one.starting for one in self.present()) and time.monotonic() - starting < START:
            self._look()
            time.sleep(0.05)
        deadline = time.monotonic() + PATIENCE
        while late := self._behind(newest):
            if time.monotonic() > deadline:
                self._give_up("not healed", f"{PATIENCE:g} s after the last fault: {late}")
            self._look()
            time.sleep(0.05)

    def _behind(self, newest: int) -> str:
        if joining := [one.idx for one in self.present() if one.busy]:
            return f"workers {joining} have not joined"
        if late := [one.idx for one in self.present() if one.row.stamp < newest]:
            return f"workers {late} do not have version {newest}; failures {self.sender.failures}"
        return f"failures {self.sender.failures}" if self.sender.failures else ""

    def _end(self) -> None:
        self.sender.finish.set()
        self._bounded("the last send()", self.sender.join)
        newest, deadline = self.sender.version, time.monotonic() + PATIENCE
        while any(one.row.stamp != newest for one in self.present()):
            if time.monotonic() > deadline:
                has = {one.idx: int(one.row.stamp) for one in self.present()}
                self.broken("not healed", f"at the end version {newest} was sent, and workers have {has}")
                break
            time.sleep(0.02)
        ends = [
            self._end_workers,
            lambda: self._bounded("shutdown() of the sender", self.driver.scheme.shutdown),
        ]
        self._dice.shuffle(ends)
        for end in ends:
            end()

    def _end_workers(self) -> None:
        for one in self.present():
            assert one.worker is not None
            one.worker.call("run", end_passes)
            self._bounded(f"shutdown() of worker {one.idx}", one.worker.call, "shutdown")
            self._bounded(f"the end of worker {one.idx}", one.worker.stop)

    def _clean(self) -> None:
        """Leave nothing running, whatever happened."""
        self.sender.finish.set()
        for one in self.present():
            self.kill(one)
        closing = threading.Thread(target=self.driver.close, daemon=True)
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

    def _give_up(self, kind: str, text: str) -> NoReturn:
        self.broken(kind, text)
        raise Ended

    def reason_of(self, idx: int, text: str) -> str:
        """Return the last fault of a worker and what ``send()`` said of it, without numbers and names."""
        one = self.workers.get(idx)
        fault = one.fault if one is not None else "late_joiner" if idx >= LATE_JOINER else "nobody"
        return f"{fault}: {re.sub(_PARTICULAR, '…', text.partition(chr(10))[0])[:100]}"

    def blame(self, idx: int, begin: float, version: int, text: str) -> None:
        """Check that a worker named by a failure was really disturbed."""
        one = self.workers.get(idx)
        gone = one is None and idx >= LATE_JOINER
        if gone or (one is not None and one.disturbed_since(begin, self.options.timeout / 2)):
            return
        if idx == -1 and self.driver.excused(begin):
            return
        who = "nobody" if idx == -1 else f"worker {idx}"
        self.broken("false blame", f"send() of version {version} blamed {who}, who was fine: {text}")

    def _look(self) -> None:
        """Check what is checked all the time."""
        now = time.monotonic()
        since = self.sender.since
        if since is not None and now - since > self.send_limit + HANG:
            self._give_up("hang", f"send() has run for {now - since:.0f} s\n{stack_of(self.sender)}")
        if self.sender.ident is not None and not self.sender.is_alive():
            raise Ended
        self._look_for_late(now)
        if now - self._told > self.options.every:
            self._told = now
            self._tell(self._status(now))

    def _look_for_late(self, now: float) -> None:
        """Check that a worker without a fault has every update soon after it was sent."""
        owed, limit = self.sender.owed, self.options.timeout + SLACK
        while owed and owed[0][0] + limit < now:
            sent, version, worker_ids, failed = owed.popleft()
            for one in self.present():
                chosen = worker_ids is None or one.idx in worker_ids
                if chosen and not {one.idx, -1} & failed and not one.busy and one.clear_at < sent:
                    self._require(one, version, now - sent)

    def _require(self, one: SoakWorker, version: int, seconds: float) -> None:
        stamp = one.row.stamp
        if stamp < version and one.idx not in self._late:
            self._late.add(one.idx)  # told once
            self.broken("missed", f"worker {one.idx} has version {stamp} {seconds:.1f} s after {version}")

    def _status(self, now: float) -> str:
        held = sample([os.getpid(), *self._pids()], self._shared)
        return (
            f"{now - self._start:6.0f} s  {self.sender.version} updates ({self.sender.failed} failed), "
            f"{sum(self.faults.counts.values())} faults, {self.board.passes.sum():,} passes, "
            f"{sum(self.board[kind].sum() for kind in BROKEN)} broken, {held['memory'] / 1e6:.0f} MB, "
            f"{held['descriptors']} descriptors, {held['threads']} threads"
        )

    def _pids(self) -> list[int]:
        return [one.pid for one in self.present() if one.pid]

    def _sample(self) -> dict[str, Sample]:
        give_back()
        trainer, workers = [os.getpid()], self._pids()
        pids = {"the trainer": trainer, "worker 0": [self.workers[0].pid], "all": trainer + workers}
        return {who: sample(some, self._shared) for who, some in pids.items()}

    def _judge(self) -> None:
        first, last = self._windows["first"], self._windows["last"]
        for who, processes in (("the trainer", 1), ("worker 0", 1), ("all", 1 + self.options.workers)):
            for text in growth(who, processes, [one[who] for one in first], [one[who] for one in last]):
                self.broken("not flat", text)

    def account(self) -> dict[str, Any]:
        """Return what the soak did and found."""
        counts = {kind: int(self.board[kind].sum()) for kind in ("passes", *BROKEN)}
        described = []
        with contextlib.suppress(FileNotFoundError):
            lines = self._board_path.with_suffix(".problems").read_text().splitlines()
            described = [json.loads(line) for line in lines]
        for kind in BROKEN:
            if counts[kind] and not self.driver.peer:
                found = [f"worker {one['worker']}: {one['text']}" for one in described if one["kind"] == kind]
                self.broken(kind, f"{counts[kind]} of {counts['passes']} passes: {'; '.join(found)[:1000]}")
        held = {
            name: {who: median([one[who] for one in window]) for who in window[0]} if window else {}
            for name, window in self._windows.items()
        }
        return {
            **{name: getattr(self.options, name) for name in _DESCRIBED},
            "seconds": round(self.took, 1),
            "updates": self.sender.version,
            "failed_updates": self.sender.failed,
            "failures": dict(self.sender.reasons.most_common(20)),
            "faults": dict(sorted(self.faults.counts.items())),
            **counts,
            "worst_send_seconds": round(self.sender.worst, 3),
            "slowest_start_seconds": round(self.slowest["start"], 1),
            "slowest_join_seconds": round(self.slowest["join"], 1),
            "hangs": sum(kind == "hang" for kind, _ in self.problems),
            "send_errors": sum(kind == "error" for kind, _ in self.problems),
            "lost_workers": sum(not one.pid for one in self.present()),
            "held": held,
            "problems": self.problems,
        }

    # -- workers ---------------------------------------------------------------------------------------

    def present(self) -> list[SoakWorker]:
        """Return the present workers; late joiners come and go in other threads."""
        return list(self.workers.values())

    def start(self, one: SoakWorker) -> None:
        """Start a worker and let it join; it is no longer busy then."""
        self._start_worker(one)
        self._join(one)

    def _start_worker(self, one: SoakWorker) -> None:
        one.starting = True
        try:
            with self._timing("start"):
                one.worker = self.driver.start_worker(one.idx)
                self.driver.init_worker(one.worker, one.idx)
        except Exception:  # noqa: BLE001 - told like every other problem
            self.broken("lost", f"worker {one.idx} did not start\n{traceback.format_exc()}")
        one.starting = False

    def _join(self, one: SoakWorker) -> None:
        """Let a started worker connect and compute."""
        try:
            assert one.worker is not None
            with self._timing("join"):
                self.driver.join(one.worker)
                one.worker.answer(PATIENCE)
            row = min(one.idx, self.options.workers)
            arguments = self._board_path, len(self.board), row, self.driver.numbered
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

    def clear(self, one: SoakWorker) -> None:
        """End a fault: soon the worker must take every update again."""
        one.clear_at = time.monotonic() + self.options.timeout + SLACK
        one.busy = False

    def kill(self, one: SoakWorker) -> None:
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
            self._give_up("hang", f"{name} did not return within {2 * PATIENCE:g} s\n{stack_of(thread)}")
        if failed:
            self._give_up("error", f"{name} raised\n{failed[0]}")


class Ended(Exception):
    """The soak cannot go on; its problems tell the reason."""


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread is."""
    frame = sys._current_frames().get(thread.ident or -1)
    return "" if frame is None else "".join(traceback.format_stack(frame))
