"""Relay of one host, driven by the sender's client in the same process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weight_update.transports.distributed.relay.client import RelayClient
from weight_update.transports.distributed.relay.gloo import PointToPointGroup
from weight_update.transports.distributed.relay.host_relay import HostRelay
from weight_update.transports.distributed.signed_queue import find_store, open_store
from weight_update.transports.distributed.store import Store
from weight_update.transports.shared_memory.slots import SharedBuffer

HERE = "127.0.0.1"
NBYTES = 64 << 20  # more than the kernel takes from a sender whose other end does not read


@pytest.fixture
def store() -> Iterator[Store]:
    server = open_store(HERE)
    yield server
    server.close()


@contextmanager
def relay_of(server: Store) -> Iterator[RelayClient]:
    """Connect a client to a host relay."""
    store = find_store(HERE, server.port, 5.0)
    client = RelayClient(server, "worker", "token", HERE, 0, "gloo", lambda reason: None)
    relay = HostRelay(store, "worker", "token", HERE, None, "gloo", lambda reason: None)
    client.open()
    yield client
    client.close()
    relay.close()
    client.wait_until_gone(5.0)
    store.close()


def link(client: RelayClient, name: str, patience: float) -> None:
    client.send_command({"do": "link", "way": "out", "name": name, "patience": patience}, patience)


@pytest.mark.slow  # its limits of time are short
def test_a_next_host_that_does_not_read_leaves_time_for_another_one(store: Store) -> None:
    """The sender gives up a relay that does not answer within twice the patience."""
    patience, following = 1.0, find_store(HERE, store.port, 5.0)

    def follow() -> None:
        group = PointToPointGroup(following, "link", "token", 1, HERE, 5.0)
        group.connect()
        group.on_loss(lambda: None)

    with relay_of(store) as client:
        other = threading.Thread(target=follow)
        other.start()
        link(client, "link", 5.0)
        assert client.receive_answer(10.0) == {}
        other.join()
        slot = SharedBuffer(NBYTES, None)
        take = {"do": "take", "number": 1, "checksum": "none", "patience": patience}
        take |= {"chained": False, "onward": True} | client.take_command_for(slot.tensor)
        client.send_command(take, patience)
        client.send_payload(slot.tensor, 10.0)
        client.send_command({"do": "sum", "number": 1, "sum": None}, patience)
        assert client.receive_answer(10.0)["fd"] >= 0
        begun = time.monotonic()
        link(client, "nobody comes there", patience)
        assert "error" in client.receive_answer(2 * patience)
        assert patience < time.monotonic() - begun < 2 * patience
    following.close()
    slot.close()
