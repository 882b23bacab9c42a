"""A sender and two workers in processes of their own, none of them a child of another."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import select
import signal
import time
from typing import Any

import torch
from faults_tools import START, WAIT, Passes, Stripes, fill

from weight_update import WeightSyncError, WeightSyncScheme


def _send_without_end(scheme: WeightSyncScheme, shape: tuple[int, int], pipe: Any) -> None:
    torch.set_num_threads(1)
    model = Stripes(*shape)
    scheme.connect(timeout=WAIT)
    version = 0
    while True:
        version += 1
        scheme.send(fill(model, version))
        if version == 3:
            pipe.send(("running", None))


def _work(scheme: WeightSyncScheme, idx: int, shape: tuple[int, int], pipe: Any) -> None:
    torch.set_num_threads(1)
    model = Stripes(*shape)
    scheme.init_on_receiver(model=model, worker_idx=idx)
    scheme.connect(timeout=WAIT)
    passes = Passes(lambda: model(START))
    error: type[BaseException] | None = None
    try:
        while True:
            scheme.receive()
    except WeightSyncError as bereaved:
        error = type(bereaved)
    seen = passes.report()
    time.sleep(0.2)
    after = passes.end()
    with torch.no_grad():
        low, high = model(START).tolist()
    found = {"error": error, "passes": seen, "after": after, "whole": low == high}
    pipe.send(("bereaved", found))
    scheme.shutdown()


class Relative:
    """One process of the family, watched through a pipe."""

    def __init__(self, target: Any, *args: Any) -> None:
        ctx = mp.get_context("fork")
        self._pipe, theirs = ctx.Pipe()
        self.process = ctx.Process(target=target, args=(*args, theirs), daemon=False)
        self.process.start()
        theirs.close()

    def expect(self, what: str, timeout: float) -> Any:
        assert self._pipe.poll(timeout), f"no {what!r} within {timeout} s"
        said, value = self._pipe.recv()
        assert said == what
        return value

    def exits_within(self, seconds: float) -> bool:
        self.process.join(seconds)
        return self.process.exitcode == 0

    def kill(self) -> None:
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT)

    def close(self) -> None:
        self.kill()
        self._pipe.close()
        self.process.close()


def _parent(scheme: WeightSyncScheme, shape: tuple[int, int], pipe: Any) -> None:
    """The sender: it starts its workers, as trainers do, and passes their words on."""
    torch.set_num_threads(1)
    scheme.init_on_sender(model=Stripes(*shape), num_workers=2)
    workers = [Relative(_work, scheme, idx, shape) for idx in range(2)]
    for worker in workers:
        # The test holds the workers' pipes too, by way of the descriptors that travel here.
        pipe.send((worker.process.pid, worker._pipe))
    _send_without_end(scheme, shape, pipe)


class Orphan:
    """A worker whose parent, the sender, may be gone."""

    def __init__(self, pid: int, pipe: Any) -> None:
        self.pid, self._pipe = pid, pipe
        self._pidfd = os.pidfd_open(pid)

    def expect(self, what: str, timeout: float) -> Any:
        assert self._pipe.poll(timeout), f"no {what!r} within {timeout} s"
        said, value = self._pipe.recv()
        assert said == what
        return value

    def exits_within(self, seconds: float) -> bool:
        return bool(select.select([self._pidfd], [], [], seconds)[0])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._pipe.close()


class Orphans:
    """The whole family; all of it ends with the context."""

    def __init__(self, kind: type[WeightSyncScheme], shape: tuple[int, int] = (8, 1 << 19)) -> None:
        self._sender = Relative(_parent, kind(timeout=WAIT), shape)
        self.workers: list[Orphan] = []

    def __enter__(self) -> Orphans:
        return self

    def run_until_sending(self) -> None:
        for _ in range(2):
            assert self._sender._pipe.poll(WAIT)
            self.workers.append(Orphan(*self._sender._pipe.recv()))
        self._sender.expect("running", WAIT)

    def kill_sender(self) -> None:
        self._sender.kill()

    def __exit__(self, *exc_info: object) -> None:
        self._sender.close()
        for worker in self.workers:
            worker.close()
