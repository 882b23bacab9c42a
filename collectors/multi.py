"""The collectors of several processes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import cloudpickle
import torchrl.collectors
from tensordict import TensorDictBase
from torch import nn

from collectors.exits import StartedPipe, read_error, run_worker
from collectors.frames import BatchQueue, ControlPipe, WorkerProcess, WorkersLateError
from collectors.locks import WithProcessLock
from collectors.requests import Request, find_model, real, require_one_each, require_workers
from collectors.signatures import signature_of
from collectors.single import Collector, captures
from collectors.torchrl_names import MultiCollectorMeta, main_of_worker, multi_base
from collectors.updates import Updates, close_all
from collectors.updating import Updating
from collectors.versions import (
    KEY,
    FrameVersion,
    VersionSource,
    choose_tracking,
    policy_scheme,
    stamp,
    writes_version,
)
from collectors.waiting import FRAMES_TIMEOUT, require_seconds
from collectors.weight_update import make_updater
from weight_update import (
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncReport,
    TransportError,
    WeightStrategy,
    WeightSyncError,
    WeightSyncScheme,
    WorkerError,
)


class _Choice(MultiCollectorMeta):
    """The metaclass of :class:`MultiCollector`, which creates one of its subclasses by ``sync=``."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of the class, followed by those of TorchRL's class that it passes on."""
        return signature_of(cls)

    def __call__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Any:
        if cls is MultiCollector and sync is not None:
            return (MultiSyncCollector if sync else MultiAsyncCollector)(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class MultiCollector(Updating, torchrl.collectors.MultiCollector, metaclass=_Choice):
    """TorchRL's ``MultiCollector``, whose workers are our :class:`~collectors.Collector`.

    Args:
        sync: whether to make a :class:`MultiSyncCollector` or a :class:`MultiAsyncCollector`.
        collector_class: collector class of each worker; None for our :class:`~collectors.Collector`.
        track_policy_version: see :class:`~collectors.Collector`. The version on a frame is the one that
            ``update_policy_weights_`` reported. A ``collector_class`` that derives from TorchRL's collectors,
            and not from ours, cannot write it: None then means False.
        weight_sync_schemes: schemes by model id; None for a :class:`~weight_update.SharedMemWeightSyncScheme`
            if the policy is a module. They are shut down with the collector.
        weight_updater: legacy updater, instead of schemes. One of ``collectors`` sends by a
            :class:`~weight_update.SharedMemWeightSyncScheme`; any other counts no versions.
        frames_timeout: seconds that the collector waits for batches while a worker delivers none, or for the
            answer of a worker to a call such as ``state_dict()``; ``math.inf`` for no limit. Time that the
            program spends between two batches does not count. Workers may take this time to start, but at
            least 1,800 s.
        on_worker_lost: ``"raise"`` ends collection with an error when a worker has ended or is late.
            ``"continue"`` logs a warning, kills a worker that is late, and continues with the other workers.
            Only a :class:`MultiAsyncCollector` can continue, because other batches have frames of every
            worker.
        options: all other options of TorchRL's ``MultiCollector``.

    Raises:
        WorkerError: workers could not start. Also raised while iterating, when a worker has ended.
        SyncTimeoutError: a worker is late, also while iterating.
        TypeError: ``track_policy_version`` is True, and ``collector_class`` cannot write versions.
        ValueError: ``frames_timeout`` or ``on_worker_lost`` is not valid, or there is no worker.
    """

    procs: list[Any]
    _running_free: bool
    queue_out = WithProcessLock("_wlock")
    _traj_pool = WithProcessLock("lock")

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        collector_class: Any = None,
        track_policy_version: Any = None,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_updater: Any = None,
        frames_timeout: float = FRAMES_TIMEOUT,
        on_worker_lost: Literal["raise", "continue"] = "raise",
        **options: Any,
    ) -> None:
        self._updates = Updates()
        self._frames_timeout = require_seconds(frames_timeout)
        self._may_lose = self._goes_on(on_worker_lost)
        factory, number = options.get("policy_factory"), options.get("num_workers")
        if not isinstance(self, AsyncCollector):
            require_workers(create_env_fn, number)
        require_one_each("policy_factory", factory, create_env_fn, number)
        self._relayed: Any = None
        adapter, updater = make_updater(weight_updater, weight_sync_schemes, policy)
        has_weights = isinstance(policy, nn.Module) or (adapter is not None and factory)
        if not weight_sync_schemes and updater is None and has_weights:
            weight_sync_schemes = {"policy": SharedMemWeightSyncScheme()}
        schemes = weight_sync_schemes or {}
        self._adopt(schemes)
        self._versions = VersionSource(policy_scheme(schemes))
        tracks = _tracking_of(collector_class, track_policy_version)
        weights: bytes | None = None
        if _needs_first_weights(policy, schemes) and not factory:
            # TorchRL would send the policy without weights, and keep only its action in batches.
            weights = cloudpickle.dumps(policy)
            options["policy_factory"] = partial(cloudpickle.loads, weights)
        if options.get("cudagraph_policy") or captures(options.get("compile_policy")):
            for scheme in schemes.values():
                scheme.stable_addresses = True
        super().__init__(
            create_env_fn,
            policy,
            collector_class=collector_class or Collector,
            track_policy_version=choose_tracking(tracks, options.get("replay_buffer")),
            weight_sync_schemes=weight_sync_schemes,
            weight_updater=updater,
            **options,
        )
        if weights is not None:
            self.policy_factory[:] = [None] * self.num_workers  # it is as large as the policy
        if adapter is not None:
            self.weight_updater = adapter

    def _goes_on(self, on_worker_lost: str) -> bool:
        """Return whether collection goes on when a worker is lost."""
        if on_worker_lost not in ("raise", "continue"):
            raise ValueError(f'on_worker_lost is "raise" or "continue", not {on_worker_lost!r}')
        if on_worker_lost == "continue" and not isinstance(self, MultiAsyncCollector):
            raise ValueError(
                'on_worker_lost="continue" needs a MultiAsyncCollector: batches of a '
                f"{type(self).__name__} have frames of every worker"
            )
        return on_worker_lost == "continue"

    @property
    def policy_version(self) -> Any:
        """The last version that a worker applied."""
        return super().policy_version if self._versions.scheme is None else self._versions.now()

    def get_model(self, model_id: str) -> Any:
        """Return a model, as in TorchRL.

        A collector that only has a ``policy_factory`` receives updates into a policy of its own, from which
        its workers get them.
        """
        passed_on = model_id in self._updates.receivers and model_id in self._updates.schemes
        factory = next(filter(None, self.policy_factory), None)
        if model_id == "policy" and self.policy is None and passed_on and factory is not None:
            if self._relayed is None:
                self._relayed = factory()
            return self._relayed
        return find_model(super().get_model, model_id, num_workers=self.num_workers)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` on the workers; the next update gets a number above the restored version."""
        super().load_state_dict(state_dict)
        version = state_dict.get(KEY)
        if isinstance(self.policy_version_tracker, FrameVersion) and version is not None:
            self._updates.continue_from(int(version))
            self._versions.restore(int(version))

    def _setup_multi_policy_version_tracking(self, track_policy_version: Any) -> None:
        if track_policy_version is True:
            self.policy_version_tracker = None if writes_version(self.policy) else FrameVersion()
        else:
            super()._setup_multi_policy_version_tracking(track_policy_version)

    def _add_collector_outputs_to_fake_td(self, fake_td: TensorDictBase) -> TensorDictBase:
        fake: TensorDictBase = super()._add_collector_outputs_to_fake_td(fake_td)
        if isinstance(self.policy_version_tracker, FrameVersion):
            stamp(fake, 0)
            fake["next", KEY] = fake[KEY]
        return fake

    def _run_processes(self) -> None:
        multi_base._main_async_collector = run_worker
        try:
            with ExitStack() as stack:
                # Updates that come meanwhile would miss the workers.
                for scheme in real(self._updates.receivers).values():
                    stack.enter_context(scheme.hold())
                with _unhidden():
                    super()._run_processes()
            self._watch_workers()
        except WeightSyncError as error:
            first = str(error) if type(error) is WorkerError else ""  # TorchRL has read its message
            errors = "\n".join(filter(None, (first, self._errors_of_workers())))
            if not errors:
                raise
            raise WorkerError(f"workers could not start:\n{errors}") from error
        finally:
            multi_base._main_async_collector = main_of_worker

    @property
    def pipes(self) -> list[Any]:
        """The pipes to the workers."""
        return self._pipes

    @pipes.setter
    def pipes(self, pipes: list[Any]) -> None:
        limit = max(FRAMES_TIMEOUT, self._frames_timeout)
        self._pipes: list[Any] = [StartedPipe(pipe, idx, self.procs, limit) for idx, pipe in enumerate(pipes)]

    def _watch_workers(self) -> None:
        """Replace the queue of batches by a :class:`BatchQueue`."""
        pipes = [pipe._original for pipe in self.pipes]
        self.queue_out = batches = BatchQueue(
            self.queue_out,
            self.procs,
            pipes,
            in_rounds=isinstance(self, MultiSyncCollector),
            frames_timeout=self._frames_timeout,
            may_lose=self._may_lose,
        )
        self.procs = [WorkerProcess(process) for process in self.procs]
        self._pipes = [ControlPipe(pipe, batches, idx) for idx, pipe in enumerate(pipes)]

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches, as in TorchRL; batches of an iteration that was left are dropped."""
        self._drop_batches()
        try:
            yield from super().iterator()
        except WorkersLateError as error:
            raise error.args[0] from None

    def _drop_batches(self) -> list[int]:
        """Wait for what workers were asked to deliver, and drop it; return the workers."""
        self._updates.require_open()
        for idx in range(self.num_workers):
            self.queue_out.settle(idx)
        return [self._get_from_queue(0.0)[0] for _ in range(self.queue_out.kept)]  # it keeps their buffers

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause workers that collect freely, as in TorchRL; they go on after any error, too.

        Raises:
            WorkerError: a worker has ended.
            SyncTimeoutError: workers do not finish their batches in time (``frames_timeout``).
        """
        if not self._running_free:
            raise RuntimeError("Collector cannot be paused: its workers collect freely only after start()")
        self._drop_batches()  # the answers to a pause that failed
        try:
            for pipe in self.pipes:
                pipe.send((None, "pause"))
            self._drop_batches()
            self._running_free = False
            yield
        finally:
            if not self._updates.ended:
                self._running_free = True
                for pipe in self.pipes:
                    if pipe.paused:
                        pipe.send((None, "restart"))

    def _send(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        if self._may_lose:
            return self._send_to_rest(request)
        try:
            return super()._send(request)
        except SyncFailedError as error:
            cut = [idx for idx, one in error.failures.items() if isinstance(one, TransportError)]
            if sys.version_info >= (3, 11):
                for reason in self.queue_out.reasons(cut):
                    error.add_note(reason)
            raise

    def _send_to_rest(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        """Send to the workers that are not lost; losing more of them meanwhile is no error."""
        to_all = request.several and request.worker_ids is None
        left = [idx for idx in range(self.num_workers) if idx not in self.queue_out.lost]
        try:
            return super()._send(replace(request, worker_ids=left) if to_all else request)
        except SyncFailedError as error:
            if not self.queue_out.lost_all(error.failures):
                raise
            if to_all:  # a worker that was lost meanwhile has kept the step from all others
                return self._send_to_rest(request)
            scheme = self._updates.schemes[next(iter(request.weights))]
            report = scheme.last_report  # with sync=False, the error's is older
            if report is None or request.several:
                raise
            return report

    def _errors_of_workers(self) -> str:
        """Return the errors of workers that failed before they connected."""
        found = []
        for idx, (pipe, process) in enumerate(zip(self.pipes, self.procs, strict=False)):
            if process.ident is None:  # TorchRL dropped the error of start()
                found.append(
                    f"worker {idx}: its process could not be started. Either an argument cannot be pickled "
                    "(instead of policy.compile(), give compile_policy; instead of another policy, "
                    "policy_factory and weight_sync_schemes), or the program lacks "
                    "`if __name__ == '__main__':`"
                )
                continue
            if error := read_error(pipe):
                found.append(f"worker {idx}: {error}")
        return "\n".join(found)

    def _worker_alive(self, worker_idx: int) -> bool:
        if worker_idx >= len(self.procs):
            return True
        process = self.procs[worker_idx]
        return not process._closed and bool(process.is_alive())

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Shut down as in TorchRL, and end the schemes of this collector."""
        self._updates.begin_end()
        end = partial(super().shutdown, timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        close_all(end, self._end_schemes)

    def _end_at_exit(self) -> None:
        self.shutdown(raise_on_error=False)


class MultiSyncCollector(MultiCollector, torchrl.collectors.MultiSyncCollector):
    """A :class:`MultiCollector` whose batches have frames of every worker."""

    @property
    def buffers(self) -> Any:
        """The buffer of each worker, which a worker sends only with its first batch."""
        return self.queue_out.buffers

    @buffers.setter
    def buffers(self, empty: list[None]) -> None:
        """Keep the buffers; TorchRL's iterations begin without any."""

    @buffers.deleter
    def buffers(self) -> None:
        """Keep the buffers; TorchRL's iterations end without any."""

    def _get_from_queue(self, timeout: float) -> tuple[int]:
        item, _ = self.queue_out.get(timeout)
        return (item[1] if isinstance(item, tuple) else item,)


class MultiAsyncCollector(MultiCollector, torchrl.collectors.MultiAsyncCollector):
    """A :class:`MultiCollector` whose batches come from the worker that finishes first."""

    @property
    def _queue_len(self) -> int:
        """Length of the queue of batches: one for each worker, because a killed worker may keep its place."""
        return int(self.num_workers)

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Reset environments, as in TorchRL; batches that were not taken yet are dropped."""
        self._drop_batches()
        super().reset(reset_idx)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` on the workers; batches that were not taken yet are dropped.

        The next update gets a number above the restored version.
        """
        dropped = self._drop_batches()
        super().load_state_dict(state_dict)
        order = "continue_random" if self._should_use_random_frames() else "continue"
        for idx in dropped:
            self.pipes[idx].send((idx, order))


class AsyncCollector(MultiAsyncCollector, torchrl.collectors.AsyncCollector):
    """A :class:`MultiAsyncCollector` of one worker; ``create_env_fn`` is one function, not a list."""


@contextmanager
def _unhidden() -> Iterator[None]:
    """Raise the error, such as KeyboardInterrupt, that a block of ``TensorDict.to_module`` has replaced."""
    try:
        yield
    except RuntimeError as error:
        hidden = error.__context__
        if hidden is None or "tensordict to boolean" not in str(error):
            raise
        error.__context__ = None
        raise hidden from None


def _tracking_of(collector_class: Any, chosen: Any) -> Any:
    """Return ``chosen``, or False instead of None for a class of TorchRL, whose versions are others."""
    kind = collector_class if isinstance(collector_class, type) else Collector
    if issubclass(kind, Updating) or chosen not in (None, True):
        return chosen
    if chosen:
        raise TypeError(
            f"collector_class is {kind.__name__}, a collector of TorchRL, which cannot write the versions of "
            "these schemes: derive it from collectors.Collector, or leave out track_policy_version=True"
        )
    return False


def _needs_first_weights(policy: Any, schemes: Mapping[str, WeightSyncScheme]) -> bool:
    """Return whether there are schemes, but none that sends a policy as a whole."""
    if policy is None or not schemes:
        return False
    if not isinstance(policy, nn.Module):  # TorchRL takes the weights out of a module only
        return True
    scheme = real(schemes).get("policy")
    return scheme is None or not _sends_all(scheme.strategy, policy)


def _sends_all(strategy: WeightStrategy, policy: nn.Module) -> bool:
    """Return whether updates carry all parameters and buffers; a state_dict lacks non-persistent buffers."""
    if strategy.select is not None:
        return False
    return strategy.extract_as == "tensordict" or not any(
        module._non_persistent_buffers_set for module in policy.modules()
    )
