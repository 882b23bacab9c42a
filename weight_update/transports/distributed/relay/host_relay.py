"""Worker's part of the relay: copies of the sender's slots, which all workers of its host map."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from weight_update.errors import FormatError, LinkClosedError, NotEnoughMemoryError, TransportError
from weight_update.progress import Progress
from weight_update.transports.distributed.checksum import CHECKSUM
from weight_update.transports.distributed.relay.gloo import FOREVER, PointToPointGroup
from weight_update.transports.distributed.relay.nccl import group_class
from weight_update.transports.distributed.relay.protocol import (
    ControlChannel,
    Forwarder,
    discarded_pieces,
    pieces_of,
    recv_pieces,
)
from weight_update.transports.distributed.store import Store, leave_in_order
from weight_update.transports.shared_memory.slots import SharedBuffer

_log = logging.getLogger(__name__)
_MAX_ERROR_CHARS = 1000  # characters of an error that fit into a message
_FORWARD_SHARE = 4
"""The next host may take this share of the sender's patience for a piece of a payload.

The relay answers no command meanwhile, and the sender waits twice its patience for an answer.
"""


class SlotReplicas:
    """Copies of the sender's slots in shared memory.

    The sender writes into a slot again only when no worker reads it, so an arriving payload may be written
    into the slot's replica at once.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._replicas: dict[str, SharedBuffer] = {}

    def of(self, slot: str, nbytes: int) -> SharedBuffer:
        """Return the replica of a slot of ``nbytes`` bytes; make it if there is none.

        Raises:
            NotEnoughMemoryError: there is no memory for a new replica.
        """
        if slot not in self._replicas:
            self._replicas[slot] = SharedBuffer(nbytes, self._directory)
        return self._replicas[slot]

    def forget(self, slots: list[str]) -> None:
        """Close the replicas of slots that the sender released; their readers keep the memory."""
        for slot in slots:
            if slot in self._replicas:
                self._replicas.pop(slot).close()

    def close(self) -> None:
        """Close all replicas."""
        self.forget(list(self._replicas))


class HostRelay:
    """A thread that receives the payloads of its host and forwards them to another host where told to.

    The worker's own thread may be busy with an update meanwhile; other workers of the host do not wait for
    it.

    The sender sends commands, and gets one answer for each:

    - ``link``: make a group with the host relay of another host. Payloads come from it (``in``) or are
      forwarded to it (``out``). It replaces the group of that direction.
    - ``take``: receive a payload for a slot, from the sender or from the host before this one in a chain. The
      sender tells the checksum later, in a message without an answer (``sum``).

    Args:
        on_loss: called from a thread with the reason when the sender is gone, or no group can be made.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        token: str,
        address: str,
        directory: str | None,
        backend: str,
        on_loss: Callable[[str], None],
    ) -> None:
        self._store, self._name, self._token, self._address = store, name, token, address
        self._replicas = SlotReplicas(directory)
        self._links: dict[str, PointToPointGroup] = {}
        self._on_loss, self._make_group = on_loss, group_class(backend)
        self._group = self._make_group(store, f"{name}/pair", token, 1, address)
        self._thread = threading.Thread(target=self._run, name="weight_update-relay", daemon=True)
        leave_in_order(self._thread)
        self._thread.start()

    def close(self) -> None:
        """Close the connection; the sender notices."""
        for group in (self._group, *list(self._links.values())):
            group.close()

    def _run(self) -> None:
        try:
            self._group.connect()
        except LinkClosedError as error:
            self._on_loss(str(error))
            return
        self._group.on_loss(lambda: self._on_loss("the other end is gone"))
        try:
            self._serve(ControlChannel(self._group, self._name, self._token, 1))
        except (TransportError, TimeoutError, FormatError) as error:
            if isinstance(error, FormatError):
                _log.warning("%s: %s", self._name, error)
        finally:
            self.close()
            self._replicas.close()

    def _serve(self, sender: ControlChannel) -> None:
        while True:
            command = sender.receive(FOREVER)
            if command["do"] == "link":
                sender.send(self._link(command), None)
            elif command["do"] == "take":
                forwarder = Forwarder(self._links.get("out") if command["onward"] else None)
                answer = self._take(command, sender, forwarder)
                sender.send(answer, None)
                limit = command["patience"] / _FORWARD_SHARE
                forwarded = answer.get("fd", -1) >= 0 and forwarder.finish(limit)
                if command["onward"] and not forwarded:
                    self._unlink("out")  # the next host notices

    def _link(self, command: dict[str, Any]) -> dict[str, Any]:
        way = command["way"]
        self._unlink(way)
        rank = 0 if way == "out" else 1
        name, patience = command["name"], command["patience"]
        link = self._make_group(self._store, name, self._token, rank, self._address, patience)
        self._links[way] = link
        try:
            link.connect()
        except LinkClosedError as error:
            del self._links[way]
            return {"error": str(error)[:_MAX_ERROR_CHARS]}
        link.on_loss(lambda: None)
        return {}

    def _unlink(self, way: str) -> None:
        link = self._links.pop(way, None)
        if link is not None:
            link.close()

    def _take(self, command: dict[str, Any], sender: ControlChannel, forwarder: Forwarder) -> dict[str, Any]:
        self._replicas.forget(command["gone"])
        problem, replica = "", None
        try:
            replica = self._replicas.of(command["slot"], command["size"])
            into = pieces_of(replica.tensor[: command["nbytes"]])
        except NotEnoughMemoryError as error:
            problem, into, forwarder = str(error), discarded_pieces(command["nbytes"]), Forwarder(None)
        source: PointToPointGroup | None = sender.group
        patience = None
        if command["chained"]:
            source, patience = self._links.get("in"), command["patience"]
        try:
            if source is None:
                raise LinkClosedError("it is not connected")
            with Progress("receiving weights", command["nbytes"]):
                total = recv_pieces(source, into, patience, forwarder)
        except (TransportError, TimeoutError) as error:
            if not command["chained"]:
                raise
            self._unlink("in")
            return {"error": f"the host before it in the chain: {error}"[:_MAX_ERROR_CHARS]}
        expected = self._sum(command, sender)
        if replica is None:  # each worker of this host reports it and keeps its version
            return {"fd": -1, "key": problem[:_MAX_ERROR_CHARS]}
        if command["checksum"] == CHECKSUM and total != expected:
            return {"error": "the payload's checksum is wrong"}
        return {"fd": replica.fd, "key": replica.key}

    @staticmethod
    def _sum(command: dict[str, Any], sender: ControlChannel) -> Any:
        """Return the checksum that the sender tells, or None if it could not send the whole payload."""
        while True:
            message = sender.receive(None)
            if message["do"] == "sum" and message["number"] == command["number"]:
                return message["sum"]
