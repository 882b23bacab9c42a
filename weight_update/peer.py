"""What the sender knows of one worker."""

from __future__ import annotations

import threading
from pathlib import Path

from weight_update.buffers import Update
from weight_update.chunks import WeightSchema
from weight_update.transports.base import TransportBackend

__all__ = ["Peer"]

_MAX_FAILURES = 8


class Peer:
    """What the sender knows of one worker."""

    def __init__(self, idx: int, link: TransportBackend, schema: WeightSchema) -> None:
        self.idx, self.link, self.schema = idx, link, schema
        self.joined = False
        self.pid = 0
        self.version: int | None = None
        self.reached = -1  # the newest version it ever applied; not forgotten when it leaves
        self.staged: int | None = None
        self.latest: Update | None = None  # what it should have
        self.applied: Update | None = None  # what it has; where memory is shared, what it reads
        self.inflight: Update | None = None
        self.since = 0.0
        self.lost: Exception | None = None
        self.failures: dict[int, Exception] = {}
        self.apply_seconds = 0.0
        self.stall_seconds = 0.0
        self.sending = threading.Lock()
        self.thread: threading.Thread | None = None

    def trouble(self) -> Exception | None:
        """What keeps it from having the weights: its own error, else how it was lost."""
        return next(iter(self.failures.values()), self.lost)

    def failure(self, version: int) -> Exception | None:
        """Why it has neither ``version`` nor a newer one in its place, and will not get one by itself."""
        if version in self.failures:
            return self.failures[version]
        pending = self.latest is not None and self.latest.version >= version
        newer = [error for number, error in self.failures.items() if number > version]
        return newer[-1] if newer and not pending else None

    def forget_old_failures(self) -> None:
        """Keep the last few: whoever sends without waiting asks for them later."""
        for version in list(self.failures)[:-_MAX_FAILURES]:
            del self.failures[version]

    def hold(self, role: str, update: Update | None) -> None:
        """Set ``latest``, ``applied`` or ``inflight``, keeping count of who uses which memory."""
        old: Update | None = self.__dict__[role]
        self.__dict__[role] = update.retain() if update is not None else None
        if old is not None:
            old.release()

    def let_go(self) -> None:
        """Stop counting on its answer. If it may still read our memory, never write there again."""
        if self.link.shares_memory and _may_run(self.pid):
            for update in (self.applied, self.inflight):
                for slot in update.slots if update is not None else ():
                    slot.abandoned = True
        self.joined, self.version, self.staged = False, None, None
        self.hold("inflight", None)
        self.hold("applied", None)


def _may_run(pid: int) -> bool:
    """Whether a process of this machine may still execute; zombies do not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
