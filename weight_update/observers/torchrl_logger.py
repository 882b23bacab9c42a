"""Updates and policy lag as scalars of TorchRL's loggers."""

from __future__ import annotations

from typing import Any, Protocol

from weight_update.observers.scalars import ScalarObserver


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
    """

    def __init__(self, logger: ScalarLogger, prefix: str = "weight_sync/") -> None:
        super().__init__(prefix)
        self._logger = logger

    def log(self, name: str, value: float, step: int) -> None:
        self._logger.log_scalar(name, value, step=step)
