"""The contract of a transport."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weight_update.transports.buffer import Allocate, Buffer
from weight_update.transports.weight_transfer import WeightTransfer
from weight_update.wire.frames import WeightChunk

__all__ = ["Allocate", "Buffer", "Capabilities", "TransportBackend"]


@dataclass(frozen=True)
class Capabilities:
    """Properties of a link that its sender and its receiver depend on.

    Attributes:
        shares_memory: whether receivers read the sender's :class:`Buffer` even after an update was applied.
            The sender then writes into it again only after every receiver has switched to another one.
        send_never_blocks: whether ``send_chunk`` returns without waiting for the other end.
        payloads_die_with_sender: whether received payloads are lost when the sender's process ends. Receivers
            then copy their weights before they disconnect, and the sender waits for that.
        pid_is_visible: whether the process id in the worker's HELLO is valid in the sender's pid namespace.
            If so, memory that a worker read is written again once its process has ended. If not, it is never
            written again after the link was lost. Once false it stays false.
        allows_rejoin: whether, on the sender's end, ``recv_chunk`` may be called again after
            :class:`~weight_update.errors.LinkClosedError` and waits for the worker to come back.
    """

    shares_memory: bool = False
    send_never_blocks: bool = False
    payloads_die_with_sender: bool = False
    pid_is_visible: bool = True
    allows_rejoin: bool = False


class TransportBackend(WeightTransfer):
    """One end of a link between a sender and one receiver.

    A link carries :class:`~weight_update.wire.frames.WeightChunk` both ways, in order, each at most once. It
    knows nothing of models. Subclasses write three methods: ``send_chunk``, ``recv_chunk`` and ``close``.
    ``send_chunk`` and ``recv_chunk`` may be called from two threads at once, but each from one at a time;
    ``close`` may be called from any thread and wakes both.
    """

    on_join_request: Callable[[WeightChunk], None] | None = None
    """Sender's end: set by the sender, called by :meth:`screen`."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties of this link; a subclass sets a class attribute, or a property where they change."""
        return Capabilities()

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
        """Send one chunk; its payload may be reused when this returns, unless memory is shared.

        Args:
            chunk: chunk to send.
            timeout: seconds; None waits as long as the other end lives.

        Raises:
            LinkClosedError: the other end is gone. ``recv_chunk`` of a sender's end still returns chunks that
                the other end had sent before, and then raises too.
            SyncTimeoutError: ``timeout`` ran out; the link is not usable afterwards.
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
            FormatError: the received bytes are not a chunk; the link is not usable afterwards.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it twice is fine."""

    def disconnect(self) -> None:
        """Sender's end: cut the worker off; it may come back where the link allows to rejoin."""
        self.close()

    def restart(self, timeout: float | None = None) -> None:
        """Receiver's end: start again; the worker joins now, perhaps in place of one that died.

        Args:
            timeout: seconds to find the other end, where it has to be found.

        Raises:
            LinkClosedError: the other end was not found.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Sender's end: return memory for a payload, such that sending it costs as little as possible.

        Raises:
            NotEnoughMemoryError: this machine has no room for it.
        """
        return Buffer(torch.empty(nbytes, dtype=torch.uint8))

    def expect(self, payload: torch.Tensor, links: Sequence[TransportBackend]) -> None:
        """Sender's end: announce that ``payload`` is about to be sent through ``links``, including this one.

        A transport may choose its route by that. Some of the links may not be used in the end. Does not wait.
        """

    def release(self, payload: torch.Tensor) -> None:
        """Receiver's end: note that the weights in ``payload`` are no longer in use here."""
