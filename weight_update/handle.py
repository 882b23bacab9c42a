"""What a caller holds of an update that is on its way."""

from __future__ import annotations

import time
from collections.abc import Mapping

from weight_update.errors import SyncFailedError
from weight_update.report import SyncReport
from weight_update.sender import Sender

__all__ = ["SendHandle", "failed"]


class SendHandle:
    """An update on its way.

    Attributes:
        version: its number.
    """

    def __init__(self, sender: Sender, report: SyncReport, workers: tuple[int, ...]) -> None:
        self._sender, self._report, self._workers = sender, report, workers
        self.version = report.version

    def __repr__(self) -> str:
        return f"SendHandle(version={self.version}, workers={list(self._workers)}, done={self.done()})"

    def done(self) -> bool:
        """Whether every worker has applied it (or a newer one), or failed."""
        return self._sender.roll.settled(self.version, self._workers)

    def wait(self, timeout: float | None = None) -> SyncReport:
        """Wait until every worker has applied this update or a newer one.

        Args:
            timeout: seconds; None takes the scheme's, counted from when all was sent.

        Raises:
            SyncFailedError: workers failed, died or were late; it names them. All others have it.
        """
        limit = self._sender.timeout if timeout is None else timeout
        start = time.perf_counter()
        failures = self._sender.roll.wait_applied(self.version, self._workers, limit, patient=timeout is None)
        self._report.seconds["ack"] = time.perf_counter() - start
        self._sender.roll.fill(self._report, self._workers)
        if failures:
            raise failed(self.version, failures, self._report)
        return self._report

    def of(self, *workers: int) -> SendHandle:
        """The same update, as far as some of its workers are concerned."""
        return SendHandle(self._sender, self._report, workers)

    def wait_staged(self) -> dict[int, Exception]:
        """Wait until the workers have staged it; the errors of those that have not."""
        return self._sender.roll.wait_staged(self.version, self._workers, self._sender.timeout)

    def commit(self) -> None:
        """Let the workers apply what they staged."""
        self._sender.commit(self.version, self._workers)

    def abort(self) -> None:
        """Let the workers forget what they staged."""
        self._sender.abort(self.version, self._workers)

    def failures(self) -> dict[int, Exception]:
        """The errors known by now, by worker; does not wait."""
        return self._sender.roll.failures(self.version, self._workers)

    @property
    def report(self) -> SyncReport:
        """The report as far as it is known."""
        return self._report


def failed(version: int, failures: Mapping[int, Exception], report: SyncReport) -> SyncFailedError:
    """The error for an update that some workers did not take."""
    lines = "".join(f"\n  worker {idx}: {error}" for idx, error in sorted(failures.items()))
    return SyncFailedError(f"version {version} was not applied by:{lines}", failures, report)
