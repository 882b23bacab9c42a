"""Trainer and worker on one machine: buffers are handed over, kept until they were read, and used again."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import quick_for
from torch import nn

from weight_update import BucketEncoding, SharedMemWeightSyncScheme, WeightStrategy
from weight_update.encodings import bucket
from weight_update.testing import Body, WorkerProcesses, fingerprint, scramble

LAYERS = 12
KINDS: dict[str, WeightStrategy] = {
    "dense": WeightStrategy("state_dict"),
    "buckets, kept": WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=1 << 15, load_instant=False)
    ),
    "buckets": WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=4096)),
    "buckets, two in flight": WeightStrategy(
        "state_dict", encoding=BucketEncoding(bucket_size=4096), max_in_flight=2
    ),
}
SLOTS = {"dense": 2, "buckets, kept": 4, "buckets": 2 * LAYERS, "buckets, two in flight": 2}
KEPT = ["dense", "buckets, kept"]  # weights lie in the slots, nothing is copied

Hire = Callable[..., WorkerProcesses]


def layers() -> nn.Sequential:
    """48 KiB; each weight fills a small bucket."""
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(LAYERS)))


@pytest.fixture
def hire(hired: Hire) -> Hire:
    def build(source: nn.Module, kind: str, workers: int = 1) -> WorkerProcesses:
        scheme = SharedMemWeightSyncScheme(strategy=KINDS[kind], timeout=20.0, connect_timeout=30.0)
        procs = hired(scheme, [layers() for _ in range(workers)], model=source, connect=False)
        procs.ask("run", note_what_was_inherited)
        procs.connect()
        return procs

    return build


def files_of_the_sender(procs: WorkerProcesses) -> dict[str, int]:
    """The inode of each slot, by its key."""
    slots = procs.scheme._sender._pool._slots
    return {slot.buffer.key: os.fstat(slot.buffer.fd).st_ino for slot in slots}


def mapped() -> list[tuple[range, str, int]]:
    """Addresses, key and inode of each slot that this process maps copy-on-write, as receivers do."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if match := re.match(r"(\w+)-(\w+) \S+p \S+ \S+ (\d+) +/memfd:weight_update-(\w+)", line):
                start, stop, inode, key = match.groups()
                if key not in inherited:
                    found.append((range(int(start, 16), int(stop, 16)), key, int(inode)))
    return found


inherited: set[str] = set()


def note_what_was_inherited(body: Body) -> None:
    """A forked worker maps what the test's process had mapped; the slots of its own come later."""
    del body
    inherited.update(key for _, key, _ in mapped())


def files_mapped(body: Body) -> dict[str, int]:
    del body
    return {key: inode for _, key, inode in mapped()}


def slots_with_weights(body: Body) -> set[str]:
    """Keys of the slots that tensors of the model lie in; "" stands for other memory."""
    slots = mapped()
    return {
        next((key for where, key, _ in slots if address in where), "") for address in body.pointers().values()
    }


def read_slowly(body: Body) -> None:
    """From now on a bucket is looked at, and after a while must still be the same, before it is read."""
    del body
    feed = bucket._BucketDecoder.feed

    def slow(self: Any, index: int, payload: torch.Tensor, allocate: Any) -> torch.Tensor:
        before = payload.clone()
        time.sleep(0.003)
        assert torch.equal(before, payload), "the sender wrote into what is being read"
        return feed(self, index, payload, allocate)

    bucket._BucketDecoder.feed = slow


@pytest.mark.parametrize("kind", KEPT)
def test_weights_of_a_worker_lie_in_the_senders_memory(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, kind, workers=2)
    seen = []
    for seed in range(6):
        scramble(source, seed)
        procs.scheme.send()
        files, (first, second) = files_of_the_sender(procs), procs.ask("run", slots_with_weights)
        assert first == second
        assert first <= set(files)
        seen.append(first)
        for there in procs.ask("run", files_mapped):
            assert first <= set(there)
            assert there.items() <= files.items()
    assert all(now.isdisjoint(before) for before, now in itertools.pairwise(seen))
    assert seen[2:] == seen[:-2]  # two sets of slots take turns


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in KEPT])
def test_buckets_that_are_read_leave_no_weights_in_slots(hire: Hire, kind: str) -> None:
    procs = hire(layers(), kind)
    for _ in range(3):
        procs.scheme.send()
        assert procs.ask("run", slots_with_weights) == [{""}]


@pytest.mark.parametrize("kind", quick_for(KINDS, *KEPT, "buckets"))
def test_the_same_slots_serve_fifty_updates(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, kind)
    procs.scheme.send()
    before = files_of_the_sender(procs)
    assert len(before) == SLOTS[kind]
    for seed in range(50):
        scramble(source, seed, finite=True)
        procs.scheme.send()
    assert files_of_the_sender(procs) == before
    (there,) = procs.ask("run", files_mapped)
    assert there.items() <= before.items()
    assert there == before  # none was mapped again
    assert procs.ask("fingerprint") == [fingerprint(source)]


@pytest.mark.parametrize("kind", quick_for(KINDS, *KEPT, "buckets"))
def test_weights_in_use_stay_as_they_are_while_others_are_sent(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, kind, workers=2)
    slow = procs.workers[0]
    held = fingerprint(source)
    slow.call("hold")
    for seed in range(3):
        scramble(source, seed, finite=True)
        handle = procs.scheme.send_async(worker_ids=1 if "flight" in kind else None)
        assert slow.call("fingerprint") == held
    slow.call("release")
    handle.wait()
    procs.scheme.send()
    assert procs.ask("fingerprint") == [fingerprint(source)] * 2
    assert len(files_of_the_sender(procs)) <= 2 * SLOTS[kind]


@pytest.mark.parametrize("kind", quick_for(["buckets", "buckets, two in flight"], "buckets"))
def test_a_bucket_is_not_written_before_it_was_read(hire: Hire, kind: str) -> None:
    source = layers()
    procs = hire(source, kind, workers=2)
    procs.workers[0].call("run", read_slowly)
    for seed in range(15):
        scramble(source, seed, finite=True)
        procs.scheme.send()
        assert procs.ask("fingerprint") == [fingerprint(source)] * 2
    assert len(files_of_the_sender(procs)) <= SLOTS[kind]
