"""Versions that travel through an object store."""

from __future__ import annotations

import contextlib
import copy
import errno
import glob
import itertools
import json
import logging
import os
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fsspec
import pytest
import torch
from engine_parts import Notebook
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from interpreters import use_template_for_forkserver
from marks import quick_for, slow
from torch import nn

from weight_update import (
    BucketEncoding,
    FormatError,
    InferenceEngine,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    ObjectStoreWeightSyncScheme,
    PatchEncoding,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
    group_schemes,
    send_together,
)
from weight_update.receiver import staging
from weight_update.testing import mlp, scramble
from weight_update.testing.chunks import hello
from weight_update.testing.models import Zoo, fingerprint
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import start_workers
from weight_update.threads import call_in_thread
from weight_update.transports.object_store import publisher, stored_frames
from weight_update.transports.object_store.manifest import StoreManifest, read_manifest
from weight_update.transports.object_store.store import ObjectStore
from weight_update.transports.socket_stream import deadline_of
from weight_update.wire.frames import Kind, WeightChunk

Scheme = ObjectStoreWeightSyncScheme
TOKEN = "secret"


class FaultyFileSystem(LocalFileSystem):  # type: ignore[misc] - fsspec has no types
    """Files of this machine, and requests that fail or hang when a test wants it."""

    protocol = "faulty"
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda verb, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        type(self).before("write" if "w" in mode else "read", path)
        return super().open(path, mode, **options)

    def cat_file(self, path: str, *limits: Any, **options: Any) -> Any:
        type(self).before("read", path)
        return super().cat_file(path, *limits, **options)

    def find(self, path: str, **options: Any) -> Any:
        type(self).before("list", path)
        return super().find(path, **options)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, str], None]], None]:
    """Return a function that sets what happens before each request: called with its verb and its path."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    return lambda before: monkeypatch.setattr(FaultyFileSystem, "before", staticmethod(before))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


class Ends:
    """The schemes of one test, which are shut down at its end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stack = contextlib.ExitStack()

    def scheme(self, **options: Any) -> Scheme:
        defaults = {"token": TOKEN, "poll_seconds": 0.02, "timeout": 10.0, "connect_timeout": 10.0}
        return self._stack.enter_context(Scheme(self.url, **{**defaults, **options}))

    def sender(self, model: Any, *, connect: bool = True, **options: Any) -> Scheme:
        scheme = self.scheme(**options)
        scheme.init_on_sender(model=model)
        if connect:
            scheme.connect()
        return scheme

    def reader(self, model: Any, **options: Any) -> Scheme:
        scheme = self.scheme(**options)
        scheme.init_on_receiver(model=model)
        scheme.connect()
        return scheme

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def ends(url: str) -> Iterator[Ends]:
    made = Ends(url)
    yield made
    made.close()


def arrives(reader: Scheme, version: int) -> None:
    """Wait until a reader has a version."""
    wait_until(lambda: reader.version == version)


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Change one element of each weight."""
    for value in model.parameters():
        value.view(-1)[0] += 1


def frames(directory: str) -> list[Path]:
    """Return the frames in a directory, from which a sender may be removing folders."""
    return sorted(map(Path, glob.glob(f"{directory}/*/*.frame")))  # Path.glob raises where a folder vanishes


ENCODINGS = ["dense", "bucket", BucketEncoding(bucket_size=4096), "patch", PatchEncoding(compression="ans")]


# -- versions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS, ids=["dense", "bucket", "buckets", "patch", "compressed"])
@pytest.mark.parametrize("protocol", ["directory", slow("memory")])
def test_bits_are_the_same_for_readers_that_join_at_any_time(
    ends: Ends, encoding: Any, protocol: str, tmp_path: Path
) -> None:
    if protocol == "memory":
        ends.url = f"memory://{tmp_path.name}"
    source = Zoo(1)
    strategy = WeightStrategy("state_dict", encoding=encoding)
    sender = ends.sender(source, strategy=strategy, most_changes=3)
    readers: list[tuple[Scheme, nn.Module]] = []
    for version in range(1, 10):
        model = Zoo(version + 1)
        readers.append((ends.reader(model), model))
        assert readers[-1][0].version == version - 1
        scramble(source.inner, version)
        source.note = {"version": version}
        assert sender.send().version == version
        assert (sender.version, sender.worker_versions) == (version, {0: version})
        for reader, mine in readers:
            arrives(reader, version)
            assert fingerprint(mine, strategy) == fingerprint(source, strategy)
            assert mine.note == source.note


def test_most_versions_are_changes_and_old_ones_are_removed(ends: Ends) -> None:
    source = mlp(1)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"), most_changes=3)
    sent = []
    for _ in range(12):
        nudge(source)
        sent.append(sender.send().wire_bytes)
    whole = [index for index, nbytes in enumerate(sent) if nbytes > max(sent) / 2]
    assert whole == [3, 7, 11]
    # the welcome, the chain before and the present one, of one frame a version
    wait_until(lambda: len(frames(ends.url)) == 1 + 4 + 1)


@pytest.mark.parametrize("bucket_size", [4096, 1 << 20], ids=["several", "one"])
def test_memory_for_buckets_is_used_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, bucket_size: int
) -> None:
    made: list[int] = []
    new_buffer = staging.new_buffer

    def note(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return new_buffer(nbytes, device)

    monkeypatch.setattr(staging, "new_buffer", note)
    model, mine = mlp(1), mlp(2)
    sender = ends.sender(model, strategy=WeightStrategy(encoding=BucketEncoding(bucket_size=bucket_size)))
    reader = ends.reader(mine)
    for turn in range(8):
        if turn == 4:
            assert made
            made.clear()
        nudge(model)
        arrives(reader, sender.send().version)
        assert fingerprint(mine) == fingerprint(model)
    assert made == []


def test_a_reader_that_was_away_gets_the_newest_version(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"), most_changes=2)
    reader = ends.reader(model)
    with reader.hold():
        for _ in range(11):
            nudge(source)
            sender.send()
    arrives(reader, 11)
    assert fingerprint(model) == fingerprint(source)


def test_a_reader_that_failed_to_apply_an_update_gets_all_weights(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"))
    reader = ends.reader(model)
    with torch.no_grad():
        next(model.parameters()).add_(1)  # the changes are for other weights
    nudge(source)
    sender.send()
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_a_reader_without_memory_for_all_weights_reads_them_later(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"))
    reader = ends.reader(model)
    refused = threading.Event()

    def refuse(nbytes: int) -> torch.Tensor:
        refused.set()
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(stored_frames, "fresh_bytes", refuse)
        with torch.no_grad():
            next(model.parameters()).add_(1)  # the changes are for other weights
        nudge(source)
        sender.send()
        assert refused.wait(10.0)
        time.sleep(0.1)
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_workers_in_processes(ends: Ends) -> None:
    use_template_for_forkserver()
    source = mlp(1)
    scheme = ends.scheme(strategy=WeightStrategy(encoding="patch"))
    with start_workers(scheme, [mlp(2), mlp(3)], "forkserver", model=source) as workers:
        for version in range(1, 4):
            scramble(source, version)
            scheme.send()
            wait_until(lambda expected=version: workers.ask("version") == [expected] * 2)
            assert workers.ask("fingerprint") == [fingerprint(source)] * 2


def test_a_pipeline(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    strategy = WeightStrategy(encoding=BucketEncoding(bucket_size=256), max_in_flight=2)
    sender, reader = ends.sender(source, strategy=strategy), ends.reader(model)
    for version in range(1, 4):
        scramble(source, version)
        sender.send()
        arrives(reader, version)
        assert fingerprint(model) == fingerprint(source)


@pytest.mark.parametrize(("encoding", "most_changes"), [("dense", 20), ("patch", 1), ("patch", 0)])
def test_several_models(ends: Ends, url: str, encoding: str, most_changes: int) -> None:
    """Each model has a URL of its own, and workers switch each by itself."""
    options = {"strategy": WeightStrategy(encoding=encoding), "most_changes": most_changes}
    sources, models = [mlp(1), mlp(2)], [mlp(3), mlp(4)]
    schemes, readers = [], []
    for number, source in enumerate(sources):
        ends.url = f"{url}/{number}"
        schemes.append(ends.sender(source, connect=False, **options))
    group_schemes(schemes)
    for number, (scheme, model) in enumerate(zip(schemes, models, strict=True)):
        scheme.connect()
        ends.url = f"{url}/{number}"
        readers.append(ends.reader(model))
    for version in range(1, 4):
        for source in sources:
            nudge(source)
        send_together(dict(zip(schemes, sources, strict=True)))
        for reader, model, source in zip(readers, models, sources, strict=True):
            arrives(reader, version)
            assert fingerprint(model) == fingerprint(source)


def test_without_waiting(ends: Ends) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source, sync=False), ends.reader(model)
    for version in range(1, 20):
        scramble(source, version)
        sender.send()
    arrives(reader, 19)
    assert fingerprint(model) == fingerprint(source)


def test_narrower_weights_and_no_model(ends: Ends) -> None:
    source, model = mlp(1), mlp(2).to(torch.bfloat16)
    sender = ends.sender(source)
    reader, listener = ends.reader(model), ends.reader(None, strategy="state_dict")
    scramble(source, 5)
    sender.send()
    received = listener.receive(timeout=10.0)
    arrives(reader, 1)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(torch.bfloat16))
        assert torch.equal(received[name], value)


class Engine(InferenceEngine):
    """An engine that keeps what it was given."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def begin_update(self, version: int) -> None: ...

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name: value.clone() for name, value in weights}

    def finish_update(self, version: int) -> None: ...


def test_an_engine(ends: Ends) -> None:
    source, engine = mlp(1), Engine()
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding="patch"))
    reader = ends.reader(engine, strategy="state_dict")
    scramble(source, 5)
    sender.send()
    arrives(reader, 1)
    assert all(torch.equal(engine.loaded[name], value) for name, value in source.state_dict().items())


def test_an_engine_that_could_not_begin_a_patch(ends: Ends) -> None:
    """The next patch changes a version that the engine does not have."""
    source, engine = mlp(1), Notebook(changes=True)
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding="patch"))
    reader = ends.reader(engine, strategy="state_dict")
    engine.fails = "begin"
    nudge(source)
    sender.send()
    wait_until(lambda: engine.fails is None)
    with torch.no_grad():
        source[0].weight.view(-1)[1] += 1
    sender.send()
    arrives(reader, 2)
    assert all(torch.equal(engine.loaded[name], value) for name, value in source.state_dict().items())


@pytest.mark.parametrize("place", ["begin", 1, "finish"])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_version_that_an_engine_could_not_load_comes_again(
    ends: Ends, place: str | int, in_chunks: bool
) -> None:
    """It may be the last one of the trainer."""
    source, engine = mlp(1), Notebook(in_chunks)
    encoding = BucketEncoding(bucket_size=256)
    sender = ends.sender(source, strategy=WeightStrategy("state_dict", encoding=encoding))
    reader = ends.reader(engine, strategy="state_dict")
    engine.fails = place
    scramble(source, 5)
    sender.send()
    sender.shutdown()
    arrives(reader, 1)
    assert all(torch.equal(engine.loaded[name], value) for name, value in source.state_dict().items())


def test_a_version_that_no_engine_could_load_is_not_read_all_the_time(ends: Ends) -> None:
    source, engine = mlp(1), Notebook()
    sender = ends.sender(source, strategy="state_dict")
    reader = ends.reader(engine, strategy="state_dict", poll_seconds=0.005)
    scramble(source, 5)
    with mock.patch.object(engine, "begin_update", side_effect=RuntimeError("broken")) as begin:
        sender.send()
        wait_until(lambda: begin.call_count > 1)
        time.sleep(0.5)
    assert begin.call_count < 10
    arrives(reader, 1)


def test_after_a_version_that_could_not_be_loaded_the_next_one_is_loaded_at_once(ends: Ends) -> None:
    source, engine = mlp(1), Notebook()
    sender = ends.sender(source, strategy="state_dict")
    reader = ends.reader(engine, strategy="state_dict")
    reader._receiver.link._again_after = 1000.0  # as after many failures
    with mock.patch.object(engine, "begin_update", side_effect=RuntimeError("broken")) as begin:
        sender.send()
        wait_until(lambda: begin.call_count > 0)
        time.sleep(0.5)
    assert begin.call_count == 1
    sender.send()
    arrives(reader, 2)


def test_a_worker_that_joined_again_and_could_not_apply_lives_on(ends: Ends, url: str) -> None:
    """A manifest that cannot be verified ends connect(), but not a worker that has weights."""
    engine, manifest = Notebook(), Path(url) / "latest.json"
    ends.sender(mlp(1), strategy="state_dict").shutdown()
    reader = ends.reader(engine, strategy="state_dict")
    with mock.patch.object(engine, "begin_update", side_effect=RuntimeError("broken")) as begin:
        source = mlp(2).bfloat16()  # of another schema, so that the worker joins again
        ends.sender(source, strategy="state_dict")
        wait_until(lambda: begin.call_count > 0)
        signed = manifest.read_bytes()
        manifest.write_bytes(StoreManifest.decode(signed, TOKEN).encode("other"))
        time.sleep(0.5)
    manifest.write_bytes(signed)
    weights = source.state_dict().items()
    wait_until(lambda: all(torch.equal(engine.loaded[name], value) for name, value in weights))
    assert reader.receive(timeout=0.0) is not None


# -- trainers that end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["dense", "patch"])
def test_a_restarted_trainer_goes_on_counting(ends: Ends, encoding: str) -> None:
    strategy, model = WeightStrategy(encoding=encoding), mlp(2)
    first = ends.sender(mlp(1), strategy=strategy)
    reader = ends.reader(model)
    first.send()
    first.shutdown()
    source = mlp(3)
    second = ends.sender(source, strategy=strategy)
    assert second.version == 2
    arrives(reader, 2)
    assert fingerprint(model) == fingerprint(source)
    wait_until(lambda: sum(map(Path.is_dir, Path(ends.url).iterdir())) == 1)  # only that of the second run


def test_a_trainer_with_other_weights(ends: Ends) -> None:
    ends.sender(mlp(1)).shutdown()
    reader = ends.reader(mlp(2))
    ends.sender(nn.Linear(3, 2))
    with pytest.raises(SchemaMismatchError, match="worker 0 does not have the same weights"):
        reader.receive(timeout=10.0)


def test_a_second_trainer_ends_the_first(ends: Ends) -> None:
    first = ends.sender(mlp(1))
    source = mlp(2)
    second = ends.sender(source)
    with pytest.raises(SyncFailedError, match=r"another sender has published version 1 .* a URL of its own"):
        first.send()
    assert second.send().version == 2
    model = mlp(3)
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


# -- strangers and damage ----------------------------------------------------------------------------------


def test_another_token(ends: Ends) -> None:
    ends.sender(mlp(1))
    with pytest.raises(JoinRefusedError, match="published with another token: give both sides the same"):
        ends.reader(mlp(2), token="other")
    with pytest.raises(JoinRefusedError, match="published with another token"):
        ends.sender(mlp(1), token="other")


def test_a_token_of_the_environment(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHT_UPDATE_TOKEN", TOKEN)
    ends.sender(mlp(1), token=None)
    monkeypatch.delenv("WEIGHT_UPDATE_TOKEN")
    model = mlp(2)
    ends.reader(model, token=TOKEN)
    assert fingerprint(model) == fingerprint(mlp(1))


def newest_frame(directory: str) -> Path:
    """Return the frame of a version that was written last."""
    return max(frames(directory), key=lambda one: (one.name[0] != "w", one.stat().st_mtime_ns))


def goes_on_with_the_next_version(ends: Ends, sender: Scheme, reader: Scheme, before: Any) -> None:
    """Check that nobody takes the damaged version 1, and that a reader with version 0 gets version 2."""
    with pytest.raises(SyncTimeoutError, match=r"digest|fewer|No such file"):
        ends.reader(mlp(4), connect_timeout=1.0)
    assert (reader.version, fingerprint(reader.model)) == (0, before)
    sender.send()
    arrives(reader, 2)


@pytest.mark.parametrize("what", ["a bit", "the end", "all of it"])
def test_a_damaged_frame(ends: Ends, what: str, caplog: pytest.LogCaptureFixture) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)
    before = fingerprint(model)

    def damage() -> None:
        newest = newest_frame(ends.url)
        raw = bytearray(newest.read_bytes())
        if what == "all of it":
            newest.unlink()
            return
        raw[-1] ^= 1
        newest.write_bytes(raw if what == "a bit" else raw[:-1])

    with reader.hold(), caplog.at_level(logging.WARNING):
        scramble(source, 3)
        # the reader looks again only after this
        reader._receiver.link._next_look = time.monotonic() + 0.5  # type: ignore[union-attr]
        sender.send()
        damage()
    goes_on_with_the_next_version(ends, sender, reader, before)
    assert fingerprint(model) == fingerprint(source)
    assert ("the weights are not updated now" in caplog.text) == (what != "all of it")


def test_objects_that_others_removed(ends: Ends, url: str) -> None:
    source, model, other = mlp(1), mlp(2), mlp(3)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"), most_changes=2)
    reader = ends.reader(model)
    with reader.hold():
        for _ in range(4):
            nudge(source)
            sender.send()
        next(Path(url).glob("*/welcome-*")).unlink()
    arrives(reader, 4)
    for _ in range(3):
        nudge(source)
        sender.send()
    ends.reader(other)
    arrives(reader, 7)
    assert fingerprint(model) == fingerprint(other) == fingerprint(source)


@pytest.mark.parametrize("what", ["all objects", "the newest versions"])
def test_lost_versions_are_replaced_by_all_weights(ends: Ends, url: str, what: str) -> None:
    """A directory was emptied, or another one was mounted there for a while."""
    source, model, other = mlp(1), mlp(2), mlp(3)
    sender, reader = ends.sender(source, strategy=WeightStrategy(encoding="patch")), ends.reader(model)
    kept = Path(shutil.copytree(url, f"{url}-kept"))
    nudge(source)
    assert sender.send().encoding == "patch"
    arrives(reader, 1)
    shutil.rmtree(url)
    if what == "the newest versions":
        kept.rename(url)
    nudge(source)
    sender.send()
    arrives(reader, 2)
    ends.reader(other)
    assert fingerprint(model) == fingerprint(other) == fingerprint(source)
    nudge(source)
    assert sender.send().encoding == "patch"
    arrives(reader, 3)


def test_a_server_that_ignores_ranges_of_bytes(
    ends: Ends, url: str, faults: Any, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = mlp(1), mlp(2)
    ends.sender(source)
    ends.url = f"faulty://{url}"
    whole = LocalFileSystem.cat_file
    monkeypatch.setattr(FaultyFileSystem, "cat_file", lambda self, path, **_: whole(self, path))
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


# -- frames of several objects -----------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let objects have 64 bytes at most, and return that number."""
    monkeypatch.setattr(stored_frames, "PIECE_BYTES", 64)
    return 64


def objects_of(frame: Path) -> list[Path]:
    """Return the objects of a frame, in order."""
    others = frame.parent.glob(f"{frame.name}.*")
    return [frame, *sorted(others, key=lambda one: int(one.suffix[1:]))]


def left_over(directory: str) -> set[str]:
    """Return the objects in a directory that belong to no frame."""
    kept = {str(one) for frame in frames(directory) for one in objects_of(frame)}
    return set(glob.glob(f"{directory}/*/*")) - kept


@pytest.mark.parametrize("encoding", ENCODINGS, ids=["dense", "bucket", "buckets", "patch", "compressed"])
def test_large_frames_lie_in_several_objects(ends: Ends, encoding: Any, small_pieces: int) -> None:
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding=encoding))
    reader = ends.reader(model)
    for version in range(1, 4):
        nudge(source)
        sender.send()
        arrives(reader, version)
        assert fingerprint(model) == fingerprint(source)
    for frame in frames(ends.url):
        objects = objects_of(frame)
        sizes = [one.stat().st_size for one in objects]
        assert set(sizes[:-1]) <= {small_pieces}
        assert 0 < sizes[-1] <= small_pieces
        assert WeightChunk.decode(b"".join(one.read_bytes() for one in objects))
    assert max(len(objects_of(frame)) for frame in frames(ends.url)) > 8


def test_all_objects_of_a_frame_are_removed(ends: Ends, small_pieces: int) -> None:
    sender = ends.sender(mlp(1))
    for _ in range(4):
        sender.send()
    wait_until(lambda: len(frames(ends.url)) == 3)  # the welcome frame and two versions
    wait_until(lambda: not left_over(ends.url))
    sender.shutdown()
    ends.sender(mlp(1)).send()
    wait_until(lambda: len(list(Path(ends.url).iterdir())) == 2)  # the manifest, and one run
    assert not left_over(ends.url)


def test_a_directory_is_removed_once(url: str) -> None:
    """A sender that still writes there makes it again, and must then find it."""
    store, names = ObjectStore(url, {}, 10.0), [f"run/{number}" for number in range(20)]
    store.write_all([(name, [b"x"]) for name in names], None)
    with mock.patch("os.rmdir", wraps=os.rmdir) as rmdir:
        store.remove(names)
    assert rmdir.call_count == 1
    assert not list(Path(url).iterdir())


@pytest.mark.parametrize("what", ["damaged", "shorter", "missing", "exchanged"])
def test_an_object_in_the_middle_of_a_frame(ends: Ends, small_pieces: int, what: str) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)
    before = fingerprint(model)
    with reader.hold():
        scramble(source, 3)
        reader._receiver.link._next_look = time.monotonic() + 0.5  # type: ignore[union-attr]
        sender.send()
        newest = newest_frame(ends.url)
        first, second = objects_of(newest)[-3:-1]
        raw = first.read_bytes()
        if what == "missing":
            first.unlink()
        elif what == "exchanged":
            first.write_bytes(second.read_bytes())
            second.write_bytes(raw)
        else:
            first.write_bytes(raw[:-1] if what == "shorter" else raw[:-1] + bytes([raw[-1] ^ 1]))
    goes_on_with_the_next_version(ends, sender, reader, before)
    assert fingerprint(model) == fingerprint(source)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_several_objects_are_on_their_way_at_once(
    ends: Ends, url: str, faults: Faults, small_pieces: int, verb: str
) -> None:
    """Nothing goes on before eight requests have begun; at most eight do."""
    ends.url = f"faulty://{url}"
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    if verb == "read":
        ends.sender(source)
    changed, running, most = threading.Condition(), 0, 0

    def count(begun: str, path: str) -> None:
        nonlocal running, most
        if begun != verb or ".frame." not in path:  # the first object of a frame is not counted
            return
        with changed:
            running, most = running + 1, max(most, running + 1)
            changed.notify_all()
            changed.wait_for(lambda: most == 8, 0.5)
            running -= 1

    faults(count)
    if verb == "write":
        ends.sender(source)
    ends.reader(model)
    assert most == 8
    assert fingerprint(model) == fingerprint(source)


def test_a_package_that_is_not_asynchronous_gets_one_request_at_a_time(
    ends: Ends, small_pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have one connection, which threads cannot share, as fsspec's for SFTP and FTP have."""

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
        busy = threading.Lock()

        def checked(*args: Any, **options: Any) -> Any:
            assert busy.acquire(blocking=False), "two requests at a time"
            try:
                time.sleep(0.002)
                return method(*args, **options)
            finally:
                busy.release()

        return checked

    for name in ("pipe_file", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, alone(getattr(MemoryFileSystem, name)))
    ends.url = f"memory://{tmp_path.name}"
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    ends.sender(source)
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


def test_a_system_that_starts_few_threads(
    ends: Ends, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[Future[Any]] = []

    def start(name: str, work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        running[:] = [one for one in running if not one.done()]
        if len(running) == 2:
            raise RuntimeError("can't start new thread")
        running.append(call_in_thread(name, work, *args, **options))
        return running[-1]

    monkeypatch.setattr("weight_update.transports.object_store.store.call_in_thread", start)
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    ends.sender(source)
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


def test_a_reader_that_disconnected_has_to_begin_again(ends: Ends) -> None:
    ends.sender(mlp(1))
    link = ends.scheme().create_transport(worker_idx=0, end="receiver")
    for _ in range(2):
        with pytest.raises(LinkClosedError, match="not connected"):
            link.recv_chunk(0.1)
        link.restart()
        link.send_chunk(hello())
        assert link.recv_chunk(1.0) is not None
        link.disconnect()
    link.close()


RUBBISH = [b"", b"{", b"[]", b'{"manifest": 1}', b"\xff" * 9, b"[" * 100_000]


@pytest.mark.parametrize("rubbish", quick_for(RUBBISH, b"", b"[" * 100_000))
def test_a_damaged_manifest(ends: Ends, url: str, rubbish: bytes) -> None:
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)
    (Path(url) / "latest.json").write_bytes(rubbish)
    with pytest.raises(SyncTimeoutError, match=r"nothing could be read in time: .*latest.json is not a"):
        ends.reader(mlp(3), connect_timeout=0.5)
    scramble(source, 3)
    sender.send()
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


@pytest.mark.parametrize(
    "fields",
    [
        slow({"chain": []}),
        {"chain": [{"version": 0, "frames": []}]},
        {"welcome": {"name": "../../x.frame", "nbytes": 5, "sha256": ""}},
        slow({"welcome": {"name": f"{'0' * 32}/welcome-{'0' * 8}.frame", "nbytes": -1, "sha256": ""}}),
        slow({"welcome": 5}),
    ],
)
def test_a_signed_manifest_is_checked_too(ends: Ends, url: str, fields: dict[str, Any]) -> None:
    ends.sender(mlp(1))
    whole = StoreManifest.decode((Path(url) / "latest.json").read_bytes(), TOKEN)
    broken = copy.copy(whole)
    for name, value in fields.items():
        object.__setattr__(broken, name, value)
    (Path(url) / "latest.json").write_bytes(broken.encode(TOKEN))
    with pytest.raises(SyncTimeoutError, match="not a manifest"):
        ends.reader(mlp(2), connect_timeout=0.5)


def test_a_frame_that_is_shorter_than_its_head(ends: Ends, url: str) -> None:
    """As of another sender with the same token."""
    ends.sender(mlp(1)).shutdown()
    manifest = StoreManifest.decode((Path(url) / "latest.json").read_bytes(), TOKEN)
    frame = Path(url) / manifest.welcome.name
    frame.write_bytes(frame.read_bytes()[:20])
    broken = replace(manifest, welcome=replace(manifest.welcome, nbytes=20))
    (Path(url) / "latest.json").write_bytes(broken.encode(TOKEN))
    with pytest.raises(SyncTimeoutError, match=r"nothing could be read in time: .* fewer than its 20 bytes"):
        ends.reader(mlp(2), connect_timeout=1.0)


def test_a_manifest_of_another_format(ends: Ends, url: str) -> None:
    ends.sender(mlp(1))
    manifest = Path(url) / "latest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "format": 99}))
    with pytest.raises(SyncTimeoutError, match="not a manifest of weight_update: its format is 99"):
        ends.reader(mlp(2), connect_timeout=0.5)


@pytest.mark.parametrize("content", ["a part of it", "another token"])
def test_a_trainer_leaves_a_manifest_alone_that_it_cannot_read(ends: Ends, url: str, content: str) -> None:
    ends.sender(mlp(1)).shutdown()
    manifest = Path(url) / "latest.json"
    if content == "a part of it":
        manifest.write_bytes(manifest.read_bytes()[:50])
    before = manifest.read_bytes()
    sender = ends.sender(mlp(1), connect=False, token="other")
    for _ in range(2):
        with pytest.raises(
            (FormatError, JoinRefusedError), match=r"start anew, remove .*latest.json, or use another"
        ):
            sender.connect()
    assert manifest.read_bytes() == before
    manifest.unlink()
    sender.connect()
    assert sender.send().version == 1


@pytest.mark.parametrize("protocol", ["directory", "memory"])
def test_readers_never_see_a_part_of_the_manifest(
    ends: Ends, protocol: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if protocol == "memory":
        ends.url = f"memory://{tmp_path.name}"
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model, poll_seconds=0.001)
    for _ in range(100):
        sender.send()
    arrives(reader, 100)
    assert caplog.text == ""


def test_a_large_object_in_place_of_the_manifest(ends: Ends, url: str) -> None:
    ends.sender(mlp(1))
    with (Path(url) / "latest.json").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(SyncTimeoutError, match=r"latest.json is not a manifest"):
        ends.reader(mlp(2), connect_timeout=1.0)


def test_other_objects_are_left_alone(ends: Ends, url: str) -> None:
    others = [Path(url) / "notes.txt", Path(url) / "a" / "b.frame", Path(url) / ("0" * 32) / "mine.txt"]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("mine")
    sender = ends.sender(mlp(1))
    sender.send()
    assert [other.read_text() for other in others] == ["mine"] * 3


# -- stores that fail --------------------------------------------------------------------------------------


Faults = Callable[[Callable[[str, str], None]], None]


def test_a_store_that_cannot_be_written(
    ends: Ends, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, strategy=WeightStrategy(encoding="patch"))
    reader = ends.reader(model)

    def refuse(verb: str, path: str) -> None:
        if verb == "write":
            raise PermissionError("no")

    faults(refuse)
    scramble(source, 3)
    with pytest.raises(SyncFailedError, match=r"cannot write faulty:.*: PermissionError: no"):
        sender.send()
    assert reader.version == 0
    faults(lambda verb, path: None)
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
    ends: Ends, url: str, faults: Faults, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the attempts would fill a disk, and fail even when there is room for a version again."""
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    sender, reader = ends.sender(source), ends.reader(model)
    before = files_in(url)

    def fill(verb: str, path: str) -> None:
        if verb == "write" and path.endswith(".frame.9"):
            raise OSError(errno.ENOSPC, "No space left on device")

    faults(fill)
    scramble(source, 3)
    with pytest.raises(SyncFailedError, match="No space left on device"):
        sender.send()
    left = files_in(url).keys() - before.keys()
    assert left
    wait_until(lambda: left.isdisjoint(files_in(url)))
    assert before.items() <= files_in(url).items()
    faults(lambda verb, path: None)
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
def test_a_sender_that_cannot_connect(
    ends: Ends,
    url: str,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"

    def refuse(verb: str, path: str) -> None:
        if verb == "write":
            raise error

    faults(refuse)
    sender = ends.sender(mlp(1), connect=False)
    for _ in range(2):
        with pytest.raises(SyncFailedError, match=f"cannot write faulty:.*: {message}"):
            sender.connect(timeout=5.0)
    faults(lambda verb, path: None)
    sender.connect(timeout=10.0)
    ends.reader(mlp(2))


def test_a_restarted_trainer_whose_first_manifest_could_not_be_written(
    ends: Ends, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"
    ends.sender(mlp(1)).shutdown()

    def refuse(verb: str, path: str) -> None:
        if verb == "write" and "/manifest-" in path:
            raise PermissionError("no")

    faults(refuse)
    source, model = mlp(2), mlp(3)
    second = ends.sender(source, connect=False)
    with pytest.raises(SyncFailedError, match=r"cannot write faulty:.*: PermissionError: no"):
        second.connect(timeout=5.0)
    faults(lambda verb, path: None)
    second.connect(timeout=10.0)  # it takes the manifest of the first trainer for no other sender's
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


def test_a_store_that_does_not_answer(
    ends: Ends, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"
    source, model, awake = mlp(1), mlp(2), threading.Event()
    sender = ends.sender(source, timeout=1.0)
    reader = ends.reader(model)
    faults(lambda verb, path: None if verb == "read" else awake.wait(60) and None)
    scramble(source, 3)
    start = time.monotonic()
    with pytest.raises(SyncFailedError, match=r"could not write .* within 1|is late"):
        sender.send()
    faults(lambda verb, path: None if verb == "write" else awake.wait(60) and None)
    with pytest.raises(SyncTimeoutError):
        ends.reader(mlp(3), connect_timeout=1.0)
    assert time.monotonic() - start < 10.0
    faults(lambda verb, path: None)
    awake.set()
    arrives(reader, 1)
    assert fingerprint(model) == fingerprint(source)


def test_the_error_of_a_store_that_is_late_is_not_its_own_cause(url: str) -> None:
    store = ObjectStore(url, {}, 1.0)
    link = publisher.ObjectStorePublisher(store, TOKEN, 8)
    assert link.recv_chunk(0.0) is not None  # the store joins
    welcome = {"schema": {}, "strategy": "", "keep": True, "version": None, "digests": None}
    late = SyncTimeoutError("late")
    with mock.patch.object(store, "read", side_effect=late), pytest.raises(SyncTimeoutError) as caught:
        link.send_chunk(WeightChunk(Kind.WELCOME, welcome))
    assert caught.value is late
    assert caught.value.__cause__ is None


def test_changes_that_were_staged_before_the_store_joined_again_are_not_published(url: str) -> None:
    """They would be the first version of the manifest, which has all weights."""
    store = ObjectStore(url, {}, 10.0)
    link = publisher.ObjectStorePublisher(store, TOKEN, 8)
    assert link.recv_chunk(0.0) is not None  # the store joins
    welcome = {"schema": {}, "strategy": "", "keep": True, "version": None, "digests": None}
    header = {"schema": "", "encoding": "", "index": 0, "count": 1, "group": None, "extra": {}}
    payload = torch.zeros(8, dtype=torch.uint8)
    for kind, fields in (
        (Kind.WELCOME, welcome),
        (Kind.UPDATE, {**header, "version": 1, "base": None, "commit": True}),
        (Kind.UPDATE, {**header, "version": 2, "base": 1, "commit": False}),
        (Kind.WELCOME, welcome),
        (Kind.COMMIT, {"version": 2}),
    ):
        link.send_chunk(WeightChunk(kind, fields, payload if kind is Kind.UPDATE else None))
    manifest = read_manifest(store, TOKEN, 10.0)
    assert manifest is not None
    assert manifest.newest == 1
    store.close()


def test_a_store_that_is_slow_is_no_worker_in_hold(ends: Ends, url: str, faults: Faults) -> None:
    ends.url, awake = f"faulty://{url}", threading.Event()
    sender = ends.sender(mlp(1))
    faults(lambda verb, path: None if verb == "read" else awake.wait(60) and None)
    with pytest.raises(SyncFailedError, match=r"within 0.1 s: it is still being sent, .* slow") as caught:
        sender.send_async().wait(0.1)
    awake.set()
    assert "hold()" not in str(caught.value)


def test_the_cause_is_told_though_the_last_read_was_late(ends: Ends, url: str, faults: Faults) -> None:
    ends.sender(mlp(1))
    ends.url = f"faulty://{url}"
    awake, reads = threading.Event(), itertools.count()

    def answer_once(verb: str, path: str) -> None:
        if next(reads):
            awake.wait(60)
        raise PermissionError("no")

    faults(answer_once)
    with pytest.raises(SyncTimeoutError, match="PermissionError: no"):
        ends.reader(mlp(2), connect_timeout=0.5)
    awake.set()


def test_a_late_write_replaces_no_newer_manifest(
    ends: Ends, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.1)
    ends.url = f"faulty://{url}"
    awake, held = threading.Event(), threading.Event()
    sender = ends.sender(mlp(1), timeout=1.0)

    def hold_the_first(verb: str, path: str) -> None:
        if verb == "write" and "manifest" in path and not held.is_set():
            held.set()
            awake.wait(60)

    faults(hold_the_first)
    with pytest.raises(SyncFailedError):
        sender.send()
    threading.Timer(0.3, awake.set).start()
    wait_until(lambda: sender.version == 1)
    assert sender.send().version == 2
    time.sleep(0.5)
    assert StoreManifest.decode((Path(url) / "latest.json").read_bytes(), TOKEN).newest == 2


def test_a_late_object_of_many_tells_the_time_for_all_of_them(url: str, faults: Faults) -> None:
    store = ObjectStore(f"faulty://{url}", {}, 10.0)
    faults(lambda verb, path: time.sleep(0.2))
    objects = [(f"run/{number}", [b"x"]) for number in range(40)]
    with pytest.raises(SyncTimeoutError, match=r"could not write .* within 0\.5 s; raise timeout="):
        store.write_all(objects, deadline_of(0.5))


def test_what_a_late_manifest_names_is_not_removed(
    ends: Ends, url: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.1)
    ends.url = f"faulty://{url}"
    awake, held, attempts = threading.Event(), threading.Event(), list[str]()
    source, model = mlp(1), mlp(2)
    sender = ends.sender(source, timeout=1.0)

    def hold_the_manifest(verb: str, path: str) -> None:
        if verb == "write" and "/manifest-" in path:
            held.set()
            awake.wait(60)
        elif verb == "write" and "/welcome-" not in path and held.is_set():
            attempts.append(path)
            raise PermissionError("no")

    faults(hold_the_manifest)
    scramble(source, 3)
    with pytest.raises(SyncFailedError):
        sender.send()
    wait_until(lambda: attempts)
    awake.set()
    seen = len(attempts)
    wait_until(lambda: len(attempts) > seen + 1)
    reader = ends.reader(model)
    assert reader.version == 1
    assert fingerprint(model) == fingerprint(source)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_requests_that_hang_together_stop_no_later_ones(
    ends: Ends, url: str, faults: Faults, small_pieces: int, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """As where all connections are lost at the same moment, and clients notice it after minutes."""
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"
    source, model = nn.Linear(16, 16), nn.Linear(16, 16)
    sender, reader = ends.sender(source, timeout=1.0), ends.reader(model, timeout=1.0)
    awake, held = threading.Event(), []

    def hold(begun: str, path: str) -> None:
        if begun == verb and ".frame." in path and len(held) < 8:
            held.append(path)
            awake.wait(60)

    faults(hold)
    scramble(source, 3)
    sender.send_async()
    arrives(reader, 1)
    awake.set()
    assert len(held) == 8
    assert fingerprint(model) == fingerprint(source)


def test_requests_that_never_end_are_few(ends: Ends, url: str, faults: Faults) -> None:
    ends.url = f"faulty://{url}"
    awake = threading.Event()
    ends.sender(mlp(1))
    reader = ends.reader(mlp(2), timeout=0.05)
    started: list[str] = []

    def hold(verb: str, path: str) -> None:
        if verb == "read" and not awake.is_set():
            started.append(path)
            awake.wait(60)

    assert reader._receiver is not None
    faults(hold)
    with mock.patch.object(reader._receiver.link, "_look_after", return_value=None):
        time.sleep(3.0)  # 60 times the timeout of a request
    awake.set()
    assert 1 <= len(started) <= 32


def test_a_frame_that_stays_damaged_is_not_read_all_the_time(
    ends: Ends, url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """The first frames of its version are read again each time."""
    ends.url = f"faulty://{url}"
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
    faults(lambda verb, path: None)
    arrives(reader, 1)


def test_a_reader_without_memory_does_not_look_all_the_time(ends: Ends, url: str, faults: Faults) -> None:
    ends.url = f"faulty://{url}"
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model, poll_seconds=0.2)
    scramble(source, 3)
    reads: list[str] = []
    assert reader._receiver is not None
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
    ends.url = f"faulty://{url}"
    with pytest.raises(SyncFailedError, match=r"cannot write faulty:.*No such file"):
        ends.sender(mlp(1))
    assert not Path(url).exists()


def test_an_empty_object_of_which_a_store_reads_no_range(ends: Ends, url: str, faults: Faults) -> None:
    ends.url = f"faulty://{url}"
    sender = ends.sender(mlp(1))
    (Path(url) / "latest.json").write_bytes(b"")

    def refuse(verb: str, path: str) -> None:
        if verb == "read" and Path(path).stat().st_size == 0:
            raise OSError("the requested range is not satisfiable")

    faults(refuse)
    with pytest.raises(SyncTimeoutError, match=r"latest.json is not a manifest"):
        ends.reader(mlp(2), connect_timeout=0.5)
    assert sender.send().version == 1


def test_connecting_to_a_store_that_does_not_answer(ends: Ends, url: str, faults: Faults) -> None:
    ends.url = f"faulty://{url}"
    awake = threading.Event()
    sender = ends.sender(mlp(1), connect=False)
    faults(lambda verb, path: awake.wait(60) and None)
    start = time.monotonic()
    with pytest.raises(SyncTimeoutError, match=r"could not read .*latest.json within 0.5 s; raise timeout="):
        sender.connect(timeout=0.5)
    assert time.monotonic() - start < 20.0
    awake.set()


def test_a_version_that_an_engine_got_a_part_of_is_not_read_all_the_time(
    ends: Ends, url: str, faults: Faults
) -> None:
    ends.url = f"faulty://{url}"
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
    faults(lambda verb, path: None)
    arrives(reader, 1)
    assert all(torch.equal(engine.loaded[name], value) for name, value in source.state_dict().items())


def test_a_reader_outlives_a_store_that_is_away(
    ends: Ends, url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    ends.url = f"faulty://{url}"
    source, model = mlp(1), mlp(2)
    sender, reader = ends.sender(source), ends.reader(model)

    def refuse(verb: str, path: str) -> None:
        if verb == "read" and threading.current_thread().name == "weight_update-object-store":
            raise ConnectionResetError("away")

    with caplog.at_level(logging.WARNING):
        faults(refuse)
        assert reader.receive(timeout=0.5) is None
        faults(lambda verb, path: None)
        scramble(source, 3)
        sender.send()
        arrives(reader, 1)
    assert caplog.text.count("the weights are not updated now: cannot read") == 1


def test_old_versions_that_cannot_be_removed(
    ends: Ends, url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    ends.url = f"faulty://{url}"

    def refuse(verb: str, path: str) -> None:
        if verb == "list":
            raise PermissionError("no")

    ends.sender(mlp(1)).shutdown()
    faults(refuse)
    with caplog.at_level(logging.WARNING):
        sender = ends.sender(mlp(1))
        of_the_first = set(frames(url)) - set(own_frames(sender, url))
        assert sender.send().version == 2
    stay = "versions of earlier senders stay in the store until the next sender connects: cannot list"
    assert stay in caplog.text
    assert "old versions could not be removed yet: cannot list" in caplog.text
    faults(lambda verb, path: None)
    sender.send()
    sender.shutdown()
    assert of_the_first
    assert of_the_first <= set(frames(url))
    ends.sender(mlp(1))
    wait_until(lambda: of_the_first.isdisjoint(frames(url)))


def own_frames(sender: Scheme, url: str) -> list[Path]:
    """Return the frames that a sender has written into a directory."""
    assert sender._sender is not None
    run = sender._sender.table[0].link._run  # type: ignore[union-attr]
    return [frame for frame in frames(url) if frame.parent.name == run]


# -- the lifecycle -----------------------------------------------------------------------------------------


def test_nothing_was_published(ends: Ends) -> None:
    with pytest.raises(
        SyncTimeoutError, match=r"no version is in .*store yet; has the trainer called connect"
    ):
        ends.reader(mlp(1), connect_timeout=0.3)


def test_a_reader_waits_for_the_first_version(ends: Ends) -> None:
    model = mlp(2)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(ends.reader, model)
        time.sleep(0.2)
        ends.sender(mlp(1))
        joining.result(10.0)
    assert fingerprint(model) == fingerprint(mlp(1))


def test_other_weights_are_refused_with_all_differences(ends: Ends) -> None:
    sender = ends.sender(nn.Linear(3, 2))
    reader = ends.scheme()
    reader.init_on_receiver(model=nn.Linear(3, 2, bias=False), worker_idx=7)
    with pytest.raises(SchemaMismatchError, match=r"worker 7 does not have the same weights(.|\n)*bias"):
        reader.connect()
    assert sender.send().version == 1


def test_both_ends_end_at_once(ends: Ends) -> None:
    sender, reader = ends.sender(mlp(1)), ends.reader(mlp(2), poll_seconds=100.0)
    start = time.monotonic()
    reader.shutdown()
    sender.shutdown()
    assert time.monotonic() - start < 30.0
    with pytest.raises(LifecycleError):
        sender.send()


def test_a_pickled_scheme_is_the_same(url: str) -> None:
    scheme = Scheme(
        url, WeightStrategy(encoding="patch"), most_changes=5, storage_options={"auto_mkdir": True}
    )
    twin = pickle.loads(pickle.dumps(scheme))
    for name in ("url", "token", "most_changes", "poll_seconds", "storage_options"):
        assert getattr(twin, name) == getattr(scheme, name)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"url": "nosuch://x"}, ValueError, "Protocol not known"),
        ({"url": ""}, ValueError, "url is empty"),
        ({"url": "/data/run::1"}, ValueError, "url='/data/run::1' has '::', by which fsspec chains file"),
        ({"url": "run::1"}, ValueError, "has '::'"),
        ({"url": "memory://bucket/run::1"}, ValueError, "has '::'"),
        (
            {"url": "simplecache::memory://run"},
            ValueError,
            "keeps copies of objects.* leave 'simplecache::' out",
        ),
        ({"url": "filecache::memory://run"}, ValueError, "keeps copies of objects"),
        ({"url": "blockcache::memory://run"}, ValueError, "keeps copies of objects"),
        ({"url": 5}, TypeError, "url is a string, such as 's3://bucket/run'"),
        ({"most_changes": -1}, ValueError, "most_changes is an integer of at least 0"),
        ({"poll_seconds": 0}, ValueError, "poll_seconds is a positive number"),
        ({"token": ""}, ValueError, "token is empty"),
        *(
            ({"strategy": WeightStrategy(encoding=PatchEncoding(**some))}, ValueError, "leave init_sync")
            for some in ({"init_sync": False}, {"init_sync_prefixes": []})
        ),
    ],
)
def test_bad_arguments(url: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Scheme(**{"url": url, **options})


@pytest.mark.parametrize("name", ["params_map", "device_map_fn"])
def test_workers_cannot_have_weights_of_their_own(ends: Ends, name: str) -> None:
    with pytest.raises(ValueError, match=f"all workers read the same weights: give no {name}"):
        ends.scheme().init_on_sender(**{"model": mlp(1), name: {0: mlp(1)}})


def test_a_collector_gives_its_own_number_of_workers(ends: Ends) -> None:
    scheme = ends.scheme()
    scheme.init_on_sender(model=mlp(1), num_workers=4, devices=["cpu"] * 4)
    scheme.connect()
    assert scheme.worker_versions == {0: 0}


def test_processes_and_indices_of_workers_mean_nothing_to_the_sender(ends: Ends) -> None:
    """Collectors set and give them."""
    sender = ends.sender(mlp(1), connect=False)
    sender.worker_alive = lambda worker_idx: False
    sender.connect()
    assert sender.send(worker_ids=[2, 3]).version == 1


def test_connecting_again_after_an_error_of_the_source(ends: Ends) -> None:
    sender = ends.sender(mlp(1), connect=False)
    with pytest.raises(SchemaMismatchError):
        sender.connect(weights=nn.Linear(3, 2))
    sender.connect(timeout=5.0)


def test_a_second_trainer_leaves_the_first_nothing_to_write(
    ends: Ends, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.02)
    first, _ = ends.sender(mlp(1)), ends.sender(mlp(2))
    wait_until(lambda: len(frames(url)) == 2)  # the second has removed those of the first
    with pytest.raises(SyncFailedError, match="another sender has published"):
        first.send()
    before = len(frames(url))
    time.sleep(0.5)  # 25 times the first pause
    assert len(frames(url)) == before


def test_a_late_trainer_removes_nothing_of_the_next(ends: Ends, url: str, faults: Faults) -> None:
    ends.url = f"faulty://{url}"
    awake, held = threading.Event(), threading.Event()
    first = ends.sender(mlp(1))

    def hold_the_first(verb: str, path: str) -> None:
        if verb == "list" and not held.is_set():
            held.set()
            awake.wait(60)

    (writer,) = first._sender.table
    wait_until(lambda: not writer.writing)  # what connect() published is cleaned up
    faults(hold_the_first)
    first.send()
    assert held.wait(5.0)
    ends.sender(mlp(2))
    awake.set()
    time.sleep(0.5)
    model = mlp(3)
    ends.reader(model)
    assert fingerprint(model) == fingerprint(mlp(2))


def test_a_relative_path_and_a_path_of_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Scheme("store").url == str(tmp_path / "store")
    assert Scheme(Path("store")).url == str(tmp_path / "store")
    assert Scheme("~/store").url == "/home/someone/store"
    assert Scheme("memory://store").url == "memory://store"
