"""Memory in which weights reach SGLang's scheduler processes, and the answers come back."""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import torch

from weight_update.wire.schema import WeightSchema

NAME = "weight_update_sglang"
PATH = re.compile(r"/proc/\d+/fd/\d+")
_POLL_SECONDS = 0.001


class SharedBatch:
    """Anonymous memory with a batch of tensors, and a second one to which each reader appends its answer.

    Processes of the same user and pid namespace open both. They end with the process that made them.
    """

    def __init__(self) -> None:
        self._data, self._answers = os.memfd_create(NAME), os.memfd_create(NAME)
        for fd in (self._data, self._answers):
            os.fchmod(fd, 0o600)
        self._number = 0  # of the last order

    def close(self) -> None:
        """Free the memory."""
        os.close(self._data)
        os.close(self._answers)

    def write(self, kind: str, named: Mapping[str, torch.Tensor]) -> str:
        """Replace the tensors, and drop all answers; return the order by which :func:`read` finds both."""
        schema = WeightSchema.of(named)
        os.ftruncate(self._data, max(os.fstat(self._data).st_size, schema.nbytes))
        os.ftruncate(self._answers, 0)
        for view, tensor in zip(
            schema.views(_mapped(self._data, schema.nbytes)), named.values(), strict=True
        ):
            view.copy_(tensor)
        here = f"/proc/{os.getpid()}/fd"
        self._number += 1
        order = {"data": f"{here}/{self._data}", "answers": f"{here}/{self._answers}", "number": self._number}
        return json.dumps({"kind": kind, "schema": schema.to_header(), **order})

    def answers(self, count: int, seconds: float) -> list[dict[str, Any]]:
        """Return the answers to the last order: wait for ``count`` of them, at most ``seconds``.

        A process that was late with an earlier order may answer that one meanwhile.
        """
        deadline = time.monotonic() + seconds
        while True:
            *lines, _ = os.pread(self._answers, os.fstat(self._answers).st_size, 0).split(b"\n")
            found = [one for one in map(json.loads, lines) if one["number"] == self._number]
            if len(found) >= count or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_SECONDS)


def read(order: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of an order, as private copies of the pages that are written to.

    Raises:
        ValueError: the order names a file that is not such memory.
    """
    schema = WeightSchema.from_header(order["schema"])
    with open(_opened(order["data"], os.O_RDONLY), "rb", 0) as file:
        flat = _mapped(file.fileno(), schema.nbytes, mmap.ACCESS_COPY)
    return dict(zip(schema.names, schema.views(flat), strict=True))


def answer(order: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Append an answer to an order; several processes may do so at once."""
    with open(_opened(order["answers"], os.O_WRONLY | os.O_APPEND), "ab", 0) as file:
        file.write(json.dumps({**content, "number": order["number"]}).encode() + b"\n")


def _opened(path: str, flags: int) -> int:
    if PATH.fullmatch(path) is None or not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise ValueError(f"{path} is not memory of weight_update")
    return os.open(path, flags | os.O_CLOEXEC)


def _mapped(fd: int, nbytes: int, access: int = mmap.ACCESS_DEFAULT) -> torch.Tensor:
    """Return the first bytes of a file, mapped for as long as the tensor is used."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(fd, nbytes, access=access), dtype=torch.uint8)
