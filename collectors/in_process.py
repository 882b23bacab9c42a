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
    names = {model_id: f"model{number}" for number, model_id in enumerate(models)}
    targets = nn.ModuleDict({names[model_id]: model for model_id, model in models.items()})
    found = {names[model_id]: strategy.extract_weights(weights[model_id]) for model_id in models}
    strategy.apply_weights(targets, found)


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
