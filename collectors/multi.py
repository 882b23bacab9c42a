"""The collectors of several processes."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torchrl.collectors
from tensordict import TensorDictBase
from torch import nn

from collectors.requests import Request, group_once, real, require_ours
from collectors.single import Collector
from collectors.torchrl_names import MultiCollectorMeta
from collectors.updating import Updating
from collectors.versions import KEY, FrameVersion, VersionSource, stamp
from weight_update import (
    LifecycleError,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightSyncError,
    WeightSyncScheme,
    WorkerError,
)

__all__ = ["AsyncCollector", "MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]


class _Choice(MultiCollectorMeta):
    """``MultiCollector(sync=...)`` makes one of the two classes below."""

    def __call__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Any:
        if cls is MultiCollector and sync is not None:
            return (MultiSyncCollector if sync else MultiAsyncCollector)(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class MultiCollector(Updating, torchrl.collectors.MultiCollector, metaclass=_Choice):
    """TorchRL's ``MultiCollector``, whose workers are our :class:`~collectors.Collector`.

    Args:
        create_env_fn: as in TorchRL.
        policy: as in TorchRL.
        sync: whether to make a :class:`MultiSyncCollector` or a :class:`MultiAsyncCollector`.
        collector_class: what runs in each worker; None is our :class:`~collectors.Collector`.
        track_policy_version: see :class:`~collectors.Collector`. The version on a frame is the one that
            ``update_policy_weights_`` reported.
        weight_sync_schemes: by model id; None with a module as policy takes a
            :class:`~weight_update.SharedMemWeightSyncScheme`. They are shut down with the collector.
        weight_updater: one of TorchRL's legacy updaters, instead of schemes. It counts no versions.
        options: all other options of TorchRL's ``MultiCollector``.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        collector_class: Any = None,
        track_policy_version: Any = True,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_updater: Any = None,
        **options: Any,
    ) -> None:
        if not weight_sync_schemes and weight_updater is None and isinstance(policy, nn.Module):
            weight_sync_schemes = {"policy": SharedMemWeightSyncScheme()}
        self._receivers: dict[str, WeightSyncScheme] = {}
        self._weight_sync_schemes = weight_sync_schemes
        self._versions = VersionSource((weight_sync_schemes or {}).get("policy"))
        require_ours(weight_sync_schemes or {})
        group_once((weight_sync_schemes or {}).values())
        if options.get("cudagraph_policy") or _captures(options.get("compile_policy")):
            for scheme in (weight_sync_schemes or {}).values():
                scheme.stable_addresses = True
        _live.add(self)
        super().__init__(
            create_env_fn,
            policy,
            collector_class=collector_class or Collector,
            track_policy_version=track_policy_version,
            weight_sync_schemes=weight_sync_schemes,
            weight_updater=weight_updater,
            **options,
        )

    @property
    def policy_version(self) -> Any:
        """The last version that a worker applied."""
        return super().policy_version if self._versions.scheme is None else self._versions.now()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` on the workers; the next update gets a number above the restored version."""
        super().load_state_dict(state_dict)
        version = state_dict.get(KEY)
        if isinstance(self.policy_version_tracker, FrameVersion) and version is not None:
            for scheme in real(self._weight_sync_schemes or {}).values():
                scheme.continue_from(int(version))
            self._versions.restore(int(version))

    def _setup_multi_policy_version_tracking(self, track_policy_version: Any) -> None:
        if track_policy_version is True:
            self.policy_version_tracker = FrameVersion()
        else:
            super()._setup_multi_policy_version_tracking(track_policy_version)

    def _add_collector_outputs_to_fake_td(self, fake_td: TensorDictBase) -> TensorDictBase:
        fake: TensorDictBase = super()._add_collector_outputs_to_fake_td(fake_td)
        if isinstance(self.policy_version_tracker, FrameVersion):
            stamp(fake, 0)
            fake["next", KEY] = fake[KEY]
        return fake

    def _run_processes(self) -> None:
        for scheme in (self._weight_sync_schemes or {}).values():
            scheme.worker_alive = _alive(weakref.ref(self))
        try:
            with ExitStack() as stack:
                for scheme in real(self._receivers).values():  # what comes meanwhile would miss the workers
                    stack.enter_context(scheme.hold())
                super()._run_processes()
        except WeightSyncError as error:
            told = self._told_by_workers()
            if not told:
                raise
            raise WorkerError(f"workers could not start:\n{told}") from error

    def _told_by_workers(self) -> str:
        """What workers that failed before they connected said about it."""
        found = []
        for idx, pipe in enumerate(self.pipes):
            try:
                message = pipe.recv() if pipe.poll(0) else None
            except (EOFError, OSError):
                continue
            if isinstance(message, Mapping) and message.get("error"):
                found.append(f"worker {idx}: {message['traceback']}")
        return "\n".join(found)

    def register_scheme_receiver(
        self, weight_recv_schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """As in TorchRL; what is received is passed on to the workers by this collector's own schemes."""
        require_ours(weight_recv_schemes)
        self._receivers.update(weight_recv_schemes)
        super().register_scheme_receiver(weight_recv_schemes, synchronize_weights=synchronize_weights)

    def _update_without_scheme(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        raise LifecycleError(
            "this collector has no weight_sync_schemes, so it cannot reach the policies of its workers; with "
            'policy_factory, give weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}'
        )

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """As in TorchRL; the schemes of this collector end with it."""
        try:
            super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        finally:
            for scheme in (*self._receivers.values(), *(self._weight_sync_schemes or {}).values()):
                scheme.shutdown()


class MultiSyncCollector(MultiCollector, torchrl.collectors.MultiSyncCollector):
    """Each batch has frames of every worker; see :class:`MultiCollector`."""


class MultiAsyncCollector(MultiCollector, torchrl.collectors.MultiAsyncCollector):
    """Each batch comes from the worker that is done first; see :class:`MultiCollector`."""


class AsyncCollector(MultiAsyncCollector, torchrl.collectors.AsyncCollector):
    """A :class:`MultiAsyncCollector` of one worker; ``create_env_fn`` is one function, not a list."""


_live: weakref.WeakSet[MultiCollector] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """At exit ``multiprocessing`` waits for all workers, and they wait for orders: send them home first."""
    for collector in list(_live):
        collector.shutdown(raise_on_error=False)


def _captures(compile_policy: Any) -> bool:
    """Whether these options of ``torch.compile`` record CUDA graphs, which fix the addresses of weights."""
    return isinstance(compile_policy, Mapping) and (
        compile_policy.get("mode") in ("reduce-overhead", "max-autotune")
        or (compile_policy.get("options") or {}).get("triton.cudagraphs", False)
    )


def _alive(collector: weakref.ref[Any]) -> Callable[[int], bool]:
    """Whether the process of a worker lives; the collector may be gone."""

    def alive(worker_idx: int) -> bool:
        owner = collector()
        return owner is None or worker_idx >= len(owner.procs) or owner.procs[worker_idx].is_alive()

    return alive
