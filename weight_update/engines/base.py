"""The interface by which an inference engine is a receiver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch


class WeightChange(NamedTuple):
    """A change of one weight.

    Attributes:
        name: name of the weight.
        positions: flat indices of the elements that changed, ascending; int64 of shape ``(n,)``. None if all
            elements changed, and of shape ``(0,)`` for a weight of :meth:`InferenceEngine.needs_with`.
        values: new values of these elements, of shape ``(n,)``; the whole weight if ``positions`` is None.
        weight: the whole weight after the change, for engines that cannot take single elements of it.
    """

    name: str
    positions: torch.Tensor | None
    values: torch.Tensor
    weight: torch.Tensor


class InferenceEngine(ABC):
    """Base class of engines that receive weights: ``scheme.init_on_receiver(model=engine, worker_idx=...)``.

    For each version the receiver calls :meth:`begin_update`, then :meth:`load_weights` or
    :meth:`load_changes`, then :meth:`finish_update`. If one of the last two raises, the receiver calls
    :meth:`abort_update`, the sender gets the error with its traceback, and the receiver's version is unknown
    (None) until the next update, which carries all weights. If ``begin_update`` raises, the previous version
    stays in force, and nothing else is called.

    The calls for one version come one after the other, without gradients, from any thread. The tensors have
    the names, shapes and dtypes of the sender after ``convert``, and are on the CPU. They may be views into
    memory that is used again: copy tensors that you keep, as loaders do. Extra state of modules is not sent.

    An engine has one receiver at a time: shut the scheme down before another one gets the engine.
    """

    loads_in_chunks: bool = False
    """Whether weights are loaded while their version still arrives.

    False: the whole version arrives and is checked first. Then all calls are made inside the gate, so that
    ``scheme.hold()`` and ``scheme.guarded(generate)`` keep them out. ``load_weights`` is called once.

    True: each chunk is loaded when it arrives, so the receiver holds one chunk at a time, and one tensor that
    spans chunks. The gate is not used: the engine itself pauses generation from ``begin_update`` to
    ``finish_update``. Updates that do not come in chunks (dense, patches, steps of
    :func:`~weight_update.send_together`) are loaded as with False.
    """

    loads_changes: bool = False
    """Whether :meth:`load_changes` is called for patches. False: :meth:`load_weights` gets all weights.

    In both cases the receiver keeps a copy of the weights on the CPU, to which it applies patches before it
    calls :meth:`begin_update`.
    """

    keeps_tensors: bool = False
    """Whether :meth:`load_weights` keeps the tensors, for example as ``data`` of parameters, without a copy.

    They then stay valid, and nobody writes to them, until ``finish_update`` of the next version has returned.
    Generation waits only while parameters are set. With patches, the receiver has two copies of the weights,
    between which the engine alternates.

    ``loads_in_chunks`` and ``loads_changes`` are not used. :meth:`load_weights` is also called between two
    updates, when the sender leaves, with tensors that are equal to those in use.
    """

    @abstractmethod
    def begin_update(self, version: int) -> None:
        """Prepare for the weights of ``version``; may wait for generation to pause."""

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load all of ``weights``; an iterator that is not used up is an error.

        Args:
            weights: pairs of name and tensor; the tensors are valid until this returns.
        """

    def load_changes(self, changes: Iterator[WeightChange], base: int) -> None:
        """Load all of ``changes``; an iterator that is not used up is an error.

        Called for a patch that arrived undamaged, if the engine has the version that the patch changes. The
        default loads each changed weight as a whole, with :meth:`load_weights`.

        Args:
            changes: one change for each weight that changed, and for each weight of :meth:`needs_with`; the
                tensors are valid until this returns.
            base: the version in force, which the changes lead from.
        """
        self.load_weights((change.name, change.weight) for change in changes)

    def needs_with(self, changed: Collection[str]) -> Collection[str]:
        """Return the weights that :meth:`load_changes` needs in addition to the ``changed`` ones.

        An engine that stores several weights as one, in a form of its own, has to load all of them if one has
        changed. It gets a :class:`WeightChange` for each weight returned here, with no element changed. The
        default returns none. This method may be called while the engine generates.

        Args:
            changed: names of the weights that a patch changes.
        """
        return ()

    @abstractmethod
    def finish_update(self, version: int) -> None:
        """Put ``version`` in force, after all of its weights were loaded."""

    def expected_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return the weights that the engine expects; ``connect()`` compares them with the sender's.

        Returns:
            tensors by name, of the right shapes and dtypes, which may be on the meta device. The engine gets
            weights in these dtypes. None accepts any weights, in the sender's dtypes.
        """
        return None

    def abort_update(self, version: int) -> None:
        """Abandon ``version``, which failed; some of its weights may be loaded already."""
        del version
