"""Memory in which a model of many small tensors stays while versions come and go."""

from __future__ import annotations

import torch

from weight_update.encodings.patch.diff_cpu import SERIAL
from weight_update.strategy.binding import Binding, count_writes
from weight_update.wire.schema import WeightSchema

__all__ = ["Arena"]

_WORD = torch.int64
_MANY = 256
_SMALL = 4096  # bytes; to point a tensor at other memory takes as long as to copy a few thousand


class Arena:
    """The flat buffer that one receiver's model lies in, so that a version enters it by one copy.

    To point 5,000 tensors of 1 KB at other memory takes over 5 ms, to copy their 5 MB less than one.

    Args:
        schema: what lies in the buffer.
        binding: the model; :meth:`suits` tells whether it pays.

    Attributes:
        binding: the same.
        values: one view for each schema entry.
    """

    def __init__(self, schema: WeightSchema, binding: Binding) -> None:
        self.binding, self._names = binding, schema.names
        with torch.inference_mode(False):  # whoever computes with the model may want gradients
            self._flat = torch.empty(schema.nbytes, dtype=torch.uint8, device="cpu")
            self.values = schema.views(self._flat)
        self._places = _places_of(self.values)

    @staticmethod
    def suits(schema: WeightSchema, binding: Binding) -> bool:
        """Whether a model is of such a kind, on the CPU (or nowhere yet), and in the dtypes of ``schema``."""
        count = len(schema.names)
        if not binding.points or count < _MANY or not 0 < schema.nbytes <= _SMALL * count:
            return False
        targets = binding.tensors(schema.names)
        return schema.nbytes % _WORD.itemsize == 0 and all(
            (target.is_cpu or target.is_meta) and target.dtype == dtype
            for target, dtype in zip(targets, schema.dtypes, strict=True)
        )

    def holds_model(self) -> bool:
        """Whether the model lies here now."""
        return _places_of(self.binding.tensors(self._names)) == self._places

    def write(self, flat: torch.Tensor, *, point: bool) -> None:
        """Make the model have the weights in ``flat``, and lie here; nobody may compute with it meanwhile.

        Args:
            flat: 1-D uint8 CPU tensor, the buffer of the schema.
            point: the model does not lie here yet.
        """
        # In parts for which torch starts no threads: those hang in forked processes.
        to, of = (torch.split(one.view(_WORD), SERIAL) for one in (self._flat, flat))
        torch._foreach_copy_(to, of)
        if point:
            self.binding.switch(self._names, self.values)
            self._places = _places_of(self.values)  # the buffer moves with the model, as into shared memory
        else:
            count_writes(self.binding.tensors(self._names))


def _places_of(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
