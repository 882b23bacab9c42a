"""Weights that a receiver keeps in memory of its own, so that later updates can change them in place."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence

import torch

from weight_update.encodings import Delta
from weight_update.encodings.patch.diff_cpu import SERIAL
from weight_update.errors import SchemaMismatchError
from weight_update.strategy.binding import Binding, count_writes
from weight_update.wire.memory import digest
from weight_update.wire.schema import WeightSchema

__all__ = ["Behind", "OwnWeights"]

_WRITES = operator.attrgetter("_version")


class Behind(Exception):
    """An update changes weights that are not here; the receiver has to ask for all of them."""


class OwnWeights:
    """The flat buffer of one receiver.

    The model's tensors lie in it where dtype and device agree; the others are copies that are renewed.

    Args:
        schema: what lies in the buffer.
        binding: the model; None keeps weights only.

    Attributes:
        values: one view for each schema entry, into the buffer in force.
    """

    def __init__(self, schema: WeightSchema, binding: Binding | None) -> None:
        self._schema, self._binding = schema, binding
        self._flat: torch.Tensor | None = None
        self._next: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._version: int | None = None
        self._left: tuple[list[int], list[int]] = [], []  # the model's tensors, as they were left
        self._required: list[torch.Tensor] = []  # the model's tensors, from require() to apply()
        self._copies: list[int] = []
        self.values: list[torch.Tensor] = []

    def adopt(self, version: int, tensors: Mapping[str, torch.Tensor], digests: Sequence[str | None]) -> None:
        """Begin with the weights that the model has, as ``version``.

        Args:
            version: the sender's.
            tensors: the model's, by name.
            digests: for each schema entry that must be equal to the sender's, what the sender's is.

        Raises:
            SchemaMismatchError: weights differ; it lists them.
        """
        names = self._schema.names
        missing = [name for name in names if name not in tensors]
        if missing or len(digests) != len(names):
            raise SchemaMismatchError(
                "init_sync=False needs a model with the sender's weights on each receiver; missing:",
                tuple(missing),
            )
        flat = self._fresh()
        views = self._schema.views(flat)
        _copy(views, [tensors[name].detach() for name in names])
        different = tuple(
            f"{name}: differs from the sender's"
            for name, view, expected in zip(names, views, digests, strict=True)
            if expected is not None and digest(view.cpu()) != expected
        )
        if different:
            raise SchemaMismatchError(
                "the receiver starts from other weights than the sender; load the same ones, or let "
                "init_sync send them:",
                different,
            )
        self._flat, self.values, self._version = flat, views, version
        self._find_copies()

    def take(
        self, values: Sequence[torch.Tensor], payloads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Copy whole weights into a new buffer; the one in force stays until :meth:`switched`.

        Args:
            values: one for each schema entry.
            payloads: memory that may be kept: if it is a whole buffer nothing is copied.

        Returns:
            views into the buffer, and the payload that was kept.
        """
        for memory in payloads:
            if memory.numel() == self._schema.nbytes and self._home.type == "cpu":
                self._next = memory, list(values)
                return list(values), memory
        flat = self._fresh()
        views = self._schema.views(flat)
        _copy(views, values)
        self._next = flat, views
        return list(views), None

    def switched(self, version: int) -> None:
        """The model now has what :meth:`take` returned, as ``version``."""
        assert self._next is not None
        (self._flat, self.values), self._next = self._next, None
        self._version = version
        self._find_copies()

    def bind(self, binding: Binding | None) -> None:
        """Keep another model current; it has :attr:`values` by now."""
        self._binding = binding
        self._find_copies()

    def require(self, base: int) -> None:
        """Check that a change of version ``base`` may be applied, and find the tensors that it will change.

        Raises:
            Behind: another version is in force, or the worker wrote into its weights.
        """
        if self._flat is None or base != self._version:
            raise Behind(f"a change of version {base}; version {self._version} is here")
        targets = self._targets()
        if _as_they_are(targets) != self._left:
            raise Behind("this worker wrote into its weights")
        self._required = targets

    def forget(self) -> None:
        """The weights in force are not known any more; only whole ones may follow."""
        self._version = None

    def apply(self, deltas: Sequence[Delta], version: int) -> None:
        """Change the weights in force, which :meth:`require` allowed just before."""
        assert self._flat is not None
        for delta in deltas:
            delta.write(self._flat)
        if self._binding is not None:
            if self._copies:
                touched = {i for delta in deltas for i in delta.touched(self._schema)}
                stale = [i for i in self._copies if i in touched]
                names = tuple(self._schema.names[i] for i in stale)
                self._binding.copy(names, [self.values[i] for i in stale])
            targets, self._required = self._required, []
            count_writes(targets)
            self._left = _as_they_are(targets)
        self._version = version

    @property
    def _home(self) -> torch.device:
        return torch.device("cpu") if self._binding is None else self._binding.home

    def _fresh(self) -> torch.Tensor:
        return torch.empty(self._schema.nbytes, dtype=torch.uint8, device=self._home)

    def _find_copies(self) -> None:
        """Find out which of the model's tensors do not lie in the buffer."""
        targets = self._targets()
        self._copies = [
            i
            for i, (target, value) in enumerate(zip(targets, self.values, strict=bool(targets)))
            if target.data_ptr() != value.data_ptr() or target.device != value.device
        ]
        self._left = _as_they_are(targets)

    def _targets(self) -> list[torch.Tensor]:
        return [] if self._binding is None else self._binding.tensors(self._schema.names)


def _as_they_are(targets: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return how often torch has seen each written to, and where each lies."""
    counted = itertools.filterfalse(torch.Tensor.is_inference, targets)
    return list(map(_WRITES, counted)), list(map(torch.Tensor.data_ptr, targets))


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy in parts for which torch starts no threads: those hang in forked processes."""
    to: list[torch.Tensor] = []
    of: list[torch.Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        size = max(target.numel(), 1) if target.is_cuda else SERIAL
        to.extend(torch.split(target.view(-1), size))
        of.extend(torch.split(source.reshape(-1), size))
    if to:
        torch._foreach_copy_(to, of)
