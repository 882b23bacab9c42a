"""The contract of a transport, and the memory that payloads are written into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weight_update.encodings import decoder_for
from weight_update.errors import FormatError, SyncTimeoutError, undo_on_error
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import Kind, Step, WeightChunk, extra_of, frames_of, payloads_of, require_chunk
from weight_update.wire.schema import WeightSchema

Allocate = Callable[[int], torch.Tensor]
"""Returns a 1-D uint8 CPU tensor of exactly so many bytes to receive a payload into."""


class Buffer:
    """Memory that a payload is written into before it is sent.

    Attributes:
        tensor: 1-D uint8 tensor of exactly the requested size; on the CPU unless the transport was told to
            keep payloads on a GPU.
        use: number of times it was borrowed for writing; a different number means different contents.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.use = 0

    def is_read_elsewhere(self) -> bool:
        """Return whether a process reads it of which the sender knows nothing; it is then not written again.

        Called while no worker reads it.
        """
        return False

    def close(self) -> None:
        """Give the memory back; receivers that still read it keep it alive on their side."""


@dataclass(frozen=True)
class Capabilities:
    """Properties of a link that its sender and its receiver depend on.

    Attributes:
        shares_memory: whether receivers read the sender's :class:`Buffer` even after an update was applied.
            The sender then writes into it again only after every receiver has switched to another one.
        send_never_blocks: whether ``send_chunk`` returns without waiting for the other end, as long as frames
            that were not read yet are short. Long updates are sent by a thread of each worker.
        payloads_die_with_sender: whether received payloads are lost when the sender's process ends. Receivers
            then copy their weights before they disconnect, and the sender waits for that.
        pid_is_visible: whether the process id in the worker's HELLO is valid in the sender's pid namespace.
            If so, the sender writes again into memory that the worker read, once the worker's process has
            ended. If not, it never writes there again after the link was lost. Once False, the value stays
            False.
        allows_rejoin: whether a worker may come back on the same link after the link was lost.
    """

    shares_memory: bool = False
    send_never_blocks: bool = False
    payloads_die_with_sender: bool = False
    pid_is_visible: bool = True
    allows_rejoin: bool = False


class Arrivals(Protocol):
    """The chunks that arrive on one connection, for threads that take turns in waiting for them.

    The thread of a worker waits by :meth:`wait`. While another thread waits for several workers at once,
    chunks would wake the worker's thread in vain. The other thread therefore calls :meth:`pause` first, which
    does not wake the worker's thread.
    """

    def wait(self, timeout: float | None) -> bool:
        """Return whether a chunk, or the end, arrived within ``timeout`` seconds.

        Chunks that arrive during a pause are found after it. The end of the connection is found at once.

        Raises:
            LinkClosedError: this end was closed.
        """

    def pause(self) -> int | None:
        """Let arriving chunks wake the caller alone, until :meth:`resume`; return the descriptor to poll.

        Return None, without a pause, if a part of a chunk was read already, the thread never waited, or this
        end was closed.
        """

    def resume(self) -> None:
        """End the pause, if there is one."""

    def peek(self) -> tuple[WeightChunk, int] | None:
        """Return the first chunk that arrived during the pause, and its size, and leave it there.

        Return None if there is none, or only ``recv_chunk`` can read it.

        Raises:
            FormatError: the received bytes are not a chunk.
        """

    def skip(self, nbytes: int) -> None:
        """Remove a chunk of this size that :meth:`peek` returned."""


class TransportBackend(ABC):
    """One end of a link between a sender and one receiver.

    A link carries :class:`~weight_update.WeightChunk` both ways, in order, each at most once. It knows
    nothing of models. A subclass implements ``send_chunk``, ``recv_chunk`` and ``close``, and sets
    :attr:`capabilities`. Where workers may come back, derive from :class:`~weight_update.ReconnectingLink`,
    which implements all of this on top of connections.

    **Lifecycle.** Creating an end does not communicate.

    1. The receiver calls ``restart`` and sends a HELLO. The sender, which waits in ``recv_chunk``, answers.
    2. Both ends send and receive chunks until a call raises or an end is closed.
    3. After an error the receiver calls ``disconnect``, and begins again with ``restart`` and a HELLO, on the
       same end. The sender calls ``disconnect`` if the link itself did not fail: the worker sent an invalid
       chunk, or did not accept one in time. If the link
       :attr:`allows rejoining <Capabilities.allows_rejoin>`, it then waits in ``recv_chunk`` for the next
       HELLO; otherwise it no longer uses its end.
    4. Each side calls ``close`` when it is shut down, or no longer needs its end.

    **When the other end leaves**, by ``disconnect``, by ``close`` or because its process ends, ``recv_chunk``
    returns the chunks that were sent before, and then raises LinkClosedError. After that, the sender's end
    of a link that allows rejoining waits for the worker's next connection, whose first chunk is a HELLO;
    nothing of the earlier connection is returned any more. The receiver's end raises until ``restart``. Any
    end raises after its own ``close``, at once.

    **Threads.** At most one thread at a time calls ``send_chunk``, and at most one calls ``recv_chunk``; the
    two may overlap. ``disconnect`` and ``close`` may be called from any thread at any time, and make a
    ``send_chunk`` or ``recv_chunk`` that waits in another thread raise LinkClosedError. After ``disconnect``,
    the sender's ``recv_chunk`` may also go on waiting, for the worker's next connection. The receiver calls
    ``restart`` while no other thread sends or receives. Any thread may read ``capabilities`` and call
    ``screen``, ``allocate``, ``expect``, ``release`` and ``pinned``.
    """

    capabilities: Capabilities = Capabilities()
    """Properties of this link; a subclass sets them for the class, and for one end where they differ."""

    on_join_request: Callable[[WeightChunk], None] | None = None
    """Set by the sender on its end, called by :meth:`screen`."""

    def screen(self, hello: WeightChunk) -> None:
        """Check a join request, at the sender's end, before its connection replaces the present one.

        A listener calls this with the HELLO of a worker that has proved to know the token.

        Raises:
            JoinRefusedError: the worker is not admitted; this link stays as it is.
        """
        if self.on_join_request is not None:
            self.on_join_request(hello)

    @property
    def arrivals(self) -> Arrivals | None:
        """The chunks that arrive at the sender on the present connection; None to wait in ``recv_chunk``."""
        return None

    @abstractmethod
    def send_chunk(self, chunk: WeightChunk, timeout: float | None = None) -> None:
        """Send one chunk; its payload may be reused when this returns, unless memory is shared.

        Args:
            chunk: chunk to send.
            timeout: seconds; None waits as long as the other end lives.

        Raises:
            LinkClosedError: the other end is gone. ``recv_chunk`` still returns chunks that the other end had
                sent before, and then raises too.
            SyncTimeoutError: ``timeout`` ran out. The transport then ends the link: both ends raise
                LinkClosedError from now on, the other one after the chunks that were sent before.
        """

    @abstractmethod
    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """Return the next chunk, or None when none arrived within ``timeout`` seconds.

        Args:
            timeout: seconds; None waits as long as the other end lives, 0 does not wait.
            allocate: returns the memory for a payload; None allocates fresh memory. Transports that share
                memory ignore it.

        Raises:
            LinkClosedError: the other end is gone, or this end was closed.
            FormatError: the received bytes are not a chunk. A transport that cannot find the beginning of the
                next chunk ends the link, as above.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. It may be called twice."""

    def disconnect(self) -> None:
        """End the connection; the other end notices this after it has read the earlier chunks.

        If the link allows rejoining, the worker may come back; otherwise this closes the end.
        """
        self.close()

    def restart(self, timeout: float | None = None) -> None:  # noqa: B027 - it need not be overridden
        """Start again, at the receiver's end: the worker joins now, perhaps in place of one that died.

        Args:
            timeout: seconds to find the other end, if the transport has to find it.

        Raises:
            LinkClosedError: the other end was not found, or this end was closed.
            SyncTimeoutError: the other end did not answer in time.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Return memory for a payload, at the sender's end, from which it can be sent with the fewest copies.

        Raises:
            NotEnoughMemoryError: this machine has no room for it.
        """
        return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def expect(  # noqa: B027 - it need not be overridden
        self, payload: torch.Tensor, links: Sequence[TransportBackend]
    ) -> None:
        """Announce, at the sender's end, that ``payload`` will be sent through ``links``, including this one.

        A transport may choose its route accordingly. Some of the links may not be used after all. This does
        not wait.
        """

    def release(self, payload: torch.Tensor) -> None:  # noqa: B027 - it need not be overridden
        """Note, at the receiver's end, that the weights in ``payload`` are no longer in use."""

    def pinned(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a received ``payload`` in memory from which a GPU copies fast, if there is any.

        They lie there until :meth:`release`, and can only be read. By default this is ``payload``.
        """
        return payload

    # -- whole sets of weights, without a scheme -----------------------------------------------------

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
        welcome: dict[str, Any] = {"schema": schema.to_header(), "strategy": strategy.extract_as}
        welcome |= {"keep": False, "version": None, "digests": None}
        self.send_chunk(WeightChunk(Kind.WELCOME, welcome), timeout)
        for chunk in frames_of(Step.of(0, named.extra), schema, encoding.name, payloads, len(payloads)):
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
            timeout: seconds to wait for the whole set; None waits as long as the other end lives.
            weights: TensorDict or dict to write into, in addition to ``model``.
            model: module to write into.
            strategy: strategy that applies and returns the weights; TensorDict by default.

        Returns:
            the weights, or None if no set began to arrive within ``timeout``.

        Raises:
            SyncTimeoutError: only a part of a set arrived in time; the next call waits for the rest.
            FormatError: the received chunks are no set of weights.
            SchemaMismatchError: the weights do not fit ``weights`` or ``model``; nothing was written.
            LinkClosedError: the other end is gone.
        """
        strategy = strategy or WeightStrategy()
        found = self._receive_set(deadline_of(timeout))
        if found is None:
            return None
        schema, chunks = WeightSchema.from_header(found[0].header["schema"]), found[1:]
        values = decoder_for(chunks[0].header["encoding"], schema).decode(payloads_of(chunks))
        named = NamedWeights(dict(zip(schema.names, values, strict=True)), extra_of(chunks))
        destinations = [given for given in (weights, model) if given is not None]
        for destination in destinations:
            schema.require_same(strategy.bind(destination).schema(), "the destination")
        for destination in destinations:
            strategy.apply_weights(destination, named)
        return strategy.export(named)

    def _receive_set(self, deadline: float | None) -> list[WeightChunk] | None:
        """Return the schema of a set and the chunks that follow it, or None if no set began to arrive."""
        # A call that timed out leaves what it received to the next one.
        arrived: list[WeightChunk] = self.__dict__.setdefault("_arrived", [])
        while len(arrived) < 2 or len(arrived) - 1 < arrived[1].header["count"]:
            with undo_on_error(arrived.clear):
                chunk = require_chunk(self.recv_chunk(seconds_left(deadline)), self)
            if chunk is None and not arrived:
                return None
            if chunk is None:
                raise SyncTimeoutError(
                    "only a part of the weights arrived in time: the other end is slow or stopped; call "
                    "receive_weights() again, with a larger timeout"
                )
            if chunk.kind is Kind.WELCOME:
                arrived.clear()
            elif chunk.kind is not Kind.UPDATE or not arrived:
                arrived.clear()
                raise FormatError(f"expected weights, got {chunk.kind.name}")
            arrived.append(chunk)
        del self.__dict__["_arrived"]
        return arrived

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
