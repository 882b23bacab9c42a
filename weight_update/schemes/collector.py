"""Access to the context of a scheme, usually a collector of TorchRL. No other module touches one.

A context may have these members, all optional:

- ``get_model(model_id)``: returns the model of that name. Without it, ``model_id`` is looked up as a path of
  attributes and subscripts such as ``"env.transform[0]"``.
- ``num_workers``, ``policy_device`` (one or a list) and ``policy_factory`` (a list): tell a sender about its
  workers.
- ``collector_rrefs``: references of ``torch.distributed.rpc`` to the collectors of its workers.
- ``first_worker_idx``: index that its first worker uses; without it 0, or 1 for the collectors of TorchRL
  whose workers use their rank.
- ``increment_version()``: called once for each update, when it becomes visible.
- ``update_policy_weights_(model_id=..., policy_or_weights=...)``: called after an update. A collector gets
  this call only if it has weight sync schemes of its own, and passes the update on to its workers. Another
  context, such as TorchRL's inference server, gets it unless it has ``increment_version()``.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from weight_update.strategy.named_weights import NamedWeights

_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]+)\]")


def resolve_model(context: Any, model_id: str) -> Any:
    """Return the model called ``model_id`` in ``context``; raise AttributeError if there is none."""
    if hasattr(context, "get_model"):
        return context.get_model(model_id)
    return resolve_path(context, model_id)


def resolve_path(root: Any, path: str) -> Any:
    """Return the object at a path such as ``"env.transform[0]"`` or ``"models['actor']"``.

    Raise AttributeError, with the path, if a step does not exist.
    """
    found = root
    for name, subscript in _STEP.findall(path):
        try:
            if name:
                found = getattr(found, name)
            else:
                key = subscript.strip("'\"")
                found = found[int(key) if key.lstrip("-").isdigit() else key]
        except (AttributeError, LookupError, TypeError) as error:
            raise AttributeError(f"no {path!r} in {type(root).__name__}: {error}") from None
    return found


def model_named(name: str, context: weakref.ref[Any] | None) -> Any:
    """Return the model at a path in the context; raise ValueError if there is no context."""
    where = None if context is None else context()
    if where is None:
        raise ValueError(f"weights={name!r} names a model, but there is no context to find it in")
    return resolve_path(where, name)


def devices_of(context: Any) -> list[torch.device | None]:
    """Return the policy device of each worker of ``context``; one entry if it names no workers."""
    devices = getattr(context, "policy_device", None)
    if isinstance(devices, (list, tuple)):
        return list(devices)
    return [devices] * int(getattr(context, "num_workers", None) or 1)


def factories_of(context: Any) -> list[Any]:
    """Return the policy factories of ``context``, one for each worker; empty if it has none."""
    factories = getattr(context, "policy_factory", None)
    if factories is None:
        return []
    factories = list(factories) if isinstance(factories, (list, tuple)) else [factories]
    return factories if any(factory is not None for factory in factories) else []


def rrefs_of(context: Any) -> list[Any]:
    """Return the RRefs of ``torch.distributed.rpc`` to the collectors of ``context``, if it has any."""
    return list(getattr(context, "collector_rrefs", None) or ())


def first_worker_of(context: Any) -> int:
    """Return the index that the first worker of ``context`` uses."""
    module = sys.modules.get("torchrl.collectors.distributed")
    by_rank = () if module is None else (module.DistributedCollector, module.DistributedSyncCollector)
    return int(getattr(context, "first_worker_idx", isinstance(context, by_rank)))


class ContextObserver:
    """Tells the context of a receiver of each update, as long as the context exists.

    Args:
        context: collector, or another object that has some of the members of a context.
        model_id: name of the model.
        export: function that returns the weights in the format of the strategy.
        connected: whether the receiver has its first weights, which are no update.
    """

    def __init__(
        self, context: Any, model_id: str, export: Callable[[NamedWeights], Any], connected: bool
    ) -> None:
        self._context, self._model_id, self._export = weakref.ref(context), model_id, export
        self._is_update = connected

    def switched(self) -> None:
        """Raise the policy version of a context that counts updates itself."""
        context: Any = self._context()
        if not _has_own_schemes(context) and hasattr(context, "increment_version"):
            context.increment_version()

    def applied(self, weights: Callable[[], NamedWeights]) -> None:
        """Call ``update_policy_weights_()`` of a context that takes the call.

        Workers of a collector that have not connected yet get the weights when they do.
        """
        context: Any = self._context()
        takes_weights, self._is_update = self._takes_weights(context), True
        if takes_weights:
            found = self._export(weights())
            context.update_policy_weights_(model_id=self._model_id, policy_or_weights=found)

    def _takes_weights(self, context: Any) -> bool:
        """Return whether ``context`` is to be given the weights that were applied."""
        if _has_own_schemes(context):
            scheme = context._weight_sync_schemes.get(self._model_id)
            return scheme is None or bool(scheme.synchronized_on_sender)
        if hasattr(context, "_weight_sync_schemes") or hasattr(context, "increment_version"):
            return False
        return self._is_update and hasattr(context, "update_policy_weights_")  # TorchRL's InferenceServer


def _has_own_schemes(context: Any) -> bool:
    return bool(getattr(context, "_weight_sync_schemes", None))


def register_with_torchrl(cls: type) -> None:
    """Make TorchRL accept our schemes where it checks for its own.

    Its class for shared memory stands for every scheme that applies updates in the background, as ours do:
    TorchRL's inference server calls ``receive()`` of any other scheme before each batch.

    A scheme calls this when it is made, because that server checks it before it initializes it, and at its
    initialization, because TorchRL may have been imported in between.
    """
    module = sys.modules.get("torchrl.weight_update")
    shared = getattr(module, "SharedMemWeightSyncScheme", None)  # another thread may be importing the module
    if shared is not None:
        shared.register(cls)
