"""An inference engine that passes calls on, fails on request, and ends the life of tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from weight_update.engines.base import InferenceEngine, WeightChange

_Item = TypeVar("_Item")


class Watched(InferenceEngine):
    """An engine that passes each call on to the ``engine`` under test.

    The engine under test gets copies of tensors. As soon as it may no longer use them, they become zeros.

    Attributes:
        calls: names of the methods that were called for updates, in order.
        before: called with the number of each weight in its version before the engine gets it, and with
            ``"finish"`` before ``finish_update``; may wait or raise.
        dtypes: dtypes of ``expected_weights()`` at its last call, by name.
        abort_error: last exception of ``abort_update``, which a receiver would only log.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine: InferenceEngine = engine
        self.loads_in_chunks: bool = engine.loads_in_chunks
        self.loads_changes: bool = engine.loads_changes
        self.keeps_tensors: bool = engine.keeps_tensors
        self.calls: list[str] = []
        self.before: Callable[[int | str], object] = lambda place: None
        self.dtypes: dict[str, torch.dtype] = {}
        self.abort_error: Exception | None = None
        self._number = 0
        self._updating = False
        self._given: list[torch.Tensor] = []
        self._in_force: list[torch.Tensor] = []

    def expected_weights(self) -> Mapping[str, torch.Tensor] | None:
        expected = self.engine.expected_weights()
        self.dtypes = {name: value.dtype for name, value in (expected or {}).items()}
        return expected

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        return self.engine.needs_with(changed)

    def begin_update(self, version: int) -> None:
        self.calls.append("begin_update")
        self.engine.begin_update(version)
        self._number, self._updating = 0, True

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("load_weights")
        self.engine.load_weights((name, self._copy(value)) for name, value in self._counted(weights))
        if not self.keeps_tensors:
            self._end_given()
        elif not self._updating:  # the sender has left, and its memory goes with it
            self._replace_tensors_in_force()

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        self.calls.append("load_changes")
        self.engine.load_changes(map(self._copy_of_change, self._counted(changes)), base)
        self._end_given()

    def finish_update(self, version: int) -> None:
        self.calls.append("finish_update")
        self.before("finish")
        self.engine.finish_update(version)
        self._updating = False
        self._replace_tensors_in_force()

    def abort_update(self, version: int) -> None:
        self.calls.append("abort_update")
        self._updating = False
        try:
            self.engine.abort_update(version)
        except Exception as error:
            self.abort_error = error
            raise

    def _counted(self, items: Iterable[_Item]) -> Iterator[_Item]:
        for item in items:
            if self._updating:
                self.before(self._number)
            self._number += 1
            yield item

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._given.append(copy)
        return copy

    def _copy_of_change(self, change: WeightChange) -> WeightChange:
        positions = None if change.positions is None else self._copy(change.positions)
        return WeightChange(change.name, positions, self._copy(change.values), self._copy(change.weight))

    def _replace_tensors_in_force(self) -> None:
        given, self._given = self._given, self._in_force
        self._end_given()
        self._in_force = given

    def _end_given(self) -> None:
        for tensor in self._given:
            tensor.zero_()
        self._given = []
