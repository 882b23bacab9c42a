"""Checkpoints under crashes, damage and a full disk."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_parts import Deadline, in_child, same_bits, visible, weights
from fuzz import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from weight_update import CorruptCheckpointError, NotEnoughSpaceError
from weight_update.checkpoints import store as checkpoint_store
from weight_update.checkpoints.manifest import ManifestIndex
from weight_update.synchronizer import CheckpointStore

SHORT = 0.2


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """Return a directory in memory, if there is one, so that nothing waits for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


def check_versions(directory: Path, allowed: set[int]) -> int:
    """Check the bits of the newest version that can be read, and return its number."""
    store = CheckpointStore(directory)
    while True:
        newest = store.latest()
        assert newest.version in allowed
        try:
            with store.reading(newest.version) as tensors:
                assert same_bits(tensors, weights(newest.version))
                assert newest.step == newest.version
                return newest.version
        except CorruptCheckpointError:
            continue  # the store looks at an older one now


def publish(directory: Path, version: int) -> None:
    store = CheckpointStore(directory, keep=1, lease_seconds=SHORT)
    store.publish(version, weights(version), step=version)


def killed_before(directory: Path, calls: int) -> int:
    def work() -> None:
        Deadline(calls)
        publish(directory, 1)

    return in_child(work)


@pytest.mark.slow
def test_a_writer_killed_at_every_step(quick_path: Path) -> None:
    outcomes = []
    for calls in range(100):
        directory = quick_path / str(calls)
        publish(directory, 0)
        status = killed_before(directory, calls)
        assert status in (0, -signal.SIGKILL)
        outcomes.append(check_versions(directory, {0, 1}))
        if status == 0:
            break
    assert status == 0, "it has more than 100 steps"
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert set(outcomes) == {0, 1}
    _next_writers_clean_up([quick_path / str(i) for i in range(len(outcomes))])


def _next_writers_clean_up(directories: list[Path]) -> None:
    stores = [CheckpointStore(path, keep=1, lease_seconds=SHORT) for path in directories]
    for version in (2, 3):
        for store in stores:
            store.publish(version, weights(version), step=version)
        time.sleep(2 * SHORT)
    for store in stores:
        store.publish(4, weights(4), step=4)
        names = visible(store.directory)
        assert len(names) == 2, names
        assert check_versions(store.directory, {4}) == 4


def test_a_writer_killed_at_any_time(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    newest = 0
    for round_ in range(12):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for version in range(newest + 1, newest + 1000):
                    publish(tmp_path, version)
                    os.write(writing, b".")
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"."  # on a loaded machine the first one may take long
        time.sleep(0.0071 * round_)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        newest = check_versions(tmp_path, set(range(newest + 1, newest + 1000)))


def test_a_version_is_found_while_the_writer_replaces_all_that_were_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = CheckpointStore(tmp_path, keep=1), CheckpointStore(tmp_path)
    writer.publish(0, weights(0), step=0)
    versions = ManifestIndex.versions

    def overtaken(index: ManifestIndex) -> list[int]:
        listed = versions(index)
        monkeypatch.setattr(ManifestIndex, "versions", versions)
        writer.publish(1, weights(1), step=1)
        return listed

    monkeypatch.setattr(ManifestIndex, "versions", overtaken)
    newest = reader.latest()
    assert newest.version == 1


@pytest.mark.parametrize("looking", ["latest", "reading"])
def test_a_broken_version_that_is_replaced_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looking: str
) -> None:
    reader, path = CheckpointStore(tmp_path), CheckpointStore(tmp_path).publish(0, weights(0), step=0)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] if looking == "latest" else raw[:-1] + bytes([raw[-1] ^ 1]))

    def before_it_is_replaced(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            try:
                return call(*arguments)
            except CorruptCheckpointError:
                monkeypatch.undo()
                CheckpointStore(tmp_path).publish(0, weights(0), step=0)
                raise

        return called

    monkeypatch.setattr(ManifestIndex, "load", before_it_is_replaced(ManifestIndex.load))
    monkeypatch.setattr(checkpoint_store, "map_file", before_it_is_replaced(checkpoint_store.map_file))
    if looking == "latest":
        reader.latest()
    else:
        with pytest.raises(CorruptCheckpointError), reader.reading(0):
            pass
    assert check_versions(tmp_path, {0}) == 0
    newest = reader.latest()
    assert newest is not None, "the one that took its place is not broken"
    assert newest.version == 0


@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_give_wrong_weights(data: st.DataObject, quick_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(dir=quick_path))
    for version in range(3):
        CheckpointStore(directory, keep=3).publish(version, weights(version), step=version)
    spared = {path.name for path in directory.glob("000000000000*")}
    files = sorted(path for path in directory.iterdir() if path.name not in spared)
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3)):
        _damage(path, files, data)
    newest = check_versions(directory, {0, 1, 2})
    store = CheckpointStore(directory, keep=1, lease_seconds=SHORT)
    store.publish(max(newest, 3), weights(3), step=3)
    assert check_versions(directory, {3}) == 3


def _damage(path: Path, files: list[Path], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["truncate", "flip", "zero", "replace", "remove", "append"]))
    if kind == "remove" or not path.exists():
        path.unlink(missing_ok=True)
        return
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, max(len(raw) - 1, 0)))
    if kind == "truncate":
        raw = raw[:place]
    elif kind == "flip" and raw:
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "zero":
        raw[place:] = bytes(len(raw) - place)
    elif kind == "append":
        raw += b"\0"
    else:
        other = data.draw(st.sampled_from(files))
        raw = bytearray(other.read_bytes()) if other.exists() else bytearray()
    path.write_bytes(raw)


def test_every_bit_of_a_file_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    path = store.publish(0, {"w": torch.arange(8, dtype=torch.uint8)}, step=0)
    raw = path.read_bytes()
    caplog.set_level(logging.ERROR)
    for bit in range(0, 8 * len(raw), 7):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(CorruptCheckpointError), store.reading(0):
            pass


def test_a_manifest_that_points_elsewhere(tmp_path: Path) -> None:
    from weight_update.synchronizer import Manifest

    store = CheckpointStore(tmp_path / "store")
    store.publish(0, weights(0), step=0)
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    forged = Manifest(1, 0, "../secret", 1, "", {})
    (store.directory / "000000000001.json").write_bytes(forged.encode())
    with pytest.raises(CorruptCheckpointError, match="secret"), store.reading(1):
        pass
    assert store.latest().version == 0


def test_a_manifest_that_is_nested_too_deep_is_skipped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(0, weights(0), step=0)
    (tmp_path / "000000000001.json").write_bytes(b"[" * 200_000)
    with pytest.raises(CorruptCheckpointError, match="not a manifest"), store.reading(1):
        pass
    assert store.latest().version == 0


def free(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def test_a_full_disk(small_mount: Path) -> None:
    store = CheckpointStore(small_mount)
    store.publish(0, weights(0), step=0)
    before = free(small_mount)
    with pytest.raises(
        NotEnoughSpaceError, match=rf"2\.0 MB .*{before} bytes\) are free; .* of your own a"
    ) as caught:
        store.publish(1, {"big": torch.zeros(500_000)}, step=1)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, OSError)
    assert free(small_mount) == before
    assert len(visible(small_mount)) == 2
    assert check_versions(small_mount, {0}) == 0
    store.publish(1, weights(1), step=1)
    assert check_versions(small_mount, {1}) == 1


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NotEnoughSpaceError, match=r"2\.0 MB .*files may not be that large.*ulimit -f"):
            store.publish(1, {"big": torch.zeros(500_000)}, step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert visible(tmp_path) == []


def test_a_disk_that_fills_up_exactly(small_mount: Path) -> None:
    """A version exists completely or not at all, wherever in the data or manifest the space ends."""
    store = CheckpointStore(small_mount, keep=1)
    store.publish(0, weights(0), step=0)
    failures = 0
    for pages in range(12):
        ballast = small_mount / "ballast"
        ballast.write_bytes(bytes(free(small_mount) - 4096 * pages))
        before = store.latest().version
        try:
            store.publish(before + 1, weights(before + 1), step=before + 1)
        except NotEnoughSpaceError:
            failures += 1
            assert check_versions(small_mount, {before}) == before
            assert free(small_mount) == 4096 * pages
        else:
            assert check_versions(small_mount, {before + 1}) == before + 1
        ballast.unlink()
    assert 1 <= failures < 12


def test_a_file_that_cannot_be_removed_stays_for_the_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.publish(0, weights(0), step=0)
    with monkeypatch.context() as patch:
        unlink = Path.unlink

        def refuse(path: Path, missing_ok: bool = False) -> None:
            if path.suffix != ".lease":
                raise PermissionError(errno.EPERM, "no")
            unlink(path, missing_ok)

        patch.setattr(Path, "unlink", refuse)
        store.publish(1, weights(1), step=1)
    assert "could not be removed yet" in caplog.text
    assert check_versions(tmp_path, {1}) == 1
    store.publish(2, weights(2), step=2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_one_file_that_cannot_be_removed_does_not_stop_the_clean_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=1, lease_seconds=0.05)
    for name in (f"{0:012}.json", f"{8:012}-{0:032x}.safetensors", f"{8:012}-{0:032x}.{1:032x}.lease"):
        (tmp_path / name).mkdir()  # nothing that can be unlinked
    for version in range(1, 5):
        store.publish(version, weights(version), step=version)
        time.sleep(0.06)
    assert check_versions(tmp_path, {4}) == 4
    assert sorted(path.name for path in tmp_path.glob("*.safetensors") if path.is_file()) == [
        path.name for path in tmp_path.glob(f"{4:012}-*")
    ]
    assert caplog.text.count("could not be removed yet") == 2, "once for each"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Return a directory that other users reach; they do not reach those of pytest."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_another_user_may_clean_up_what_is_his_in_a_sticky_directory(open_path: Path) -> None:
    open_path.chmod(0o1777)
    CheckpointStore(open_path).publish(0, weights(0), step=0)
    for path in open_path.iterdir():
        path.chmod(0o600)
    theirs = open_path / f"{0:012}-{0:032x}.{1:032x}.lease"
    theirs.touch(0o600)

    def publish() -> None:
        os.setgid(65534)
        os.setuid(65534)
        store = CheckpointStore(open_path, keep=1)
        for version in range(1, 4):
            store.publish(version, weights(version), step=version)

    assert in_child(publish) == 0
    assert [path.name for path in sorted(open_path.glob("*.json"))] == [f"{0:012}.json", f"{3:012}.json"]
    assert theirs.exists()


@pytest.mark.parametrize(
    "name",
    [
        f"{5:012}.json",
        f"{5:012}-{0:032x}.safetensors",
        f"{5:012}-{0:032x}.json.part",
        f"{5:012}-{0:032x}.{1:032x}.lease",
    ],
)
def test_a_fifo_with_a_name_of_ours_stops_nobody(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    store, seen = CheckpointStore(tmp_path), list[int]()

    def use() -> None:
        store.publish(6, weights(6), step=6)
        with CheckpointStore(tmp_path).reading(6):
            latest = CheckpointStore(tmp_path).latest()
        seen.append(-1 if latest is None else latest.version)

    using = threading.Thread(target=use, daemon=True)
    using.start()
    using.join(20.0)
    assert seen == [6]
