"""``weight-update inspect``: what it shows, and damage that it finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_parts import SCHEMA, Model, call, data_file, document, dump, flip, full, make_run, patches, welcome
from marks import slow

from weight_update import ObjectStoreWeightSyncScheme, WeightChunk
from weight_update.cli.contents.checkpoints import read_directory
from weight_update.cli.contents.frames import read_frames
from weight_update.synchronizer import CheckpointStore
from weight_update.transports.object_store import stored_frames
from weight_update.wire.frames import Step, frames_of


@pytest.fixture
def run_7(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def test_inspect_shows_a_directory_and_writes_nothing(run_7: Path) -> None:
    (run_7 / "notes.txt").write_text("not a checkpoint")
    before = sorted(path.name for path in run_7.iterdir())
    result, table = call("inspect", run_7, "--json"), call("inspect", run_7)
    assert (result.exit_code, table.exit_code) == (0, 0), table.output
    assert sorted(path.name for path in run_7.iterdir()) == before
    found = document(result)
    assert found["newest_complete_version"] == 12
    assert [(row["version"], row["step"], row["state"]) for row in found["versions"]] == [
        (12, 120, "ok"),
        (11, 110, "ok"),
    ]
    assert found["versions"][0]["bytes"] == data_file(run_7, 12).stat().st_size
    assert sorted(found["tensors"], key=lambda row: str(row["name"])) == [
        {"name": "one.bias", "dtype": "float32", "shape": [3], "bytes": 12, "tied_to": None},
        {"name": "one.weight", "dtype": "float32", "shape": [3, 4], "bytes": 48, "tied_to": None},
        {"name": "steps", "dtype": "int64", "shape": [], "bytes": 8, "tied_to": None},
        {"name": "two.weight", "dtype": "float32", "shape": [3, 4], "bytes": 48, "tied_to": "one.weight"},
    ]
    assert found["extra_state"] == ["_extra_state"]
    assert "one.weight" in table.stdout
    assert found["versions"][0]["checksum"] in table.stdout


@pytest.mark.parametrize("step", [slow(1), 13])
def test_every_flipped_byte_of_a_version_is_found(run_7: Path, step: int) -> None:
    for path in (data_file(run_7, 12), run_7 / "000000000012.json"):
        raw = path.read_bytes()
        for at in range(0, len(raw), step):
            flip(path, at)
            found = read_directory(run_7)
            assert not found["good"], (path, at)
            assert found["newest_complete_version"] == 11
            path.write_bytes(raw)
    assert read_directory(run_7)["good"]


@pytest.mark.parametrize("given", ["directory", "manifest", "data"])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: flip(path, -1), "the digest of"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, not"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
    ],
    ids=["flipped", "short", "empty"],
)
def test_inspect_fails_if_a_file_is_damaged(
    run_7: Path, given: str, damage: Callable[[Path], object], problem: str
) -> None:
    data = data_file(run_7, 12)
    damage(data)
    path = {"directory": run_7, "manifest": run_7 / "000000000012.json", "data": data}[given]
    result = call("inspect", path, "--json")
    assert result.exit_code == 1
    found = document(result)
    row = found["versions"][0] if given == "directory" else found
    assert row["state"] == "damaged"
    assert problem in row["problem"]


def test_inspect_names_the_cure_of_a_damaged_version(run_7: Path) -> None:
    assert "cure" not in document(call("inspect", run_7, "--json"))
    data, manifest = data_file(run_7, 12), run_7 / "000000000012.json"
    flip(data, -1)
    for path in (run_7, manifest, data):
        cure = document(call("inspect", path, "--json"))["cure"]
        assert "use version 11, the newest complete one" in cure
        assert "delete 000000000012.json (the next publish() removes its data)" in cure
    assert CheckpointStore(run_7).latest() is not None
    manifest.unlink()
    alone = document(call("inspect", data, "--json"))  # the digest is unknown now
    assert (alone["good"], "cure" in alone) == (True, False)
    store = CheckpointStore(run_7)
    store.publish(13, Model().state_dict(), step=130)
    assert not data.exists()
    flip(data_file(run_7, 13), -1)
    data_file(run_7, 11).unlink()
    found = document(call("inspect", run_7, "--json"))
    assert "wait for the next one" in found["cure"]
    assert "delete 000000000013.json and 000000000011.json" in found["cure"]


def test_inspect_advises_nobody_to_delete_a_version_that_it_cannot_read(run_7: Path) -> None:
    manifest = run_7 / "000000000012.json"
    manifest.unlink()
    manifest.mkdir()  # opened, also by root, and not read
    result = call("inspect", run_7, "--json")
    found = document(result)
    assert (result.exit_code, "cure" in found) == (1, False)
    assert [row["state"] for row in found["versions"]] == ["unreadable", "ok"]
    assert "not a regular file" in found["versions"][0]["problem"]


def test_inspect_prints_plain_lines_into_a_pipe(run_7: Path, tmp_path: Path) -> None:
    frames = dump(tmp_path / "frames", welcome(), full(3), *patches(3, 4))
    for path in (run_7, data_file(run_7, 12), frames):
        lines = call("inspect", path).stdout.splitlines()
        assert lines[0].split() == ["result", "ok"]
        assert all(line == line.rstrip() for line in lines)
        assert not any("─" in line for line in lines)
    flip(frames, -1)
    assert call("inspect", frames).stdout.splitlines()[0].split() == ["result", "failed"]


def test_a_name_with_control_characters_takes_one_line(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).publish(0, {"a\nb\x1b[31mc\x07": torch.ones(1)}, step=0)
    lines = call("inspect", tmp_path).stdout.splitlines()
    assert lines[-1].split() == ["a\\nb\\x1b[31mc\\x07", "float32", "[1]", "4", "B"]


def test_inspect_names_missing_and_left_over_files(run_7: Path) -> None:
    data_file(run_7, 12).unlink()
    (run_7 / f"000000000013-{'0' * 32}.safetensors.part").write_bytes(b"half")
    found = document(call("inspect", run_7, "--json"))
    assert found["versions"][0]["problem"].endswith("is missing")
    assert [row["bytes"] for row in found["other_files"]] == [4]
    assert found["other_files"][0]["meaning"].startswith("incomplete")


def test_inspect_reads_one_version_and_a_file_of_another_program(run_7: Path, tmp_path: Path) -> None:
    one = document(call("inspect", data_file(run_7, 11), "--json"))
    assert (one["good"], one["version"], one["step"]) == (True, 11, 110)
    alone = tmp_path / "model.safetensors"
    alone.write_bytes(data_file(run_7, 11).read_bytes())
    found = document(call("inspect", alone, "--json"))
    assert (found["good"], found["checksum"]) == (True, "none: no manifest names this file")
    assert found["tensors"] == one["tensors"]
    alone.write_bytes(alone.read_bytes()[:-1])
    assert call("inspect", alone).exit_code == 1


def test_inspect_does_not_wait_at_a_file_that_is_not_regular(tmp_path: Path, run_7: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = call("inspect", tmp_path / "pipe")
    assert result.exit_code == 2
    assert "not a regular file" in result.stderr
    data = data_file(run_7, 12)
    size = data.stat().st_size
    data.unlink()
    os.mkfifo(data)
    found = document(call("inspect", run_7, "--json"))
    assert found["versions"][0]["problem"] == f"{data.name} has 0 bytes, not {size}"
    assert found["newest_complete_version"] == 11


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_inspect_refuses_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for place, words in (
        (path, "is no file of weights; known: directories of"),
        (tmp_path, "no checkpoints"),
    ):
        result = call("inspect", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr
    assert call("inspect", tmp_path / "nothing").exit_code == 2


def test_inspect_tells_an_object_store_from_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_frames, "PIECE_BYTES", 64)
    with ObjectStoreWeightSyncScheme(tmp_path, token="secret") as trainer:
        trainer.init_on_sender(model=Model())
        trainer.connect()
    result = call("inspect", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "holds versions of an ObjectStoreWeightSyncScheme" in result.stderr
    assert list(tmp_path.glob("*/*.frame.1"))
    for frame in tmp_path.glob("*/*.frame"):
        found = document(call("inspect", frame, "--json"))
        assert (found["good"], len(found["frames"])) == (True, 1)
        frame.with_name(f"{frame.name}.1").unlink()
        assert call("inspect", frame).exit_code == 1


def test_inspect_shows_frames_and_the_chain_of_patches(tmp_path: Path) -> None:
    path = dump(tmp_path / "frames", welcome(), full(3), *patches(3, 4), *patches(4, 5, 6))
    result = call("inspect", path, "--json")
    assert result.exit_code == 0, result.output
    found = document(result)
    assert found["chain"] == "3 -> 4 -> 5 -> 6"
    assert [row["kind"] for row in found["frames"]] == ["WELCOME", *["UPDATE"] * 4]
    assert [row["chunk"] for row in found["frames"]] == [None, "1 of 1", "1 of 1", "1 of 2", "2 of 2"]
    assert [(row["base"], row["version"], row["changed_elements"]) for row in found["patches"]] == [
        (3, 4, 1),
        (4, 5, 1),
        (5, 6, 1),
    ]
    assert [row["name"] for row in found["tensors"]] == ["weight", "bias"]
    assert "3 -> 4 -> 5 -> 6" in call("inspect", path).stdout


@pytest.mark.parametrize("step", [slow(1), 7])
def test_every_flipped_byte_of_a_frame_is_found(tmp_path: Path, step: int) -> None:
    path = dump(tmp_path / "frames", full(3), *patches(3, 4))
    raw = path.read_bytes()
    for at in range(0, len(raw), step):
        flip(path, at)
        assert not read_frames(path)["good"], at
        path.write_bytes(raw)
    assert read_frames(path)["good"]


@pytest.mark.parametrize("know_schema", [False, True])
@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([full(3), *patches(4, 5)], "applies to version 4, the update before makes 3"),
        (patches(3, 4, 5)[:1], "the file ends after chunk 1 of 2"),
        (patches(3, 4, 5)[1:], "chunk 2 follows chunk 0"),
        (patches(4, 5, base=3), "a delta applies to version 4, the one before makes 3"),
        (
            list(frames_of(Step(7), SCHEMA, "patch/1", [patches(3, 4)[0].payload], 1, 3)),
            "the deltas end at version 4",
        ),
    ],
    ids=["gap", "end missing", "start missing", "wrong base", "wrong version"],
)
def test_inspect_finds_a_broken_chain(
    tmp_path: Path, know_schema: bool, chunks: list[WeightChunk], problem: str
) -> None:
    path = dump(tmp_path / "frames", *[welcome()] * know_schema, *chunks)
    result = call("inspect", path, "--json")
    assert result.exit_code == 1
    assert problem in str(document(result)["frames"][-1]["problem"])


def test_inspect_decodes_payloads_if_it_knows_the_schema(tmp_path: Path) -> None:
    short = next(frames_of(Step(3), SCHEMA, "dense/1", [torch.zeros(64, dtype=torch.uint8)], 1))
    assert read_frames(dump(tmp_path / "one", short))["good"]
    assert not read_frames(dump(tmp_path / "two", welcome(), short))["good"]


def test_inspect_goes_on_after_a_damaged_payload_and_ends_at_a_cut(tmp_path: Path) -> None:
    path = dump(tmp_path / "frames", full(3), full(4), full(5))
    flip(path, len(full(3).encode()) - 1)
    assert [row["state"] for row in read_frames(path)["frames"]] == ["damaged", "ok", "ok"]
    path.write_bytes(path.read_bytes()[:-1])
    assert [row["state"] for row in read_frames(path)["frames"]] == ["damaged", "ok", "damaged"]
