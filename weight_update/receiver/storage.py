"""Updates that are staged, and the memory that their weights come to lie in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_update.encodings import Delta
from weight_update.receiver.targets import Target
from weight_update.wire.schema import WeightSchema

__all__ = ["StagedUpdate", "Storage"]


@dataclass
class StagedUpdate:
    """An update that arrived completely and was checked. The update in force keeps this form.

    Attributes:
        version: number of the update.
        group: name of the step that switches several models together; None for one model.
        payloads: received memory that the values lie in.
        values: one tensor for each schema entry; empty where an engine has the weights.
        extra: extra state by name.
        storage: memory that the weights come to lie in.
        base: version that ``deltas`` change; None for an update of all weights.
        deltas: changes to apply.
        used_up: payloads that nobody reads once the update is in force.
        arrived: time of arrival, by ``time.perf_counter``.
        seconds: time for which an engine that loads in chunks kept forward passes out.
        undo: function that reverts :meth:`Staging.begin`.
    """

    version: int
    group: str | None
    payloads: list[torch.Tensor]
    values: list[torch.Tensor]
    extra: dict[str, Any]
    storage: Storage
    base: int | None = None
    deltas: list[Delta] = field(default_factory=list)
    used_up: list[torch.Tensor] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    undo: Callable[[], None] = lambda: None


class Storage:
    """The memory that the weights of a version lie in: here, the payloads that they arrived in.

    An update goes through :meth:`stage` while forward passes run, then through :meth:`begin` and
    :meth:`switch` while they wait.

    Args:
        schema: layout of the weights.
    """

    def __init__(self, schema: WeightSchema) -> None:
        self.schema = schema

    def stage(self, update: StagedUpdate, target: Target) -> None:
        """Do everything that may fail or take long, before any forward pass has to wait."""
        update.values = target.prepare(self.schema.names, update.values)

    def begin(self, update: StagedUpdate, target: Target, replaced: bool) -> None:
        """Make sure that the update can be switched to; raise if it cannot.

        Args:
            update: the update.
            target: what the update is written to.
            replaced: whether parts of the target were replaced since :meth:`stage`.
        """
        if replaced:
            update.values = target.prepare(self.schema.names, update.values)

    def switch(self, update: StagedUpdate, target: Target) -> None:
        """Put the update in force; only an engine may still raise."""
        target.write(self.schema.names, update.values, update.version)
        if target.takes_over:
            update.used_up, update.payloads, update.values = update.payloads, [], []
