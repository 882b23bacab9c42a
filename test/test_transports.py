"""The transports keep their contract, and what is special about each."""

import multiprocessing
from typing import NoReturn

import pytest

from weight_update.errors import JoinRefusedError
from weight_update.testing import TransportContract, greet
from weight_update.testing.transports import Ends
from weight_update.transports import (
    DistributedTransport,
    MemoryTransport,
    MPTransport,
    RPCTransport,
    SharedMemTransport,
)
from weight_update.transports.distributed import DistributedListener
from weight_update.transports.mailbox import find_store, open_store
from weight_update.transports.shared_mem import SharedMemListener


class TestMemoryTransport(TransportContract):
    def make_ends(self) -> Ends:
        return MemoryTransport.pair()


class TestMPTransport(TransportContract):
    def make_ends(self) -> Ends:
        queues = multiprocessing.Queue(), multiprocessing.Queue()
        return MPTransport(*queues), MPTransport(*queues, end="receiver")


class TestSharedMemTransport(TransportContract):
    def make_ends(self) -> Ends:
        sender = SharedMemTransport()
        self.listener = SharedMemListener("token", {0: sender}, nobody_else)
        self.listener.start()
        receiver = SharedMemTransport(self.listener.address)
        greet(sender, receiver)
        return sender, receiver

    def teardown_method(self) -> None:
        self.listener.close()


class TestDistributedTransport(TransportContract):
    """Two ends on one host, which share memory."""

    hosts = ("here", "here")
    sender_class = DistributedTransport

    def make_ends(self) -> Ends:
        store = open_store("127.0.0.1")
        sender = self.sender_class(token="token", address="127.0.0.1", host=self.hosts[0])
        self.listener = DistributedListener(store, "token", {0: sender}, nobody_else)
        self.listener.start()
        receiver = DistributedTransport(
            lambda timeout: find_store("127.0.0.1", store.port, timeout),
            token="token",
            host=self.hosts[1],
        )
        greet(sender, receiver)
        return sender, receiver

    def teardown_method(self) -> None:
        self.listener.close()


class TestDistributedTransportAcrossHosts(TestDistributedTransport):
    """Two ends that believe to be on two hosts: payloads cross a socket."""

    hosts = ("here", "there")


def nobody_else(worker_idx: int) -> NoReturn:
    raise JoinRefusedError(f"unknown worker index {worker_idx}")


@pytest.mark.slow  # the link of Distributed
class TestRPCTransport(TestDistributedTransport):
    """Without an object to call; ``test_rpc`` has those."""

    sender_class = RPCTransport
