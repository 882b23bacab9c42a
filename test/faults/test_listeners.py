"""A flood of strangers costs a listener little, and excludes no process that knows the token."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults_tools import WAIT, eventually
from torch import nn

from weight_update import (
    ExplorerClient,
    SharedMemWeightSyncScheme,
    Synchronizer,
    WeightChunk,
)
from weight_update.errors import TransportError
from weight_update.testing.workers import RemoteObject
from weight_update.wire.frames import Kind


class Host(ABC):
    """A listening process, as seen by the test."""

    def __init__(self) -> None:
        self._calls = RemoteObject(lambda: self)
        self.process = self._calls.runner
        self.address, self.token = self._calls.call("listen")

    @abstractmethod
    def listen(self) -> tuple[str, str]:
        """Start to listen, in the process; return address and token."""

    @abstractmethod
    def connect(self) -> socket.socket:
        """Connect as a stranger."""

    @abstractmethod
    def join(self, index: int, timeout: float = WAIT) -> None:
        """Join with the token; raise an exception if that fails."""

    def call(self, function: Any, *args: Any) -> Any:
        return self._calls.call("run", function, *args)

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def end(self) -> None:  # noqa: B027 - it need not be overridden
        """Do nothing; the process ends."""

    def close(self) -> None:
        self._calls.runner.kill()
        self._calls.stop()


class Trainer(Host):
    def listen(self) -> tuple[str, str]:
        self.scheme = SharedMemWeightSyncScheme(timeout=WAIT, connect_timeout=WAIT)
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 7.0)
        self.scheme.init_on_sender(model=model, num_workers=1)
        threading.Thread(target=self.scheme.connect, daemon=True).start()
        return self.scheme.address, self.scheme.token

    def connect(self) -> socket.socket:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.setblocking(False)
        assert eventually(lambda: stranger.connect_ex(self.address) == 0, 5.0), "nobody accepts any more"
        stranger.settimeout(WAIT)
        return stranger

    def join(self, index: int, timeout: float = WAIT) -> None:
        model = nn.Linear(2, 2)
        scheme = SharedMemWeightSyncScheme(address=self.address, token=self.token)
        with scheme:
            scheme.init_on_receiver(model=model, worker_idx=index)
            scheme.connect(timeout=timeout)
            assert model.weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]


class Service(Host):
    def listen(self) -> tuple[str, str]:
        self.synchronizer = Synchronizer("memory", "trainer_driven", lease=WAIT)
        server = self.synchronizer.serve()
        return server.address, server.token

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), WAIT)

    def join(self, index: int, timeout: float = WAIT) -> None:
        with ExplorerClient(self.address, nn.Linear(2, 2), token=self.token, timeout=timeout) as client:
            assert client.blocking.latest_version() is None


@pytest.fixture(params=[Trainer, Service])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = request.param()
    host.join(0)
    yield host
    host.close()


# -- what is asked of a host -------------------------------------------------------------------------


def spare_descriptors(count: int) -> None:
    """Limit the number of further files that the process may open."""
    limit = len(os.listdir("/proc/self/fd")) + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def spare_memory(megabytes: int | None) -> None:
    """Limit the process to that much more of a resource; None removes the limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = -1 if megabytes is None else pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))


def most_memory() -> int:
    """Return the peak memory of the process in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def threads() -> int:
    """Return the number of threads of the process, which may have no descriptor left to list them."""
    return os.stat("/proc/self/task").st_nlink - 2


# -- strangers ---------------------------------------------------------------------------------------


def test_idle_connections_and_few_descriptors(host: Host) -> None:
    host.call(spare_descriptors, 40)
    before = host.call(threads)
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(host.connect())
        host.join(1)
        assert host.call(threads) <= before + 4  # those of one more worker
    host.join(2)


def test_long_headers_of_strangers(host: Host) -> None:
    before = host.call(most_memory)
    frame = WeightChunk(Kind.GOODBYE, {}).encode()
    head = frame[:8] + (64 << 20).to_bytes(4, "little") + frame[12:28]
    with ExitStack() as stack:
        for _ in range(4):
            stranger = stack.enter_context(host.connect())
            stranger.settimeout(1.0)
            with contextlib.suppress(OSError):
                stranger.sendall(head + bytes(32 << 20))
        host.join(1)
    assert host.call(most_memory) < before + 16


def test_no_memory_for_threads(host: Host) -> None:
    host.call(spare_memory, 2)
    errors: list[Exception] = []

    def join() -> None:
        try:
            host.join(1)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    joining = threading.Thread(target=join)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(host.connect())
        joining.start()
        time.sleep(0.3)
        host.call(spare_memory, None)
        joining.join()
    assert all(isinstance(error, TransportError) for error in errors), errors
    host.join(1)
    host.join(2)


# -- a listener that does not answer -----------------------------------------------------------------
