"""Updates as scalars of TorchRL's loggers."""

from __future__ import annotations

from typing import Any, Protocol

from weight_update.report import SyncReport, WorkerEvent

__all__ = ["ScalarLogger", "TorchRLLoggerObserver"]


class ScalarLogger(Protocol):
    """The method that is needed of a ``torchrl.record.loggers.Logger``."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> Any:
        """Record the value of a scalar at a step."""


class TorchRLLoggerObserver:
    """Observer that passes figures of each update to a logger of TorchRL, with the version as step.

    The scalars are ``{stage}_ms`` for each stage, ``total_ms``, ``wire_bytes``, ``changed_fraction``,
    ``slowest_apply_ms``, ``longest_stall_ms`` and ``workers_lost``. The last one is the number of workers
    lost so far, and is logged with the next update.

    Args:
        logger: logger of TorchRL, or any object with its ``log_scalar``.
        prefix: start of the name of each scalar.
    """

    def __init__(self, logger: ScalarLogger, prefix: str = "weight_sync/") -> None:
        self._logger, self._prefix = logger, prefix
        self._lost = 0

    def __call__(self, news: SyncReport | WorkerEvent) -> None:
        """Log the scalars of an update, or count a lost worker."""
        if isinstance(news, WorkerEvent):
            self._lost += news.kind == "lost"
            return
        seconds = {**news.seconds, "total": news.total_seconds}
        if news.apply_seconds:
            seconds["slowest_apply"] = max(news.apply_seconds.values())
        if news.stall_seconds:
            seconds["longest_stall"] = max(news.stall_seconds.values())
        scalars = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
        scalars |= {"wire_bytes": news.wire_bytes, "changed_fraction": news.changed_fraction}
        for name, value in {**scalars, "workers_lost": self._lost}.items():
            self._logger.log_scalar(self._prefix + name, value, step=news.version)
