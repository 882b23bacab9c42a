"""Errors of calls of vLLM's server, without vLLM; test/engines has tests with the real package."""

from __future__ import annotations

import contextlib
import http.server
import importlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from torch import nn

from weight_update import (
    LifecycleError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    WeightSyncScheme,
)
from weight_update.engines import SGLangServer
from weight_update.serving.vllm import VLLMServer, connect_servers, init_info
from weight_update.serving.vllm.control import update_in_session

WAIT = 20.0


@contextlib.contextmanager
def serving(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """Start a server that answers a path with a status and a content; yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            status, content = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a server that has one route, whose answer is not JSON."""
    with serving(lambda path: (200 if path == "/get_world_size" else 404, b"<html>")) as made:
        yield made


def test_a_server_that_is_not_vllm(url: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{url}/get_world_size answered, but is not vLLM"):
        VLLMServer(url).world_size()


@contextlib.contextmanager
def answering(answer: bytes, piece: bytes = b"", stalls: bool = False) -> Iterator[str]:
    """Start a server that gives one answer, and then closes the connection unless it ``stalls``.

    A server that stalls goes on to send a ``piece`` again and again.
    """
    ended = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(answer)
            while stalls and not ended.wait(0.1):
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        pool.submit(serve)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()


@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b"3", b'{"world_size": "two"}'])
def test_a_server_with_other_answers(content: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
    refused = pytest.raises(RuntimeError, match=r"/get_world_size answered, but is not vLLM; correct the URL")
    with answering(answer) as url, refused:
        VLLMServer(url).world_size()


@pytest.mark.parametrize("stalls", [False, True])
def test_an_error_whose_text_breaks_off(stalls: bool) -> None:
    failed = pytest.raises(RuntimeError, match=r"/pause\?mode=wait answered 500: \(the rest of the answer")
    answer = b"HTTP/1.1 500 Error\r\nContent-Length: 100\r\n\r\nshort"
    with answering(answer, stalls=stalls) as url, failed:
        VLLMServer(url, timeout=0.5).pause()


@pytest.mark.parametrize("key", ["secret\n", "sécret", "se\x1bcret"])
def test_a_key_that_no_header_may_have(key: str) -> None:
    with pytest.raises(
        ValueError, match=r"the key has a line break or another control char.* strip\(\) removes"
    ) as raised:
        SGLangServer("http://127.0.0.1:1", api_key=key)
    assert "cret" not in str(raised.value)


def test_a_server_without_the_routes(url: str) -> None:
    with pytest.raises(
        RuntimeError, match="/weight_info answered 404: start vLLM with VLLM_SERVER_DEV_MODE=1"
    ):
        VLLMServer(url).weight_version()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_an_answer(url: str, status: int) -> None:
    """Python would call the other address by GET, show it the key, and take its page for success."""
    page = f"{url}/get_world_size"
    answer = f"HTTP/1.1 {status} Moved\r\nLocation: {page}\r\nContent-Length: 0\r\n\r\n".encode()
    refused = pytest.raises(RuntimeError, match=rf"answered {status}: to {page}; give the URL of the server")
    with answering(answer) as moved, refused:
        VLLMServer(moved).pause()


def test_a_server_that_does_not_answer_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = VLLMServer(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1)
        with pytest.raises(
            SyncTimeoutError, match=r"/get_world_size took longer than 0.1 s \(raise timeout=\)"
        ):
            server.world_size()


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\n", b"X-More: 1\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_that_comes_in_small_pieces(begin: bytes, piece: bytes) -> None:
    """Each piece comes in time, and the answer does not."""
    began = time.monotonic()
    with answering(begin, piece, stalls=True) as url:
        with pytest.raises(SyncTimeoutError, match=r"/pause\?mode=wait took longer than 0.5 s"):
            VLLMServer(url, timeout=0.5).pause()
        assert time.monotonic() - began < WAIT / 4


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody = f"http://127.0.0.1:{listening.getsockname()[1]}"
    for url in (nobody, "127.0.0.1:8000", "localhost", "http://localhost:port"):
        with pytest.raises(TransportError, match="start it, or give a URL such as http://host:8000"):
            VLLMServer(url).world_size()


@pytest.mark.parametrize(
    "scheme", [MultiProcessWeightSyncScheme("state_dict"), MemoryWeightSyncScheme("state_dict")]
)
def test_schemes_that_other_programs_cannot_join(scheme: WeightSyncScheme) -> None:
    with pytest.raises(LifecycleError, match="not a sender yet"):
        init_info(scheme)
    with scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(TypeError, match=f"workers cannot join {type(scheme).__name__}: .* use SharedMem"):
            init_info(scheme)


def test_connect_servers_needs_servers() -> None:
    with SharedMemWeightSyncScheme("state_dict") as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(ValueError, match=r"no server; give connect_servers\(scheme, VLLMServer\(url\)\)"):
            connect_servers(scheme)
        with pytest.raises(TypeError, match=r"give VLLMServer\(url\), not 'http://10.0.0.6:8000'"):
            connect_servers(scheme, "http://10.0.0.6:8000")  # type: ignore[arg-type]


def test_the_next_send_after_a_server_refused_its_workers() -> None:
    def answer(path: str) -> tuple[int, bytes]:
        return 500 if path == "/init_weight_transfer_engine" else 200, b'{"world_size": 1}'

    with serving(answer) as url, SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
            connect_servers(scheme, VLLMServer(url))
        with pytest.raises(SyncFailedError, match="worker 0: it is not connected; has it called connect"):
            scheme.send()


def test_an_interrupt_while_a_server_has_its_workers_join() -> None:
    joining, ended = threading.Event(), threading.Event()

    def answer(path: str) -> tuple[int, bytes]:
        if path == "/init_weight_transfer_engine":
            joining.set()
            ended.wait(WAIT)
        return 200, b'{"world_size": 1}'

    def interrupt() -> None:
        joining.wait(WAIT)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with serving(answer) as url, SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            connect_servers(scheme, VLLMServer(url))
        assert time.monotonic() - began < WAIT / 2
        interrupting.join(WAIT)
        ended.set()


def test_a_session_that_an_earlier_trainer_left_open() -> None:
    """The update fails, and the next one does not."""

    class Client:
        def __init__(self) -> None:
            self.active = True

        def start_weight_update(self) -> None:
            if self.active:
                raise RuntimeError("a weight update is already active. Call finish_weight_update first.")
            self.active = True

        def update_weights(self, update_info: dict[str, Any]) -> None:
            assert update_info == {"version": 3}

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.active = False

    client = Client()
    with pytest.raises(RuntimeError, match="already active"):
        update_in_session(client, 3)
    update_in_session(client, 3)


@pytest.mark.parametrize("timeout", [0, float("nan"), float("inf"), -1.0])
def test_a_timeout_that_is_no_time(timeout: float) -> None:
    for make in (VLLMServer, SGLangServer):
        with pytest.raises(ValueError, match="timeout is a positive number of seconds"):
            make("http://127.0.0.1:1", timeout=timeout)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the trainer's side, with stand-ins for the classes of vLLM that it derives from."""
    kind = TypeVar("kind")

    @dataclass
    class InitInfo:
        is_sender: bool = True

    class Engine(Generic[kind]):
        """Stand for ``TrainerWeightTransferEngine``."""

    registered = SimpleNamespace(_registry={"weight_update": None})
    package = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed", package):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base, factory = ModuleType(f"{package}.base"), ModuleType(f"{package}.factory")
    vars(base).update(TrainerInitInfo=InitInfo, TrainerWeightTransferEngine=Engine)
    vars(base).update(VLLMWeightSyncClient=object, WeightSource=object)
    vars(factory).update(WeightTransferEngineFactory=registered, WeightTransferTrainerFactory=registered)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    ours = "weight_update.serving.vllm.trainer"
    monkeypatch.setitem(sys.modules, ours, ModuleType(ours))  # both are restored afterwards
    monkeypatch.setattr(importlib.import_module("weight_update.serving.vllm"), "trainer", None, raising=False)
    del sys.modules[ours]
    return importlib.import_module(ours)


@pytest.mark.parametrize("world_size", [0, "2", 2.5])
def test_a_world_size_that_is_no_number_of_workers(trainer: Any, world_size: Any) -> None:
    with pytest.raises(ValueError, match=f"world_size is the number .* plus one, not {world_size!r}"):
        trainer.TrainerInitInfo(world_size=world_size).make_scheme()


def test_a_trainer_that_is_given_no_scheme(trainer: Any) -> None:
    with pytest.raises(TypeError, match=r"scheme such as SharedMemWeightSyncScheme\(\.\.\.\), not 'shared'"):
        trainer.TrainerInitInfo(scheme="shared").make_scheme()
