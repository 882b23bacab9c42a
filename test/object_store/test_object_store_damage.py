"""Damaged, lost and foreign objects of an object store."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from marks import quick_for, slow
from object_store_parts import (
    TOKEN,
    Ends,
    FaultyFileSystem,
    arrives,
    goes_on_with_the_next_version,
    newest_frame,
    nudge,
)

from weight_update import FormatError, JoinRefusedError, SyncTimeoutError, WeightStrategy
from weight_update.testing import mlp, scramble
from weight_update.testing.models import fingerprint
from weight_update.transports.object_store.manifest import StoreManifest


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
    ends: Ends, faults: Any, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = mlp(1), mlp(2)
    ends.sender(source)
    whole = LocalFileSystem.cat_file
    monkeypatch.setattr(FaultyFileSystem, "cat_file", lambda self, path, **_: whole(self, path))
    ends.reader(model)
    assert fingerprint(model) == fingerprint(source)


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
