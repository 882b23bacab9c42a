"""The sources of weights for each worker, from the arguments of init_on_sender."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weight_update.arguments import whole_number
from weight_update.errors import NothingToSendError
from weight_update.schemes.collector import devices_of, factories_of, resolve_model
from weight_update.sender.workers import NOBODY
from weight_update.sharded.gathering import is_sharded
from weight_update.strategy.strategy import WeightStrategy
from weight_update.text import plural

DeviceMap = Callable[[int, Any], Any]


class ModelOf:
    """A model in a context, looked up by name at each call; only a weak reference to the context is kept."""

    def __init__(self, context: Any, model_id: str) -> None:
        self._context, self._model_id = weakref.ref(context), model_id

    def __call__(self) -> Any:
        """Return the model; raise NothingToSendError if the context no longer exists."""
        context = self._context()
        if context is None:
            raise NothingToSendError(f"the context of {self._model_id!r} no longer exists")
        return resolve_model(context, self._model_id)


@dataclass
class Sources:
    """The weights that each worker gets when ``send`` is called without weights."""

    # Source of each worker, or None; workers may share one. Without workers, that of NOBODY.
    by_worker: dict[int, Any] = field(repr=False)
    devices: dict[int, torch.device | None]  # device of each worker, where known
    device_map: DeviceMap | None = None  # applied to the source for each worker

    @classmethod
    def of(
        cls,
        sources: Mapping[str, Any],
        model_id: str | None,
        devices: Sequence[torch.device | str | None] | None,
        device_map_fn: DeviceMap | None,
        num_workers: int | None,
    ) -> Sources:
        """Return the sources that the arguments of ``init_on_sender`` describe.

        ``sources`` are the arguments of which one is given, by name.

        Raises:
            ValueError: the arguments contradict each other or are too few; the message says which.
            TypeError: the model of the context is not a module.
        """
        given = {name: value for name, value in sources.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                "give init_on_sender exactly one of context (with model_id), model, weights or params_map; "
                f"got {' and '.join(given) or 'none'}"
            )
        ((name, source),) = given.items()
        if name == "params_map":
            _only(name, devices=devices, device_map_fn=device_map_fn, num_workers=num_workers)
            if not source or not all(isinstance(idx, int) and idx >= 0 for idx in source):
                raise ValueError("params_map maps worker indices (int) to weights, for at least one worker")
            return cls(dict(source), dict.fromkeys(source))
        if name == "context":
            _only(name, devices=devices, device_map_fn=device_map_fn)
            return cls._of_context(source, model_id, num_workers)
        return cls._of_source(source, devices, device_map_fn, num_workers)

    @classmethod
    def _of_context(cls, context: Any, model_id: str | None, num_workers: int | None) -> Sources:
        if model_id is None:
            raise ValueError("init_on_sender(context=...) needs model_id as well")
        devices = [_device(one) for one in devices_of(context)]
        if num_workers is not None and whole_number(num_workers, "num_workers", least=1) != len(devices):
            devices = [devices[0] if len(set(devices)) == 1 else None] * num_workers
        workers = dict(enumerate(devices))
        factories = factories_of(context)
        model, source = _model_or_none(context, model_id), ModelOf(context, model_id)
        if model is None and model_id == "policy" and factories:
            if all(factory is factories[0] for factory in factories):
                model = source = factories[0]()
            elif len(factories) < len(workers):
                raise ValueError(
                    f"policy_factory has {len(factories)} functions for {len(workers)} workers; give one, or "
                    "one for each worker"
                )
            else:
                return cls({idx: factories[idx]() for idx in workers}, workers)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{model_id!r} of {type(context).__name__} is of type {type(model).__name__}, not an "
                "nn.Module; policies without parameters need no scheme"
            )
        return cls(dict.fromkeys(workers, source), workers)

    @classmethod
    def _of_source(
        cls,
        source: Any,
        devices: Sequence[torch.device | str | None] | None,
        device_map_fn: DeviceMap | None,
        num_workers: int | None,
    ) -> Sources:
        if devices is None and num_workers is None:
            raise ValueError("init_on_sender needs the number of workers: give devices or num_workers")
        if device_map_fn is not None and devices is not None:
            raise ValueError("give either devices or device_map_fn, not both")
        given = len(devices or ()) if num_workers is None else num_workers
        count = whole_number(given, "num_workers", least=0)
        if devices is not None and not count == len(devices) > 0:
            raise ValueError(
                f"{num_workers=} does not go with {plural(len(devices), 'device')}; give one for each worker"
            )
        if count == 0 and device_map_fn is not None:
            raise ValueError("device_map_fn needs workers from the start: give num_workers of at least 1")
        places = [_device(one) for one in devices or [None] * count]
        workers = range(count) or [NOBODY]
        return cls(dict.fromkeys(workers, source), dict(enumerate(places)), device_map_fn)

    @property
    def nobody(self) -> list[int]:
        """``NOBODY`` if there are no workers from the start, else nothing."""
        return [idx for idx in self.by_worker if idx == NOBODY]

    @property
    def common(self) -> bool:
        """Whether all workers have the same weights by default, so that a late joiner can have them too."""
        return self.device_map is None and len({id(source) for source in self.by_worker.values()}) == 1

    def sharded(self, strategy: WeightStrategy) -> bool:
        """Return whether other processes hold parts of the weights of a source."""
        distinct = {id(one): one for one in self.by_worker.values() if one is not None}
        return any(is_sharded(strategy, one) for one in distinct.values())


def _device(given: Any) -> torch.device | None:
    try:
        return None if given is None else torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"devices has {given!r}, which is no device; give a list with one for each worker, such as "
            "['cpu', 'cuda:0']"
        ) from None


def _model_or_none(context: Any, model_id: str) -> Any:
    try:
        return resolve_model(context, model_id)
    except (ValueError, AttributeError):
        if model_id != "policy" or not factories_of(context):
            raise
        return None


def _only(name: str, **others: Any) -> None:
    extra = [other for other, value in others.items() if value is not None]
    if extra:
        raise ValueError(f"{' and '.join(extra)} cannot be given together with {name}")
