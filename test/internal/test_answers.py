"""Answers that the thread which waits for them reads, while signal handlers raise in it."""

from __future__ import annotations

import functools
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from faults_tools import Processes, Stripes, Worker, eventually, fill, leave
from marks import random_interrupts
from pairs import connect_pair
from torch import nn

from weight_update import SharedMemWeightSyncScheme, WeightStrategy, WeightSyncScheme
from weight_update.sender.buffers import ChunkedUpdate, VersionId
from weight_update.sender.sender import Sender
from weight_update.sender.workers import WorkerState
from weight_update.transports.shared_memory.slots import SlotTable
from weight_update.transports.shared_memory.transport import SlotStream
from weight_update.transports.socket_stream import SocketStream
from weight_update.wire.frames import Kind, WeightChunk

# The other method has its alarm on the timer that sends signals here.
pytestmark = [pytest.mark.timeout(120, method="thread"), random_interrupts]
PROMPT = 15.0
"""Seconds: more than any call here takes on a busy machine, and fewer than a timeout of the library."""
UPDATES = 300


def two_layers() -> Stripes:
    return Stripes(2, 64)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def version_of(me: Worker) -> int | None:
    version: int | None = me.scheme.version
    return version


def interrupted_update(scheme: WeightSyncScheme, model: nn.Module, rng: random.Random) -> bool:
    """Send an update; return whether the wait for it was interrupted."""
    handle = scheme.send_async(model)
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
        handle.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)  # or it came already
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("reads", [True, False])
def test_interrupts_while_the_trainer_waits(reads: bool) -> None:
    """If the trainer does not read all answers itself, it waits for threads that do."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, interrupted = random.Random(seed), 0
    with closing(Processes()) as processes:
        scheme, model = processes.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), two_layers()
        workers = processes.launch(scheme, model, two_layers, 2)
        sender = scheme._require_sender().sender
        for version in range(1, UPDATES):
            update = functools.partial(interrupted_update, scheme, fill(model, version), rng)
            interrupted += sender.attend(update) if reads else update()
        assert interrupted > UPDATES // 10
        assert scheme.send(fill(model, UPDATES)).version == UPDATES
        assert [worker.call(version_of) for worker in workers] == [UPDATES, UPDATES]
        workers[0].call(leave, timeout=PROMPT)
        assert eventually(lambda: scheme.worker_versions[0] is None), "nobody reads what this worker sends"


def test_an_answer_that_a_thread_takes_just_before_the_caller() -> None:
    """A worker that is done when the caller is about to read is not waited for."""
    with closing(Processes()) as processes:
        scheme, model = processes.scheme(SharedMemWeightSyncScheme, timeout=PROMPT), two_layers()
        processes.launch(scheme, model, two_layers, 2)
        sender, asked = scheme._require_sender().sender, set[int]()
        assert isinstance(sender, Sender)

        def done(worker: WorkerState) -> bool:
            """Return False at first, as if the answer came a moment later."""
            known = worker.idx in asked
            asked.add(worker.idx)
            return known

        assert eventually(scheme.send_async(fill(model, 1)).done)
        start = time.monotonic()
        sender.reader.read(sender.table.known([0, 1]), done, start + PROMPT)
        assert asked == {0, 1}
        assert time.monotonic() - start < PROMPT / 2


class Interrupting(set[int]):
    """A set to which a signal handler lets nothing be added without an interrupt."""

    def add(self, item: int) -> None:
        super().add(item)
        raise KeyboardInterrupt


def test_an_interrupt_where_a_wait_begins() -> None:
    """Afterwards, the threads of workers read what arrives while nobody waits."""
    scheme, model = SharedMemWeightSyncScheme(timeout=PROMPT), nn.Linear(2, 2)
    with scheme, connect_pair(scheme, model, nn.Linear(2, 2)):
        sender = scheme._require_sender().sender
        assert isinstance(sender, Sender)
        sender.reader._attending = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            scheme.send()
        sender.reader._attending = set(sender.reader._attending)
        handle = scheme.send_async()
        assert eventually(handle.done)


TIMES = {"apply_seconds": 0.0, "stall_seconds": 0.0}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(Kind.TAKEN, {"index": 9}), (Kind.STAGED, {}), (Kind.APPLIED, TIMES)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_late_answer_to_an_earlier_version_frees_no_chunk(kind: Kind, fields: dict[str, Any]) -> None:
    """The memory of a chunk is written again once every worker has read it."""
    scheme = SharedMemWeightSyncScheme(WeightStrategy(encoding="bucket"), timeout=PROMPT)
    with scheme, connect_pair(scheme, nn.Linear(2, 2), nn.Linear(2, 2)):
        sender = scheme._require_sender().sender
        assert isinstance(sender, Sender)
        worker, use = sender.table[0], sender._pool.take(64)
        with sender.table.lock:
            slot = use.slot
            worker.inflight = ChunkedUpdate(VersionId(5), [], [use])
            del use
            sender._answers._handle(worker, WeightChunk(kind, {"version": 4, **fields}))
            assert slot.in_use
            sender._answers._handle(worker, WeightChunk(kind, {"version": 5, **fields}))
            assert not slot.in_use
            worker.inflight = None


def test_a_thread_that_waits_no_more_ends_only_its_own_pause() -> None:
    """A connection that is lost keeps its descriptor for another thread that still polls it."""
    ours, theirs = socket.socketpair()
    stream = SlotStream(SocketStream(ours), SlotTable(), "", lambda: None)
    stream.wait(0.0)
    with theirs, ThreadPoolExecutor(1) as other:
        descriptor = stream.pause()
        other.submit(stream.pause).result()
        other.submit(stream.resume).result()
        stream.close()
        assert ours.fileno() == descriptor
        stream.resume()
        assert ours.fileno() == -1
