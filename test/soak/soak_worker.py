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

BROKEN = ("torn", "backward", "wrong_version", "errors")
"""Problems that a forward pass can have; the board counts each."""
BLOCKS = 64
"""Parts of each tensor that change together."""
REFUSAL = "the soak lets this worker refuse the update"
_REPORTED = 3
"""Broken passes of one kind that a process describes; all are counted."""
_PAUSE = 0.001


def open_board(path: Path, rows: int) -> np.recarray[Any, Any]:
    """Map the counters of all workers, one row each.

    They are in a file, which every process maps, so that they outlive a worker that is killed. One process
    writes each field of a row.

    Args:
        path: the file, made by the trainer.
        rows: number of workers that may be there at once.
    """
    row = np.dtype([(name, np.int64) for name in ("passes", *BROKEN, "stamp", "refuse", "delay_ms")])
    if not path.exists():
        path.write_bytes(bytes(rows * row.itemsize))
    return np.memmap(path, row, "r+", shape=(rows,)).view(np.recarray)


class Stamped(nn.Module):
    """A model whose every element is a function of the version, so that a forward pass can check all of them.

    Args:
        megabytes: size of all weights, in units of a million bytes.
        tensors: number of weights.
        period: versions between two changes of a block; 1 changes every element with every version. The first
            block of each tensor always changes.

    Attributes:
        orders: row of the board that orders the model to be slow, and to refuse an update.
    """

    def __init__(self, megabytes: float, tensors: int, period: int) -> None:
        super().__init__()
        width = max(1, int(megabytes * 1e6 / 4 / tensors / BLOCKS))
        self.register_buffer("stamp", torch.full((1,), -1, dtype=torch.int64))
        parts = [nn.Parameter(torch.zeros(BLOCKS * width)) for _ in range(tensors)]
        self.weights = nn.ParameterList(parts)
        self.period, self.note = period, None
        self.orders: Any = None

    def forward(self, value: torch.Tensor) -> tuple[int, str]:
        """Return the version of the weights and a description of what is wrong with them, if anything is."""
        del value
        version = int(self.stamp[0])
        expected = bits_of(version, len(self.weights), self.period)
        delay_ms = 0 if self.orders is None else self.orders.delay_ms
        time.sleep(max(delay_ms / 1e3, _PAUSE))  # other threads run in the middle of the pass
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


class Noted(Stamped):
    """Its version also travels as extra state, which it refuses when ordered to."""

    def get_extra_state(self) -> int | None:
        return self.note

    def set_extra_state(self, note: int | None) -> None:
        if self.orders is not None and self.orders.refuse:
            self.orders.refuse = 0
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


def start_passes(body: Body, path: Path, rows: int, number: int, numbered: bool) -> int:
    """Begin forward passes without pause, counted in row ``number`` of the board; return the process id."""
    body.passes = Passes(body, path, rows, number, numbered)
    body.passes.start()
    return os.getpid()


def end_passes(body: Body) -> None:
    """Make no more forward passes."""
    body.passes.stop.set()
    body.passes.join(30.0)


def follow(body: Body, network: Any, host: str) -> None:
    """Move this process to another host of the network."""
    os.environ["WEIGHT_UPDATE_HOST"] = host
    if network is not None:
        network.enter(host)


class Passes(threading.Thread):
    """Forward passes of a worker, each of which is checked.

    Args:
        body: of the worker.
        path: of the board.
        rows: of the board.
        number: of this worker's row.
        numbered: whether the versions of the scheme are those that the weights were filled with.
    """

    def __init__(self, body: Body, path: Path, rows: int, number: int, numbered: bool) -> None:
        super().__init__(name="soak-passes", daemon=True)
        self._body, self._number, self._numbered = body, number, numbered
        self._problems = path.with_suffix(".problems")
        self._row: Any = open_board(path, rows)[number]
        self._row.refuse = self._row.delay_ms = 0
        self._row.stamp = self._newest = -1
        self._told: Counter[str] = Counter()
        self.stop = threading.Event()
        body.model.orders = self._row

    def run(self) -> None:
        try:
            with torch.no_grad():
                while not self.stop.wait(_PAUSE):
                    self._check_one()
        except Exception:  # noqa: BLE001 - told to the trainer
            self._tell("errors", traceback.format_exc())

    def _check_one(self) -> None:
        """Make one pass; every fourth one inside ``hold()``, which fixes the version that it must see."""
        scheme = self._body.scheme
        holding = hasattr(scheme, "hold") and self._row.passes % 4 == 0
        with scheme.hold() if holding else contextlib.nullcontext():
            version, text = self._body.model(torch.ones(1))
            named = scheme.version if holding and self._numbered else version
        self._row.passes += 1
        if text:
            self._tell("torn", f"version {version}: {text}")
        if version < self._newest:
            self._tell("backward", f"version {version} after version {self._newest}")
        if named != version:
            self._tell("wrong_version", f"weights of version {version} are called version {named}")
        self._newest = max(self._newest, version)
        self._row.stamp = version
        if hasattr(scheme, "advance"):
            with contextlib.suppress(WeightSyncError):  # an explorer goes on with the weights that it has
                scheme.advance()

    def _tell(self, kind: str, text: str) -> None:
        """Count a broken promise, and describe it."""
        setattr(self._row, kind, getattr(self._row, kind) + 1)
        self._told[kind] += 1
        if self._told[kind] <= _REPORTED:
            line = json.dumps({"worker": self._number, "kind": kind, "text": text})
            with self._problems.open("a") as file:
                file.write(line + "\n")
