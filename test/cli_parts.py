"""Parts that tests of the command weight-update share."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import run_python
from torch import nn

from weight_update import PatchEncoding, WeightChunk, WeightSchema
from weight_update.encodings.base import Tracker
from weight_update.synchronizer import CheckpointStore
from weight_update.wire.frames import Kind, Step, frames_of

pytest.importorskip("click", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")
pytest.importorskip("prometheus_client", reason="the extra cli is not installed")

from click.testing import CliRunner, Result

from weight_update.cli.commands import weight_update

ROOT = Path(__file__).resolve().parent.parent


def call(*arguments: str | Path) -> Result:
    runner = CliRunner(env={"WEIGHT_UPDATE_PROGRESS": "1"})  # which bench changes
    return runner.invoke(weight_update, [str(one) for one in arguments])


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


IN_A_FOLDER = """
import os, sys
from weight_update.cli import main
os.chdir({folder!r})
sys.argv = {words!r}
if __name__ == "__main__":
    main()
"""


def in_folder(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in another folder."""
    return run_python("-c", IN_A_FOLDER.format(folder=str(folder), words=words), quick_spawn=True)


class Model(nn.Module):
    """A few kilobytes: tied tensors, several dtypes and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.two = nn.Linear(4, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("steps", torch.tensor(3))

    def get_extra_state(self) -> Any:
        return {"name": "model"}

    def set_extra_state(self, state: Any) -> None:
        del state


def make_run(folder: Path) -> Path:
    """Return a directory with the versions 11 and 12 of a model."""
    store = CheckpointStore(folder / "run-7")
    for version in (11, 12):
        store.publish(version, Model().state_dict(), step=10 * version)
    return store.directory


def data_file(directory: Path, version: int) -> Path:
    return next(directory.glob(f"{version:012}-*.safetensors"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


TENSORS = {"weight": torch.arange(64, dtype=torch.float32).view(8, 8), "bias": torch.zeros(8)}
SCHEMA = WeightSchema.of(TENSORS)


def welcome() -> WeightChunk:
    header = {"schema": SCHEMA.to_header(), "strategy": "state_dict", "keep": True}
    return WeightChunk(Kind.WELCOME, {**header, "version": 3, "digests": None})


def full(version: int) -> WeightChunk:
    flat = torch.zeros(SCHEMA.nbytes, dtype=torch.uint8)
    torch._foreach_copy_(SCHEMA.views(flat), list(TENSORS.values()))
    return next(frames_of(Step(version), SCHEMA, "dense/1", [flat], 1))


def patches(first: int, *versions: int, base: int | None = None) -> list[WeightChunk]:
    """Return one update that consists of a patch for each version."""
    tracker: Tracker[Any] = PatchEncoding().tracker(SCHEMA, None)
    tracker.begin(list(TENSORS.values()))
    new = [value.clone() for value in TENSORS.values()]
    payloads, before = [], first
    for version in versions:
        new[0][0, version % 8] += 1.0
        difference = tracker.compare(new)
        payload = tracker.encode(
            difference, before, version, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        )
        assert payload is not None
        tracker.advance(difference)
        payloads.append(payload.clone())
        before = version
    step, start = Step(versions[-1]), first if base is None else base
    return list(frames_of(step, SCHEMA, "patch/1", payloads, len(payloads), start))


def dump(path: Path, *chunks: WeightChunk) -> Path:
    path.write_bytes(b"".join(chunk.encode() for chunk in chunks))
    return path


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(300, 200)
        self.register_buffer("flags", torch.zeros(10, dtype=torch.bool))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

net = Net()
number = 3
"""
