"""What an inference engine does to be a receiver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

__all__ = ["InferenceEngine"]


class InferenceEngine(ABC):
    """Takes versions of weights as they come: ``scheme.init_on_receiver(model=engine, worker_idx=...)``.

    For each version: :meth:`begin_update`, then :meth:`load_weights`, then :meth:`finish_update`. If one of
    the last two raises, :meth:`abort_update` follows, the sender gets the error with its traceback, and the
    receiver's version is unknown (None) until the next update, which is complete. If ``begin_update`` raises,
    nothing was begun: the version stays, and nothing else is called.

    The calls for one version come one after the other, without gradients; which thread makes them is not
    promised. Tensors are those that the sender's ``convert`` gives, on the CPU. They may be views into memory
    that is used again: copy what is to be kept, as loaders do. Extra state of modules stays with the sender.
    """

    loads_in_chunks: bool = False
    """False: all of a version arrives and is checked first; then all calls are made inside the gate, so that
    ``scheme.hold()`` and ``scheme.guarded(generate)`` keep them out. ``load_weights`` is called once.

    True: what is whole with a chunk is loaded when the chunk comes, so one chunk is held at a time, and one
    tensor that spans chunks. The gate is not used: the engine itself pauses generation from ``begin_update``
    to ``finish_update``. Updates that do not come in chunks (dense, patches, steps of
    :func:`~weight_update.send_together`) are loaded as with False.
    """

    @abstractmethod
    def begin_update(self, version: int) -> None:
        """Weights of ``version`` are about to come; may wait for generation to pause."""

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load these, all of them: an iterator that is not used up is an error.

        Args:
            weights: name and tensor of each; the tensors are valid until this returns.
        """

    @abstractmethod
    def finish_update(self, version: int) -> None:
        """All weights of ``version`` were loaded: it is in force when this returns."""

    def expected_weights(self) -> Mapping[str, torch.Tensor] | None:
        """The weights that the engine takes, to be compared with the sender's by ``connect()``.

        Returns:
            tensors by name, of the right shapes and dtypes, which may be on the meta device; weights are
            given in these dtypes. None: whatever the sender has is accepted, in its dtypes.
        """
        return None

    def abort_update(self, version: int) -> None:
        """What was begun will not be finished, and some weights may be loaded already."""
        del version
