"""Worker's part of the relay: copies of the sender's slots, which all workers of its host map."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    NotEnoughMemoryError,
    TransportError,
    undo_on_error,
)
from weight_update.progress import Progress
from weight_update.threads import start_thread
from weight_update.transports.distributed.relay.nccl import payload_stream
from weight_update.transports.distributed.relay.payload_stream import (
    STALLED,
    AwaitedStream,
    Forwarder,
    PayloadStream,
    call_for_connection,
    discarded_pieces,
    pieces_of,
)
from weight_update.transports.distributed.transfer import CHECKSUM
from weight_update.transports.listener import Listener
from weight_update.transports.shared_memory.slots import SharedBuffer
from weight_update.transports.signed_stream import SignedStream, call, listen
from weight_update.transports.socket_stream import SocketStream, deadline_of, seconds_left

_log = logging.getLogger(__name__)
_CONTEXT = "relay"
_MAX_ERROR_CHARS = 1000  # characters of an error that fit into a message
_FORWARD_SHARE = 4
"""The next host may take this share of the sender's patience for a piece of a payload.

The relay answers no command meanwhile, and the sender waits twice its patience for an answer.
"""


class HostRelay:
    """A thread that receives the payloads of its host and forwards them to another host where told to.

    A payload is written into a copy of the sender's slot in shared memory. The worker's own thread may be
    busy with an update meanwhile; other workers of the host do not wait for it.

    The sender sends commands, and gets one answer for each, except for ``sum``:

    - ``listen``: listen for the host relay of another host, which will send payloads over the link ``name``.
    - ``link``: connect to the host relay of another host, to forward payloads over the link ``name``.
    - ``take``: receive a payload for a slot, from the sender or over a link.
    - ``sum``: the checksum of the payload.

    Args:
        connect: connects to the sender, with the number of the connection as argument; raises as
            :func:`~weight_update.transports.signed_stream.call`.
        token: secret of all ends.
        directory: directory of replicas.
        on_failure: called from a thread with an error when the sender cannot be reached.
    """

    def __init__(
        self,
        connect: Callable[[int], SignedStream],
        token: str,
        directory: str | None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._connect, self._token, self._on_failure = connect, token, on_failure
        self._directory = directory
        self._replicas: dict[str, SharedBuffer] = {}  # by key of the sender's slot
        self._backend, self._connections = "", 1
        self._sender = AwaitedStream()
        self._incoming: dict[str, AwaitedStream] = {}  # the last link from another host, by its name
        self._outgoing: PayloadStream | None = None
        self._listener: Listener | None = None
        # In order, because it closes replicas after close().
        self._thread = start_thread("weight_update-relay", self._run, in_order=True)

    def close(self) -> None:
        """Close all connections; the sender notices."""
        self._sender.close()
        self._close_incoming()
        for one in (self._listener, self._outgoing):
            if one is not None:
                one.close()

    def _run(self) -> None:
        try:
            self._open()
            self._serve(self._sender.get(0.0))
        except (TransportError, TimeoutError):
            pass  # the sender is gone, or sees the end of this connection
        except FormatError as error:
            _log.warning("the connection for payloads was ended: %s", error)
        finally:
            self.close()
            self._forget(list(self._replicas))

    def _open(self) -> None:
        """Make as many connections as the sender asks for."""
        signed = self._connect_to_sender(0)
        with undo_on_error(signed.close):
            greeting = signed.receive_json(STALLED)
            self._backend, self._connections = greeting["backend"], greeting["connections"]
            stream = payload_stream(signed, self._backend, 1)
        self._sender.add(stream, 0, self._connections)
        self._add_connections(self._sender, self._connect_to_sender, 1, range(1, self._connections))

    def _connect_to_sender(self, number: int) -> SignedStream:
        try:
            return self._connect(number)
        except (OSError, FormatError) as error:
            self._on_failure(LinkClosedError(f"no connection for payloads ({error})"))
            raise LinkClosedError(str(error)) from None

    def _add_connections(
        self, stream: AwaitedStream, connect: Callable[[int], SignedStream], rank: int, numbers: range
    ) -> None:
        """Make connections of a stream, all at the same time."""

        def add(number: int) -> None:
            signed = connect(number)
            with undo_on_error(signed.close):
                one = payload_stream(signed, self._backend, rank)
            stream.add(one, number, self._connections)

        for made in [call_for_connection(add, number) for number in numbers]:
            made.result()

    def _serve(self, sender: PayloadStream) -> None:
        signed = sender.signed
        while True:
            command = signed.receive_json(None)
            if command["do"] == "listen":
                signed.send_json(self._listen(command, signed.local_address), STALLED)
            elif command["do"] == "link":
                signed.send_json(self._link(command), STALLED)
            elif command["do"] == "take":
                forwarder = Forwarder(self._outgoing if command["onward"] else None)
                answer = self._take(command, sender, forwarder)
                signed.send_json(answer, STALLED)
                limit = command["patience"] / _FORWARD_SHARE
                forwarded = answer.get("fd", -1) >= 0 and forwarder.finish(limit)
                if command["onward"] and not forwarded:
                    self._unlink()  # the next host notices

    def _listen(self, command: dict[str, Any], address: str) -> dict[str, Any]:
        self._close_incoming()
        self._incoming = {command["name"]: AwaitedStream()}
        try:
            if self._listener is None:
                sock = listen(address)
                self._port = sock.getsockname()[1]
                self._listener = Listener(
                    sock, self._token, _CONTEXT, self._admit, "weight_update-relay-listener", _log
                )
                self._listener.start()
        except OSError as error:
            return {"error": str(error)[:_MAX_ERROR_CHARS]}
        return {"address": address, "port": self._port}

    def _admit(self, stream: SocketStream, key: bytes, deadline: float) -> None:
        """Take over a connection of another host relay."""
        signed = SignedStream(stream, key, listener=True)
        request = signed.receive_json(seconds_left(deadline))
        link = self._incoming.get(str(request.get("name")))
        if link is None:
            raise LinkClosedError("it belongs to no link of this host")
        link.add(payload_stream(signed, self._backend, 1), request["connection"], self._connections)

    def _link(self, command: dict[str, Any]) -> dict[str, Any]:
        self._unlink()
        deadline, outgoing = deadline_of(command["patience"]), AwaitedStream()

        def connect(number: int) -> SignedStream:
            signed = call(command["address"], command["port"], self._token, _CONTEXT, deadline)
            with undo_on_error(signed.close):
                signed.send_json({"name": command["name"], "connection": number}, seconds_left(deadline))
            return signed

        try:
            with undo_on_error(outgoing.close):
                self._add_connections(outgoing, connect, 0, range(self._connections))
                self._outgoing = outgoing.get(0.0)
        except OSError as error:
            return {"error": str(error)[:_MAX_ERROR_CHARS]}
        return {}

    def _close_incoming(self) -> None:
        for link in self._incoming.values():
            link.close()

    def _unlink(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.close()

    def _replica(self, slot: str, nbytes: int) -> SharedBuffer:
        """Return the copy of a slot of ``nbytes`` bytes; raise as :class:`SharedBuffer`.

        The sender writes into a slot again only when no worker reads it, so an arriving payload may be
        written into the copy at once.
        """
        if slot in self._replicas and self._replicas[slot].is_read_elsewhere():
            self._forget([slot])
        if slot not in self._replicas:
            self._replicas[slot] = SharedBuffer(nbytes, self._directory)
        return self._replicas[slot]

    def _forget(self, slots: list[str]) -> None:
        """Close the copies of slots that the sender released; their readers keep the memory."""
        for slot in slots:
            if slot in self._replicas:
                self._replicas.pop(slot).close()

    def _take(self, command: dict[str, Any], sender: PayloadStream, forwarder: Forwarder) -> dict[str, Any]:
        self._forget(command["gone"])
        problem, replica = "", None
        try:
            replica = self._replica(command["slot"], command["size"])
            into = pieces_of(replica.tensor[: command["nbytes"]])
        except (NotEnoughMemoryError, OSError) as error:  # OSError: no such directory
            problem, into, forwarder = str(error), discarded_pieces(command["nbytes"]), Forwarder(None)
        source, patience = sender, STALLED
        try:
            if command["link"] is not None:
                patience = command["patience"]
                source = self._incoming[command["link"]].get(patience)
            with Progress("receiving weights", command["nbytes"]):
                total = source.recv_payload(into, patience, forwarder)
        except (TransportError, TimeoutError) as error:
            if command["link"] is None:
                raise
            self._close_incoming()
            return {"error": f"the host before it in the chain: {error}"[:_MAX_ERROR_CHARS]}
        expected = self._sum(command, sender.signed)
        if replica is None:  # each worker of this host reports it and keeps its version
            return {"fd": -1, "key": problem[:_MAX_ERROR_CHARS]}
        if command["checksum"] == CHECKSUM and total != expected:
            return {"error": "the payload's checksum is wrong"}
        return {"fd": replica.fd, "key": replica.key}

    @staticmethod
    def _sum(command: dict[str, Any], sender: SignedStream) -> Any:
        """Return the checksum that the sender tells, or None if it could not send the whole payload."""
        while True:
            message = sender.receive_json(STALLED)
            if message["do"] == "sum" and message["number"] == command["number"]:
                return message["sum"]
