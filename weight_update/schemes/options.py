"""The keyword options of schemes, each in one place, and how subclasses pass them on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import torch

from weight_update.arguments import refuse_arguments
from weight_update.schemes.sources import DeviceMap
from weight_update.strategy.strategy import WeightStrategy

_F = TypeVar("_F", bound=Callable[..., Any])
_FOR_STRATEGY = "give such options to the strategy: strategy=WeightStrategy(encoding=...), for example"


class SchemeOptions(TypedDict, total=False):
    """Options of :class:`~weight_update.WeightSyncScheme`."""

    timeout: float
    connect_timeout: float
    stable_addresses: bool


class RemoteOptions(SchemeOptions, total=False):
    """Options of :class:`~weight_update.RemoteWeightSyncScheme`."""

    address: str
    port: int
    token: str | None
    host: str | None
    directory: str | None
    connections: int


class RayOptions(RemoteOptions, total=False):
    """Options of :class:`~weight_update.RayWeightSyncScheme`."""

    data: str
    name: str | None
    namespace: str | None


class SenderOptions(TypedDict, total=False):
    """Options of :meth:`~weight_update.WeightSyncScheme.init_on_sender`."""

    model_id: str | None
    context: Any
    model: Any
    weights: Any
    params_map: Mapping[int, Any] | None
    devices: Sequence[torch.device | str | None] | None
    device_map_fn: DeviceMap | None
    num_workers: int | None
    ctx: Any


def refuse_options(scheme: object, given: Mapping[str, object]) -> None:
    """Raise TypeError, which says where they belong, if a scheme was given options that it does not have."""
    of_strategy = inspect.signature(WeightStrategy).parameters
    refuse_arguments(scheme, {name: None for name in given if name in of_strategy}, _FOR_STRATEGY)
    refuse_arguments(scheme, given, f"it takes {', '.join(inspect.signature(type(scheme)).parameters)}")


def takes_options_of(base: Callable[..., Any]) -> Callable[[_F], _F]:
    """Return a decorator for a function that passes its ``**options`` on to ``base``.

    The signature of the function then lists the options, so that ``help()`` and the manual show them.
    """

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        own = dict(signature.parameters)
        own.popitem()  # **options
        theirs = inspect.signature(base).parameters.values()
        options = [one for one in theirs if one.kind is one.KEYWORD_ONLY and one.name not in own]
        function.__signature__ = signature.replace(parameters=[*own.values(), *options])
        return function

    return decorate
