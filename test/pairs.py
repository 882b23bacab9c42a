"""A sender and one receiver in the same process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from weight_update import WeightSyncScheme

_Scheme = TypeVar("_Scheme", bound=WeightSyncScheme)

PATHS: dict[str, dict[str, Any]] = {
    "dense": {},
    "flat buffer": {},
    "patch": {"encoding": "patch"},
    "dense copied": {"stable_addresses": True},
    "patch copied": {"encoding": "patch", "stable_addresses": True},
}
"""Options of the ways in which a receiver keeps a model; the tests make models small or large enough."""


def connect_pair(
    sender: _Scheme, source: Any, target: Any, receiver: _Scheme | None = None, **options: Any
) -> _Scheme:
    """Connect ``sender``, of the model ``source``, with a receiver of ``target``; return the receiver.

    Args:
        sender: a scheme; one that is not initialized is initialized with ``source`` and one worker.
        source: the sender's model.
        target: the receiver's model or engine.
        receiver: a scheme that is not initialized; by default a copy of ``sender``.
        options: further arguments of ``init_on_receiver``.
    """
    if not sender.initialized_on_sender:
        sender.init_on_sender(model=source, num_workers=1)
    receiver = copy.copy(sender) if receiver is None else receiver
    receiver.init_on_receiver(model=target, worker_idx=0, **options)
    try:
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(receiver.connect)
            sender.connect()
            joining.result()
    except BaseException:
        receiver.shutdown()
        raise
    return receiver


@torch.no_grad()
def add_one(model: nn.Module) -> None:
    """Add 1 to all weights, buffers included."""
    for one in model.state_dict().values():
        one += 1


def same(source: nn.Module, target: nn.Module) -> bool:
    """Return whether ``target`` has the weights of ``source``."""
    mine = target.state_dict()
    return all(torch.equal(mine[name], value) for name, value in source.state_dict().items())


def interrupt_once(
    patch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    *,
    after: bool,
    handle: Callable[[], object] = lambda: None,
) -> None:
    """Have the main thread's next call of a method raise KeyboardInterrupt, before or after its work."""
    real = getattr(owner, method)

    def interrupted(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return real(*arguments)
        patch.setattr(owner, method, real)
        if after:
            real(*arguments)
        handle()
        raise KeyboardInterrupt

    patch.setattr(owner, method, interrupted)
