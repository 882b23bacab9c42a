"""A program that is written from the manual alone reads what the library sends."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_parts import Frame, Reader, make_frame, read_frame, read_head
from marks import quick_for, slow
from torch import nn
from torch.distributed import TCPStore

from weight_update import (
    BucketEncoding,
    DistributedWeightSyncScheme,
    Encoding,
    ObjectStoreWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)

TOKEN = "secret"


class Mixed(nn.Module):
    """Tensors of several widths and shapes, two of them tied."""

    def __init__(self, size: int = 40) -> None:
        super().__init__()
        self.one = nn.Linear(size, 300, dtype=torch.bfloat16)
        self.cube = nn.Parameter(torch.randn(3, 4, 5))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.pair = nn.Parameter(torch.randn(2, 3, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.randn(()))
        self.again = self.cube
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def change(model: nn.Module) -> None:
    """Change every seventh element of each tensor."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.view(-1)[::7] += 1


def assert_equal(
    found: dict[str, torch.Tensor], model: nn.Module, sent_as: torch.dtype | None = None
) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        narrow = value.to(sent_as) if sent_as is not None and value.is_floating_point() else value
        assert found[name].dtype == value.dtype
        assert found[name].tolist() == narrow.to(value.dtype).tolist(), name


ENCODINGS: dict[str, Callable[[], Encoding | str]] = {
    "dense": lambda: "dense",
    "bucket": lambda: BucketEncoding(bucket_size=1 << 12),
    "bucket-bf16": lambda: BucketEncoding(bucket_size=1 << 12, bucket_dtype="bf16"),
    **{
        f"{layout}-{delta}-{values}-{compression}": partial(
            PatchEncoding, layout=layout, delta_encoding=delta, values=values, compression=compression
        )
        for layout in ("flat", "coo")
        for delta in (True, False)
        for values in ("raw", "relative")
        for compression in ("none", "zstd", "lz4", "ans")
    },
}


def stored(store: Path, frame: Mapping[str, Any]) -> bytes:
    """Return a frame of an object store, whose objects have 16 MiB, or fewer bytes if they are the last."""
    count = -(-frame["nbytes"] // (16 << 20))
    names = [frame["name"], *(f"{frame['name']}.{i}" for i in range(1, count))]
    objects = [(store / name).read_bytes() for name in names]
    assert [len(one) for one in objects[:-1]] == [16 << 20] * (count - 1)
    digests = b"".join(hashlib.sha256(one).digest() for one in objects)
    assert hashlib.sha256(digests).hexdigest() == frame["sha256"]
    assert sum(map(len, objects)) == frame["nbytes"]
    return b"".join(objects)


@pytest.mark.parametrize(
    "encoding",
    quick_for(ENCODINGS, "dense", "bucket", "bucket-bf16", "flat-True-relative-ans", "coo-True-raw-zstd"),
)
def test_the_frames_of_an_object_store_are_read(encoding: str, tmp_path: Path) -> None:
    for name, package in (("zstd", "zstandard"), ("lz4", "lz4")):
        if name in encoding:
            pytest.importorskip(package)
    model = Mixed()
    strategy = WeightStrategy("state_dict", encoding=ENCODINGS[encoding]())
    with ObjectStoreWeightSyncScheme(str(tmp_path), strategy, token=TOKEN) as scheme:
        scheme.init_on_sender(model=model)
        scheme.connect()
        reader: Reader | None = None
        for _ in range(3):
            manifest = json.loads(json.loads((tmp_path / "latest.json").read_bytes())["manifest"])
            if reader is None:
                reader = Reader(read_frame(stored(tmp_path, manifest["welcome"])))
            for frame in manifest["chain"][-1]["frames"]:
                raw = stored(tmp_path, frame)
                reader.take(read_frame(raw))
            assert_equal(reader.weights(), model, torch.bfloat16 if encoding == "bucket-bf16" else None)
            change(model)
            scheme.send()
    assert reader is not None
    assert encoding.count("-") < 3 or f"{encoding.rpartition('-')[2]}/1".encode() in raw  # the compression
    wire = {"dense": "dense/1", "bucket": "bucket/1"}
    assert reader.encodings[1:] == [wire.get(encoding.partition("-")[0], "patch/1")] * 2


def test_a_frame_of_an_object_store_lies_in_several_objects(tmp_path: Path) -> None:
    model = nn.Linear(3000, 3000)
    with ObjectStoreWeightSyncScheme(str(tmp_path), token=TOKEN) as scheme:
        scheme.init_on_sender(model=model)
        scheme.connect()
    manifest = json.loads(json.loads((tmp_path / "latest.json").read_bytes())["manifest"])
    reader = Reader(read_frame(stored(tmp_path, manifest["welcome"])))
    ((frame,),) = (version["frames"] for version in manifest["chain"])
    reader.take(read_frame(stored(tmp_path, frame)))
    assert len(list(tmp_path.glob(f"{frame['name']}.*"))) == 2
    assert torch.equal(reader.weights()["weight"], model.weight.detach())


# -- workers ---------------------------------------------------------------------------------------


def proof(role: bytes, context: bytes) -> bytes:
    return hmac.new(TOKEN.encode(), b"weight_update handshake" + role + context, hashlib.sha256).digest()


class Connection:
    """A connection to the sender, from the handshake on."""

    def __init__(self, connected: socket.socket, context: str) -> None:
        self._socket = connected
        connected.settimeout(20.0)
        self.descriptors: list[int] = []
        magic, status, theirs = struct.unpack("<4sB32s", self.read(37))
        assert (magic, status) == (b"WUH1", 0)
        mine = os.urandom(32)
        said = theirs + mine + context.encode()
        self.write(b"WUH1" + mine + proof(b"C", said))
        assert self.read(37) == b"WUH1\0" + proof(b"L", said)
        self._key, self._sent, self._received = proof(b"K", said), 0, 0

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more, descriptors, _, _ = socket.recv_fds(self._socket, size - len(data), 1)
            if not more:
                raise ConnectionError("the other end closed the connection")
            data += more
            self.descriptors += descriptors
        return data

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _sign(self, role: bytes, number: int, body: bytes) -> bytes:
        return hmac.new(self._key, role + struct.pack("<Q", number) + body, hashlib.sha256).digest()

    def send(self, body: bytes) -> None:
        self.write(struct.pack("<I", len(body)) + self._sign(b"C", self._sent, body) + body)
        self._sent += 1

    def receive(self) -> bytes:
        (size,) = struct.unpack("<I", self.read(4))
        shown, body = self.read(32), self.read(size)
        assert shown == self._sign(b"L", self._received, body)
        self._received += 1
        return body

    def receive_payload(self, size: int) -> tuple[bytes, str]:
        """Return the payload that follows, and its checksum."""
        payload, sums = self.read(size), b""
        for start in range(0, size, 4 << 20):
            block = payload[start : start + (4 << 20)]
            words = np.frombuffer(block + bytes(-len(block) % 2048), "<u8").reshape(-1, 256)
            sums += words.sum(0, dtype=np.uint64).tobytes()
        return payload, hashlib.blake2b(sums, digest_size=16).hexdigest()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Worker(ABC):
    """A worker of the sender that listens at ``connection``."""

    def __init__(self, connection: Connection) -> None:
        self.frames = connection
        hello = {"token": "", "worker": 0, "pid": os.getpid(), "version": None, "schema": None, "error": None}
        self.answer("HELLO", **hello)
        welcome = self.next_frame()
        assert welcome.kind == "WELCOME"
        self.reader = Reader(welcome)

    @abstractmethod
    def answer(self, kind: str, **header: Any) -> None: ...

    @abstractmethod
    def next_frame(self) -> Frame: ...

    def take_update(self) -> None:
        while not self.reader.take(update := self.next_frame()):
            self.answer("TAKEN", version=update.header["version"], index=update.header["index"])
        version = update.header["version"]
        self.answer("APPLIED", version=version, apply_seconds=0.1, stall_seconds=0.0)


class LocalWorker(Worker):
    """A worker on the host of the sender."""

    def __init__(self, scheme: SharedMemWeightSyncScheme) -> None:
        assert scheme.address is not None
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(scheme.address)
        self._slots: dict[bytes, int] = {}
        super().__init__(Connection(connected, f"shared memory {scheme.address}"))

    def answer(self, kind: str, **header: Any) -> None:
        self.frames.write(make_frame(kind, **header))

    def next_frame(self) -> Frame:
        head = self.frames.read(28)
        head += self.frames.read(struct.unpack("<I", head[8:12])[0])
        kind, header, nbytes, crc = read_head(head)
        assert not crc
        payload = self._payload(nbytes) if nbytes else b""
        return Frame(kind, header, np.frombuffer(payload, np.uint8))

    def _payload(self, nbytes: int) -> bytes:
        key, what = struct.unpack("<32sB", self.frames.read(33))
        if what == 1:
            self._slots[key] = self.frames.descriptors.pop()
        slot = self._slots[key]
        assert os.pread(slot, 33, os.fstat(slot).st_size - 33) == key + b"\0"
        return os.pread(slot, nbytes, 0)

    def close(self) -> None:
        self.frames.close()
        for slot in self._slots.values():
            os.close(slot)


class RemoteWorker(Worker):
    """A worker on another host, and its host relay, which keeps the payload in this object."""

    def __init__(self, port: int) -> None:
        key = "weight_update/" + proof(b"A", b"rendezvous").hex()
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        found = store.get(key)
        assert found[:32] == proof(b"A", b"rendezvous " + found[32:])
        where = json.loads(found[32:])
        assert "/files of " in where["host"]
        self.ways: list[str] = []
        first, self.payloads = (
            Connection(socket.create_connection(("127.0.0.1", where["port"])), f"sender {where['name']}")
            for _ in range(2)
        )
        first.send(json.dumps({"do": "join", "name": "n", "host": "another host"}).encode())
        super().__init__(first)
        request = {"do": "take payloads", "name": "n", "connection": 0}
        self.payloads.send(json.dumps(request).encode())
        assert json.loads(self.payloads.receive()) == {"backend": "gloo", "connections": 1}
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def answer(self, kind: str, **header: Any) -> None:
        frame = make_frame(kind, **header)
        self.frames.send(struct.pack("<II", len(frame), 0) + frame)

    def next_frame(self) -> Frame:
        body = self.frames.receive()
        size, where_size = struct.unpack("<II", body[:8])
        if not where_size:
            return read_frame(body[8:])
        kind, header, nbytes, crc = read_head(body[8 : 8 + size])
        location = json.loads(body[8 + size : 8 + size + where_size])
        if location is None:
            payload, total = self.frames.receive_payload(nbytes)
            assert self.frames.receive().decode() == total
            self.ways.append("follows")
        else:
            assert location == [os.getpid(), 5, "k"]
            payload = self._payload
            self.ways.append("relay")
        assert (len(payload), crc) == (nbytes, 0)
        return Frame(kind, header, np.frombuffer(payload, np.uint8))

    def _relay(self) -> None:
        """Do the work of a host relay, as a thread, until the connection ends."""
        with contextlib.suppress(OSError):
            while command := json.loads(self.payloads.receive()):
                assert (command["do"], command["link"], command["onward"]) == ("take", None, False)
                assert command["checksum"] == "lanes256/1"
                self._payload, total = self.payloads.receive_payload(command["nbytes"])
                message = json.loads(self.payloads.receive())
                assert message == {"do": "sum", "number": command["number"], "sum": total}
                self.payloads.send(json.dumps({"fd": 5, "key": "k"}).encode())

    def close(self) -> None:
        self.frames.close()
        self.payloads.close()
        self._thread.join(20.0)


@pytest.mark.parametrize("encoding", ["dense", slow("bucket"), "patch"])
def test_a_worker_on_the_host_of_the_sender_is_written_from_the_manual(encoding: str) -> None:
    model = Mixed()
    strategy = WeightStrategy("state_dict", encoding=encoding)
    with SharedMemWeightSyncScheme(strategy, token=TOKEN, timeout=20.0) as scheme:
        scheme.init_on_sender(model=model, num_workers=1)
        exchange_updates(scheme, model, lambda: LocalWorker(scheme))


def exchange_updates(scheme: WeightSyncScheme, model: nn.Module, join: Callable[[], Any]) -> Any:
    """Connect a worker, and send it changes three times, so that slots are used again; return the worker."""
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(scheme.connect)
        worker = join()
        worker.take_update()
        connecting.result()
    assert_equal(worker.reader.weights(), model)
    for version in (1, 2, 3):
        change(model)
        handle = scheme.send_async()
        worker.take_update()
        assert handle.wait().apply_seconds == {0: 0.1}
        assert_equal(worker.reader.weights(), model)
        assert scheme.worker_versions == {0: version}
    worker.answer("GOODBYE")
    worker.close()
    return worker


@pytest.mark.parametrize(
    ("encoding", "size", "way"),
    [
        ("dense", 8, "inline"),
        slow("patch", 8, "inline"),
        slow("dense", 800, "follows"),
        ("bucket", 800, "follows"),
        slow("dense", 8000, "relay"),
        slow("bucket", 8000, "relay"),
        ("patch", 8000, "relay"),
    ],
)
def test_a_worker_on_another_host_is_written_from_the_manual(encoding: str, size: int, way: str) -> None:
    model = Mixed(size)
    strategy = WeightStrategy("state_dict", encoding=encoding)
    with DistributedWeightSyncScheme(strategy=strategy, token=TOKEN, timeout=20.0) as scheme:
        scheme.init_on_sender(model=model, num_workers=1)
        worker = exchange_updates(scheme, model, lambda: RemoteWorker(scheme.port))
    assert worker.ways[:1] == [way] * (way != "inline")
