"""Frames of an object store that lie in several objects."""

from __future__ import annotations

import glob
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from object_store_parts import (
    ENCODINGS,
    Ends,
    Faults,
    arrives,
    frames,
    goes_on_with_the_next_version,
    newest_frame,
    nudge,
)
from torch import nn

from weight_update import WeightStrategy
from weight_update.testing import mlp, scramble
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import wait_until
from weight_update.threads import call_in_thread
from weight_update.transports.object_store.store import ObjectStore
from weight_update.wire.frames import WeightChunk


def objects_of(frame: Path) -> list[Path]:
    """Return the objects of a frame, in order."""
    others = frame.parent.glob(f"{frame.name}.*")
    return [frame, *sorted(others, key=lambda one: int(one.suffix[1:]))]


def left_over(directory: str) -> set[str]:
    """Return the objects in a directory that belong to no frame."""
    kept = {str(one) for frame in frames(directory) for one in objects_of(frame)}
    return set(glob.glob(f"{directory}/*/*")) - kept


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
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
    ends: Ends, faults: Faults, small_pieces: int, verb: str
) -> None:
    """Nothing goes on before eight requests have begun; at most eight do."""
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
