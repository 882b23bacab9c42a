"""Updates, events and policy lag as lines of a log."""

from __future__ import annotations

import logging

from weight_update.arguments import require_method
from weight_update.report import Event, PolicyLag, SyncReport


class LogObserver:
    """Observer that logs each update, each event of a worker, and the policy lag of each batch.

    Failures of an update, and workers that are lost or late, are logged as warnings or above. The policy lag,
    and events of the kind ``"applied"``, have the level DEBUG.

    Args:
        logger: destination; None takes the logger ``"weight_update"``.
        level: level of updates, and of workers that join, leave or are sent all weights.

    Raises:
        TypeError: ``logger`` is not a logger, or ``level`` is not a number.
    """

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        if not isinstance(level, int):
            raise TypeError(f"level= is a number such as logging.INFO, not {level!r}")
        self._logger, self._level = logger or logging.getLogger("weight_update"), level
        require_method(self._logger, "log", "a logger, as logging.getLogger(name) returns")

    def __call__(self, news: Event) -> None:
        """Log an update or an event."""
        alarm, kind = max(self._level, logging.WARNING), getattr(news, "kind", None)
        level = alarm if kind in ("lost", "late") else self._level
        if isinstance(news, PolicyLag) or kind == "applied":
            level = logging.DEBUG
        self._logger.log(level, "%s", news)
        if isinstance(news, SyncReport):
            for worker, error in sorted(news.failures.items()):
                self._logger.log(alarm, "version %d failed on worker %d: %s", news.version, worker, error)
