"""The interface by which an inference engine is a receiver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch


class InferenceEngine(ABC):
    """Receives versions of weights in its own way: ``scheme.init_on_receiver(model=engine, worker_idx=...)``.

    For each version the receiver calls :meth:`begin_update`, then :meth:`load_weights`, then
    :meth:`finish_update`. If one of the last two raises, the receiver calls :meth:`abort_update`, the sender
    gets the error with its traceback, and the receiver's version is unknown (None) until the next update,
    which carries all weights. If ``begin_update`` raises, the version before stays in force, and nothing
    else is called.

    The calls for one version come one after the other, without gradients, from any thread. The tensors have
    the names, shapes and dtypes of the sender after ``convert``, and are on the CPU. They may be views into
    memory that is used again: copy what is to be kept, as loaders do. Extra state of modules stays with the
    sender.
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

    @abstractmethod
    def begin_update(self, version: int) -> None:
        """Prepare for the weights of ``version``; may wait for generation to pause."""

    @abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load all of ``weights``; an iterator that is not used up is an error.

        Args:
            weights: pairs of name and tensor; the tensors are valid until this returns.
        """

    @abstractmethod
    def finish_update(self, version: int) -> None:
        """Put ``version``, of which all weights were loaded, in force."""

    def expected_weights(self) -> Mapping[str, torch.Tensor] | None:
        """Return the weights that the engine takes, for ``connect()`` to compare with the sender's.

        Returns:
            tensors by name, of the right shapes and dtypes, which may be on the meta device. The engine gets
            weights in these dtypes. None accepts any weights, in the sender's dtypes.
        """
        return None

    def abort_update(self, version: int) -> None:
        """Give up ``version``, which will not be finished and of which some weights may be loaded already."""
        del version
