"""Updates and policy lag as scalars, for loggers of curves such as those of TorchRL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from weight_update.arguments import require_method
from weight_update.report import Event, PolicyLag, SyncReport, WorkerEvent


class ScalarObserver(ABC):
    """Observer that passes figures of each update to a logger, with the version as step.

    The scalars of an update are ``{stage}_ms`` for each stage, ``total_ms``, ``wire_bytes``,
    ``changed_fraction``, ``slowest_apply_ms``, ``longest_stall_ms``, ``workers_failed`` and ``workers_lost``.
    ``workers_failed`` is the number of workers that did not apply the update; a lost worker counts once,
    until it joins again. ``workers_lost`` is the number of workers lost so far, and is logged with the next
    update.

    A collector's batch has the scalars ``policy_lag_mean`` and ``policy_lag_max``. Their step is the number
    of frames of which the observer was told so far.

    Args:
        prefix: start of the name of each scalar.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lost = self._frames = 0

    def __call__(self, news: Event) -> None:
        """Log the scalars of an update or a batch, or count a lost worker."""
        if isinstance(news, WorkerEvent):
            self._lost += news.kind == "lost"
        elif isinstance(news, PolicyLag):
            self._frames += news.frames
            self._log_all({"policy_lag_mean": news.mean, "policy_lag_max": news.max}, self._frames)
        else:
            self._log_all({**_scalars_of(news), "workers_lost": self._lost}, news.version)

    @abstractmethod
    def log(self, name: str, value: float, step: int) -> None:
        """Log one scalar."""

    def _log_all(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self.log(self._prefix + name, value, step)


class ScalarLogger(Protocol):
    """The method that is needed of a ``torchrl.record.loggers.Logger``."""

    def log_scalar(self, name: str, value: float, step: int | None = None) -> Any:
        """Record the value of a scalar at a step."""


class TorchRLLoggerObserver(ScalarObserver):
    """Observer that passes figures of each update to a logger of TorchRL, with the version as step.

    The scalars are those of :class:`~weight_update.observers.ScalarObserver`.

    Args:
        logger: logger of TorchRL, or any object with its ``log_scalar``.
        prefix: start of the name of each scalar.

    Raises:
        TypeError: ``logger`` has no ``log_scalar``.
    """

    def __init__(self, logger: ScalarLogger, prefix: str = "weight_sync/") -> None:
        super().__init__(prefix)
        require_method(logger, "log_scalar", "a logger, such as a CSVLogger of TorchRL")
        self._logger = logger

    def log(self, name: str, value: float, step: int) -> None:
        self._logger.log_scalar(name, value, step=step)


def _scalars_of(report: SyncReport) -> dict[str, float]:
    seconds = {**report.seconds, "total": report.total_seconds}
    if report.apply_seconds:
        seconds["slowest_apply"] = max(report.apply_seconds.values())
    if report.stall_seconds:
        seconds["longest_stall"] = max(report.stall_seconds.values())
    scalars = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    scalars |= {"wire_bytes": report.wire_bytes, "changed_fraction": report.changed_fraction}
    return {**scalars, "workers_failed": len(report.failures)}
