"""The transports keep their contract; tests of the properties of each."""

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from pairs import interrupt_once
from torch.distributed import rpc

from weight_update.errors import (
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    NotEnoughMemoryError,
    SyncTimeoutError,
)
from weight_update.testing import TransportContract, greet
from weight_update.testing.chunks import (
    Ends,
    hello,
    in_background,
    must_receive,
    number,
    update_of,
)
from weight_update.testing.processes import wait_until
from weight_update.transports import (
    DistributedTransport,
    MemoryTransport,
    MPTransport,
    RayTransport,
    RPCTransport,
    SharedMemTransport,
    multiprocess,
)
from weight_update.transports.distributed.rendezvous import Announcement, SenderStore
from weight_update.transports.distributed.transport import DistributedListener
from weight_update.transports.shared_memory.slots import slot_of
from weight_update.transports.shared_memory.transport import SharedMemListener
from weight_update.transports.socket_stream import SocketStream
from weight_update.wire.frames import Kind, WeightChunk


@pytest.mark.smoke
class TestMemoryTransport(TransportContract):
    def make_ends(self) -> Ends:
        return MemoryTransport.pair()


@pytest.mark.smoke
class TestMPTransport(TransportContract):
    def make_ends(self) -> Ends:
        queues = multiprocessing.Queue(), multiprocessing.Queue()
        return MPTransport(*queues), MPTransport(*queues, end="receiver")

    def test_a_last_word_can_be_read(self) -> None:
        """In one process both ends have the same queues, which close with the first end."""
        queues = multiprocessing.Queue(), multiprocessing.Queue()
        sender = MPTransport(*queues)
        child = multiprocessing.get_context("fork").Process(target=speak_and_end, args=queues)
        child.start()
        sender.watch(child.pid)
        child.join()
        with pytest.raises(LinkClosedError):
            sender.send_chunk(number(1))
        assert must_receive(sender).header == {"version": 7}
        with pytest.raises(LinkClosedError):
            sender.recv_chunk(10.0)
        sender.close()

    def test_a_last_word_to_the_receiver_can_be_read(self) -> None:
        queues = multiprocessing.Queue(), multiprocessing.Queue()
        with contextlib.closing(MPTransport(*queues, end="receiver")) as receiver:
            child = multiprocessing.get_context("fork").Process(target=send_and_end, args=queues)
            child.start()
            receiver.watch(child.pid)
            child.join()
            assert must_receive(receiver).header == {"version": 7}
            with pytest.raises(LinkClosedError):
                receiver.recv_chunk(10.0)


def send_and_end(*queues: multiprocessing.Queue) -> None:
    MPTransport(*queues).send_chunk(number(7))


def send_too_early(sender: MPTransport) -> None:
    """Send an update and release its memory, as if the worker had no time to open it."""
    chunk = update_of(sender, 100_000)
    sender.send_chunk(chunk)
    slot_of(chunk.payload).close()


@pytest.mark.parametrize("joins", [False, True], ids=["reads", "joins again"])
def test_a_worker_that_is_late_for_the_last_update_learns_of_the_end(joins: bool) -> None:
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    sender = MPTransport(*queues)
    send_too_early(sender)
    sender.send_chunk(WeightChunk(Kind.GOODBYE, {}))
    with contextlib.closing(MPTransport(*queues, end="receiver")) as receiver:
        if not joins:
            assert must_receive(receiver).kind is Kind.GOODBYE
            return
        time.sleep(0.3)  # a queue writes in a thread of its own
        with pytest.raises(LinkClosedError, match="the sender was shut down"):
            receiver.restart()


def test_an_update_that_is_gone_takes_no_later_one_along() -> None:
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    sender = MPTransport(*queues)
    with contextlib.closing(MPTransport(*queues, end="receiver")) as receiver:
        send_too_early(sender)
        sender.send_chunk(number(2))
        with pytest.raises(LinkClosedError, match="which had the weights, has ended"):
            receiver.recv_chunk(10.0)
        assert must_receive(receiver).header == {"version": 2}


@pytest.mark.parametrize("directory", [None, "/dev/shm"])
def test_an_update_that_is_gone_is_not_read_from_the_memory_of_the_next(directory: str | None) -> None:
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    sender = MPTransport(*queues, directory=directory)
    with contextlib.closing(MPTransport(*queues, end="receiver", directory=directory)) as receiver:
        chunk = update_of(sender, 100_000)
        sender.send_chunk(chunk)
        assert chunk.payload is not None
        slot, descriptor = slot_of(chunk.payload), slot_of(chunk.payload).fd
        slot.close()
        del chunk  # which had the memory mapped
        later = sender.allocate(100_000)
        if slot_of(later.tensor).fd != descriptor:  # as it is, unless others have taken lower numbers
            os.dup2(slot_of(later.tensor).fd, descriptor)
        with pytest.raises(LinkClosedError, match="has released the slot"):
            receiver.recv_chunk(10.0)


@pytest.mark.parametrize(("end", "name"), [("sender", "sender"), ("receiver", "worker")])
def test_queues_tell_which_end_disconnected(end: str, name: str) -> None:
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    ends = {"sender": MPTransport(*queues), "receiver": MPTransport(*queues, end="receiver")}
    ends.pop(end).disconnect()
    (other,) = ends.values()
    with pytest.raises(LinkClosedError, match=f"the {name} disconnected"):
        other.recv_chunk(10.0)
    other.close()


def join_and_wait(name: str, nbytes: int, restarted: Any, *queues: multiprocessing.Queue) -> None:
    worker = MPTransport(*queues, end="receiver", name=name)
    worker.restart()
    restarted.release()
    worker.send_chunk(hello_of_a_large_model(nbytes))
    time.sleep(60.0)


def await_hello(restarted: Any, outbox: multiprocessing.Queue) -> None:
    """Wait until a worker has written as much of its HELLO as fits into the pipe."""
    assert restarted.acquire(timeout=20.0)
    found = bytearray(4)

    def unread() -> int:
        fcntl.ioctl(outbox._reader.fileno(), termios.FIONREAD, found)
        return int.from_bytes(found, sys.byteorder)

    wait_until(lambda: unread() > 0)
    before = -1
    while before < unread():
        before = unread()
        time.sleep(0.1)


def hello_of_a_large_model(nbytes: int) -> WeightChunk:
    return hello(schema={"names": "x" * nbytes})


@pytest.mark.parametrize("nbytes", [300_000, 3 << 20], ids=["fits into a pipe", "does not fit"])
def test_workers_are_killed_before_their_hello_is_read(nbytes: int) -> None:
    name, fork = uuid.uuid4().hex, multiprocessing.get_context("fork")
    queues, restarted = (fork.Queue(), fork.Queue()), fork.Semaphore(0)
    workers = [fork.Process(target=join_and_wait, args=(name, nbytes, restarted, *queues)) for _ in range(3)]
    with contextlib.closing(MPTransport(*queues)) as sender:
        for worker in workers:
            worker.start()
            await_hello(restarted, queues[1])
            if worker is not workers[-1]:
                worker.kill()
                worker.join()
        assert must_receive(sender).header["pid"] == workers[-1].pid
        workers[-1].kill()
        workers[-1].join()


def test_a_killed_worker_whose_hello_is_read_is_replaced() -> None:
    name, fork = uuid.uuid4().hex, multiprocessing.get_context("fork")
    queues, restarted = (fork.Queue(), fork.Queue()), fork.Semaphore(0)
    with contextlib.closing(MPTransport(*queues)) as sender:
        for _ in range(2):
            worker = fork.Process(target=join_and_wait, args=(name, 300_000, restarted, *queues))
            worker.start()
            await_hello(restarted, queues[1])
            worker.kill()
            worker.join()
            assert must_receive(sender).header["pid"] == worker.pid


def die_in_the_middle_of_an_item(*queues: multiprocessing.Queue) -> None:
    worker, read = MPTransport(*queues, end="receiver"), os.read

    def read_and_die(fd: int, nbytes: int) -> NoReturn:
        read(fd, nbytes)
        os.kill(os.getpid(), signal.SIGKILL)

    os.read = read_and_die
    worker.recv_chunk(20.0)


def test_a_worker_killed_in_the_middle_of_an_item_leaves_no_half_of_it() -> None:
    fork = multiprocessing.get_context("fork")
    queues = fork.Queue(), fork.Queue()
    sender, receiver = MPTransport(*queues), MPTransport(*queues, end="receiver")
    with contextlib.closing(sender), contextlib.closing(receiver):
        worker = fork.Process(target=die_in_the_middle_of_an_item, args=queues)
        worker.start()
        sender.send_chunk(number(1))
        worker.join(20.0)
        assert worker.exitcode == -signal.SIGKILL
        receiver.restart()
        sender.send_chunk(number(2))
        assert must_receive(receiver).header == {"version": 2}


@pytest.mark.parametrize("name", [None, uuid.uuid4().hex], ids=["unnamed", "named"])
def test_a_worker_tries_again_while_its_hello_is_not_read(
    name: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    queues, nbytes = (multiprocessing.Queue(), multiprocessing.Queue()), 3 << 20  # more than a pipe takes
    sender, worker = MPTransport(*queues), MPTransport(*queues, end="receiver", name=name)
    for _ in range(2):
        worker.restart()
        worker.send_chunk(hello_of_a_large_model(nbytes))
        time.sleep(0.2)
    for _ in range(2):
        assert must_receive(sender).kind is Kind.HELLO
    for end in (sender, worker):
        end.close()
    assert capfd.readouterr().err == ""


def test_restart_that_close_overtakes_leaves_the_queues_to_another_receiver() -> None:
    name, queues = uuid.uuid4().hex, (multiprocessing.Queue(), multiprocessing.Queue())
    closed = MPTransport(*queues, end="receiver", name=name)
    closed.close()
    with pytest.raises(LinkClosedError, match="this end was closed"):
        closed.restart()
    with contextlib.closing(MPTransport(*queues, end="receiver", name=name)) as other:
        other.restart()


def test_restart_after_one_that_a_signal_handler_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    name, queues = uuid.uuid4().hex, (multiprocessing.Queue(), multiprocessing.Queue())
    with contextlib.closing(MPTransport(*queues, end="receiver", name=name)) as worker:
        interrupt_once(monkeypatch, MPTransport, "_take_over_queues", after=False)
        with pytest.raises(KeyboardInterrupt):
            worker.restart()
        worker.restart()


def test_a_queue_whose_thread_could_not_be_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    sender, receiver = MPTransport(*queues), MPTransport(*queues, end="receiver")
    with contextlib.closing(sender), contextlib.closing(receiver):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(NotEnoughMemoryError, match=r"can't start new thread.*\(ulimit -u\)"):
                sender.send_chunk(number(1))
            sender.disconnect()
        sender.send_chunk(number(2))
        assert must_receive(receiver).header == {"version": 2}


def no_thread(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


@pytest.mark.timeout(20, method="thread")
def test_a_full_queue_is_a_timeout() -> None:
    """A user may give queues of a maximum size."""
    queues = multiprocessing.Queue(1), multiprocessing.Queue(1)
    with contextlib.closing(MPTransport(*queues)) as sender:
        sender.send_chunk(number(1))
        with pytest.raises(SyncTimeoutError, match="does not read"):
            sender.send_chunk(number(2), 0.1)
        sender.disconnect()


def test_half_an_item_in_a_queue_does_not_hold_up_its_reader() -> None:
    """As of a sender that was killed, or stopped, while it wrote a long message."""
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    head = WeightChunk(Kind.REFUSED, {"reason": "x" * 9000, "problems": []}).encode_head(checksum=False)
    item = pickle.dumps((head, None))
    raw, pipe = len(item).to_bytes(4, "big") + item, queues[0]._writer.fileno()
    queues[0]._sem.acquire()
    with contextlib.closing(MPTransport(*queues, end="receiver")) as receiver, ThreadPoolExecutor(1) as pool:
        for part in raw[:2], raw[2:5000]:
            os.write(pipe, part)
            reading = pool.submit(receiver.recv_chunk, 0.1)
            try:
                assert reading.result(5.0) is None
            except BaseException:
                os.write(pipe, raw[2:] if part == raw[:2] else raw[5000:])  # the thread waits for it
                raise
        os.write(pipe, raw[5000:])
        chunk = receiver.recv_chunk(10.0)
        assert chunk is not None
        assert chunk.kind is Kind.REFUSED


def test_a_worker_that_ended_before_its_join_request_was_read() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    queues = multiprocessing.Queue(), multiprocessing.Queue()
    sender, receiver = MPTransport(*queues), MPTransport(*queues, end="receiver")
    with contextlib.closing(sender), contextlib.closing(receiver):
        receiver.send_chunk(hello(pid=ended.pid))
        must_receive(sender)
        with pytest.raises(LinkClosedError, match="the other process is gone"):
            sender.recv_chunk(2.0)
        assert sender.recv_chunk(0.0) is None  # it waits for another worker


def speak_and_end(weight_queue: multiprocessing.Queue, ack_queue: Any) -> None:
    """Send a message and end while the queue's thread has not written it yet."""
    write = ack_queue._send_bytes

    def write_late(item: bytes) -> None:
        time.sleep(0.5)
        write(item)

    ack_queue._send_bytes = write_late
    MPTransport(weight_queue, ack_queue, end="receiver").send_chunk(number(7))


def speak_without_a_reader(nbytes: int, *queues: multiprocessing.Queue) -> None:
    multiprocess._FLUSH_SECONDS = 1.0
    for outbox in queues:
        MPTransport(None, outbox, end="receiver").send_chunk(hello_of_a_large_model(nbytes))


def test_a_process_ends_though_nobody_reads_its_last_words() -> None:
    queues, nbytes = [multiprocessing.Queue() for _ in range(30)], 3 << 20  # more than a pipe takes
    worker = multiprocessing.get_context("fork").Process(
        target=speak_without_a_reader, args=(nbytes, *queues)
    )
    worker.start()
    worker.join(20.0)
    assert worker.exitcode == 0


class TestSharedMemTransport(TransportContract):
    def make_ends(self) -> Ends:
        sender = SharedMemTransport()
        self.listener = SharedMemListener("token", {0: sender}, nobody_else)
        self.listener.start()
        receiver = SharedMemTransport(self.listener.address, token="token")
        greet(sender, receiver)
        return sender, receiver

    def make_successor(self) -> SharedMemTransport:
        return SharedMemTransport(self.listener.address, token="token")

    def teardown_method(self) -> None:
        self.listener.close()

    def test_memory_that_was_released_before_it_was_read(self, ends: Ends) -> None:
        """A sender that shuts down releases its memory, and its GOODBYE comes after what was not read."""
        sender, receiver = ends
        update = update_of(sender, 64)
        for _ in range(3):
            sender.send_chunk(update)
        must_receive(receiver)  # the slot is open from now on
        slot_of(update.payload).close()
        must_receive(receiver)  # the receiver finds out afterwards
        with pytest.raises(LinkClosedError, match="the sender has released the memory of this update"):
            receiver.recv_chunk(5.0)

    def test_no_free_descriptor_for_a_slot(self, ends: Ends) -> None:
        sender, receiver = ends
        sender.send_chunk(update_of(sender, 64))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(NotEnoughMemoryError, match=r"raise .*ulimit -n"):
                receiver.recv_chunk(5.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestDistributedTransport(TransportContract):
    """Two ends on one host, which share memory."""

    hosts = ("here", "here")
    sender_class = DistributedTransport
    token = "token"

    def make_ends(self) -> Ends:
        store = SenderStore("127.0.0.1", 0)
        self.port = store.port
        sender = self.sender_class(token=self.token, host=self.hosts[0])
        self.listener = DistributedListener(store, self.hosts[0], self.token, {0: sender}, nobody_else)
        self.listener.start()
        receiver = self.make_successor()
        greet(sender, receiver, self.token)
        return sender, receiver

    def make_successor(self) -> DistributedTransport:
        return DistributedTransport("127.0.0.1", self.port, token=self.token, host=self.hosts[1])

    def teardown_method(self) -> None:
        self.listener.close()


@pytest.mark.smoke
class TestDistributedTransportAcrossHosts(TestDistributedTransport):
    """Two ends with different host names: payloads cross a socket."""

    hosts = ("here", "there")


def nobody_else(worker_idx: int) -> NoReturn:
    raise JoinRefusedError(f"unknown worker index {worker_idx}")


@pytest.mark.slow  # the link of Distributed
class TestRPCTransport(TestDistributedTransport):
    """Links without an object to call; ``test_rpc`` tests the calls."""

    sender_class = RPCTransport


@pytest.mark.parametrize("leave", ["worker", "sender"])
def test_a_call_does_not_keep_a_worker_from_joining_again(
    leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SenderStore("127.0.0.1", 0)
    sender = RPCTransport(SimpleNamespace(owner=lambda: "worker"), host="here")
    worker = DistributedTransport("127.0.0.1", store.port, token="token", host="here")
    monkeypatch.setattr(rpc, "rpc_async", lambda *_, **__: torch.futures.Future())  # it never ends
    with contextlib.closing(
        DistributedListener(store, "here", "token", {0: sender}, nobody_else)
    ) as listener:
        listener.start()
        greet(sender, worker)
        worker.send_chunk(applied(0))
        assert must_receive(sender).kind is Kind.APPLIED
        worker.send_chunk(applied(1))
        assert sender.recv_chunk(0.2) is None
        (worker if leave == "worker" else sender).disconnect()
        worker.disconnect()
        worker.restart(10.0)
        worker.send_chunk(hello(version=1))
        with pytest.raises(LinkClosedError, match="during a call"):
            sender.recv_chunk(20.0)
        assert must_receive(sender).header["version"] == 1
        sender.close()
        worker.close()


def applied(version: int) -> WeightChunk:
    return WeightChunk(Kind.APPLIED, {"version": version, "apply_seconds": 0.0, "stall_seconds": 0.0})


@pytest.mark.parametrize("drops", [False, True], ids=["refused", "dropped"])
def test_a_firewall_blocks_the_port_for_workers_of_other_hosts(drops: bool) -> None:
    with ExitStack() as stack:
        blocked = stack.enter_context(socket.socket())
        blocked.bind(("127.0.0.1", 0))
        port = blocked.getsockname()[1]
        if drops:
            blocked.listen(0)
            for _ in range(2):  # the second one fills the backlog
                caller = stack.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(("127.0.0.1", port))
        store = stack.enter_context(contextlib.closing(SenderStore("127.0.0.1", 0)))
        store.announce(Announcement("here", "", port, "name"), "token")
        worker = DistributedTransport("127.0.0.1", store.port, token="token", host="there")
        with pytest.raises(SyncTimeoutError if drops else LinkClosedError, match=f"port {port} .* firewall"):
            worker.restart(1.0)


@pytest.mark.parametrize("backlog", [5, 0], ids=["silent", "full"])
def test_close_wakes_a_worker_that_connects(backlog: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind("\0weight_update-test-" + uuid.uuid4().hex)
        listener.listen(backlog)
        first.connect(listener.getsockname())
        worker = SharedMemTransport(listener.getsockname(), token="token")
        errors: list[Exception] = []

        def connect() -> None:
            try:
                worker.restart(None)
            except LinkClosedError as error:
                errors.append(error)

        connecting = in_background(connect)
        time.sleep(0.1)
        assert connecting.is_alive()
        worker.close()
        connecting.join(10.0)
    assert "this end was closed" in str(errors)


@contextlib.contextmanager
def opened(case: TransportContract) -> Iterator[Ends]:
    sender, receiver = case.make_ends()
    yield sender, receiver
    receiver.close()
    sender.close()
    case.teardown_method()


@pytest.mark.parametrize("case", [TestSharedMemTransport(), TestDistributedTransport()])
def test_a_long_hello_meets_a_long_answer(case: TransportContract) -> None:
    """Each HELLO exceeds a socket's buffer; a repeated HELLO must not wait for the end that answers."""
    long = "x" * (2 << 20)
    mine = hello(schema={"x": long})
    answer = WeightChunk(Kind.REFUSED, {"reason": long, "problems": []})
    with opened(case) as (sender, receiver):
        asking = in_background(receiver.send_chunk, mine, 10.0)
        assert must_receive(sender).header == mine.header
        asking.join()
        answering = in_background(sender.send_chunk, answer, 10.0)
        receiver.send_chunk(mine, 1.0)
        assert must_receive(receiver).header == answer.header
        answering.join()


def test_the_token_does_not_cross_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    case = TestDistributedTransportAcrossHosts()
    case.token = "confidential"
    sent: list[bytes] = []
    send = SocketStream.send

    def overheard(self: SocketStream, data: bytes | memoryview, deadline: float | None) -> None:
        sent.append(bytes(data))
        send(self, data, deadline)

    monkeypatch.setattr(SocketStream, "send", overheard)
    with opened(case) as (sender, receiver):
        again = hello("confidential", version=7)
        receiver.send_chunk(again, 10.0)
        assert must_receive(sender).header == again.header
    assert any(b'"version": 7' in message or b'"version":7' in message for message in sent)
    assert not any(b"confidential" in message for message in sent)


@pytest.mark.parametrize("count", [1, 2])
def test_queues_without_an_end_become_a_receiver_by_receiving(count: int) -> None:
    """As in TorchRL, both ends are created with the same arguments."""
    queues = [multiprocessing.Queue() for _ in range(count)]
    sender, receiver = MPTransport(*queues), MPTransport(*queues)
    sender.send_weights({"a": torch.ones(2)})
    got = receiver.receive_weights(10.0, weights=(target := {"a": torch.zeros(2)}))
    assert got is not None
    assert target["a"].tolist() == [1, 1]
    sender.close()


@pytest.mark.parametrize("kind", [SharedMemTransport, DistributedTransport, RPCTransport, RayTransport])
def test_a_senders_end_that_nobody_is_connected_to(kind: type[SharedMemTransport]) -> None:
    with contextlib.closing(kind()) as end:
        message = (
            rf"is for a receiver's end; this {kind.__name__} is a sender's end.*let a scheme create both"
        )
        for call in (end.receive_weights, end.restart):
            with pytest.raises(LifecycleError, match=message):
                call()


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            RPCTransport,
            {"rref": rpc.WorkerInfo("w", 1)},
            "got a WorkerInfo: an RRef tells where the worker is",
        ),
        (RPCTransport, {"collector_info": None, "collector_rref": None}, r"give rref= alone"),
        (
            RPCTransport,
            {"weights_buffer": None},
            r"RPCTransport\(\) takes no weights_buffer: .*process group",
        ),
        (
            DistributedTransport,
            {"weights_buffer": {}, "rank": 1},
            r"takes no weights_buffer, rank: it needs no",
        ),
        (
            RayTransport,
            {"remote_actor": None, "worker_idx": 0},
            r"give its init_on_sender\(\) remote_collectors=",
        ),
    ],
)
def test_arguments_of_torchrl_are_refused(kind: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(**given)
