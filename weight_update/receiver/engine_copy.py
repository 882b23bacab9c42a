"""The copy of an engine's weights, to which its receiver applies patches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from weight_update.encodings import Delta
from weight_update.encodings.patch.changes import BITS
from weight_update.encodings.patch.threads import in_threads, threads_for
from weight_update.engines.base import WeightChange
from weight_update.receiver.flat_buffers import OwnCopy
from weight_update.receiver.targets import EngineTarget, StagedUpdate, Target
from weight_update.wire.schema import WeightSchema


class EngineCopy(OwnCopy):
    """A copy of all weights of an engine, in a flat buffer.

    A patch is applied to the copy when it arrives, while the engine still computes with its own weights. If
    the patch is then not put in force, later patches are refused until all weights are sent.
    """

    _changes: Sequence[WeightChange] = ()  # of the patch that is staged

    def stage(self, update: StagedUpdate, target: Target) -> None:
        super().stage(update, target)
        if update.base is None:
            return
        self.apply(update.deltas, update.version)
        self.forget()  # until the engine has these changes
        if _takes_changes(target):
            self._changes = changes_of(update.deltas, self.schema, self.values)
        update.deltas = []

    def begin(self, update: StagedUpdate, target: Target, replaced: bool) -> None:
        """Do nothing: nobody but the receiver writes into the copy."""

    def switch(self, update: StagedUpdate, target: Target) -> None:
        changes, self._changes = self._changes, ()
        if update.base is not None and _takes_changes(target):
            assert isinstance(target, EngineTarget)
            target.write_changes(changes, update.base, update.version)
        else:
            super().switch(update, target)
        self._version = update.version


def _takes_changes(target: Target) -> bool:
    return isinstance(target, EngineTarget) and target.loads_changes


def changes_of(
    deltas: Sequence[Delta], schema: WeightSchema, values: Sequence[torch.Tensor]
) -> list[WeightChange]:
    """Return what ``deltas`` changed; ``values`` has the new value of each schema entry, on the CPU."""
    touched = sorted({i for delta in deltas for i in delta.touched(schema)})
    change = functools.partial(_change_of, deltas, schema, values)
    return in_threads(change, touched, threads_for(sum(values[i].numel() for i in touched)))


def _change_of(
    deltas: Sequence[Delta], schema: WeightSchema, values: Sequence[torch.Tensor], i: int
) -> WeightChange:
    name, weight = schema.names[i], values[i]
    found: list[torch.Tensor] = []
    for delta in deltas:
        elements = delta.elements_of(schema.tensors[i])
        if elements is None:
            return WeightChange(name, None, weight, weight)
        found.append(elements)
    positions = found[0] if len(found) == 1 else torch.from_numpy(np.unique(torch.cat(found).numpy()))
    return WeightChange(name, positions, _at(weight, positions), weight)


# Not torch: its threads hang in forked processes.
def _at(weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    flat = weight.view(-1)
    bits = flat.view(BITS.get(weight.element_size(), weight.dtype))
    return torch.from_numpy(np.take(bits.numpy(), positions.numpy())).view(weight.dtype)
