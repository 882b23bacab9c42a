"""The program of a worker process of :class:`~collectors.RPCCollector`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

_log = logging.getLogger(__name__)
_CONNECT, _FOREVER = timedelta(seconds=30), timedelta(days=3650)
_leave = threading.Event()
_dist: Any = dist
_rpc: Any = rpc


def name_of(idx: int) -> str:
    """Return the name of a worker in the RPC world, as TorchRL does."""
    return f"COLLECTOR_NODE_{idx + 1}"


def was_in_a_world() -> bool:
    """Return whether this process is or was in an RPC world; PyTorch allows only one."""
    return bool(_rpc._init_counter)


def join_world(name: str, rank: int, size: int, options: Any) -> None:
    """Join a world of ``size`` processes, and wait for the others."""
    kind = _rpc.BackendType.TENSORPIPE
    _rpc.init_rpc(name, rank=rank, world_size=size, backend=kind, rpc_backend_options=options)


def run_node(
    *,
    idx: int,
    address: str,
    port: int,
    world_size: int,
    devices: Any,
    options: dict[str, Any],
    end_seconds: float,
) -> None:
    """Stay in the RPC world until the trainer calls :func:`leave` or is gone.

    Args:
        idx: index of this worker.
        address: address of the trainer.
        port: port of the rendezvous.
        world_size: number of workers and the trainer.
        devices: devices of this worker for RPC: one, a list, or None.
        options: options of ``TensorPipeRpcBackendOptions``.
        end_seconds: seconds that the end may take.
    """
    if devices is not None and not isinstance(devices, list):
        devices = [torch.device(devices)]
    transport = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{address}:{port}", devices=devices, **options
    )
    join_world(name_of(idx), idx + 1, world_size, transport)
    orphaned = threading.Event()
    watched = address, port, orphaned
    threading.Thread(target=_await_end, args=watched, name="weight_update-trainer", daemon=True).start()
    _leave.wait()
    rpc.shutdown(graceful=not orphaned.is_set(), timeout=int(end_seconds))


def _await_end(address: str, port: int, orphaned: threading.Event) -> None:
    """Wait for the end of the trainer, whose store breaks its connections then."""
    with contextlib.suppress(RuntimeError):
        _dist.TCPStore(address, port, timeout=_CONNECT).wait(["weight_update/never"], _FOREVER)
    orphaned.set()
    _leave.set()


def leave() -> None:
    """End the program of this worker."""
    _leave.set()


def make_collector(cls: Callable[..., Any], env: Any, several: int, options: dict[str, Any]) -> Any:
    """Create the collector of this worker."""
    return cls([env] * several if several else env, **options)


def made(rref: Any) -> None:
    """Wait until the collector of this worker is created; raise its error if it failed."""
    rref.local_value()
