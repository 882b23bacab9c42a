"""The contract of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from weight_update.encodings import decoder_for
from weight_update.errors import FormatError
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.wire.frames import Kind, WeightChunk
from weight_update.wire.schema import WeightSchema
from weight_update.wire.updates import Step, extra_of, frames_of, payloads_of

__all__ = ["Allocate", "Buffer", "TransportBackend"]

Allocate = Callable[[int], torch.Tensor]
"""Gives a 1-D uint8 CPU tensor of exactly so many bytes to receive a payload into."""


class Buffer:
    """Memory that a payload is written into before it is sent.

    Attributes:
        tensor: 1-D uint8 tensor of exactly the size asked for; on the CPU unless a transport was told to keep
            payloads on a GPU.
        use: how often it was lent to be written; another number means another content.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.use = 0

    def close(self) -> None:
        """Give the memory back; receivers that still read it keep it alive on their side."""


class TransportBackend(ABC):
    """One end of a link between a sender and one receiver.

    A link carries :class:`~weight_update.wire.frames.WeightChunk` both ways, in order, each at most once. It
    knows nothing of models. Subclasses write three methods: ``send_chunk``, ``recv_chunk`` and ``close``.
    ``send_chunk`` and ``recv_chunk`` may be called from two threads at once, but each from one at a time;
    ``close`` may be called from any thread and wakes both.
    """

    shares_memory: ClassVar[bool] = False
    """Whether receivers keep reading the sender's :class:`Buffer` after an update was applied. The
    sender then does not write into it before every receiver has moved on."""

    @property
    def quick(self) -> bool:
        """Whether ``send_chunk`` returns without waiting for the other end."""
        return self.shares_memory

    @property
    def lends(self) -> bool:
        """Whether payloads that were received are gone when the sender's process ends.

        Receivers then take their weights out of them before they part, and the sender waits for that.
        """
        return False

    @property
    def near(self) -> bool:
        """Whether the worker's process id, as its HELLO tells it, is its number in this process's namespace.

        If so, memory that a worker read may be written again once its process has ended. If not, it is not
        written again after the link was lost. Once false it stays so.
        """
        return True

    rejoins: ClassVar[bool] = False
    """Whether, on the sender's end, ``recv_chunk`` may be called again after
    :class:`~weight_update.errors.LinkClosedError` and waits for the worker to come back."""

    on_join_request: Callable[[WeightChunk], None] | None = None
    """Sender's end: set by the sender, called by :meth:`screen`."""

    def screen(self, hello: WeightChunk) -> None:
        """Sender's end: check a join request before its connection replaces the one that this link has.

        A listener calls this with the HELLO of a worker that has proved to know the token.

        Raises:
            JoinRefusedError: the worker is not admitted; this link stays as it is.
        """
        if self.on_join_request is not None:
            self.on_join_request(hello)

    @abstractmethod
    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Hand over one chunk; its payload may be reused when this returns, unless memory is shared.

        Args:
            chunk: what to send.
            timeout: seconds; None waits as long as the other end lives.

        Raises:
            LinkClosedError: the other end is gone. ``recv_chunk`` of a sender's end still gives what that had
                said, and then raises too.
            SyncTimeoutError: ``timeout`` ran out; the link is not usable afterwards.
        """

    @abstractmethod
    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """The next chunk, or None when none arrived within ``timeout`` seconds.

        Args:
            timeout: seconds; None waits as long as the other end lives, 0 only looks.
            allocate: where payloads go; the default allocates fresh memory. Transports that share memory
                ignore it.

        Raises:
            LinkClosedError: the other end is gone, or this end was closed.
            FormatError: what arrived is not a chunk; the link is not usable afterwards.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it twice is fine."""

    def disconnect(self) -> None:
        """Sender's end: cut the worker off; where ``rejoins`` is true it may come back."""
        self.close()

    def restart(self, timeout: float | None = None) -> None:  # noqa: B027 - most links begin empty
        """Receiver's end: forget what came before, perhaps for a worker that died; it joins (again) now.

        Args:
            timeout: seconds to find the other end, where it has to be found.

        Raises:
            LinkClosedError: it was not found.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Sender's end: memory for a payload, such that sending it costs as little as possible.

        Raises:
            NotEnoughMemoryError: it does not fit on this machine.
        """
        return Buffer(torch.empty(nbytes, dtype=torch.uint8))

    def expect(self, payload: torch.Tensor, links: Sequence[TransportBackend]) -> None:  # noqa: B027
        """Sender's end: ``payload`` is about to be sent through all of ``links``, of which this is one.

        A transport may choose its way by that. Some of the links may not be used in the end. Does not wait.
        """

    def release(self, payload: torch.Tensor) -> None:  # noqa: B027 - only shared memory cares
        """Receiver's end: the weights in ``payload`` are no longer in use here."""

    # -- whole sets of weights, without a scheme ---------------------------------------------------

    def send_weights(
        self, weights: Any, *, strategy: WeightStrategy | None = None, timeout: float | None = None
    ) -> None:
        """Send one set of weights with its schema; the counterpart of :meth:`receive_weights`.

        Where memory is shared, that of the last four sets is kept for receivers that are slow.

        Args:
            weights: anything that :meth:`WeightStrategy.extract_weights` takes.
            strategy: how to read them; TensorDict by default.
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
            timeout: seconds to wait for it to begin; None waits.
            weights: a TensorDict or dict to write into, beside ``model``.
            model: module to write into.
            strategy: how to apply and return them; TensorDict by default.

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
        """Send the first weights; the counterpart waits in the method of the same name."""
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
        """Wait for the first weights and apply them; as :meth:`receive_weights`."""
        del worker_idx  # a link knows its worker
        return self.receive_weights(timeout, weights=weights, model=model, strategy=strategy)
