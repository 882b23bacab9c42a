"""Object stores that fail, or are away for a while."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine_parts import Notebook
from object_store_parts import TOKEN, Ends, Faults, FaultyFileSystem, Scheme, arrives, frames, refusing
from torch import nn

from weight_update import BucketEncoding, SyncFailedError, SyncTimeoutError, WeightStrategy
from weight_update.testing import mlp, scramble
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import wait_until
from weight_update.transports.object_store import publisher
from weight_update.transports.object_store.manifest import read_manifest
from weight_update.transports.object_store.store import ObjectStore
from weight_update.wire.frames import Kind, WeightChunk


def test_a_store_that_cannot_be_written(ends: Ends, faults: Faults) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"))
    reader = ends.reader(model)
    faults(refusing("write", PermissionError("no")))
    scramble(source, 3)
    with pytest.raises(SyncFailedError, match=r"cannot write faulty:.*: PermissionError: no"):
        sender.send()
    assert reader.version == 0
    faults()
    arrives(reader, 1)  # the sender tries again by itself
    assert fingerprint(model) == fingerprint(source)
    assert sender.send().version == 2


def test_without_threads_for_a_moment_both_ends_go_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the limit of the processes of a user or of a container."""
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 1.0)
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)
    start, unread = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "weight_update-object-store":
            if threading.current_thread().name == "weight_update-receiver-0":
                unread.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    scramble(source, 3)
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(SyncFailedError, match=r"cannot write .*: can't start new thread"):
                sender.send()
            assert unread.wait(10)
        arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)
    assert sender.send().version == 2
    assert caplog.text.count("the weights are not updated now: cannot read") == 1


def test_a_write_that_the_disk_cuts_off_leaves_nothing(
    ends: Ends, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a frame would take up the last space of a full disk, and each retry would leave another."""
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 30.0)  # no retry before the files are compared
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)
    before = files_in(url)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # fewer bytes than a frame has
    try:
        scramble(source, 3)
        with pytest.raises(SyncFailedError, match=r"cannot write .*/000000000001-.*File too large"):
            sender.send()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(url) == before
    assert reader.version == 0


def test_the_objects_of_a_frame_that_was_cut_off_are_removed_before_the_next_attempt(
    ends: Ends, url: str, faults: Faults, small_pieces: int
) -> None:
    """Otherwise the attempts would fill a disk, and fail even when there is room for a version again."""
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    sender, reader = ends.sender(source), ends.reader(model)
    before = files_in(url)
    faults(refusing("write", OSError(errno.ENOSPC, "No space left on device"), part=".frame.9"))
    scramble(source, 3)
    with pytest.raises(SyncFailedError, match="No space left on device"):
        sender.send()
    left = files_in(url).keys() - before.keys()
    assert left
    wait_until(lambda: left.isdisjoint(files_in(url)))
    assert before.items() <= files_in(url).items()
    faults()
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def files_in(url: str) -> dict[str, bytes]:
    """Return the files below a directory, by name."""
    found = {}
    for path in filter(Path.is_file, Path(url).rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it is removed meanwhile
            found[str(path)] = path.read_bytes()
    return found


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("no"), "PermissionError: no"),
        (NotImplementedError(), "fsspec only reads such URLs; give the trainer one that it can write"),
    ],
    ids=["not allowed", "only readers can use it"],
)
def test_a_sender_that_cannot_connect(ends: Ends, faults: Faults, error: Exception, message: str) -> None:
    faults(refusing("write", error))
    sender = ends.sender(mlp(1), connect=False)
    for _ in range(2):
        with pytest.raises(SyncFailedError, match=f"cannot write faulty:.*: {message}"):
            sender.connect(timeout=5.0)
    faults()
    sender.connect(timeout=10.0)
    ends.reader(mlp(2))


def test_a_restarted_trainer_whose_first_manifest_could_not_be_written(ends: Ends, faults: Faults) -> None:
    ends.sender(mlp(1)).shutdown()
    source, model = mlp(2), mlp(3)
    faults(refusing("write", PermissionError("no"), part="/manifest-"))
    second = ends.sender(source, connect=False)
    with pytest.raises(SyncFailedError, match=r"cannot write faulty:.*: PermissionError: no"):
        second.connect(timeout=5.0)
    faults()
    second.connect(timeout=10.0)  # it takes the manifest of the first trainer for no other sender's
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


WELCOME = {"schema": {}, "strategy": "", "keep": True, "version": None, "digests": None}


def joined(url: str) -> tuple[ObjectStore, publisher.ObjectStorePublisher]:
    """Return a store, and a sender's link that it has joined."""
    store = ObjectStore(url, {}, 10.0)
    link = publisher.ObjectStorePublisher(store, TOKEN, 8)
    assert link.recv_chunk(0.0) is not None
    return store, link


def test_the_error_of_a_store_that_is_late_is_not_its_own_cause(url: str) -> None:
    store, link = joined(url)
    late = SyncTimeoutError("late")
    with mock.patch.object(store, "read", side_effect=late), pytest.raises(SyncTimeoutError) as caught:
        link.send_chunk(WeightChunk(Kind.WELCOME, WELCOME))
    assert caught.value is late
    assert caught.value.__cause__ is None


def test_changes_that_were_staged_before_the_store_joined_again_are_not_published(url: str) -> None:
    """They would be the first version of the manifest, which has all weights."""
    store, link = joined(url)
    header = {"schema": "", "encoding": "", "index": 0, "count": 1, "group": None, "extra": {}}
    payload = torch.zeros(8, dtype=torch.uint8)
    for kind, fields in (
        (Kind.WELCOME, WELCOME),
        (Kind.UPDATE, {**header, "version": 1, "base": None, "commit": True}),
        (Kind.UPDATE, {**header, "version": 2, "base": 1, "commit": False}),
        (Kind.WELCOME, WELCOME),
        (Kind.COMMIT, {"version": 2}),
    ):
        link.send_chunk(WeightChunk(kind, fields, payload if kind is Kind.UPDATE else None))
    manifest = read_manifest(store, TOKEN, None)
    assert manifest.newest == 1
    store.close()


def test_a_frame_that_stays_damaged_is_not_read_all_the_time(
    ends: Ends, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """The first frames of its version are read again each time."""
    source = mlp(1)
    sender = ends.sender(source, strategy=WeightStrategy(encoding=BucketEncoding(bucket_size=256)))
    reader = ends.reader(mlp(2), poll_seconds=0.005)
    reads: list[str] = []

    def lose_the_second(verb: str, path: str) -> None:
        if verb == "read" and "/000000000001-" in path:
            reads.append(path)
            if path != reads[0]:
                raise ConnectionResetError("away")

    faults(lose_the_second)
    with caplog.at_level(logging.WARNING):
        sender.send()
        wait_until(lambda: len(reads) > 1)
        time.sleep(0.5)
    assert len(reads) < 20
    assert caplog.text.count("the weights are not updated now") == 1
    faults()
    arrives(reader, 1)


def test_a_reader_without_memory_does_not_look_all_the_time(ends: Ends, faults: Faults) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model, poll_seconds=0.2)
    scramble(source, 3)
    reads: list[str] = []
    with mock.patch.object(reader._receiver.staging, "allocate", side_effect=MemoryError("none is left")):
        sender.send()
        faults(lambda verb, path: reads.append(path))
        wait_until(lambda: reads)
        time.sleep(0.5)
    assert len(reads) < 25
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_a_bucket_that_does_not_exist_is_not_made(
    ends: Ends, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyFileSystem, "async_impl", True)
    with pytest.raises(SyncFailedError, match=r"cannot write faulty:.*No such file"):
        ends.sender(mlp(1))
    assert not Path(url).exists()


def test_an_empty_object_of_which_a_store_reads_no_range(ends: Ends, url: str, faults: Faults) -> None:
    sender = ends.sender(mlp(1))
    (Path(url) / "latest.json").write_bytes(b"")

    def refuse(verb: str, path: str) -> None:
        if verb == "read" and Path(path).stat().st_size == 0:
            raise OSError("the requested range is not satisfiable")

    faults(refuse)
    with pytest.raises(SyncTimeoutError, match=r"latest.json is not a manifest"):
        ends.reader(mlp(2), connect_timeout=0.5)
    assert sender.send().version == 1


def test_a_version_that_an_engine_got_a_part_of_is_not_read_all_the_time(ends: Ends, faults: Faults) -> None:
    source, engine = mlp(1), Notebook(in_chunks=True)
    encoding = BucketEncoding(bucket_size=256)
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding=encoding))
    reader = ends.reader(engine, strategy="state_dict")
    there: set[str] = set()

    def refuse(verb: str, path: str) -> None:
        if verb == "read" and "/000000000001-" in path and path not in there:
            if there:
                raise ConnectionResetError("away")
            there.add(path)

    faults(refuse)
    scramble(source, 3)
    sender.send()
    wait_until(lambda: ("begin", 1) in engine.calls)
    time.sleep(0.5)
    assert engine.calls.count(("begin", 1)) < 10
    faults()
    arrives(reader, 1)
    assert fingerprint(engine.loaded) == fingerprint(source)


def test_a_reader_outlives_a_store_that_is_away(
    ends: Ends, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)

    def refuse(verb: str, path: str) -> None:
        if verb == "read" and threading.current_thread().name == "weight_update-object-store":
            raise ConnectionResetError("away")

    with caplog.at_level(logging.WARNING):
        faults(refuse)
        assert reader.receive(timeout=0.5) is None
        faults()
        scramble(source, 3)
        sender.send()
        arrives(reader, 1)
    assert caplog.text.count("the weights are not updated now: cannot read") == 1


def test_old_versions_that_cannot_be_removed(
    ends: Ends, url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    ends.sender(mlp(1)).shutdown()
    faults(refusing("list", PermissionError("no")))
    with caplog.at_level(logging.WARNING):
        sender = ends.sender(mlp(1))
        of_the_first = set(frames(url)) - set(own_frames(sender, url))
        assert sender.send().version == 2
    stay = "versions of earlier senders stay in the store until the next sender connects: cannot list"
    assert stay in caplog.text
    assert "old versions could not be removed yet: cannot list" in caplog.text
    faults()
    sender.send()
    sender.shutdown()
    assert of_the_first
    assert of_the_first <= set(frames(url))
    ends.sender(mlp(1))
    wait_until(lambda: of_the_first.isdisjoint(frames(url)))


def own_frames(sender: Scheme, url: str) -> list[Path]:
    """Return the frames that a sender has written into a directory."""
    run = sender._sender.table[0].link._run  # type: ignore[union-attr]
    return [frame for frame in frames(url) if frame.parent.name == run]
