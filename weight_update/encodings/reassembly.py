"""Reassembly of tensors from a flat buffer that arrives in parts."""

from __future__ import annotations

import torch

from weight_update.wire.memory import await_stream
from weight_update.wire.schema import WeightSchema

__all__ = ["Joiner", "copy_bytes"]


class Joiner:
    """A joiner of the parts of a schema's flat buffer, which returns each tensor with its last byte."""

    def __init__(self, schema: WeightSchema) -> None:
        self._tensors = schema.tensors
        self._ends = [meta.offset + meta.nbytes for meta in schema.tensors]
        self._order = sorted(range(len(self._ends)), key=self._ends.__getitem__)
        self._next = 0  # index into the order of the first incomplete tensor
        self._begun: torch.Tensor | None = None  # bytes of that tensor, if it spans parts

    def take(self, start: int, body: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return the position in the schema and the value of each tensor that ends in this part.

        Args:
            start: position of the first byte in the flat buffer: the end of the previous part, or 0 for the
                first part of an update.
            body: 1-D uint8 tensor; values are views into it, except of tensors that span parts.
        """
        if start == 0:
            self._next, self._begun = 0, None
        stop = start + body.numel()
        self._continue(start, body)
        found = []
        while self._next < len(self._order) and self._ends[self._order[self._next]] <= stop:
            position = self._order[self._next]
            meta = self._tensors[position]
            spans = meta.offset < start
            raw = self._begun if spans else body[meta.offset - start : self._ends[position] - start]
            assert raw is not None
            found.append((position, raw.view(meta.dtype).view(meta.shape)))
            self._next += 1
        self._begin(start, body)
        return found

    def _continue(self, start: int, body: torch.Tensor) -> None:
        if self._begun is not None:
            position = self._order[self._next]
            place = start - self._tensors[position].offset
            rest = body[: self._ends[position] - start]
            copy_bytes(self._begun[place : place + rest.numel()], rest)

    def _begin(self, start: int, body: torch.Tensor) -> None:
        """Keep the bytes of a tensor that continues in the next part."""
        if self._next == len(self._order):
            self._begun = None
            return
        meta = self._tensors[self._order[self._next]]
        if meta.offset >= start:
            begin = body[meta.offset - start :]
            self._begun = body.new_empty(meta.nbytes) if begin.numel() else None
            if self._begun is not None:
                copy_bytes(self._begun[: begin.numel()], begin)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 1-D uint8 tensors of one size, and wait until they are copied."""
    if target.is_cuda or source.is_cuda:
        target.copy_(source)
        await_stream(target)
    else:  # not torch: its threads hang in forked processes
        target.numpy()[:] = source.numpy()
