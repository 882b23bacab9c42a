"""Tensors put together from a flat buffer that arrives part by part."""

from __future__ import annotations

import torch

from weight_update.wire.schema import WeightSchema

__all__ = ["Joiner"]


class Joiner:
    """Gives each tensor of a flat buffer as soon as the last of its bytes is there.

    Args:
        schema: what lies in the buffer.
    """

    def __init__(self, schema: WeightSchema) -> None:
        self._tensors = schema.tensors
        self._ends = [meta.offset + meta.nbytes for meta in schema.tensors]
        self._order = sorted(range(len(self._ends)), key=self._ends.__getitem__)
        self._next = 0  # in this order, the first that is not whole yet
        self._begun: torch.Tensor | None = None  # bytes of that one, if it spans parts

    def take(self, start: int, body: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The tensors that end in this part.

        Args:
            start: place of its first byte in the flat buffer: the end of the part before, or 0 to begin anew.
            body: 1-D uint8 CPU tensor.

        Returns:
            position in the schema and value; the values are views into ``body``, except of those that span
            parts.
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
            piece = body[: self._ends[position] - start]
            # Not torch: its threads hang in forked processes.
            self._begun.numpy()[place : place + piece.numel()] = piece.numpy()

    def _begin(self, start: int, body: torch.Tensor) -> None:
        """Keep what is here of a tensor that goes on in the next part."""
        if self._next == len(self._order):
            self._begun = None
            return
        meta = self._tensors[self._order[self._next]]
        if meta.offset >= start:
            piece = body[meta.offset - start :]
            self._begun = torch.empty(meta.nbytes, dtype=torch.uint8) if piece.numel() else None
            if self._begun is not None:
                self._begun.numpy()[: piece.numel()] = piece.numpy()
