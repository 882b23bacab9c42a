"""Updates and events as lines of a log."""

from __future__ import annotations

import logging

from weight_update.report import SyncReport, WorkerEvent

__all__ = ["LogObserver"]


class LogObserver:
    """Observer that logs each update and each event of a worker.

    Failures of an update, and workers that are lost or late, are logged as warnings or above.

    Args:
        logger: destination; None takes the logger ``"weight_update"``.
        level: level of all that is not a warning.
    """

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._logger, self._level = logger or logging.getLogger("weight_update"), level

    def __call__(self, news: SyncReport | WorkerEvent) -> None:
        """Log an update or an event."""
        alarm = max(self._level, logging.WARNING)
        bad = isinstance(news, WorkerEvent) and news.kind in ("lost", "late")
        self._logger.log(alarm if bad else self._level, "%s", news)
        if isinstance(news, SyncReport):
            for worker, error in sorted(news.failures.items()):
                self._logger.log(alarm, "version %d failed on worker %d: %s", news.version, worker, error)
