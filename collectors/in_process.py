"""Updates of models in the collector's own process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from weight_update import NoWeightSyncScheme, WeightStrategy, WeightSyncScheme


def apply_all(models: Mapping[str, nn.Module], weights: Mapping[str, Any]) -> None:
    """Copy weights into the models of the same ids, or raise and change none.

    Raises:
        SchemaMismatchError: names, shapes or dtypes differ somewhere; nothing was written.
        UnsupportedSourceError: weights have a type that cannot be read; nothing was written.
    """
    strategy = WeightStrategy("tensordict")
    found = {model_id: strategy.extract_weights(weights[model_id]) for model_id in models}
    if len(models) == 1:
        ((model_id, model),) = models.items()
        strategy.apply_weights(model, found[model_id])
        return
    targets = nn.Module()
    targets._modules.update(_in_parentheses(models))  # add_module() refuses a name with a dot
    strategy.apply_weights(targets, _in_parentheses(found))


def _in_parentheses(by_id: Mapping[str, Any]) -> dict[str, Any]:
    """Put model ids into parentheses, so that no name of a weight is both ``policy.module`` and a model."""
    return {f"({model_id})": value for model_id, value in by_id.items()}


def receive_here(scheme: WeightSyncScheme, model_id: str, source: Any, model: Any) -> WeightSyncScheme:
    """Make ``scheme`` the sender of a receiver in this process, connect the two, and return the receiver.

    The scheme is not initialized yet. It reads ``source`` and keeps ``model`` current.
    """
    scheme.init_on_sender(model_id=model_id, model=source, num_workers=1)
    receiver = copy.copy(scheme)
    receiver.init_on_receiver(model_id=model_id, model=model, worker_idx=0)
    if isinstance(scheme, NoWeightSyncScheme):
        return receiver
    with ThreadPoolExecutor(1, thread_name_prefix="weight_update-join") as pool:
        joining = pool.submit(receiver.connect)
        scheme.connect()
        joining.result()
    return receiver
