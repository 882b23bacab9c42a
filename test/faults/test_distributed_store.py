"""Whatever strangers write into the store: workers join, and connections to other hosts go on."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from faults_tools import Crew, Remote, Stripes, assert_whole, compute, end_compute, eventually, fill, join
from torch.distributed import TCPStore

from weight_update import DistributedWeightSyncScheme, WeightChunk
from weight_update.chunks import Kind

SHAPE = (8, 4096)  # more than what travels with a signal


def make_here() -> Stripes:
    return Stripes(*SHAPE)


def make_elsewhere() -> Stripes:
    os.environ["WEIGHT_UPDATE_HOST"] = f"host of {os.getpid()}"
    return Stripes(*SHAPE)


class Training:
    """A trainer with a worker on another host, into which updates flow."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.model = crew, make_here()
        self.scheme = crew.scheme(DistributedWeightSyncScheme, timeout=10.0)
        self.scheme.init_on_sender(model=self.model, num_workers=1)
        self.far = self.start(0, make_elsewhere)
        self.scheme.connect(timeout=20.0)
        self.far.result()
        self.far.call(compute)

    def start(self, idx: int, make_model: Callable[[], Stripes]) -> Remote:
        worker = self.crew.start(self.scheme, idx, make_model)
        worker.begin(join)
        return worker

    def send(self) -> None:
        """Send an update, which all workers apply."""
        self.scheme.send(fill(self.model, (self.scheme.version or 0) + 1))

    def goes_on(self) -> None:
        """Check that updates arrive, and that workers join on this host and on others."""
        self.send()
        late = [self.start(idx, make) for idx, make in ((1, make_here), (2, make_elsewhere))]
        for worker in late:
            worker.result()
        self.send()
        for worker in late:
            worker.kill()
        assert eventually(lambda: set(self.scheme.worker_versions) == {0})
        self.send()
        assert_whole(self.far.call(end_compute))
        self.far.call(compute)


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child forked after OpenMP ran hangs in its own parallel loops
    with closing(Crew()) as crew:
        yield Training(crew)
    torch.set_num_threads(threads)


def stranger_of(training: Training) -> TCPStore:
    """Return a client of somebody who reaches the port and speaks the protocol."""
    return TCPStore("127.0.0.1", training.scheme.port, is_master=False, wait_for_workers=False)


def join_request(link: str) -> bytes:
    """Return a join request that nobody signed."""
    header = {"token": "", "worker": 0, "pid": 1, "version": None, "schema": None, "error": None}
    info = json.dumps({"link": link, "host": "h"}).encode()
    return bytes(25) + struct.pack("<I", len(info)) + info + WeightChunk(Kind.HELLO, header).encode()


@pytest.mark.parametrize("link", ["x" * 9000, "x" * 100, "", "../door"], ids=["long", "odd", "empty", "path"])
def test_a_join_request_with_a_forged_name(training: Training, caplog, link: str) -> None:
    with caplog.at_level(logging.WARNING):
        stranger_of(training).queue_push("door", join_request(link))
        assert eventually(lambda: "refused a connection: wrong token" in caplog.text, 5.0)
    training.goes_on()


@pytest.mark.parametrize("way", ["set", "add", "append"])
def test_the_join_queue_becomes_a_key(training: Training, way: str) -> None:
    stranger = stranger_of(training)
    if way == "add":
        stranger.add("door", 1)
    else:
        getattr(stranger, way)("door", "x")
    training.goes_on()
