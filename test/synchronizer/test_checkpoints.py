"""Versions of weights in a directory: writing, reading, waiting, removal."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from checkpoint_parts import every_dtype, in_child, same_bits, visible, weights

from weight_update import CorruptCheckpointError
from weight_update.synchronizer import CheckpointStore

SHORT = 0.6  # seconds after which a lease counts as dead in these tests


def versions(store: CheckpointStore) -> list[int]:
    return sorted(int(path.stem) for path in store.directory.glob("*.json"))


def data_files(store: CheckpointStore) -> int:
    return len(list(store.directory.glob("*.safetensors*")))


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store, tensors = CheckpointStore(tmp_path), every_dtype()
    path = store.publish(3, tensors, step=7)
    assert path.exists()
    with CheckpointStore(tmp_path).reading(3) as found:
        assert same_bits(found, tensors)


def test_tensors_larger_than_a_piece(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    tensors = {f"{i}": torch.randn(700_000 + i) for i in range(5)}
    tensors.update({f"small.{i}": torch.tensor([i]) for i in range(3000)})
    store.publish(0, tensors, step=0)
    with store.reading(0) as found:
        assert same_bits(found, tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    store, tensors = CheckpointStore(tmp_path), every_dtype()
    store.publish(0, {name: value.cuda() for name, value in tensors.items()}, step=0)
    with store.reading(0) as found:
        assert same_bits(found, tensors)


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    path = store.publish(1, weights(1), step=10)
    newest = store.latest()
    assert newest is not None
    assert (newest.version, newest.step, newest.nbytes) == (1, 10, path.stat().st_size)
    assert newest.file == path.name
    assert newest.tensors == {"a.weight": "float32[8, 3]", "a.bias": "bfloat16[8]"}


def test_tensors_may_be_kept_and_written_to(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.publish(0, weights(0), step=0)
    with store.reading(0) as first, store.reading(0) as second:
        first["a.weight"].fill_(5.0)
        assert same_bits(second, weights(0))
        kept = second["a.weight"]
    store.publish(1, weights(1), step=1)
    assert torch.equal(kept, weights(0)["a.weight"])


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in range(5):
        store.publish(version, weights(version), step=version)
    assert versions(store) == [3, 4]
    assert data_files(store) == 2
    assert not list(tmp_path.glob("*.lease"))
    with pytest.raises(FileNotFoundError), store.reading(0):
        pass


def test_numbers_only_grow(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(5, weights(5), step=5)
    with pytest.raises(ValueError, match="below 5"):
        store.publish(4, weights(4), step=4)
    with pytest.raises(ValueError, match="not -1"):
        store.publish(-1, weights(4), step=4)
    assert versions(store) == [5]


def test_the_newest_may_be_written_again(tmp_path: Path) -> None:
    """As a trainer does that was killed before it could tell anybody."""
    store = CheckpointStore(tmp_path)
    store.publish(5, weights(5), step=5)
    with store.reading(5) as before:
        CheckpointStore(tmp_path).publish(5, weights(6), step=6)
        assert same_bits(before, weights(5))
    with store.reading(5) as after:
        assert same_bits(after, weights(6))
    del before
    store.publish(6, weights(6), step=6)
    assert data_files(store) == 2


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    names = ["notes.txt", "1.json", "model.safetensors", "000000000001-x.safetensors", "a.lease", "b.part"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "000000000000").mkdir()
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT)
    for version in range(3):
        store.publish(version, weights(version), step=0)
    assert set(names) | {"000000000000"} <= set(visible(tmp_path))
    assert store.latest().version == 2


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match="lease_seconds"):
        CheckpointStore(tmp_path, lease_seconds=0)


def test_a_version_stays_while_somebody_reads_it(tmp_path: Path) -> None:
    writer, reader = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT), CheckpointStore(tmp_path)
    writer.publish(0, weights(0), step=0)
    with reader.reading(0) as tensors:
        for version in (1, 2):
            writer.publish(version, weights(version), step=0)
        assert versions(writer) == [0, 2]
        with CheckpointStore(tmp_path).reading(0) as more:
            assert same_bits(more, tensors)
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


@pytest.mark.parametrize("ending", ["kill", "return"])
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
        for version in range(1, 4):
            store.publish(version, weights(version), step=0)
            time.sleep(SHORT)
            assert versions(store) == [0, version], "it is alive, so its lease is renewed"
        if ending == "kill":
            process.kill()
        else:
            here.send(None)
        process.join(30)
        assert bool(list(tmp_path.glob("*.lease"))) == (ending == "kill")
        _gone_soon(store, first=4)
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


def test_waiting_for_a_newer_version(tmp_path: Path) -> None:
    writer, reader = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    began = time.monotonic()
    assert reader.wait_newer(-1, timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < 2
    later = threading.Timer(0.3, writer.publish, args=(0, weights(0)), kwargs={"step": 4})
    later.start()
    found = reader.wait_newer(-1, timeout=30)
    later.join()
    assert found is not None
    assert (found.version, found.step) == (0, 4)
    assert reader.wait_newer(0, timeout=0) is None
    assert reader.wait_newer(-1, timeout=0) is not None


def test_waiting_costs_little(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    began = time.thread_time()
    store.wait_newer(0, timeout=2.0)
    assert time.thread_time() - began < 0.2


def test_a_broken_version_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    path = store.publish(1, weights(1), step=1)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert store.latest().version == 0
        assert store.wait_newer(0, timeout=0.3) is None
        assert len(caplog.records) == 1
    path.write_bytes(raw)
    assert store.latest().version == 1, "looked at again, because it changed"


def test_wrong_bits_are_found_by_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    path = store.publish(1, weights(1), step=1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert store.latest().version == 1
    with pytest.raises(CorruptCheckpointError, match="digest"), store.reading(1):
        pass
    assert store.latest().version == 0
    assert len(caplog.records) == 1
    assert not list(tmp_path.glob("*.lease"))
    path = store.publish(1, weights(1), step=1)
    with store.reading(1) as tensors:
        assert same_bits(tensors, weights(1))


def test_a_stopped_reader_loses_only_its_lease(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=SHORT)
    store.publish(0, weights(0), step=0)
    with store.reading(0) as tensors:
        (lease,) = tmp_path.glob("*.lease")
        lease.unlink()  # as one does who takes it for dead
        time.sleep(SHORT / 2)
        assert "taken for dead" in caplog.text
        store.publish(1, weights(1), step=1)
        assert versions(store) == [1]
        assert same_bits(tensors, weights(0)), "what is mapped stays, on one machine"


def test_a_store_is_of_use_to_several_threads(tmp_path: Path) -> None:
    store, errors = CheckpointStore(tmp_path, keep=1), []

    def read() -> None:
        seen = -1
        while seen < 30:
            found = store.wait_newer(seen, timeout=30)
            try:
                with store.reading(found.version) as tensors:
                    if not same_bits(tensors, weights(found.version)):
                        errors.append(found)
            except FileNotFoundError:
                continue  # an even newer one is there
            seen = found.version

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(31):
        store.publish(version, weights(version), step=0)
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
