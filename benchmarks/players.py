"""The receiving side of the schemes that leave the machine: a model in a process or in a Ray actor."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import Model

__all__ = ["Player", "enter_world", "player_process", "the_player"]

_PATIENCE = 60.0  # seconds for one step of getting together

_here: list[Player] = []


class Player:
    """A worker. As a collector does, it gives its scheme the policy, and takes calls of the sender.

    Args:
        idx: index from 0.
        megabytes: size of the model.
        tensors: number of its tensors.
    """

    def __init__(self, idx: int, megabytes: float, tensors: int) -> None:
        torch.set_num_threads(1)
        self.worker_idx = idx
        self.policy = Model(megabytes, tensors)
        self._scheme: Any = None

    def join(self, scheme: Any, number: int) -> int:
        """Connect as worker ``number``, and return the id of this process."""
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self, worker_idx=number)
        scheme.connect(worker_idx=number)
        return os.getpid()

    def marks(self) -> tuple[float, float]:
        """See :meth:`Model.marks`."""
        return self.policy.marks()

    def leave(self) -> None:
        self._scheme.shutdown()

    def _receive_weights_scheme(self) -> None:
        """Called by the sender, through RPC or Ray."""
        self._scheme.receive()


def the_player() -> Player:
    """The one of this process."""
    return _here[0]


def player_process(
    conn: Connection, idx: int, model: tuple[float, int], host: str | None, world: int | None
) -> None:
    """Body of a worker that is a process.

    Args:
        conn: brings a scheme and the worker's number, then orders.
        idx: index from 0.
        model: megabytes, tensors.
        host: name of the host that it is to believe to be on; None: the one that it is on.
        world: processes of the world to enter; None enters none.
    """
    if host is not None:
        os.environ["WEIGHT_UPDATE_HOST"] = host
    player = Player(idx, *model)
    _here.append(player)
    if world is not None:
        enter_world(idx + 1, world)
    conn.send(player.join(*conn.recv()))
    try:
        while conn.recv() == "marks":
            conn.send(player.marks())
    except EOFError:
        pass
    player.leave()


def enter_world(rank: int, size: int) -> None:
    """Become a member of the default process group and of the RPC world, as TorchRL's collectors do."""
    from torch.distributed import rpc

    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=_PATIENCE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about what it does itself
        rpc.init_rpc(
            f"player{rank}",
            rank=rank,
            world_size=size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"tcp://127.0.0.1:{os.environ['RPC_PORT']}", rpc_timeout=_PATIENCE
            ),
        )
