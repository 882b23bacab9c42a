"""The sources that a sender reads weights from, for each worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from weight_update.errors import NothingToSendError, UnknownWorkerError, UnsupportedSourceError
from weight_update.schemes.collector import devices_of, factories_of, resolve_model
from weight_update.sharded import Gathering
from weight_update.strategy.named_weights import NamedWeights
from weight_update.strategy.strategy import WeightStrategy

__all__ = ["ModelOf", "Sources"]

DeviceMap = Callable[[int, Any], Any]


class ModelOf:
    """A model in a context, looked up by name at each call; only a weak reference to the context is kept."""

    def __init__(self, context: Any, model_id: str) -> None:
        self._context, self._model_id = weakref.ref(context), model_id

    def __call__(self) -> Any:
        """Return the model.

        Raises:
            NothingToSendError: the context no longer exists.
        """
        context = self._context()
        if context is None:
            raise NothingToSendError(f"the context of {self._model_id!r} no longer exists")
        return resolve_model(context, self._model_id)


@dataclass
class Sources:
    """The weights that each worker gets when ``send`` is called without weights.

    Attributes:
        by_worker: source of each worker, or None where there is none; workers may share one.
        devices: device of each worker, where known.
        device_map: applied to the source for each worker, if given.
        chosen: names that the strategy selects, for each worker; see :meth:`survey`.
        gathering: gathers the weights of a sharded trainer; None if the trainer is not sharded.
    """

    by_worker: dict[int, Any]
    devices: dict[int, torch.device | None]
    device_map: DeviceMap | None = None
    chosen: dict[int, frozenset[str] | None] = field(default_factory=dict)
    gathering: Gathering | None = None

    @classmethod
    def of(
        cls,
        *,
        context: Any,
        model_id: str | None,
        model: Any,
        weights: Any,
        params_map: Mapping[int, Any] | None,
        devices: Sequence[torch.device | str | None] | None,
        device_map_fn: DeviceMap | None,
        num_workers: int | None,
    ) -> Sources:
        """Return the sources that the arguments of ``init_on_sender`` describe.

        Raises:
            ValueError: the arguments contradict each other or are too few; the message says which.
            TypeError: the model of the context is not a module.
        """
        given = {
            "context": context,
            "model": model,
            "weights": weights,
            "params_map": params_map,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                "give init_on_sender exactly one of context (with model_id), model, weights or params_map; "
                f"got {' and '.join(names) or 'none'}"
            )
        if params_map is not None:
            _only(names[0], devices=devices, device_map_fn=device_map_fn, num_workers=num_workers)
            return cls._of_map(params_map)
        if context is not None:
            _only(names[0], devices=devices, device_map_fn=device_map_fn)
            return cls._of_context(context, model_id, num_workers)
        source = model if model is not None else weights
        return cls._of_source(source, devices, device_map_fn, num_workers)

    @classmethod
    def _of_map(cls, params_map: Mapping[int, Any]) -> Sources:
        if not params_map or not all(isinstance(idx, int) for idx in params_map):
            raise ValueError("params_map maps worker indices (int) to weights, for at least one worker")
        return cls(dict(params_map), dict.fromkeys(params_map))

    @classmethod
    def _of_context(cls, context: Any, model_id: str | None, num_workers: int | None) -> Sources:
        if model_id is None:
            raise ValueError("init_on_sender(context=...) needs model_id as well")
        devices = devices_of(context)
        if num_workers is not None and num_workers != len(devices):
            devices = [devices[0] if len(set(devices)) == 1 else None] * num_workers
        workers = dict(enumerate(devices))
        factories = factories_of(context)
        model = _model_or_none(context, model_id)
        if model is None and model_id == "policy" and factories:
            if all(factory is factories[0] for factory in factories):
                model = factories[0]()
            else:
                return cls({idx: factories[idx]() for idx in workers}, workers)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{model_id!r} of {type(context).__name__} is a {type(model).__name__}, not an nn.Module; "
                "policies without parameters need no scheme"
            )
        if _model_or_none(context, model_id) is model:
            model = ModelOf(context, model_id)
        return cls(dict.fromkeys(workers, model), workers)

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
        count = len(devices) if devices is not None else int(num_workers or 0)
        if count < 1 or (num_workers is not None and num_workers != count):
            raise ValueError(f"{num_workers=} does not go with {count} devices; at least one is needed")
        places = [None if d is None else torch.device(d) for d in devices or [None] * count]
        return cls(dict.fromkeys(range(count), source), dict(enumerate(places)), device_map_fn)

    def with_late_joiners(self, workers: Sequence[int]) -> Sources:
        """Return sources that also serve the late joiners among ``workers``; see :attr:`common`."""
        late = [idx for idx in workers if idx not in self.by_worker]
        if not late or not self.common:
            return self
        like = next(iter(self.by_worker))
        return replace(
            self,
            by_worker={**self.by_worker, **dict.fromkeys(late, self.by_worker[like])},
            devices={**self.devices, **dict.fromkeys(late)},
            chosen={**self.chosen, **dict.fromkeys(late, self.chosen.get(like))},
        )

    @property
    def common(self) -> bool:
        """Whether all workers have the same weights by default, so that a late joiner can have them too."""
        return self.device_map is None and len({id(source) for source in self.by_worker.values()}) == 1

    def sharded(self, strategy: WeightStrategy) -> bool:
        """Return whether other processes hold parts of the weights of a source."""
        distinct = {id(one): one for one in self.by_worker.values() if one is not None}
        return any(strategy.named(one).sharded for one in distinct.values())

    def survey(self, strategy: WeightStrategy) -> dict[int, tuple[NamedWeights, NamedWeights | None]]:
        """Return the weights that each worker is to have, and those that updates carry (None for all).

        Workers that get the same weights share one object.

        Raises:
            ValueError: the strategy selects nothing.
            NothingToSendError, UnsupportedSourceError: as :meth:`read`.
        """
        sources = self._sources_of(None, sorted(self.by_worker))
        self._begin()
        found: dict[int, tuple[NamedWeights, NamedWeights | None]] = {}
        chosen: dict[int, frozenset[str] | None] = {}
        for source in sources.values():
            if id(source) in found:
                continue
            names = chosen[id(source)] = strategy.chosen(source)
            if names is None or strategy.partial:
                found[id(source)] = self._outgoing(strategy, source, names), None
            else:
                tracked = self._outgoing(strategy, source, names)
                found[id(source)] = self._outgoing(strategy, source), tracked
        self.chosen = {idx: chosen[id(source)] for idx, source in sources.items()}
        return {idx: found[id(source)] for idx, source in sources.items()}

    def read(
        self, strategy: WeightStrategy, weights: Any, workers: Sequence[int], *, first: bool = False
    ) -> dict[int, NamedWeights]:
        """Return the weights for each of ``workers``; workers that get the same weights share one object.

        Args:
            strategy: strategy that reads them.
            weights: weights as given to ``send``; None for the sources of this object.
            workers: indices.
            first: whether to read all weights that workers are to have, not only those that updates carry.

        Raises:
            NothingToSendError: no weights were given and there is no source.
            UnsupportedSourceError: the weights are of a type that cannot be read.
        """
        found = self._sources_of(weights, workers)
        self._begin()
        everything = first and not strategy.partial
        named: dict[int, NamedWeights] = {}
        for idx, source in found.items():
            if id(source) not in named:
                chosen = None if everything else self.chosen.get(idx)
                named[id(source)] = self._outgoing(strategy, source, chosen)
        return {idx: named[id(source)] for idx, source in found.items()}

    def _begin(self) -> None:
        if self.gathering is not None:
            self.gathering.begin()

    def _outgoing(
        self, strategy: WeightStrategy, source: Any, chosen: frozenset[str] | None = None
    ) -> NamedWeights:
        if self.gathering is not None:
            return self.gathering.read(strategy, source, chosen)
        named = strategy.outgoing(source, chosen)
        if named.sharded:
            raise UnsupportedSourceError(
                "these weights are sharded (DTensor): give init_on_sender a sharded model on every rank, or "
                "WeightStrategy(gather=GatherShards())"
            )
        return named

    def _sources_of(self, weights: Any, workers: Sequence[int]) -> dict[int, Any]:
        per_worker = is_per_worker(weights)
        found: dict[int, Any] = {}
        for idx in workers:
            source = weights[idx] if per_worker else weights
            source = self.by_worker[idx] if source is None else source
            if source is None:
                raise NothingToSendError(
                    "send() without weights needs a model: give init_on_sender one, or give send() weights"
                )
            found[idx] = source
        if self.device_map is not None:
            found = {idx: self.device_map(idx, source) for idx, source in found.items()}
        return found

    def select(self, worker_ids: Any, weights: Any) -> list[int]:
        """Return the worker indices that the arguments of ``send`` mean.

        Raises:
            UnknownWorkerError: no worker has one of the indices or devices.
        """
        known = sorted(self.by_worker)
        chosen: list[int] = []
        if worker_ids is None:
            chosen = sorted(weights) if is_per_worker(weights) else known
        else:
            many = isinstance(worker_ids, (list, tuple, set, range))
            for item in worker_ids if many else [worker_ids]:
                chosen.extend(self._workers_of(item))
        if not chosen:
            raise UnknownWorkerError(f"worker_ids={worker_ids!r} names no worker (known workers: {known})")
        lacking = [i for i in chosen if is_per_worker(weights) and i not in weights]
        unknown = [i for i in chosen if i not in self.by_worker] + lacking
        if unknown:
            raise UnknownWorkerError(f"no weights or no such worker: {unknown} (known workers: {known})")
        return list(dict.fromkeys(chosen))

    def _workers_of(self, item: Any) -> list[int]:
        if isinstance(item, (torch.device, str)):
            try:
                device = torch.device(item)
            except RuntimeError:
                raise UnknownWorkerError(f"{item!r} is neither a worker index nor a device") from None
            matching = [idx for idx, place in self.devices.items() if place == device]
            if not matching:
                raise UnknownWorkerError(f"no worker on {device} (devices: {self.devices})")
            return matching
        return [int(item)]


def is_per_worker(weights: Any) -> bool:
    """Return whether ``weights`` maps worker indices to weights."""
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return False  # a TensorDict is a Mapping too, but one without a truth value
    return len(weights) > 0 and all(isinstance(key, int) for key in weights)


def _model_or_none(context: Any, model_id: str) -> Any:
    try:
        return resolve_model(context, model_id)
    except (ValueError, AttributeError):
        if not factories_of(context):
            raise
        return None


def _only(name: str, **others: Any) -> None:
    extra = [other for other, value in others.items() if value is not None]
    if extra:
        raise ValueError(f"{' and '.join(extra)} cannot be given together with {name}")
