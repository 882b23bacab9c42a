"""A worker's part in "once a host": it keeps copies of the sender's slots, which all of its host map."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weight_update.errors import (
    FormatError,
    LinkClosedError,
    NotEnoughMemoryError,
    TransportError,
)
from weight_update.transports.distributed.checksum import CHECKSUM
from weight_update.transports.distributed.relay.gloo import FOREVER, Pair
from weight_update.transports.distributed.relay.pairs import pair_of
from weight_update.transports.distributed.relay.protocol import (
    Notes,
    Onward,
    discarded_pieces,
    pieces_of,
    recv_pieces,
)
from weight_update.transports.distributed.store import Store, leave_in_order
from weight_update.transports.shared_memory.slots import SharedBuffer

__all__ = ["Keeper", "Mirrors"]

_log = logging.getLogger(__name__)
_WORDS = 1000  # characters of an error that fit into a note


class Mirrors:
    """Copies of the sender's slots, in shared memory.

    The sender writes into a slot again only when nobody reads it, so what arrives for a slot may go into
    its mirror without asking.

    Args:
        directory: see :class:`SharedBuffer`.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._mirrors: dict[str, SharedBuffer] = {}

    def of(self, slot: str, nbytes: int) -> SharedBuffer:
        """The mirror of a slot of ``nbytes`` bytes.

        Raises:
            NotEnoughMemoryError: it is new and does not fit.
        """
        if slot not in self._mirrors:
            self._mirrors[slot] = SharedBuffer(nbytes, self._directory)
        return self._mirrors[slot]

    def forget(self, slots: list[str]) -> None:
        """The sender has given these up; who still reads a mirror keeps its memory."""
        for slot in slots:
            if slot in self._mirrors:
                self._mirrors.pop(slot).close()

    def close(self) -> None:
        """Forget all."""
        self.forget(list(self._mirrors))


class Keeper:
    """A thread that takes what the sender sends to this host, and passes it on to another if told so.

    The worker's own thread may be busy with an update meanwhile: its siblings do not wait for it.

    Each order of the sender is a note, and is answered by one:

    - ``link``: make a pair with the keeper of another host; we get payloads from it (``in``) or pass them on
      through it (``out``). It takes the place of the one we had for that.
    - ``take``: a payload for a slot comes, from the sender or from the host before us in a chain. The sender
      tells its checksum when it knows it (``sum``, which has no answer of its own).

    Args:
        store: where pairs find each other.
        name: of the connection to the sender.
        token: what all ends know.
        address: of this machine's interface for payloads.
        directory: where mirrors lie, see :class:`SharedBuffer`.
        backend: what payloads go through.
        on_loss: called from a thread when the sender is gone.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        token: str,
        address: str,
        directory: str | None,
        backend: str,
        on_loss: Callable[[], None],
    ) -> None:
        self._store, self._name, self._token, self._address = store, name, token, address
        self._mirrors = Mirrors(directory)
        self._links: dict[str, Pair] = {}
        self._on_loss, self._make_pair = on_loss, pair_of(backend)
        self._pair: Pair | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weight_update-mirror", daemon=True)
        leave_in_order(self._thread)
        self._thread.start()

    def close(self) -> None:
        """End it; the sender hears of that."""
        with self._closing:
            self._closed = True
            if self._pair is not None:
                self._pair.close()

    def _run(self) -> None:
        try:
            pair = self._make_pair(self._store, f"{self._name}/pair", self._token, 1, self._address)
        except LinkClosedError as error:
            if not self._closed:
                _log.warning("%s: only small payloads can be received: %s", self._name, error)
            return
        pair.on_loss(self._on_loss)
        with self._closing:
            self._pair = pair
            if self._closed:
                pair.close()
        try:
            self._serve(Notes(pair, self._name, self._token, 1))
        except (TransportError, TimeoutError, FormatError) as error:
            if isinstance(error, FormatError):
                _log.warning("%s: %s", self._name, error)
        finally:
            pair.close()
            for link in self._links.values():
                link.close()
            self._mirrors.close()

    def _serve(self, sender: Notes) -> None:
        while True:
            order = sender.hear(FOREVER)
            if order["do"] == "link":
                sender.say(self._link(order), None)
            elif order["do"] == "take":
                onward = Onward(self._links.get("out") if order["onward"] else None)
                answer = self._take(order, sender, onward)
                sender.say(answer, None)
                whole = answer.get("fd", -1) >= 0
                if order["onward"] and not (whole and onward.finish(order["patience"])):
                    self._unlink("out")  # the next one notices

    def _link(self, order: dict[str, Any]) -> dict[str, Any]:
        way = order["way"]
        self._unlink(way)
        try:
            rank = 0 if way == "out" else 1
            name, patience = order["name"], order["patience"]
            made = self._make_pair(self._store, name, self._token, rank, self._address, patience)
        except LinkClosedError as error:
            return {"error": str(error)[:_WORDS]}
        made.on_loss(lambda: None)
        self._links[way] = made
        return {}

    def _unlink(self, way: str) -> None:
        link = self._links.pop(way, None)
        if link is not None:
            link.close()

    def _take(self, order: dict[str, Any], sender: Notes, onward: Onward) -> dict[str, Any]:
        self._mirrors.forget(order["gone"])
        problem, mirror = "", None
        try:
            mirror = self._mirrors.of(order["slot"], order["size"])
            into = pieces_of(mirror.tensor[: order["nbytes"]])
        except NotEnoughMemoryError as error:
            problem, into, onward = str(error), discarded_pieces(order["nbytes"]), Onward(None)
        try:
            total = self._payload(order, sender.pair, into, onward)
        except (TransportError, TimeoutError) as error:
            if not order["chained"]:
                raise
            self._unlink("in")
            return {"error": f"the host before it in the chain: {error}"[:_WORDS]}
        expected = self._sum(order, sender)
        if mirror is None:  # each worker of this host tells the sender so, and keeps the version it has
            return {"fd": -1, "key": problem[:_WORDS]}
        if order["checksum"] == CHECKSUM and total != expected:
            return {"error": "the payload's checksum does not hold"}
        return {"fd": mirror.fd, "key": mirror.key}

    def _payload(
        self, order: dict[str, Any], sender: Pair, into: Sequence[torch.Tensor], onward: Onward
    ) -> str:
        if not order["chained"]:
            return recv_pieces(sender, into, None, onward)
        if "in" not in self._links:
            raise LinkClosedError("it is not connected")
        return recv_pieces(self._links["in"], into, order["patience"], onward)

    @staticmethod
    def _sum(order: dict[str, Any], sender: Notes) -> Any:
        """What the sender says the checksum is; None if it could not send all."""
        while True:
            note = sender.hear(None)
            if note["do"] == "sum" and note["number"] == order["number"]:
                return note["sum"]
