"""Whole sets of weights through one link, without a scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch

from weight_update.encodings import decoder_for
from weight_update.errors import FormatError
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.buffer import Allocate, Buffer
from weight_update.wire.frames import Kind, Step, WeightChunk, extra_of, frames_of, payloads_of
from weight_update.wire.schema import WeightSchema


class WeightTransfer(ABC):
    """Mixin of :class:`~weight_update.TransportBackend` that sends and receives weights instead of chunks."""

    @abstractmethod
    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Send one chunk."""

    @abstractmethod
    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """Return the next chunk, or None on timeout."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer:
        """Return memory for a payload."""

    def send_weights(
        self, weights: Any, *, strategy: WeightStrategy | None = None, timeout: float | None = None
    ) -> None:
        """Send one set of weights with its schema; the counterpart of :meth:`receive_weights`.

        Shared memory of the last four sets is kept for slow receivers.

        Args:
            weights: anything that :meth:`WeightStrategy.extract_weights` accepts.
            strategy: strategy that reads the weights; TensorDict by default.
            timeout: seconds, as in :meth:`send_chunk`.
        """
        strategy = strategy or WeightStrategy()
        named = strategy.named(weights)
        schema = WeightSchema.of(named.tensors)
        kept: deque[list[Buffer]] = self.__dict__.setdefault("_kept", deque(maxlen=4))
        kept.append(lent := [])

        def lend(nbytes: int) -> torch.Tensor:
            lent.append(self.allocate(nbytes))
            return lent[-1].tensor

        encoding = strategy.encoding.whole
        encoder = encoding.encoder(schema)
        payloads = encoder.encode(list(named.tensors.values()), lend)
        hello: dict[str, Any] = {"schema": schema.to_header(), "strategy": strategy.extract_as}
        hello |= {"keep": False, "version": None, "digests": None}
        self.send_chunk(WeightChunk(Kind.WELCOME, hello), timeout)
        for chunk in frames_of(Step.of(0, named.extra), schema, encoding.name, payloads):
            self.send_chunk(chunk, timeout)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Receive one set of weights sent by :meth:`send_weights` and apply it.

        Args:
            timeout: seconds to wait for the first chunk; None waits for ever.
            weights: TensorDict or dict to write into, in addition to ``model``.
            model: module to write into.
            strategy: strategy that applies and returns the weights; TensorDict by default.

        Returns:
            the weights, or None on timeout.
        """
        strategy = strategy or WeightStrategy()
        first = self.recv_chunk(timeout)
        if first is None:
            return None
        if first.kind is not Kind.WELCOME:
            raise FormatError(f"expected a schema, got a {first.kind.name} frame")
        schema = WeightSchema.from_header(first.header["schema"])
        chunks: list[WeightChunk] = []
        while not chunks or len(chunks) < chunks[0].header["count"]:
            chunk = self.recv_chunk(None)
            if chunk is None or chunk.kind is not Kind.UPDATE:
                raise FormatError("expected weights")
            chunks.append(chunk)
        values = decoder_for(chunks[0].header["encoding"], schema).decode(payloads_of(chunks))
        named = NamedWeights(dict(zip(schema.names, values, strict=True)), extra_of(chunks))
        destinations = [given for given in (weights, model) if given is not None]
        for destination in destinations:
            schema.require_same(strategy.bind(destination).schema(), "the destination")
        for destination in destinations:
            strategy.apply_weights(destination, named)
        return strategy.export(named)

    def setup_connection_and_weights_on_sender(
        self, *, weights: Any, strategy: WeightStrategy | None = None
    ) -> None:
        """Send the first weights, for :meth:`setup_connection_and_weights_on_receiver` at the other end."""
        self.send_weights(weights, strategy=strategy)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
        timeout: float | None = None,
    ) -> Any | None:
        """Wait for the first weights and apply them, as :meth:`receive_weights` does."""
        del worker_idx  # a link knows its worker
        return self.receive_weights(timeout, weights=weights, model=model, strategy=strategy)
