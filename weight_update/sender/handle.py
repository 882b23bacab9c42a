"""Handles of updates that are on their way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from weight_update.errors import SyncFailedError
from weight_update.report import SyncReport

__all__ = ["SendHandle", "failed"]


class UpdateOwner(Protocol):
    """The methods of a sender that a handle calls.

    The sender is a :class:`~weight_update.sender.sender.Sender`, or its counterpart on a rank of a sharded
    trainer that does not lead.
    """

    def members(self, workers: Sequence[int]) -> Sequence[object]: ...

    def settled(self, version: int, workers: Sequence[int]) -> bool: ...

    def wait(
        self, report: SyncReport, workers: Sequence[int], timeout: float | None
    ) -> dict[int, Exception]: ...

    def wait_staged(self, version: int, workers: Sequence[int]) -> dict[int, Exception]: ...

    def commit(self, version: int, workers: Sequence[int]) -> None: ...

    def abort(self, version: int, workers: Sequence[int]) -> None: ...

    def failures(self, version: int, workers: Sequence[int]) -> dict[int, Exception]: ...


class SendHandle:
    """An update that is on its way to workers.

    On a sharded trainer, either all ranks call :meth:`wait` or none does. On ranks that do not lead,
    :meth:`done` and :meth:`failures` know nothing until it has returned.

    Attributes:
        version: number of the update.
        workers: indices of the workers that are sent it.
    """

    def __init__(self, sender: UpdateOwner, report: SyncReport, workers: tuple[int, ...]) -> None:
        self._sender, self._report, self.workers = sender, report, workers
        self._members = sender.members(workers)
        self.version = report.version

    def __repr__(self) -> str:
        return f"SendHandle(version={self.version}, workers={list(self.workers)}, done={self.done()})"

    def done(self) -> bool:
        """Return whether every worker has applied this update or a newer one, failed or left."""
        return self._sender.settled(self.version, self.workers)

    def wait(self, timeout: float | None = None) -> SyncReport:
        """Wait until every worker has applied this update or a newer one.

        Args:
            timeout: seconds; None takes the scheme's, counted from when all was sent.

        Raises:
            SyncFailedError: workers failed, died or were late; it names them, and all others have it.
        """
        start = time.perf_counter()
        failures = self._sender.wait(self._report, self.workers, timeout)
        self._report.seconds["ack"] = time.perf_counter() - start
        if failures:
            raise failed(self.version, failures, self._report)
        return self._report

    def of(self, *workers: int) -> SendHandle:
        """Return a handle of the same update for some of its workers."""
        return SendHandle(self._sender, self._report, workers)

    def wait_staged(self) -> dict[int, Exception]:
        """Wait until the workers have staged the update; return the errors of all others."""
        return self._sender.wait_staged(self.version, self.workers)

    def commit(self) -> None:
        """Have the workers apply the staged update."""
        self._sender.commit(self.version, self.workers)

    def abort(self) -> None:
        """Have the workers forget the staged update."""
        self._sender.abort(self.version, self.workers)

    def failures(self) -> dict[int, Exception]:
        """Return the errors known by now, by worker index, without waiting."""
        return self._sender.failures(self.version, self.workers)

    @property
    def report(self) -> SyncReport:
        """The report, as far as it is known."""
        return self._report


def failed(version: int, failures: Mapping[int, Exception], report: SyncReport | None) -> SyncFailedError:
    """Return the error for an update that some workers did not apply."""
    lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
    return SyncFailedError(f"version {version} was not applied by:{lines}", failures, report)
