"""Versions of weights in a directory: writing, reading, waiting, removal."""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_parts import data_files, every_dtype, same_bits, versions, visible, weights

from weight_update import CorruptCheckpointError, LifecycleError
from weight_update.synchronizer import CheckpointStore

SHORT = 0.6  # seconds after which a lease counts as dead in these tests


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store, tensors = CheckpointStore(tmp_path), every_dtype()
    path = store.publish(3, tensors, step=7)
    assert path.exists()
    with CheckpointStore(tmp_path).reading(3) as found:
        assert same_bits(found, tensors)


def test_a_state_dict_with_extra_state_comes_back(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    source, model = Counting(2, 2), Counting(2, 2)
    source.seen = 7
    CheckpointStore(tmp_path).publish(0, source.state_dict(), step=0)
    with CheckpointStore(tmp_path).reading(0) as weights:
        model.load_state_dict(weights)
    assert model.seen == 7
    assert torch.equal(model.weight, source.weight)


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


def test_many_versions_that_stay_are_read_twice_by_a_publish(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=20)
    for version in range(20):
        store.publish(version, weights(version), step=version)
    opened, read = os.open, list[str]()

    def note(path: Any, *args: Any, **options: Any) -> int:
        read.append(Path(path).name)
        return opened(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", note)
        store.publish(20, weights(20), step=20)
    assert read.count("000000000010.json") == 2, "once before and once after the version is written"


@pytest.mark.parametrize("version", [1.0, "1", True, None, -1])
def test_a_version_to_read_is_an_integer(tmp_path: Path, version: Any) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(1, weights(1), step=1)
    with pytest.raises(ValueError, match="version is an integer"), store.reading(version):
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
    """A trainer that was killed before it could report a version writes it again."""
    store = CheckpointStore(tmp_path)
    store.publish(5, weights(5), step=5)
    with store.reading(5) as before:
        anew = CheckpointStore(tmp_path)
        anew.publish(5, weights(6), step=6)
        assert same_bits(before, weights(5))
    with store.reading(5) as after:
        assert same_bits(after, weights(6))
    del before
    anew.publish(6, weights(6), step=6)
    assert data_files(store) == 2


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    names = ["notes.txt", "1.json", "model.safetensors", "000000000001-x.safetensors", "a.lease", "b.part"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "000000000000").mkdir()
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=0.01)
    for version in range(3):
        store.publish(version, weights(version), step=0)
        time.sleep(0.02)  # longer than a lease lives
    assert set(names) | {"000000000000"} <= set(visible(tmp_path))
    assert store.latest().version == 2


def test_a_store_can_be_given_to_another_process(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    with pickle.loads(pickle.dumps(store)).reading(0) as tensors:
        assert same_bits(tensors, weights(0))


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match="lease_seconds"):
        CheckpointStore(tmp_path, lease_seconds=0)
    for version in (None, "8", -2, 1.5):
        with pytest.raises(ValueError, match=f"version is an integer of at least -1, not {version!r}"):
            CheckpointStore(tmp_path).wait_newer(version, timeout=0.0)  # type: ignore[arg-type]
    for timeout in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="timeout is a number of seconds from 0 on"):
            CheckpointStore(tmp_path).wait_newer(-1, timeout)
    for timeout in (None, "1"):
        with pytest.raises(TypeError, match="timeout is a number of seconds"):
            CheckpointStore(tmp_path).wait_newer(-1, timeout)  # type: ignore[arg-type]
    file = tmp_path / "weights.pt"
    file.touch()
    with pytest.raises(NotADirectoryError, match="give a directory, not a file"):
        CheckpointStore(file)


def test_waiting_for_a_newer_version(tmp_path: Path) -> None:
    writer, reader = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    began = time.monotonic()
    assert reader.wait_newer(-1, timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < 10
    later = threading.Timer(0.3, writer.publish, args=(0, weights(0)), kwargs={"step": 4})
    later.start()
    found = reader.wait_newer(-1, timeout=30)
    later.join()
    assert (found.version, found.step) == (0, 4)
    assert reader.wait_newer(0, timeout=0) is None
    assert reader.wait_newer(-1, timeout=0) is not None


@pytest.mark.slow
def test_waiting_costs_little(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    began = time.thread_time()
    store.wait_newer(0, timeout=1.0)
    assert time.thread_time() - began < 0.1


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


def test_a_version_that_cannot_be_read_for_a_moment_is_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    opened = os.open

    def fail(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".json"):
            raise OSError(errno.EIO, "the file server is away", str(path))
        return opened(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert store.latest() is None
        assert store.latest() is None
    assert len(caplog.records) == 1
    assert store.latest().version == 0, "its files have not changed"


def test_a_broken_version_is_skipped_though_its_data_cannot_be_looked_at(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    store.publish(1, weights(1), step=1)
    (tmp_path / "000000000001.json").write_text("{}")
    loop = tmp_path / f"000000000001-{'0' * 32}.safetensors"
    loop.symlink_to(loop)
    found = store.latest()
    assert found.version == 0


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


def test_a_file_that_is_restored_with_its_old_times_is_read_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.publish(0, weights(0), step=0)
    copy, raw = tmp_path / "copy", bytearray(path.read_bytes())
    shutil.copy2(path, copy)
    raw[-1] ^= 1
    path.write_bytes(raw)
    shutil.copystat(copy, path)  # a bad disk changes no times either
    with pytest.raises(CorruptCheckpointError, match="digest"), store.reading(0):
        pass
    assert store.latest() is None
    copy.replace(path)
    assert store.latest().version == 0


def test_a_relative_path_stays_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("run-7")
    store.publish(0, weights(0), step=0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.publish(1, weights(1), step=1)
    with store.reading(1) as tensors:
        assert same_bits(tensors, weights(1))
    assert versions(CheckpointStore(tmp_path / "run-7")) == [0, 1]


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


@pytest.mark.parametrize(
    ("directory", "file"), [(None, 0o600), (0o700, 0o600), (0o750, 0o640), (0o755, 0o644), (0o777, 0o644)]
)
def test_files_are_open_to_those_who_may_read_the_directory(
    tmp_path: Path, directory: int | None, file: int
) -> None:
    """A new directory is its user's alone; an existing one is left as it is."""
    where = tmp_path / "checkpoints"
    if directory is not None:
        where.mkdir()
        where.chmod(directory)
    before = os.umask(0o022)
    try:
        CheckpointStore(where).publish(1, weights(1), step=1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(where.stat().st_mode) == (directory or 0o700)
    assert {stat.S_IMODE(path.stat().st_mode) for path in where.iterdir()} == {file}


def test_two_trainers_that_write_one_directory(tmp_path: Path) -> None:
    """The one whose version was replaced is told; the other one goes on."""
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.publish(1, weights(1), step=1)
    second.publish(1, weights(2), step=2)
    for version in (1, 2):
        with pytest.raises(LifecycleError, match=r"another trainer has published version 1 .* end one"):
            first.publish(version, weights(1), step=3)
    second.publish(2, weights(2), step=4)
    assert CheckpointStore(tmp_path).latest().step == 4


def test_a_trainer_whose_publish_takes_long_replaces_no_version_of_the_next_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trainer hangs in a write to the disk, and the second one is its restart."""
    first, second, sync = CheckpointStore(tmp_path), CheckpointStore(tmp_path), os.fsync
    first.publish(1, weights(1), step=1)

    def hang(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        second.publish(2, weights(2), step=2)
        sync(fd)

    monkeypatch.setattr(os, "fsync", hang)
    with pytest.raises(LifecycleError, match="another trainer has published version 2"):
        first.publish(2, weights(1), step=3)
    assert CheckpointStore(tmp_path).latest().step == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2, "nothing of the first one's version stays"
    second.publish(3, weights(3), step=3)


def test_a_trainer_that_resumes_goes_on_with_its_own_versions(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).publish(1, weights(1), step=1)
    store = CheckpointStore(tmp_path, keep=3)
    for version in (2, 2, 3, 4):
        store.publish(version, weights(version), step=version)
    for path in tmp_path.glob("00000000000[34]*"):
        path.unlink()
    store.publish(3, weights(3), step=3)
    assert store.latest().version == 3


@pytest.mark.parametrize("call", range(1, 5))
def test_a_publish_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """If the last call fails, the version exists although its publish raised."""
    store, sync, calls = CheckpointStore(tmp_path), os.fsync, list[int]()

    def fail(fd: int) -> None:
        calls.append(fd)
        if len(calls) == call:
            raise OSError(errno.EIO, "no disk today")
        sync(fd)

    store.publish(1, weights(1), step=1)
    for version in (1, 2):
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="no disk today"):
                store.publish(version, weights(2), step=2)
        store.publish(version, weights(1), step=3)
        assert store.latest().step == 3


def test_a_reader_of_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    where = tmp_path / "rnu-7"
    store = CheckpointStore(where)
    assert (store.latest(), store.last_number(), store.manifest(1)) == (None, -1, None)
    assert store.wait_newer(-1, timeout=0.0) is None
    with pytest.raises(FileNotFoundError, match="no version 1"), store.reading(1):
        pass
    assert not where.exists(), "a reader does not create it"
    CheckpointStore(where).publish(1, weights(1), step=0)
    assert store.last_number() == 1
    shutil.rmtree(where)
    with pytest.raises(FileNotFoundError):  # an unmounted file system, perhaps
        store.latest()
