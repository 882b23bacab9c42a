"""Signal handlers that shut something down while the thread they interrupt holds its lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace

import pytest

from weight_update import LifecycleError, LinkClosedError, Synchronizer, SyncMethod
from weight_update.sender.observers import Observers
from weight_update.synchronizer.rpc import SocketChannel
from weight_update.testing.processes import wait_until
from weight_update.transports.rate_limit import RateLimitedLog
from weight_update.transports.ray import connection
from weight_update.transports.shared_memory.slots import HostSlotMapping, SharedBuffer, SlotTable
from weight_update.transports.signed_stream import SignedStream
from weight_update.wire.frames import Kind, WeightChunk


def in_time(call: Callable[[], object]) -> None:
    """Call a function in a thread, which may hang; raise its error here."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_while_a_slot_is_mapped() -> None:
    slots, table = [SharedBuffer(1 << 12) for _ in range(2)], SlotTable()

    def map_and_clear() -> HostSlotMapping:
        mapping = HostSlotMapping(slots[1].key, slots[1].fd)
        table.clear()
        return mapping

    table.payload(slots[0].key, 1 << 12, lambda: HostSlotMapping(slots[0].key, slots[0].fd))
    in_time(lambda: table.payload(slots[1].key, 1 << 12, map_and_clear))
    for slot in slots:
        slot.close()


def test_while_a_record_is_counted() -> None:
    log = RateLimitedLog(logging.getLogger(__name__))

    def log_inside() -> None:
        with log._lock:
            log.warning("an observer raised an error")

    in_time(log_inside)


def test_while_slots_are_looked_at() -> None:
    table = SlotTable()

    class Mapping(HostSlotMapping):
        @property
        def released(self) -> bool:
            table.clear()
            return False

    with closing(SharedBuffer(1 << 12)) as slot:
        in_time(lambda: table.payload(slot.key, 1 << 12, lambda: Mapping(slot.key, slot.fd)))


def test_while_a_message_is_given_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "call", lambda method, *arguments: method(*arguments))
    actor = SimpleNamespace(put=lambda *_: link.close(), finish=None)
    link = connection.RayConnection(actor, "name", 0)
    in_time(lambda: link.send(WeightChunk(Kind.GOODBYE, {})))
    with pytest.raises(LinkClosedError, match="closed"):
        link.send(WeightChunk(Kind.GOODBYE, {}))


def test_while_a_call_takes_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = SocketChannel("127.0.0.1:1", "token")
    require_open = channel._require_open

    def close_first() -> None:
        monkeypatch.setattr(channel, "_require_open", require_open)
        channel.close()
        require_open()

    monkeypatch.setattr(channel, "_require_open", close_first)
    with pytest.raises(LinkClosedError, match="the channel was closed"):
        in_time(lambda: channel.call("status", {}, 5.0))


def test_while_a_call_makes_a_connection() -> None:
    class Connections(set[SignedStream]):
        def add(self, connection: SignedStream) -> None:
            made.append(connection)
            channel.close()
            super().add(connection)

    made: list[SignedStream] = []
    with closing(Synchronizer(SyncMethod.MEMORY)) as where:
        server = where.serve()
        channel = SocketChannel(server.address, server.token)
        channel._open = Connections()
        with pytest.raises(LinkClosedError, match="the channel was closed"):
            in_time(lambda: channel.call("status", {}, 5.0))
        assert made[0].stream.sock.fileno() == -1


def test_while_an_observer_is_added() -> None:
    def observe(tell: object) -> Callable[[], None]:
        observers.close()
        return lambda: None

    observers = Observers(observe)
    in_time(lambda: observers.add(print))
    wait_until(lambda: observers.functions == ())


def test_while_the_service_of_a_synchronizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Synchronizer(SyncMethod.MEMORY)
    make = where._make_service

    def close_first() -> object:
        where.close()
        return make()

    monkeypatch.setattr(where, "_make_service", close_first)
    with pytest.raises(LifecycleError, match="is closed"):
        in_time(lambda: where.service)


def test_a_server_that_is_made_while_another_thread_closes_the_synchronizer_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = Synchronizer(SyncMethod.MEMORY)
    monkeypatch.setattr(where, "reach_by", lambda address: where.close())
    with pytest.raises(LifecycleError, match="is closed"):
        where.serve()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "weight_update-synchronizer"])
