"""The workers of one sender, seen from it: processes, processes of an RPC world, or Ray actors."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from benchmarks.players import Player, enter_world, player_process, the_player

__all__ = ["Actors", "Processes", "World"]

_PATIENCE = 60.0  # seconds for an answer of an actor
_LEAVING = 2.0  # seconds; TorchRL's may not end by themselves
Marks = list[tuple[float, float]]


class Processes:
    """Workers that are processes of this machine. They are forked, so this must come before any thread.

    Args:
        count: how many.
        model: megabytes and tensors of the model.
        first: number of the first worker; TorchRL's go by their rank, ours by their index.
        apart: whether each is to count as a host of its own.
        world: processes of the world that they enter; None for none.
    """

    arguments: dict[str, Any]
    """For ``init_on_sender``, beside what every scheme gets."""

    def __init__(
        self, count: int, model: tuple[float, int], first: int, apart: bool, world: int | None = None
    ) -> None:
        self.arguments = {}
        self._first = first
        self._conns: list[Connection] = []
        self._processes: list[Any] = []
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "RPC_PORT": _free_port()}
        ctx = mp.get_context("fork")
        for idx in range(count):
            mine, theirs = ctx.Pipe()
            args = (theirs, idx, model, f"host{idx}" if apart else None, world)
            self._processes.append(ctx.Process(target=player_process, args=args, daemon=True))
            self._processes[-1].start()
            self._conns.append(mine)
            theirs.close()  # so that recv() ends when the worker dies

    def connect(self, scheme: Any) -> tuple[int, ...]:
        """Let all connect with the initialized sender; their process ids."""
        self._hand_out(scheme)
        scheme.connect()
        try:
            return tuple(conn.recv() for conn in self._conns)
        except EOFError:
            raise RuntimeError("a worker died before it was connected") from None

    def _hand_out(self, scheme: Any) -> None:
        for number, conn in enumerate(self._conns, self._first):
            conn.send((scheme, number))

    def marks(self) -> Marks:
        """What each worker has; see :meth:`Model.marks`."""
        for conn in self._conns:
            conn.send("marks")
        return [conn.recv() for conn in self._conns]

    def close(self) -> None:
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send("end")
        limit = time.monotonic() + _LEAVING
        for process in self._processes:
            process.join(max(limit - time.monotonic(), 0.0))


class World(Processes):
    """Processes of one RPC world and one default process group, with the sender as rank 0."""

    collector_class = Player

    def __init__(self, count: int, model: tuple[float, int], first: int) -> None:
        from torch.distributed import rpc

        super().__init__(count, model, first, apart=False, world=count + 1)
        enter_world(0, count + 1)
        self.collector_infos = [rpc.get_worker_info(f"player{rank}") for rank in range(1, count + 1)]
        self.collector_rrefs = [rpc.remote(info, the_player) for info in self.collector_infos]

    def _hand_out(self, scheme: Any) -> None:
        # TorchRL's scheme cannot be pickled any more when it knows the workers.
        super()._hand_out(type(scheme)())


class Actors:
    """Workers that are Ray actors.

    Args:
        count: how many.
        model: megabytes and tensors of the model.
        address: of the running Ray.
    """

    def __init__(self, count: int, model: tuple[float, int], address: str) -> None:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level="error")
        self._ray = ray
        make = ray.remote(Player).options(num_cpus=0)
        self.arguments = {"remote_collectors": [make.remote(idx, *model) for idx in range(count)]}
        self._actors = self.arguments["remote_collectors"]

    def connect(self, scheme: Any) -> tuple[int, ...]:
        """See :meth:`Processes.connect`."""
        calls = [actor.join.remote(scheme, idx) for idx, actor in enumerate(self._actors)]
        scheme.connect()
        return tuple(self._ray.get(calls, timeout=_PATIENCE))

    def marks(self) -> Marks:
        """See :meth:`Processes.marks`."""
        marks: Marks = self._ray.get([actor.marks.remote() for actor in self._actors], timeout=_PATIENCE)
        return marks

    def close(self) -> None:
        calls = [actor.leave.remote() for actor in self._actors]
        self._ray.wait(calls, num_returns=len(calls), timeout=_LEAVING)
        self._ray.shutdown()


def _free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])
