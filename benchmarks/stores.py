"""Weights that pass through files: object store and CheckpointStore, beside torch.save and safetensors."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.options import Options
from benchmarks.report import Table, Times, file_system, machine, ratio, say, show_ratio
from benchmarks.targets import target, targets_table
from benchmarks.updates import Weights, change, layered
from weight_update import ObjectStoreWeightSyncScheme, WeightStrategy
from weight_update.encodings import BucketEncoding
from weight_update.synchronizer import CheckpointStore
from weight_update.wire.memory import byte_view

QUICK = "4 MB, 2 turns"

COPY, HASHED = "plain copy of the bytes", "the same, with SHA-256"
SAVED, TENSORS = "torch.save, torch.load", "safetensors"
CHECKPOINT, STORED = "CheckpointStore", "object store, {}"
ENCODINGS = {"dense": "dense", "bucket, 64 MB": BucketEncoding(bucket_size=64 << 20), "patch": "patch"}
_CHANGED = 0.01
_POLL = 0.02
_SECONDS = 60.0


class Way(NamedTuple):
    """A way from the trainer's weights, through a directory, to those of a worker.

    Attributes:
        name: its name in the table.
        write: function that writes the trainer's weights, and returns the number of bytes.
        read: function that reads them into the worker's.
        theirs: the worker's weights.
    """

    name: str
    write: Callable[[], int]
    read: Callable[[], object]
    theirs: Weights


def _copy(directory: Path, weights: Weights, theirs: Weights) -> Way:
    """Write and read the bytes of all tensors; nothing is described or checked."""
    return _copied(COPY, directory, weights, theirs, lambda data: None)


def _hashed(directory: Path, weights: Weights, theirs: Weights) -> Way:
    """Do the same, and compute the SHA-256 digest of each tensor on both sides."""
    return _copied(HASHED, directory, weights, theirs, lambda data: hashlib.sha256(data).digest())


def _copied(
    name: str,
    directory: Path,
    weights: Weights,
    theirs: Weights,
    check: Callable[[memoryview], object],
) -> Way:
    file, draft = directory / "weights", directory / "draft"
    ends = list(itertools.accumulate(value.nbytes for value in weights.values()))

    def copy(path: Path, flags: int, transfer: Callable[..., int], tensors: Weights) -> None:
        def each(value: torch.Tensor, end: int) -> None:
            data = byte_view(value.view(-1).view(torch.uint8))
            transfer(fd, data, end - len(data))
            check(data)

        fd = os.open(path, flags)
        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                deque(threads.map(each, tensors.values(), ends), maxlen=0)
        finally:
            os.close(fd)

    def write() -> int:
        copy(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.pwrite, weights)
        return draft.replace(file).stat().st_size

    def read() -> None:
        copy(file, os.O_RDONLY, lambda fd, data, start: os.preadv(fd, [data], start), theirs)

    return Way(name, write, read, theirs)


def _saved(directory: Path, weights: Weights, theirs: Weights) -> Way:
    file, draft = directory / "weights.pt", directory / "draft"

    def write() -> int:
        torch.save(weights, draft)
        return draft.replace(file).stat().st_size

    return Way(SAVED, write, lambda: _take(theirs, torch.load(file, mmap=True)), theirs)


def _safetensors(directory: Path, weights: Weights, theirs: Weights) -> Way:
    from safetensors.torch import load_file, save_file

    file, draft = directory / "weights.safetensors", directory / "draft"

    def write() -> int:
        save_file(weights, draft)
        return draft.replace(file).stat().st_size

    return Way(TENSORS, write, lambda: _take(theirs, load_file(file)), theirs)


def _checkpoints(directory: Path, weights: Weights, theirs: Weights) -> Way:
    store = CheckpointStore(directory)

    def write() -> int:
        step = store.last_number() + 1
        return store.publish(step, weights, step=step).stat().st_size

    def read() -> None:
        with store.reading(store.last_number()) as found:
            _take(theirs, found)

    return Way(CHECKPOINT, write, read, theirs)


def _stored(
    directory: Path, weights: Weights, theirs: Weights, encoding: Any, name: str, ending: ExitStack
) -> Way:
    url = str(directory)
    trainer = ObjectStoreWeightSyncScheme(url, WeightStrategy(encoding=encoding), token="benchmark")
    trainer.init_on_sender(weights=weights)
    ending.callback(trainer.shutdown)
    trainer.connect()
    worker = ObjectStoreWeightSyncScheme(url, token="benchmark", poll_seconds=_POLL)
    worker.init_on_receiver(model=theirs)
    ending.callback(worker.shutdown)
    worker.connect()
    seen = [trainer.version]

    def write() -> int:
        report = trainer.send(weights=weights)
        seen[0] = report.version
        return report.wire_bytes

    def read() -> None:
        while worker.version != seen[0]:
            if worker.receive(timeout=_SECONDS) is None:
                raise RuntimeError(f"version {seen[0]} was not read within {_SECONDS:g} s")

    return Way(name, write, read, theirs)


def _take(theirs: Weights, found: Mapping[str, torch.Tensor]) -> None:
    torch._foreach_copy_(list(theirs.values()), [found[name] for name in theirs])


def measure(megabytes: float, turns: int, directory: Path) -> dict[str, tuple[Times, int]]:
    """Write and read in all ways, in turns; return the times and the bytes of an update, by way.

    Raises:
        RuntimeError: a worker ended with other weights than the trainer.
    """
    weights, random = layered(megabytes), np.random.default_rng(0)
    makers: list[Callable[..., Way]] = [_copy, _hashed, _saved, _checkpoints]
    if importlib.util.find_spec("safetensors") is not None:
        makers.insert(3, _safetensors)
    with tempfile.TemporaryDirectory(dir=directory) as folder, ExitStack() as ending:

        def place() -> tuple[Path, Weights, Weights]:
            return Path(tempfile.mkdtemp(dir=folder)), weights, {k: v.clone() for k, v in weights.items()}

        ways = [make(*place()) for make in makers]
        ways += [
            _stored(*place(), encoding, STORED.format(name), ending) for name, encoding in ENCODINGS.items()
        ]
        found = {way.name: (Times(), 0) for way in ways}
        for turn in range(turns + 1):
            say(f"turn {turn} of {turns}")
            change(weights, _CHANGED, "mostly 1 ulp", random)
            for way in ways:
                times = found[way.name][0]
                found[way.name] = times, times.add("write", way.write)
                times.add("read", way.read)
                if not all(torch.equal(theirs, weights[name]) for name, theirs in way.theirs.items()):
                    raise RuntimeError(f"{way.name}: the worker has other weights")
    return found


def add_options(known: Options) -> None:
    known.add("--mb", 500.0, "size of the model in MB, bfloat16", quick=4.0)
    known.add("--turns", 7, "how often each thing is timed", quick=2)
    place = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    known.add("--directory", place, "existing directory in which files are written", kind=Path)


def facts(options: argparse.Namespace) -> list[str]:
    return machine()


def tables(options: argparse.Namespace) -> Iterator[Table]:
    found = measure(options.mb, options.turns, options.directory)
    both = {name: times.figure("write", "read") for name, (times, _) in found.items()}
    ours = [name for name in found if name not in (COPY, HASHED, SAVED, TENSORS)]
    rows = []
    for name, (times, nbytes) in found.items():
        figures = [times.figure("write"), times.figure("read"), both[name]]
        cells = [one.cell(1e3, 0) if name in ours else one.show(1e3, 0) for one in figures]
        rows.append(
            [
                name,
                f"{nbytes / 1e6:.1f}",
                *cells,
                *(show_ratio(both[name], both[one], 2) for one in (HASHED, SAVED)),
            ]
        )
    note = (
        "Milliseconds, median (min .. max); trainer and worker are in one process. *MB*: size of a "
        "version. *write*: until the files of a version are complete.\n"
        f"*read*: until the worker has the weights; workers of the object store look every {_POLL * 1e3:.0f} "
        "ms. In each turn, 1 % of the elements change. The last four check a digest of all bytes.\n"
        f"File system: {file_system(options.directory)}."
    )
    head = ["way", "MB", "write", "read", "both", "of a copy with SHA-256", f"of {SAVED}"]
    yield Table(f"{options.mb:g} MB through a directory", note, head, rows)
    yield targets_table(
        [
            *(
                target(
                    "{way}: write and read, of a copy with SHA-256", ratio(both[name], both[HASHED]), way=name
                )
                for name in ours
            ),
            target(
                "object store, patch: write and read, of torch.save and load",
                ratio(both[STORED.format("patch")], both[SAVED]),
            ),
        ]
    )
