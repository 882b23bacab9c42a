"""The worker's side of a soak: a model whose weights tell their version, and a thread that checks them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weight_update import WeightSyncError
from weight_update.testing import Body

# Faults make the library warn all the time: SOAK_LOG names a file for that.
logging.basicConfig(filename=os.environ.get("SOAK_LOG", os.devnull))

BLOCKS = 64
"""Parts of each tensor that change together."""
REFUSAL = "the soak lets this worker refuse the update"
_REPORTED = 3
"""Broken passes of one kind that a process describes; all are counted."""
_PAUSE = 0.001


class Board:
    """Counters of all workers, in a file that every process maps: they outlive a worker that is killed.

    Args:
        path: the file, made by the trainer.
        rows: number of workers that may be there at once.
    """

    FIELDS = ("pid", "passes", "torn", "backward", "wrong_version", "errors", "stamp", "refuse", "delay_ms")

    def __init__(self, path: Path, rows: int) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(8 * rows * len(self.FIELDS)))
        self._cells = np.memmap(path, dtype=np.int64, mode="r+", shape=(rows, len(self.FIELDS)))

    def get(self, row: int, field: str) -> int:
        """Return one counter."""
        return int(self._cells[row, self.FIELDS.index(field)])

    def set(self, row: int, field: str, value: int) -> None:
        """Write one counter."""
        self._cells[row, self.FIELDS.index(field)] = value

    def add(self, row: int, field: str) -> None:
        """Count one; each field of a row has one writer."""
        self._cells[row, self.FIELDS.index(field)] += 1

    def total(self, field: str) -> int:
        """Return the sum over all workers."""
        return int(self._cells[:, self.FIELDS.index(field)].sum())

    @property
    def problems(self) -> Path:
        """The file that workers describe broken passes in, one line of JSON each."""
        return self.path.with_suffix(".problems")


class Stamped(nn.Module):
    """A model whose every element is a function of the version, so that a forward pass can check all of them.

    Args:
        megabytes: size of all weights, in units of a million bytes.
        tensors: number of weights.
        period: versions between two changes of a block; 1 changes every element with every version. The first
            block of each tensor always changes.
    """

    def __init__(self, megabytes: float, tensors: int, period: int) -> None:
        super().__init__()
        width = max(1, int(megabytes * 1e6 / 4 / tensors / BLOCKS))
        self.register_buffer("stamp", torch.full((1,), -1, dtype=torch.int64))
        parts = [nn.Parameter(torch.zeros(BLOCKS * width)) for _ in range(tensors)]
        self.weights = nn.ParameterList(parts)
        self.period, self.note = period, None
        self._board: Board | None = None
        self._row = 0

    def watch(self, board: Board, row: int) -> None:
        """Take orders from a row of ``board``: to be slow, and to refuse an update."""
        self._board, self._row = board, row

    def forward(self, value: torch.Tensor) -> tuple[int, str]:
        """Return the version of the weights and a description of what is wrong with them, if anything is."""
        del value
        version = int(self.stamp[0])
        expected = bits_of(version, len(self.weights), self.period)
        self._dawdle()
        wrong = {}
        for number, weight in enumerate(self.weights):
            found = weight.detach().view(torch.int32).view(BLOCKS, -1)
            differing = int((found != expected[number, :, None]).any(1).sum())
            if differing:
                wrong[number] = differing
        text = f"blocks that differ, by tensor: {wrong}; " if wrong else ""
        if int(self.stamp[0]) != version:
            text += f"the version became {int(self.stamp[0])} during the pass; "
        if self.note not in (None, version):
            text += f"the extra state is of version {self.note}"
        return version, text

    def _dawdle(self) -> None:
        """Let other threads run in the middle of the pass, and be as slow as ordered."""
        delay = 0 if self._board is None else self._board.get(self._row, "delay_ms")
        time.sleep(max(delay / 1e3, _PAUSE))


class Noted(Stamped):
    """Its version also travels as extra state, which it refuses when ordered to."""

    def get_extra_state(self) -> int | None:
        return self.note

    def set_extra_state(self, note: int | None) -> None:
        if self._board is not None and self._board.get(self._row, "refuse"):
            self._board.set(self._row, "refuse", 0)
            raise RuntimeError(REFUSAL)
        self.note = note


def bits_of(version: int, tensors: int, period: int) -> torch.Tensor:
    """Return the bits of each block of each tensor; as float32 they are between 1 and 2."""
    block = torch.arange(tensors * BLOCKS).view(tensors, BLOCKS)
    every = torch.full_like(block, period)
    every[:, 0] = 1
    changed = version - (version - block * 7919 % every) % every
    mixed = (changed * 1000003 ^ block * 7368787) * 69069 & 0x7FFFFF
    return (0x3F800000 | mixed).to(torch.int32)


@torch.no_grad()
def fill(model: Stamped, version: int) -> Stamped:
    """Give ``model`` the weights of ``version``."""
    bits = bits_of(version, len(model.weights), model.period)
    for number, weight in enumerate(model.weights):
        weight.detach().view(torch.int32).view(BLOCKS, -1).copy_(bits[number, :, None].expand(BLOCKS, -1))
    model.stamp.fill_(version)
    if isinstance(model, Noted):
        model.note = version
    return model


# -- run in a worker -----------------------------------------------------------------------------------


def init(body: Body, make: Callable[[], Stamped]) -> None:
    """Call ``init_on_receiver`` with a new model."""
    body.init(make())


def start_passes(body: Body, path: Path, rows: int, row: int, numbered: bool) -> int:
    """Begin forward passes without pause, counted in ``row`` of the board; return the process id.

    Args:
        body: of the worker.
        path: of the board.
        rows: of the board.
        row: of this worker.
        numbered: whether the versions of the scheme are those that the weights were filled with.
    """
    board = Board(path, rows)
    board.set(row, "refuse", 0)
    board.set(row, "delay_ms", 0)
    board.set(row, "stamp", -1)
    board.set(row, "pid", os.getpid())
    body.model.watch(board, row)
    body.watch = Watch(board, row, numbered)
    body.watch.thread = threading.Thread(target=_run, args=(body,), name="soak-passes", daemon=True)
    body.watch.thread.start()
    return os.getpid()


def end_passes(body: Body) -> None:
    """Make no more forward passes."""
    body.watch.stop.set()
    body.watch.thread.join(30.0)


def follow(body: Body, network: Any, host: str) -> None:
    """Move this process to another host of the network."""
    os.environ["WEIGHT_UPDATE_HOST"] = host
    if network is not None:
        network.enter(host)


def _run(body: Body) -> None:
    watch = body.watch
    try:
        with torch.no_grad():
            while not watch.stop.wait(_PAUSE):
                watch.look(body)
    except Exception:  # noqa: BLE001 - told to the trainer
        watch.tell("errors", traceback.format_exc())


class Watch:
    """Checks one forward pass after another.

    Args:
        board: counts.
        row: of this worker.
        numbered: see :func:`start_passes`.
    """

    def __init__(self, board: Board, row: int, numbered: bool) -> None:
        self._board, self._row, self._numbered = board, row, numbered
        self._newest = -1
        self._told: Counter[str] = Counter()
        self.stop = threading.Event()
        self.thread: Any = None

    def look(self, body: Body) -> None:
        """Make one pass; every fourth one inside ``hold()``, which fixes the version that it must see."""
        turn = self._board.get(self._row, "passes")
        holding = hasattr(body.scheme, "hold") and turn % 4 == 0
        with body.scheme.hold() if holding else contextlib.nullcontext():
            version, text = body.model(torch.ones(1))
            named = body.scheme.version if holding and self._numbered else version
        self._board.add(self._row, "passes")
        if text:
            self.tell("torn", f"version {version}: {text}")
        if version < self._newest:
            self.tell("backward", f"version {version} after version {self._newest}")
        if named != version:
            self.tell("wrong_version", f"weights of version {version} are called version {named}")
        self._newest = max(self._newest, version)
        self._board.set(self._row, "stamp", version)
        if hasattr(body.scheme, "advance"):
            with contextlib.suppress(WeightSyncError):  # an explorer goes on with the weights that it has
                body.scheme.advance()

    def tell(self, kind: str, text: str) -> None:
        """Count a broken promise, and describe it."""
        self._board.add(self._row, kind)
        self._told[kind] += 1
        if self._told[kind] <= _REPORTED:
            line = json.dumps({"worker": self._row, "kind": kind, "text": text})
            with self._board.problems.open("a") as file:
                file.write(line + "\n")
