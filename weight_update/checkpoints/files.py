"""CHECKPOINT: weights of a model into files and back."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from weight_update.checkpoints.store import CheckpointStore
from weight_update.errors import CorruptCheckpointError
from weight_update.receiver.gate import Gate
from weight_update.strategy.named_weights import from_items
from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.memory import memory_identity

__all__ = ["Files"]

_log = logging.getLogger(__name__)


class Files:
    """A directory of checkpoints, as trainers write and explorers read it.

    Args:
        directory: shared by all.
        strategy: how weights leave and enter a model.
    """

    def __init__(self, directory: str | os.PathLike[str], strategy: WeightStrategy) -> None:
        self._store, self._strategy = CheckpointStore(directory), strategy

    def newest(self) -> tuple[int, int] | None:
        """Version and trainer step of the newest complete one."""
        manifest = self._store.latest()
        return None if manifest is None else (manifest.version, manifest.step)

    def wait_newer(self, version: int, timeout: float, ended: threading.Event) -> int | None:
        """Wait for a version above ``version``; None if none came in time, or before it ended.

        Raises:
            OSError: the directory cannot be read.
        """
        manifest = self._store.wait_newer(version, timeout, ended)
        return None if manifest is None else manifest.version

    def publish(self, version: int, source: Any, step: int) -> int:
        """Write the weights of ``source``; how many bytes.

        Raises:
            OSError: the disk is full, or cannot be written; nothing is visible.
        """
        chosen = self._strategy.chosen(source) if self._strategy.partial else None
        named = self._strategy.outgoing(source, chosen)
        tensors = {name: value.detach() for name, value in named.tensors.items()}
        self._store.publish(version, {**tensors, **named.extra}, step=step)
        return sum(value.numel() * value.element_size() for value in tensors.values())

    def apply(
        self,
        version: int,
        have: int | None,
        model: Any,
        gate: Gate,
        timeout: float,
        ended: threading.Event,
    ) -> tuple[int, int] | None:
        """Put ``version`` into a model, between forward passes; or the newest that can be read.

        Args:
            version: the one that should be there.
            have: in force; nothing older is read.
            model: module, TensorDict or dict.
            gate: of the model.
            timeout: seconds to wait for a forward pass to end.
            ended: ends that wait, after :meth:`Gate.look_again`.

        Returns:
            version and trainer step of what is in force now; None if nothing newer could be read.

        Raises:
            SchemaMismatchError: the file holds the weights of another model.
            SyncTimeoutError: a forward pass took too long.
            LinkClosedError: it ended before the forward pass did.
        """
        if have is not None and have >= version:
            return None
        newest = self.newest()
        for candidate in dict.fromkeys([version, -1 if newest is None else newest[0]]):
            if candidate >= 0 and (have is None or candidate > have):
                manifest = self._store.manifest(candidate)
                try:
                    self._apply(candidate, model, gate, timeout, ended)
                except (CorruptCheckpointError, FileNotFoundError) as error:
                    _log.warning("checkpoint %d is not used: %s", candidate, error)
                    continue
                return candidate, 0 if manifest is None else manifest.step
        return None

    def _apply(self, version: int, model: Any, gate: Gate, timeout: float, ended: threading.Event) -> None:
        with self._store.reading(version) as found:
            weights = from_items(iter(found.items()))
            weights.tensors = _tied_as_in(self._strategy.named(model).tensors, weights.tensors)
            gate.run(lambda: self._strategy.apply_weights(model, weights), timeout, ended.is_set)


def _tied_as_in(
    model: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``tensors``, where names that are one tensor in ``model`` are one tensor again."""
    first: dict[Any, torch.Tensor] = {}
    tied = dict(tensors)
    for name, value in model.items():
        key = memory_identity(value)
        if key is not None and name in tied:
            tied[name] = first.setdefault(key, tied[name])
    return tied
