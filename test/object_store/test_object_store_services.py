"""Versions that travel by the protocols of Amazon S3 and Google Cloud Storage, spoken by real clients."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import fsspec
import pytest
from object_store_parts import nudge

from weight_update import (
    BucketEncoding,
    ObjectStoreWeightSyncScheme,
    SyncFailedError,
    WeightStrategy,
)
from weight_update.testing import mlp
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import start_workers
from weight_update.transports.object_store import stored_frames

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_S3 = """
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="127.0.0.1", port={port}).start()
"""
_GS = """
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", {port}, in_memory=True).start()
"""
_WAIT = "import time; time.sleep(1000)"
_NEEDED = {"s3": ["s3fs", "moto", "flask"], "gs": ["gcsfs", "gcp_storage_emulator"]}
_INSTALL = {"s3": "s3fs 'moto[server]'", "gs": "gcsfs gcp-storage-emulator"}


class Service(NamedTuple):
    """A server, and how to reach it.

    Attributes:
        protocol: ``"s3"`` or ``"gs"``.
        process: the server's process.
        options: ``storage_options`` for its clients.
    """

    protocol: str
    process: subprocess.Popen[bytes]
    options: dict[str, Any]

    def scheme(self, folder: str, **options: Any) -> ObjectStoreWeightSyncScheme:
        defaults = {"token": "secret", "poll_seconds": 0.05, "timeout": 10.0}
        return ObjectStoreWeightSyncScheme(
            f"{self.protocol}://bucket/{folder}", storage_options=self.options, **{**defaults, **options}
        )


@pytest.fixture(scope="module", params=["s3", "gs"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    protocol = request.param
    if not all(map(importlib.util.find_spec, _NEEDED[protocol])):
        pytest.skip(f"to run it, pip install {_INSTALL[protocol]}")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options: dict[str, Any] = {"endpoint_url": url}
    options |= {"key": "a", "secret": "b"} if protocol == "s3" else {"token": "anon", "project": "p"}
    program = (_S3 if protocol == "s3" else _GS).format(port=port) + _WAIT
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks Google's own servers
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: _listens(port), 60.0)
            fsspec.filesystem(protocol, **options).mkdir("bucket")
            yield Service(protocol, process, options)
        finally:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "encoding", ["dense", BucketEncoding(bucket_size=4096), "patch"], ids=["dense", "buckets", "patch"]
)
def test_versions_arrive_and_old_ones_are_removed(
    service: Service, encoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_frames, "PIECE_BYTES", 3000)
    folder = f"run-{time.time_ns()}"
    source, model, late = mlp(1), mlp(2), mlp(3)
    with (
        service.scheme(folder, strategy=WeightStrategy(encoding=encoding), most_changes=3) as sender,
        service.scheme(folder) as reader,
        service.scheme(folder) as joiner,
    ):
        sender.init_on_sender(model=source)
        sender.connect()
        reader.init_on_receiver(model=model)
        reader.connect()
        for _ in range(10):
            nudge(source)
            version = sender.send().version
            wait_until(lambda expected=version: reader.version == expected)
            assert fingerprint(model) == fingerprint(source)
        joiner.init_on_receiver(model=late)
        joiner.connect()
        assert joiner.version == version
        assert fingerprint(late) == fingerprint(source)
        files = fsspec.filesystem(service.protocol, **service.options)
        files.invalidate_cache()
        held = {int(name.rpartition("/")[2].partition("-")[0]) for name in _frames(files, folder)}
        assert version in held
        assert held <= set(range(version - 7, version + 1))  # two chains of at most four


def _frames(files: Any, folder: str) -> list[str]:
    return [name for name in files.find(f"bucket/{folder}") if "/0000" in name]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_in_processes(service: Service, method: Any) -> None:
    source = mlp(1)
    scheme = service.scheme(f"processes-{method}", strategy=WeightStrategy(encoding="patch"))
    with start_workers(scheme, [mlp(2), mlp(3)], method, model=source) as workers:
        for _ in range(3):
            nudge(source)
            version = scheme.send().version
            wait_until(lambda expected=version: workers.ask("version") == [expected] * 2)
            assert workers.ask("fingerprint") == [fingerprint(source)] * 2


def test_a_server_that_does_not_answer_for_a_while(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    source, model = mlp(1), mlp(2)
    with service.scheme("stopped", timeout=2.0) as sender, service.scheme("stopped", timeout=2.0) as reader:
        sender.init_on_sender(model=source)
        sender.connect()
        reader.init_on_receiver(model=model)
        reader.connect()
        nudge(source)
        service.process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(SyncFailedError, match="within 2 s; raise timeout= if the store is slow"):
                sender.send()
            assert time.monotonic() - began < 8.0
            wait_until(lambda: "could not read" in caplog.text)
        finally:
            service.process.send_signal(signal.SIGCONT)
        version = _sent(sender)
        wait_until(lambda: reader.version == version, 40.0)
        assert fingerprint(model) == fingerprint(source)


def _sent(sender: ObjectStoreWeightSyncScheme) -> int:
    """Send until the store, which joins again after a while, has a new version; return its number."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return sender.send().version
        except SyncFailedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_a_bucket_that_does_not_exist_is_named(service: Service) -> None:
    url = f"{service.protocol}://nowhere/run"
    with ObjectStoreWeightSyncScheme(url, token="secret", storage_options=service.options) as sender:
        sender.init_on_sender(model=mlp(1))
        with pytest.raises(SyncFailedError, match=f"cannot write {url}/.*"):
            sender.connect()
