"""The addresses that clients are told, and the state after serving has failed."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from sync_parts import model_at

from weight_update import (
    ExplorerClient,
    FormatError,
    LifecycleError,
    LinkClosedError,
    Synchronizer,
    SyncMethod,
    TrainerClient,
    TransportError,
)
from weight_update.synchronizer import client as client_module
from weight_update.synchronizer import rpc
from weight_update.transports import signed_stream
from weight_update.transports.signed_stream import SignedStream
from weight_update.transports.socket_stream import SocketStream


@pytest.fixture
def own_address() -> str:
    """Return an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no route, and so perhaps no address but loopback")
        return str(sock.getsockname()[0])


def test_directly_a_trainer_beside_the_synchronizer_is_found_where_that_is_served(own_address: str) -> None:
    with Synchronizer(SyncMethod.NCCL) as where:
        server = where.serve(own_address)
        model = model_at(-1)
        with (
            TrainerClient(where, model_at(3)) as trainer,
            ExplorerClient(server, model, timeout=1.0) as explorer,
        ):
            publisher = trainer.blocking._method.publisher
            assert publisher.endpoint["address"] == own_address
            explorer.step = 1
            assert explorer.blocking.sync_weight()["version"] == 0, "it joined there"


def test_the_weights_of_a_synchronizer_are_sent_where_it_is_served(own_address: str) -> None:
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve(own_address)
        with TrainerClient(where, model_at(3)) as trainer, ExplorerClient(server, model_at(-1)) as explorer:
            trainer.step = explorer.step = 1
            trainer.blocking.sync_weight()
            assert where.service._newest.publisher.endpoint["address"] == own_address
            assert explorer.blocking.sync_weight()["version"] == 0


def test_serving_after_weights_were_sent_on_another_interface_is_refused(own_address: str) -> None:
    with Synchronizer(SyncMethod.MEMORY) as where, TrainerClient(where, model_at(3)) as trainer:
        trainer.blocking.sync_weight()
        with pytest.raises(LifecycleError, match="already sends weights on another interface"):
            where.serve(own_address)


def test_directly_serving_after_the_trainer_came_is_refused_and_leaves_no_server(own_address: str) -> None:
    with Synchronizer(SyncMethod.NCCL) as where, TrainerClient(where, model_at(0)):
        with pytest.raises(LifecycleError, match=r"serve\(\) before"):
            where.serve(own_address, port=(port := free_port(own_address)))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((own_address, port), 5.0)


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("address", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize("method", list(SyncMethod))
def test_an_address_that_stands_for_all_is_refused(method: SyncMethod, address: str, tmp_path) -> None:
    with Synchronizer(method, directory=tmp_path) as where:
        with pytest.raises(ValueError, match="all interfaces"):
            where.serve(address)
        with pytest.raises(ValueError, match="all interfaces"):
            TrainerClient(where, model_at(0), address=address)
        assert where.service.status()["trainer"] == "stopped"


def servers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "weight_update-synchronizer"]


@pytest.mark.parametrize("name", ["team/run", "", None])
def test_a_name_of_an_actor_that_its_address_would_not_have_is_refused(name: Any) -> None:
    with (
        Synchronizer(SyncMethod.MEMORY) as where,
        pytest.raises(ValueError, match=f"name is a text without '/', .* not {name!r}; give a namespace"),
    ):
        where.as_ray_actor(name)


def test_close_ends_the_servers_also_when_another_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(servers())
    where = Synchronizer(SyncMethod.MEMORY)
    server = where.serve()
    where.serve()

    def fail() -> None:
        raise OSError("no")

    monkeypatch.setattr(where.service, "end_sessions", fail)
    monkeypatch.setattr(server, "close", lambda close=server.close: (close(), fail()))
    with pytest.raises(OSError, match="no"):
        where.close()
    for thread in servers():
        thread.join(5.0)
    assert len(servers()) == before


def test_a_signed_message_that_is_not_json_is_a_format_error() -> None:
    left, right = socket.socketpair()
    host = SignedStream(SocketStream(left), bytes(32), listener=True)
    client = SignedStream(SocketStream(right), bytes(32), listener=False)
    client.send(b"{nothing", None)
    with pytest.raises(FormatError, match="not JSON"):
        host.receive_json(10.0)
    for end in (client, host):
        end.close()


def test_a_connection_that_is_made_while_the_channel_closes_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def connect_late(*args):
        made.append(connect(*args))
        channel.close()  # as another thread may
        return made[-1]

    connect = signed_stream.dial
    monkeypatch.setattr(signed_stream, "dial", connect_late)
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        channel = rpc.SocketChannel(server.address, server.token)
        for _ in range(2):  # another thread may also begin a call when the channel is closed
            with pytest.raises(LinkClosedError, match=r"^the channel was closed$"):
                channel.call("status", {}, 5.0)
    assert [one.sock.fileno() for one in made] == [-1], "a closed channel does not connect"


def test_a_call_that_fails_leaves_connections_that_are_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may connect to a server that has just started again, while an old call fails."""

    def prove_late(*args: Any) -> bytes:
        key = prove(*args)
        channel._drop()  # as a call of another thread that fails
        return key

    prove = rpc.prove_token
    monkeypatch.setattr(rpc, "prove_token", prove_late)
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        channel = rpc.SocketChannel(server.address, server.token)
        assert channel.call("status", {}, 5.0)
        channel.close()


def test_a_call_that_fails_ends_the_others_with_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life may just have connected. Any other error would end its thread."""

    def connect_early(deadline: float) -> SignedStream:
        connection = connect(deadline)
        channel._drop()  # as a call of another thread that fails
        return connection

    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        channel = rpc.SocketChannel(server.address, server.token)
        connect = channel._connect
        monkeypatch.setattr(channel, "_connect", connect_early)
        with pytest.raises(LinkClosedError, match=r"^the synchronizer at "):
            channel.call("beat", {"session": ""}, 5.0)


@pytest.mark.parametrize("client", [TrainerClient, ExplorerClient])
@pytest.mark.parametrize("moment", ["hello", "thread"])
def test_a_client_that_cannot_be_made_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch, client: Any, moment: str
) -> None:
    made = []

    def connect(*args: Any) -> Any:
        made.append(dial(*args))
        return made[-1]

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    dial = signed_stream.dial
    with Synchronizer(SyncMethod.MEMORY) as where:
        server = where.serve()
        monkeypatch.setattr(signed_stream, "dial", connect)
        if moment == "hello":
            monkeypatch.setattr(type(where.service), "call", lambda *_: {"error": "can't start new thread"})
        else:
            monkeypatch.setattr(client_module, "start_thread", fail)
        with pytest.raises((TransportError, RuntimeError), match="can't start new thread"):
            client(server.address, model_at(0), token=server.token)
    assert [one.sock.fileno() for one in made] == [-1]
