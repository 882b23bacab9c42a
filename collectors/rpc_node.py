"""The program of a worker process of :class:`~collectors.RPCCollector`."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.distributed import rpc

_log = logging.getLogger(__name__)
_leave = threading.Event()
_rpc: Any = rpc


def name_of(idx: int) -> str:
    """Return the name of a worker in the RPC world, as TorchRL does."""
    return f"COLLECTOR_NODE_{idx + 1}"


def was_in_a_world() -> bool:
    """Whether this process is or was in an RPC world; PyTorch then cannot connect it with new processes."""
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
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_await_end, args=(parent.sentinel,), daemon=True).start()
    _leave.wait()
    rpc.shutdown(graceful=parent is None or not wait([parent.sentinel], 0), timeout=int(end_seconds))


def _await_end(sentinel: int) -> None:
    wait([sentinel])
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
