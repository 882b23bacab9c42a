"""Memory in which a model of many small tensors stays while versions come and go."""

from __future__ import annotations

import operator

import torch

from weight_update.binding import Binding
from weight_update.chunks import WeightSchema
from weight_update.encodings.scan import SERIAL

__all__ = ["Arena"]

_WORD = torch.int64
_MANY = 256
_SMALL = 4096  # bytes; to point a tensor at other memory takes as long as to copy a few thousand


class Arena:
    """The flat buffer that one receiver's model lies in, so that a version enters it by one copy.

    To point 5,000 tensors of 1 KB at other memory takes over 5 ms, to copy their 5 MB less than one.

    Args:
        schema: what lies in the buffer; it must be one that :meth:`suits`.
        binding: the model.

    Attributes:
        values: one view for each schema entry.
    """

    def __init__(self, schema: WeightSchema, binding: Binding) -> None:
        self._names, self._binding = schema.names, binding
        self._flat = torch.empty(schema.nbytes, dtype=torch.uint8)
        self.values = schema.views(self._flat)
        self._places = list(map(torch.Tensor.data_ptr, self.values))
        self._inside: list[torch.Tensor] | None = None  # the model's tensors, if they were found to lie here

    @staticmethod
    def suits(schema: WeightSchema, binding: Binding) -> bool:
        """Whether it pays."""
        count, words = len(schema.names), schema.nbytes % _WORD.itemsize == 0
        return binding.points and words and count >= _MANY and 0 < schema.nbytes <= _SMALL * count

    def look(self) -> bool:
        """Find out whether the model lies here; to be asked before each :meth:`write`, outside the gate."""
        targets = self._binding.tensors(self._names)
        lies_here = list(map(torch.Tensor.data_ptr, targets)) == self._places
        self._inside = targets if lies_here else None
        return lies_here

    def write(self, flat: torch.Tensor) -> None:
        """Make the model have the weights in ``flat``, and lie here; nobody may compute with it meanwhile.

        Args:
            flat: 1-D uint8 CPU tensor, the buffer of the schema.
        """
        # In parts for which torch starts no threads: those hang in forked processes.
        to, of = (torch.split(one.view(_WORD), SERIAL) for one in (self._flat, flat))
        torch._foreach_copy_(to, of)
        targets = self._binding.tensors(self._names)  # in the meantime the worker may have replaced some
        if self._inside is None or not all(map(operator.is_, targets, self._inside)):
            self._binding.switch(self._names, self.values)
