"""Updates and policy lag as scalars for TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from weight_update.arguments import require_method
from weight_update.errors import Closing, optional
from weight_update.observers.scalars import ScalarObserver


class TensorBoardObserver(ScalarObserver, Closing):
    """Observer that writes figures of each update as scalars for TensorBoard, with the version as step.

    The scalars are those of :class:`~weight_update.observers.ScalarObserver`. Needs
    ``pip install "weight-update[tensorboard]"``.

    Args:
        log_dir_or_writer: directory for the event files; or a ``torch.utils.tensorboard.SummaryWriter``,
            which stays open.
        prefix: start of the name of each scalar.

    Raises:
        TypeError: this is neither a directory nor a writer.
        ImportError: a directory was given, and the package ``tensorboard`` is not installed.
    """

    def __init__(self, log_dir_or_writer: str | os.PathLike[str] | Any, prefix: str = "weight_sync/") -> None:
        super().__init__(prefix)
        self._owns, self._closed = isinstance(log_dir_or_writer, (str, os.PathLike)), False
        if not self._owns:
            require_method(log_dir_or_writer, "add_scalar", "a directory or a SummaryWriter")
        self._writer: Any = _writer_to(log_dir_or_writer) if self._owns else log_dir_or_writer

    def log(self, name: str, value: float, step: int) -> None:
        if not self._closed:  # a closed writer would begin another event file
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write all scalars to the disk.

        If this observer made the event file, it closes the file, and ignores updates that come later.
        """
        if self._owns:
            self._closed = True
            self._writer.close()
        else:
            self._writer.flush()


def _writer_to(log_dir: str | os.PathLike[str]) -> Any:
    optional("tensorboard", "tensorboard")
    from torch.utils import tensorboard

    make: Any = tensorboard.SummaryWriter
    return make(os.fspath(log_dir))
