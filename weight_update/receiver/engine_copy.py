"""Copies of the weights of an engine, to which patches are applied while the engine still computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from weight_update.encodings import Delta
from weight_update.encodings.dense import copy_tensors
from weight_update.engines.base import WeightChange
from weight_update.errors import SchemaMismatchError
from weight_update.receiver.elements import changed_elements, take
from weight_update.receiver.flat_buffers import OwnCopy
from weight_update.receiver.targets import EngineTarget, StagedUpdate, Target
from weight_update.threads import in_threads, threads_for
from weight_update.wire.schema import WeightSchema


class EngineCopy(OwnCopy):
    """A copy of all weights, for an engine that copies what it is given.

    If a patch arrived and was then not put in force, the copy has it already, and the engine does not. No
    other patch fits then, and all weights are sent.
    """

    _changes: Sequence[WeightChange] = ()  # of the patch that is staged

    def stage(self, update: StagedUpdate, target: Target) -> None:
        super().stage(update, target)
        if update.base is None:
            return
        self.apply(update.deltas, update.version)
        self._version = None  # until the engine has it, too
        if _takes_changes(target):
            changes = _changes_of(update.deltas, self.schema, self.values)
            self._changes = [*changes, *self._needed_with(changes, target)]
        update.deltas = []

    def _needed_with(self, changes: Sequence[WeightChange], target: EngineTarget) -> list[WeightChange]:
        changed = {change.name for change in changes}
        needed = set(target.needs_with(changed)) - changed
        if unknown := needed.difference(self.schema.names):
            raise SchemaMismatchError(
                "needs_with() of the engine names weights that are not sent:", tuple(unknown)
            )
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        weights = zip(self.schema.names, self.values, strict=True)
        return [WeightChange(name, nothing, w.view(-1)[:0], w) for name, w in weights if name in needed]

    def begin(self, update: StagedUpdate, target: Target) -> None:
        """Do nothing: nobody but the receiver writes into the copy."""

    def switch(self, update: StagedUpdate, target: Target) -> None:
        changes, self._changes = self._changes, ()
        if update.base is not None and _takes_changes(target):
            whole = zip(self.schema.names, self.values, strict=True)
            target.write_changes(changes, whole, update.base, update.version)
        else:
            super().switch(update, target)
        self._version = update.version


class DoubleBuffer(OwnCopy):
    """Two copies of all weights, for an engine that keeps what it is given.

    The engine computes with one copy while a patch is applied to the other; then they change places.
    """

    _spare: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # None if its content is unknown
    _staged: Sequence[Delta] = ()
    _behind: Sequence[Delta] = ()  # changes that the spare copy lacks

    def stage(self, update: StagedUpdate, target: Target) -> None:
        super().stage(update, target)
        if update.base is None:
            return
        flat, views = self._equal_spare()
        for delta in update.deltas:
            delta.write(flat)
        self._staged = [delta.kept() for delta in update.deltas]
        self._next, update.values, update.deltas = (flat, views), list(views), []

    def switch(self, update: StagedUpdate, target: Target) -> None:
        target.write(self.schema.names, update.values, update.version)
        self._spare = None if update.base is None else (self._flat, self.values)
        self._behind = self._staged
        self._flat, self.values = self._next
        self._version = update.version

    def settle(self) -> None:
        if self._spare is not None:
            self._spare = self._equal_spare()

    def _equal_spare(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a copy that equals the one in force, and that is not spare until :meth:`switch`."""
        spare, self._spare = self._spare, None
        if spare is None:
            flat = self._allocate()
            spare = flat, self.schema.views(flat)
            copy_tensors(spare[1], self.values, "applying weights", serial=True)
        else:
            behind, self._behind = self._behind, ()
            for delta in behind:
                delta.write(spare[0])
        return spare


def _takes_changes(target: Target) -> TypeGuard[EngineTarget]:
    return isinstance(target, EngineTarget) and target.loads_changes


def _changes_of(
    deltas: Sequence[Delta], schema: WeightSchema, values: Sequence[torch.Tensor]
) -> list[WeightChange]:
    """Return what ``deltas`` changed; ``values`` has the new value of each schema entry, on the CPU."""

    def change(i: int) -> WeightChange:
        name, weight = schema.names[i], values[i]
        positions = changed_elements(deltas, schema.tensors[i])
        if positions is None:
            return WeightChange(name, None, weight, weight)
        bits = torch.from_numpy(take(weight, positions))
        return WeightChange(name, torch.from_numpy(positions), bits.view(weight.dtype), weight)

    touched = sorted({i for delta in deltas for i in delta.touched(schema)})
    return in_threads(change, touched, threads_for(sum(values[i].numel() for i in touched)))
