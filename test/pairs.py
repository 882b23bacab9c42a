"""A sender and one receiver in the same process."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from weight_update import WeightSyncScheme
from weight_update.receiver import flat_buffers

_Scheme = TypeVar("_Scheme", bound=WeightSyncScheme)

PATHS: dict[str, dict[str, Any]] = {
    "dense": {},
    "flat buffer": {},
    "patch": {"encoding": "patch"},
    "dense copied": {"stable_addresses": True},
    "patch copied": {"encoding": "patch", "stable_addresses": True},
}
"""Options of the ways in which a receiver keeps a model; see :func:`keep_as`."""


@torch.no_grad()
def add_one(model: nn.Module) -> None:
    """Add one to all weights of a model."""
    for one in model.state_dict().values():
        one += 1


def same(source: nn.Module, target: nn.Module) -> bool:
    """Return whether the target has the weights of the source."""
    mine = target.state_dict()
    return all(torch.equal(mine[name], value) for name, value in source.state_dict().items())


def keep_as(path: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have receivers keep small models as one of ``PATHS`` says; return its options."""
    patch.setattr(flat_buffers, "_MANY", 1 if path == "flat buffer" else 1 << 30)
    return PATHS[path]


def connect_pair(sender: _Scheme, source: Any, target: Any, **options: Any) -> _Scheme:
    """Connect ``sender``, of the model ``source``, with a receiver of ``target``; return the receiver.

    Args:
        sender: a scheme; one that is not initialized is initialized with ``source`` and one worker.
        source: the sender's model.
        target: the receiver's model or engine.
        options: further arguments of ``init_on_receiver``.
    """
    if not sender.initialized_on_sender:
        sender.init_on_sender(model=source, num_workers=1)
    receiver = copy.copy(sender)
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
