"""The choice of a collector by ``Collector(backend=..., num_collectors=...)``."""

from __future__ import annotations

import inspect
from typing import Any

from collectors.requests import change_each
from collectors.signatures import signature_of
from collectors.torchrl_names import (
    CollectorMeta,
    contextual_backend_error,
    get_service_backend,
    normalize_service_backend,
)


class BackendChoice(CollectorMeta):
    """The metaclass of :class:`~collectors.Collector`, which chooses among our collectors."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of the class, followed by those of TorchRL's class that it passes on."""
        return signature_of(cls)

    def __call__(
        cls,
        *args: Any,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **options: Any,
    ) -> Any:
        """Make the collector that ``backend`` and ``num_collectors`` ask for; without both, this class.

        Raises:
            TypeError: a subclass is asked for another backend, or an argument has the wrong type.
            ValueError: the arguments contradict each other.
        """
        choices = _choices()
        if cls is not choices["direct"]:  # TorchRL refuses all four there
            given = {"backend": backend, "backend_options": backend_options, "sync": sync}
            return super().__call__(*args, num_collectors=num_collectors, **given, **options)
        _require_number(num_collectors)
        kind = _resolve(backend, num_collectors, choices)
        if kind == "direct":
            _require_direct(num_collectors, sync, backend_options)
            args, options = cls._normalize_direct_env_fn(args, options)
            return super().__call__(*args, **options)
        if sync is not None and not isinstance(sync, bool):
            raise TypeError(f"sync is True, False or None, not {sync!r}")
        options = cls._merged(args, options, backend_options or {})
        args, options, number = cls._normalize_env_fns(args, options, num_collectors)
        tracks = options.get("track_policy_version")
        cls._drop_inapplicable_defaults(choices[kind], options)
        if tracks is not None:  # TorchRL drops its own default, which is not ours
            _track_versions(kind, options, tracks)
        if kind == "ray":
            options["num_collectors"] = number
        if kind == "submitit" and options.setdefault("launcher", "submitit") != "submitit":
            raise ValueError(f"backend='submitit' requires launcher='submitit', not {options['launcher']!r}")
        return choices[kind](*args, sync=bool(sync), **options)

    def _merged(cls, args: tuple[Any, ...], options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """Return ``options`` together with ``backend_options``."""
        if len(args) > 2:
            raise TypeError(
                "a Collector takes at most two arguments without a name: create_env_fn and policy"
            )
        reserved = sorted(cls._RESERVED_OPTIONS & more.keys())
        if reserved:
            raise ValueError(f"these names are reserved for arguments of Collector itself: {reserved}")
        twice = sorted(more.keys() & {*options, *("create_env_fn", "policy")[: len(args)]})
        if twice:
            raise ValueError(f"backend_options duplicate arguments: {twice}")
        return {**options, **more}


def _choices() -> dict[str, Any]:
    """Return the collectors by backend."""
    import collectors

    return {
        "direct": collectors.Collector,
        "process": collectors.MultiCollector,
        "ray": collectors.RayCollector,
        "rpc": collectors.RPCCollector,
        "distributed": collectors.DistributedCollector,
        "submitit": collectors.DistributedCollector,
    }


def _resolve(backend: str | None, num_collectors: int | None, choices: dict[str, Any]) -> str:
    """Return the given backend, that of an enclosing ``torchrl.service_backend``, or the default."""
    surrounding = get_service_backend() if backend is None else None
    if backend is not None:
        kind = normalize_service_backend(backend)
    else:
        kind = surrounding or ("direct" if num_collectors is None else "process")
    if kind not in choices:
        message = f"Collector has no backend {kind!r}; the backends are {', '.join(sorted(choices))}."
        raise ValueError(contextual_backend_error(message, service=surrounding is not None))
    return str(kind)


def _track_versions(kind: str, options: dict[str, Any], tracks: Any) -> None:
    """Give ``track_policy_version`` to the collector, or to those of its workers."""
    if kind == "process":
        options["track_policy_version"] = tracks
        return
    options.pop("track_policy_version", None)
    given, tracking = options.get("collector_kwargs"), {"track_policy_version": tracks}
    options["collector_kwargs"] = change_each(given, lambda one: tracking | one)


def _require_number(num_collectors: Any) -> None:
    if num_collectors is None:
        return
    if isinstance(num_collectors, bool) or not isinstance(num_collectors, int):
        raise TypeError(f"num_collectors is a positive integer, not {num_collectors!r}")
    if num_collectors < 1:
        raise ValueError(f"num_collectors is a positive integer, not {num_collectors}")


def _require_direct(num_collectors: int | None, sync: Any, backend_options: Any) -> None:
    if num_collectors not in (None, 1):
        raise ValueError(f'backend="direct" runs at most one collector, not {num_collectors}')
    if sync is not None or backend_options:
        raise ValueError('backend="direct" takes neither sync nor backend_options')
