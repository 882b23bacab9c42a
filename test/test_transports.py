"""The transports keep their contract, and what is special about each."""

import multiprocessing

from weight_update.chunks import Kind, WeightChunk
from weight_update.testing.transports import Ends, TransportContract
from weight_update.transports import MemoryTransport, MPTransport, SharedMemTransport
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
        self.listener = SharedMemListener("token", {0: sender})
        self.listener.start()
        receiver = SharedMemTransport(self.listener.address)
        hello = {"token": "token", "worker": 0, "pid": 0, "version": None, "schema": None}
        receiver.send_chunk(WeightChunk(Kind.HELLO, hello))
        assert sender.recv_chunk(10.0).kind is Kind.HELLO
        return sender, receiver

    def teardown_method(self) -> None:
        self.listener.close()
