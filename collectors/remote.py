"""The common base of the collectors whose workers run collectors, on any host."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torchrl.collectors
from torch import nn

from collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.requests import change_each, require_one_each, require_ours
from collectors.signatures import signature_of
from collectors.single import Collector
from collectors.updates import Updates
from collectors.updating import Updating
from collectors.versions import policy_scheme
from collectors.waiting import FRAMES_TIMEOUT, WaitingTimes, require_seconds
from collectors.weight_update import make_updater
from weight_update import SharedMemWeightSyncScheme, WeightSyncScheme


class Remote(Updating, torchrl.collectors.BaseCollector):
    """The base of the distributed, RPC and Ray collectors, placed before TorchRL's classes.

    Call sequence:

    1. ``__init__`` chooses the schemes (ours, one group; :meth:`_default_scheme` if none is given and the
       policy has weights), takes our collectors for the workers, and sets ``worker_alive`` on the schemes.
    2. It calls :meth:`_begin`, which is TorchRL's ``__init__`` unless a subclass extends it. When ``_begin``
       returns, workers run and the schemes are initialized, and connected where TorchRL connects them there.
       If it raises, :meth:`_give_up` is called.
    3. ``weight_recv_schemes`` are registered last, so that received weights reach connected workers.
    4. ``shutdown`` ends the workers, then all schemes. It is also called at exit.

    A subclass implements :meth:`_default_scheme` and ``shutdown``, and :meth:`_worker_alive` and
    :meth:`_give_up` if it can.

    Args:
        create_env_fn: as in TorchRL: a list, one for each worker.
        collector_class: collector of each worker: a class, or ``"single"``, ``"sync"`` or ``"async"`` for
            ours. None for ``"single"``, or for ``"sync"`` if each worker has several environments.
        num_workers_per_collector: as in TorchRL.
        weight_sync_schemes: schemes by model id; None for the default. They are shut down with the collector.
        weight_recv_schemes: receivers of this collector, if it is a worker itself; weights are passed on.
        weight_updater: legacy updater, instead of schemes. One of ``collectors`` sends by the default scheme.
        worker_idx: index of this collector, if it is a worker itself.
        frames_timeout: seconds that the collector waits for batches while a worker delivers none;
            ``math.inf`` for no limit. A :class:`~weight_update.SyncTimeoutError` then names the worker.
        options: all other options of TorchRL's collector.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = signature_of(cls)  # for help(), where **options hide it

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Any = None,
        collector_class: Any = None,
        collector_kwargs: Any = None,
        num_workers_per_collector: int = 1,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_updater: Any = None,
        worker_idx: int | None = None,
        frames_timeout: float = FRAMES_TIMEOUT,
        **options: Any,
    ) -> None:
        self._updates = Updates()
        kind = inner_class(collector_class, num_workers_per_collector)
        require_one_each("policy_factory", policy_factory, create_env_fn, options.get("num_collectors"))
        self.worker_idx = worker_idx
        self._waits = WaitingTimes(require_seconds(frames_timeout))
        adapter, updater = make_updater(weight_updater, weight_sync_schemes, policy)
        if weight_sync_schemes is None and updater is None:
            has_weights = isinstance(policy, nn.Module) or _any(policy_factory)
            weight_sync_schemes = {"policy": self._default_scheme(**options)} if has_weights else {}
        require_ours(weight_sync_schemes or {})
        require_ours(weight_recv_schemes or {})
        self._adopt(weight_sync_schemes or {})
        try:
            self._begin(
                create_env_fn,
                policy,
                policy_factory=policy_factory,
                collector_class=kind,
                collector_kwargs=inner_options(collector_kwargs, kind, policy, policy_factory),
                num_workers_per_collector=num_workers_per_collector,
                weight_sync_schemes=weight_sync_schemes,
                weight_updater=updater,
                **options,
            )
            if adapter is not None:
                self.weight_updater = adapter
            if weight_recv_schemes:
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self._give_up()
            raise

    # -- for subclasses ----------------------------------------------------------------------------

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        super().__init__(create_env_fn, policy, **options)

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        """Return the scheme of a policy without one; ``options`` are the options of the collector."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Release everything after an error at any point of ``__init__``."""
        self._end_schemes()

    def _end_schemes(self) -> None:
        self._disown()
        super()._end_schemes()

    # -- for users ---------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int | None:
        """The last version that a worker applied; None without a scheme for the policy."""
        scheme = policy_scheme(self._updates.schemes)
        return None if scheme is None else scheme.version


def inner_class(collector_class: Any, num_workers_per_collector: int) -> Any:
    """Return the collector class of each worker: one of ours, unless the caller gave a class."""
    if collector_class is None:
        collector_class = "single" if num_workers_per_collector == 1 else "sync"
    ours = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
    if not isinstance(collector_class, str):
        return collector_class
    if collector_class not in ours:
        raise ValueError(f"collector_class is a class or one of {[*ours]}, not {collector_class!r}")
    return ours[collector_class]


def inner_options(options: Any, kind: Any, policy: Any, policy_factory: Any) -> Any:
    """Return the options of the workers' collectors, with a scheme for their own workers if they lack one."""
    lacks = not isinstance(policy, nn.Module) and _any(policy_factory)
    if not lacks or not isinstance(kind, type) or not issubclass(kind, MultiCollector):
        return options
    return change_each(
        options, lambda one: {"weight_sync_schemes": {"policy": SharedMemWeightSyncScheme()}, **one}
    )


def _any(policy_factory: Any) -> bool:
    return any(policy_factory) if isinstance(policy_factory, Sequence) else policy_factory is not None
