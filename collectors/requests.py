"""Requests made by ``update_policy_weights_``, and sending them by schemes."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from weight_update import (
    LifecycleError,
    NoWeightSyncScheme,
    SyncReport,
    UnsupportedSourceError,
    WeightSyncBackend,
    WeightSyncScheme,
    group_schemes,
    send_together,
)

Schemes = Mapping[str, WeightSyncScheme]
_owned: weakref.WeakSet[WeightSyncScheme] = weakref.WeakSet()
"""Schemes that a collector of this process initializes, and ends with itself."""


@dataclass(frozen=True)
class Request:
    """Weights for one or several models.

    Attributes:
        weights: weights by model id; None for the collector's own source of that model.
        worker_ids: workers to update; None for all.
        several: whether the caller gave ``weights_dict``, and so expects a dict of reports.
    """

    weights: dict[str, Any] = field(repr=False)
    worker_ids: Any = None
    several: bool = False

    @classmethod
    def of(cls, weights: Mapping[str, Any], model_id: str | None, worker_ids: Any) -> Request:
        """Read the arguments of ``update_policy_weights_``; ``weights`` has the weight arguments by name.

        Raises:
            TypeError: ``weights_dict`` is not a dict.
            UnsupportedSourceError: modules by model id were not given as ``weights_dict``.
            ValueError: the arguments contradict each other.
        """
        given = {name: value for name, value in weights.items() if value is not None}
        if "policy_weights" in given:
            warnings.warn("policy_weights was renamed to policy_or_weights", DeprecationWarning, stacklevel=3)
        if len(given) > 1:
            raise ValueError(f"give only one of {', '.join(given)}")
        weights_dict = given.pop("weights_dict", None)
        if weights_dict is None:
            source = next(iter(given.values()), None)
            _require_one_model(source)
            return cls({model_id or "policy": source}, worker_ids)
        if model_id is not None:
            raise ValueError("model_id and weights_dict cannot be given together")
        if not isinstance(weights_dict, Mapping):
            raise TypeError(
                "weights_dict is a dict of weights by model id, such as {'policy': policy}, not "
                f"{weights_dict!r:.60}; give the weights of one model as the first argument"
            )
        if not weights_dict:
            raise ValueError("weights_dict is empty")
        return cls(dict(weights_dict), worker_ids, several=True)


def _require_one_model(source: Any) -> None:
    """Raise UnsupportedSourceError if the weights of one model are a dict of modules by name."""
    named = [key for key in source if isinstance(key, str)] if isinstance(source, dict) else []
    modules = [key for key in named if isinstance(source[key], nn.Module)]
    if modules:
        raise UnsupportedSourceError(
            f"a dict of modules, {modules}, is not the weights of one model; give modules by model id as "
            "weights_dict="
        )


def send(schemes: Schemes, request: Request) -> SyncReport | dict[str, SyncReport]:
    """Send a request; a worker applies several models together or not at all.

    Raises:
        KeyError: a model has no scheme; nothing was sent.
        SyncFailedError: a worker failed; see :func:`~weight_update.send_together`.
    """
    unknown = [model_id for model_id in request.weights if model_id not in schemes]
    if unknown:
        raise KeyError(
            f"no weight sync scheme for {unknown}: give one of {sorted(schemes)} as model_id=, or several of "
            "them as keys of weights_dict=; other models need a scheme in weight_sync_schemes="
        )
    if not request.several:
        ((model_id, weights),) = request.weights.items()
        return schemes[model_id].send(weights, request.worker_ids)
    chosen = real({model_id: schemes[model_id] for model_id in request.weights})
    step = {scheme: request.weights[model_id] for model_id, scheme in chosen.items()}
    reports = send_together(step, request.worker_ids) if step else {}
    idle = SyncReport(0, "none")
    return {model_id: reports.get(schemes[model_id], idle) for model_id in request.weights}


def real(schemes: Schemes) -> dict[str, WeightSyncScheme]:
    """Return the schemes that send weights."""
    return {key: scheme for key, scheme in schemes.items() if not isinstance(scheme, NoWeightSyncScheme)}


def require_ours(schemes: Mapping[str, Any]) -> None:
    """Raise TypeError for schemes of another library, whose versions and forward passes are unknown."""
    if not isinstance(schemes, Mapping):
        raise TypeError(f"schemes are a dict by model id, such as {{'policy': scheme}}, not {schemes!r}")
    for model_id, scheme in schemes.items():
        if not isinstance(model_id, str):
            raise TypeError(f"a model id is a string, such as 'policy', not {model_id!r}")
        if isinstance(scheme, type) and issubclass(scheme, WeightSyncScheme):
            raise TypeError(f"the scheme of {model_id!r} is a class; give an instance: {scheme.__name__}()")
        if not isinstance(scheme, WeightSyncScheme):
            raise _foreign(model_id, scheme)


def require_unused(schemes: Mapping[str, Any]) -> None:
    """Raise LifecycleError for a scheme that was connected before, else as :func:`require_ours`."""
    require_ours(schemes)
    for model_id, scheme in schemes.items():
        if scheme.last_report is not None:
            raise _used(model_id, scheme)


def require_unowned(schemes: Mapping[str, Any]) -> None:
    """Raise LifecycleError for a scheme of another collector, else as :func:`require_ours`."""
    require_ours(schemes)
    for model_id, scheme in schemes.items():
        if scheme in _owned and scheme.initialized_on_sender:
            raise _used(model_id, scheme)


def own(schemes: Iterable[WeightSyncScheme]) -> None:
    """Note that a collector initializes these schemes."""
    _owned.update(schemes)


def _used(model_id: str, scheme: WeightSyncScheme) -> LifecycleError:
    return LifecycleError(
        f"the scheme of {model_id!r} was connected before ({scheme!r}); give each collector a scheme of its "
        "own"
    )


def require_one_each(name: str, given: Any, create_env_fn: Any, number: int | None = None) -> None:
    """Raise ValueError if the argument ``name`` is a list that does not have one item for each worker.

    ``number`` is the number of workers if ``create_env_fn`` is no list.
    """
    workers = len(create_env_fn) if isinstance(create_env_fn, Sequence) else number
    if isinstance(given, Sequence) and workers not in (None, len(given)):
        raise ValueError(
            f"{name} is a list of {len(given)}, and there are {workers} workers; give a list with one for "
            "each worker, or one for all"
        )


def change_each(collector_kwargs: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return ``collector_kwargs``, one dict or a list with one for each worker, after ``change`` of each."""
    if isinstance(collector_kwargs, Sequence):
        return [change(one or {}) for one in collector_kwargs]
    return change(collector_kwargs or {})


def require_workers(create_env_fn: Any, number: int | None, name: str = "num_workers") -> None:
    """Raise ValueError if ``create_env_fn`` and ``number``, the argument ``name``, ask for no worker."""
    if not (create_env_fn if isinstance(create_env_fn, Sequence) else number):
        raise ValueError(
            "create_env_fn is a list with a function for each worker, such as [make_env] * 4, or one "
            f"function with {name}=4, not {create_env_fn!r:.60}"
        )


def _foreign(model_id: str, scheme: Any) -> TypeError:
    """Return the error about a scheme that is not of this library."""
    kind = type(scheme)
    if hasattr(kind, "init_on_sender"):
        return TypeError(
            f"the scheme of {model_id!r} is of type {kind.__module__}.{kind.__name__}; these collectors need "
            "one of weight_update (usually it is enough to change the import)"
        )
    known = isinstance(scheme, str) and scheme in get_args(WeightSyncBackend)
    cure = f"WeightSyncScheme.from_backend({scheme!r})" if known else "SharedMemWeightSyncScheme()"
    return TypeError(
        f"the scheme of {model_id!r} is {scheme!r:.60}; give a scheme of weight_update, such as {cure}"
    )


def find_model(find: Callable[[str], Any], model_id: str, *, num_workers: int | None = None) -> Any:
    """Return ``find(model_id)``; raise AttributeError, in one line, if there is no such model.

    The error names the remedy for a model that only the workers have, if there are ``num_workers`` of them.
    """
    try:
        return find(model_id)
    except (AttributeError, LookupError, TypeError) as error:  # no such attribute, item or items at all
        in_policy, hint = f"policy.{model_id}", ""
        with contextlib.suppress(AttributeError, LookupError, TypeError):
            find(in_policy)
            hint = f"; the policy has one: {in_policy!r}"
        if num_workers is not None and not hint:
            hint = (
                f"; if only the workers have it, call init_on_sender(model_id={model_id!r}, weights=..., "
                f"num_workers={num_workers}) on its scheme first"
            )
        raise AttributeError(
            f"this collector has no model {model_id!r}; a model id is 'policy' or a path of attributes, such "
            f"as 'env.transform[0]'{hint}"
        ) from error


def group_once(schemes: Iterable[WeightSyncScheme]) -> None:
    """Group the schemes, unless their owner did."""
    schemes = list(schemes)
    groups = {scheme.group for scheme in schemes}
    if len(groups) > 1 or None in groups:
        group_schemes(schemes)
