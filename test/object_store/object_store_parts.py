"""Schemes on an object store for tests, and a store whose requests fail or hang."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from weight_update import BucketEncoding, ObjectStoreWeightSyncScheme, PatchEncoding, SyncTimeoutError
from weight_update.testing import mlp
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import wait_until

Scheme = ObjectStoreWeightSyncScheme
TOKEN = "secret"
ENCODINGS = {
    "dense": "dense",
    "bucket": "bucket",
    "buckets": BucketEncoding(bucket_size=4096),
    "patch": "patch",
    "compressed": PatchEncoding(compression="ans"),
}

Before = Callable[[str, str], object]
"""A function that is called before each request, with its verb and its path."""

Faults = Callable[..., None]
"""A function that sets what happens before each request; nothing, if that is not given."""


class FaultyFileSystem(LocalFileSystem):  # type: ignore[misc] - fsspec has no types
    """Files of this machine, and requests that fail or hang when a test wants it."""

    protocol = "faulty"
    before: ClassVar[Before] = staticmethod(lambda verb, path: None)

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


def refusing(verb: str, error: Exception, part: str = "") -> Before:
    """Return a function that raises an error before each request with this verb and a part of the path."""

    def refuse(begun: str, path: str) -> None:
        if begun == verb and part in path:
            raise error

    return refuse


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
