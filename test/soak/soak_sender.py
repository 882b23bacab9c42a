"""The thread of a soak that sends updates."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter, deque
from typing import TYPE_CHECKING

from soak_worker import REFUSAL

if TYPE_CHECKING:
    from soak_faults import SoakWorker
    from soak_run import Soak


class Sender(threading.Thread):
    """Sends updates, and checks how each of them ends.

    Args:
        soak: the soak that it belongs to.

    Attributes:
        version: of the last update.
        failures: of the last update, by worker index.
        failed: number of updates with failures.
        reasons: number of failures of each kind.
        worst: seconds of the longest ``send()``.
        since: when the ``send()`` that is under way began.
        refuser: worker that is to refuse the next update.
        owed: updates that workers must have soon: when each was sent, its version, for which workers, and
            the workers that failed.
    """

    def __init__(self, soak: Soak) -> None:
        super().__init__(name="soak-sender", daemon=True)
        self._soak, self._driver = soak, soak.driver
        self._dice = random.Random(soak.options.seed + 1)
        self.version, self.failed, self.worst = 0, 0, 0.0
        self.since: float | None = None
        self.failures: dict[int, str] = {}
        self.reasons: Counter[str] = Counter()
        self.refuser: SoakWorker | None = None
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
        if (refuser := self.refuser) is not None:
            self.refuser = None
            self._refuse(refuser)
            return
        draw = self._dice.random()
        workers = range(self._soak.options.workers)
        some = self._dice.sample(workers, self._dice.randrange(1, len(workers) + 1)) if draw < 0.1 else None
        self.send(some, self._dice.randrange(2, 6) if draw > 0.9 else 1)

    def send(self, worker_ids: list[int] | None = None, burst: int = 1) -> None:
        """Send one update, or several of which the last one counts."""
        begin = self.since = time.monotonic()
        last, failures = self._driver.send(self.version + 1, worker_ids, burst)
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

    def _refuse(self, one: SoakWorker) -> None:
        """Let one worker raise while it applies an update; the error must come here."""
        self.send()
        if one.idx not in self.failures:
            one.row.refuse = 1
            self.send()
            found = self.failures.get(one.idx, "nothing")
            if REFUSAL not in found:
                self._soak.broken("silence", f"worker {one.idx} raised, and send() told {found}")
        self._soak.clear(one)
