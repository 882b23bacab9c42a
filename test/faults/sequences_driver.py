"""The driver of schemes that run through random sequences of operations, and the requests to a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import rpc_parts
import torch
from soak_drivers import Driver
from soak_worker import end_passes, fill, follow
from torch.distributed import rpc

from collectors.nodes import free_port
from weight_update import BucketEncoding, RPCWeightSyncScheme, TransportError, WeightStrategy
from weight_update.testing import Body
from weight_update.testing.processes import eventually
from weight_update.testing.worker_processes import start_worker

WORKERS, LATE_JOINER = 3, 100
"""The number of the first workers, and the index of the late joiner."""


class SequenceDriver(Driver):
    """The driver of one scheme after another; the network, Ray or the RPC world stays.

    If a process of the RPC world dies, those that come later are outside of the world.
    """

    def open(self) -> None:
        self.inside: set[int] = set()
        self.renewed: set[int] = set()  # RPC cannot call a process that has the name of an earlier one
        self.called: set[int] = set()
        self.closed = self.options.scheme != "rpc"
        if not self.closed:
            self.port = free_port()
            rpc_parts.enter(rpc_parts.TRAINER, 0, self.port, None)
            self.stack.callback(rpc_parts.leave, graceful=False)
        if self.options.hosts:
            self._open_network()
        if self.options.scheme == "ray":
            self._open_ray()

    def renew(self, stamp: int) -> None:
        """Initialize a new sender."""
        self.source = fill(self.make_model(), stamp)
        self.scheme = self.make_scheme()
        self.init_on_sender()

    def make_scheme(self) -> Any:
        return RPCWeightSyncScheme(**self.limits()) if self.options.scheme == "rpc" else super().make_scheme()

    def init_on_sender(self) -> None:
        if self.options.scheme != "rpc":
            return super().init_on_sender()
        self.called = self.inside - self.renewed if self.options.calls else set()
        rrefs = {idx: rpc.remote(f"w{idx}", rpc_parts.called_object) for idx in self.called}
        return self.scheme.init_on_sender(model=self.source, num_workers=WORKERS, worker_rrefs=rrefs)

    def strategy(self) -> WeightStrategy:
        if self.options.encoding not in ("bucket", "pipeline"):
            return super().strategy()
        flying = 2 if self.options.encoding == "pipeline" else None
        return WeightStrategy(encoding=BucketEncoding(1 << 16), max_in_flight=flying)

    def started(self, idx: int, alone: bool) -> Any:
        """Start a process and move it to its place; ``alone`` if another one is stopped."""
        if self.options.scheme == "rpc":
            worker = start_worker(RPCWeightSyncScheme(), idx, "forkserver")
        else:
            worker = self.start_worker(idx)
        if self.options.hosts:
            worker.call("run", follow, self.network, self.host_of(idx))
        if not self.closed and not alone and idx < WORKERS:
            worker.call("run", rpc_parts.enter_world, f"w{idx}", idx + 1, self.port, None)
            self.inside.add(idx)
        return worker

    def ended(self, member: Member, leaves: bool = False) -> None:
        """Note that a process has ended; first it ``leaves`` the world, unless another one has died."""
        leaves = leaves and not self.closed
        if member.idx in self.inside and leaves:
            member.worker.call("run", rpc_parts.leave_world)
            self.renewed.add(member.idx)
        self.closed = self.closed or (member.idx in self.inside and not leaves)
        self.inside.discard(member.idx)
        self.called.discard(member.idx)


class Clock(threading.Thread):
    """Counts the seconds in which a busy machine let nothing run; no promise holds for them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._last, self._lost = time.monotonic(), 0.0
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(0.05)
            self._lost, self._last = self.lost(), time.monotonic()

    def lost(self) -> float:
        gap = time.monotonic() - self._last
        return self._lost + (gap if gap > 0.5 else 0.0)


class Member:
    """A worker, in the state "up", "stopped", "joining" or "gone"; ``dead`` if its process is, too.

    It is ``excused`` if an update may miss it, because of a fault since the last update that it got.
    """

    def __init__(self, idx: int, worker: Any) -> None:
        self.idx, self.worker, self.row, self.pid = idx, worker, -1, 0
        self.state, self.excused, self.dead = "joining", True, False

    @property
    def forgotten(self) -> bool:
        """Whether the sender may have forgotten it: it forgets a late joiner whose link has failed."""
        return self.idx == LATE_JOINER and self.excused


# -- in a worker ---------------------------------------------------------------------------------------


def begin(body: Body, scheme: Any, make: Callable[[], Any]) -> None:
    body.scheme = scheme or body.scheme
    body.init(make())
    rpc_parts.called_object().schemes["policy"] = body.scheme


def look(body: Body) -> tuple[int | None, int, str]:
    """Return the version, the stamp on the weights, and what is wrong with them."""
    with body.scheme.hold(), torch.no_grad():
        return body.scheme.version, *body.model(torch.ones(1))


def take(body: Body, timeout: float) -> str:
    """Receive until no update comes within ``timeout``; return the error."""
    try:
        while body.scheme.receive(timeout) is not None:
            pass
    except TransportError as error:
        return str(error)
    return ""


def leave(body: Body) -> list[str]:
    """Shut down; return the threads that go on."""
    end_passes(body)
    body.scheme.shutdown()
    eventually(lambda: not threads_left(), 5.0)
    return threads_left()


def threads_left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("weight_update")]
