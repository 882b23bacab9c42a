"""Leases: a reader keeps its checkpoint, but only as long as it lives."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from checkpoint_parts import data_files, in_child, same_bits, versions, visible, weights
from marks import slow

from weight_update.checkpoints import lease
from weight_update.synchronizer import CheckpointStore

SHORT = 0.6  # seconds after which a lease counts as dead in these tests


def test_a_version_stays_while_it_is_read(tmp_path: Path) -> None:
    gc.collect()  # errors of other tests may hold weights, and so leases
    writer, reader = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT), CheckpointStore(tmp_path)
    writer.publish(0, weights(0), step=0)
    with reader.reading(0) as tensors:
        for version in (1, 2):
            writer.publish(version, weights(version), step=0)
        assert versions(writer) == [0, 2]
        with CheckpointStore(tmp_path).reading(0) as more:
            assert same_bits(more, tensors)
            assert [thread.name for thread in threading.enumerate()].count("weight_update-lease") == 2
    del tensors, more
    writer.publish(3, weights(3), step=0)
    assert versions(writer) == [3]
    assert data_files(writer) == 1


def test_a_version_stays_while_a_tensor_of_it_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.publish(0, weights(0), step=0)
    with store.reading(0) as tensors:
        kept = tensors.pop("a.weight")[2:]
    del tensors
    store.publish(1, weights(1), step=0)
    assert versions(store) == [0, 1]
    del kept
    store.publish(2, weights(2), step=0)
    assert versions(store) == [2]


def _read_and_hold(directory: Path, pipe: Connection) -> None:
    store = CheckpointStore(directory, lease_seconds=SHORT)
    with store.reading(0) as tensors:
        pipe.send(float(tensors["a.weight"].sum()))
        pipe.recv()


@pytest.mark.parametrize("ending", ["kill", slow("return")])
def test_a_reader_in_another_process(tmp_path: Path, ending: str) -> None:
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT)
    store.publish(0, weights(0), step=0)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_read_and_hold, args=(tmp_path, there), daemon=True)
    process.start()
    try:
        assert here.poll(30)
        here.recv()
        for version in range(1, 3):
            store.publish(version, weights(version), step=0)
            time.sleep(SHORT)
            assert versions(store) == [0, version], "it is alive, so its lease is renewed"
        if ending == "kill":
            process.kill()
        else:
            here.send(None)
        process.join(30)
        assert bool(list(tmp_path.glob("*.lease"))) == (ending == "kill")
        _gone_soon(store, first=3)
    finally:
        process.kill()
        process.join(30)


def _gone_soon(store: CheckpointStore, first: int) -> None:
    deadline = time.monotonic() + 10 * SHORT
    while True:
        store.publish(first, weights(first), step=0)
        if data_files(store) == 1 and not list(store.directory.glob("*.lease")):
            break
        assert time.monotonic() < deadline, visible(store.directory)
        first += 1
        time.sleep(SHORT / 4)


def test_clocks_that_jump_change_nothing(tmp_path: Path) -> None:
    """The times of leases may be anything, on the file server too."""
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT)
    store.publish(0, weights(0), step=0)
    with store.reading(0) as tensors:
        for version, moment in enumerate([0, 4_000_000_000, 1, 2_000_000_000], start=1):
            (lease,) = tmp_path.glob("*.lease")
            os.utime(lease, (moment, moment))
            store.publish(version, weights(version), step=0)
            assert 0 in versions(store)
        assert same_bits(tensors, weights(0))


def test_a_forked_process_does_not_end_the_lease(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.publish(0, weights(0), step=0)
    tensors = {}

    def forget() -> None:
        tensors.clear()

    with store.reading(0) as found:
        tensors.update(found)
        found.clear()
        assert in_child(forget) == 0
        assert len(list(tmp_path.glob("*.lease"))) == 1


def test_a_stopped_reader_loses_only_its_lease(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT)
    store.publish(0, weights(0), step=0)
    with store.reading(0) as tensors:
        (lease,) = tmp_path.glob("*.lease")
        lease.unlink()  # as one does who takes it for dead
        time.sleep(SHORT / 2)
        assert "considered expired, or somebody removed it" in caplog.text
        store.publish(1, weights(1), step=1)
        assert versions(store) == [1]
        assert same_bits(tensors, weights(0)), "what is mapped stays, on one machine"


def _read_all(directory: Path, last: int, pipe: Connection) -> None:
    """Read the newest version until the last one is there; no version may ever look broken."""
    logging.getLogger("weight_update").addHandler(_Refusing())
    store, seen, reads = CheckpointStore(directory), -1, 0
    while seen < last:
        manifest = store.wait_newer(seen, timeout=30)
        try:
            with store.reading(manifest.version) as tensors:
                assert same_bits(tensors, weights(manifest.version))
        except FileNotFoundError:
            continue  # a newer one is there
        assert manifest.version > seen
        seen, reads = manifest.version, reads + 1
    pipe.send(reads)


class _Refusing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


@pytest.mark.slow
def test_readers_in_other_processes_beside_a_fast_writer(tmp_path: Path) -> None:
    context, last = multiprocessing.get_context("fork"), 150
    here, there = multiprocessing.Pipe()
    readers = [context.Process(target=_read_all, args=(tmp_path, last, there), daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    there.close()
    try:
        store = CheckpointStore(tmp_path, keep=1)
        for version in range(last + 1):
            store.publish(version, weights(version), step=0)
        reads = [here.recv() for _ in readers if here.poll(30)]
        assert len(reads) == 3
        assert min(reads) > 3
    finally:
        for reader in readers:
            reader.kill()
            reader.join(30)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_reader_that_may_not_write_is_told_why_it_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with (
        pytest.raises(OSError, match="readers, too, need to write to the directory") as found,
        store.reading(0),
    ):
        pass
    assert found.value.errno == number


def test_without_a_thread_no_lease_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    monkeypatch.setattr(lease, "start_thread", refuse)
    with pytest.raises(RuntimeError, match="thread"), store.reading(0):
        pass
    assert not list(tmp_path.glob("*.lease"))
