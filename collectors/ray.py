"""The collector over Ray."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torchrl.collectors.distributed as torchrl_distributed
from tensordict import TensorDictBase

from collectors.ray_learner import LearnerSender, connect_actors, hand_over
from collectors.remote import Remote
from collectors.requests import Request, change_each, require_workers
from collectors.updates import close_all
from collectors.versions import KEY
from collectors.waiting import FRAMES_TIMEOUT
from weight_update import (
    LifecycleError,
    LinkClosedError,
    RayWeightSyncScheme,
    SyncFailedError,
    SyncReport,
    SyncTimeoutError,
    WeightSyncScheme,
    WorkerError,
)

_LOOK_SECONDS, _WARN_SECONDS = 0.5, 60.0
_log = logging.getLogger(__name__)


class RayCollector(Remote, torchrl_distributed.RayCollector):
    """TorchRL's ``RayCollector``, whose actors run our collectors.

    Schemes connect at the first ``update_policy_weights_``, as in TorchRL. Until then actors compute with the
    policy as it was at their creation, and their frames have version 0. An actor that Ray restarts,
    as ``remote_configs={"max_restarts": -1}`` allows, gets the newest weights before it collects again.
    Arguments that are not listed here are TorchRL's.

    Args:
        create_env_fn: a list, one for each actor; or one function, with ``num_collectors``.
        collector_class: see :class:`~collectors.remote.Remote`.
        weight_sync_schemes: schemes by model id; None for a :class:`~weight_update.RayWeightSyncScheme` if
            the policy has weights. Actors on other nodes need one with ``address=`` or
            ``data="object_store"``. They are shut down with the collector.
        weight_recv_schemes: receivers of this collector, if it is a worker itself; weights are passed on.
        weight_updater: see :class:`~collectors.remote.Remote`.
        total_frames: number of frames; -1 for no end.
        frames_timeout: seconds that the collector waits for batches, as for
            :class:`~collectors.MultiCollector`. Actors may take this time to start, but at least 1,800 s.

    Raises:
        ImportError: Ray is not installed.
        ValueError: ``create_env_fn`` is an empty list, or one function without ``num_collectors``.
        SyncTimeoutError: actors did not start in time; it names them.
        WorkerError: an actor has died, or could not start. It names the worker. Also raised while iterating.
    """

    _weight_sync_initialized: bool
    _actor_options = "remote_configs"
    """Name of the argument for the options of actors."""

    def _begin(self, create_env_fn: Any, policy: Any, **options: Any) -> None:
        self._remote_collectors: list[Any] = []
        self._runtime_lease: Any = None
        self._learner: LearnerSender | None = None
        self._missed: set[int] = set()  # workers that missed an update because their link was gone
        if find_spec("ray") is None:
            raise ImportError('RayCollector needs Ray: pip install "weight-update[ray]"', name="ray")
        require_workers(create_env_fn, options.get("num_collectors"), "num_collectors")
        # Copies: TorchRL writes into them.
        options["collector_kwargs"] = change_each(options["collector_kwargs"], dict)
        with warnings.catch_warnings():
            if schemes := options["weight_sync_schemes"]:
                # TorchRL does not know that they reach policies of factories,
                warnings.filterwarnings("ignore", "The policy is not an nn.Module", UserWarning)
                options["weight_sync_schemes"] = {}  # nor that some know nothing of actors
            super()._begin(create_env_fn, policy, **options)
        if schemes:
            self._initialize(schemes)

    def _initialize(self, schemes: dict[str, WeightSyncScheme]) -> None:
        """Initialize schemes as senders, and give each actor its receivers."""
        actors = self.remote_collectors
        for model_id, scheme in schemes.items():
            if isinstance(scheme, RayWeightSyncScheme):
                scheme.init_on_sender(model_id=model_id, context=self, remote_collectors=actors)
            elif not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self, num_workers=len(actors))
        self._weight_sync_schemes = schemes
        self._register(actors)

    def _register(self, actors: list[Any], *, connect: bool = False) -> None:
        import ray

        schemes = self._weight_sync_schemes
        ray.get([one.register_scheme_receiver.remote(schemes, synchronize_weights=connect) for one in actors])

    def add_collectors(self, *args: Any, **options: Any) -> None:
        """Start actors as TorchRL does, and wait for them; TorchRL waits without a limit.

        Actors that are added later get the current weights before this returns.
        """
        before = len(self._remote_collectors)
        super().add_collectors(*args, **options)
        self._wait_for_actors()
        if self._weight_sync_schemes and self._learner is None:
            self._register(self._remote_collectors[before:], connect=self._weight_sync_initialized)

    def _wait_for_actors(self) -> None:
        import ray

        begin, limit, warn_after = time.monotonic(), max(FRAMES_TIMEOUT, self._waits.limit), _WARN_SECONDS
        calls = [actor.__ray_ready__.options(max_task_retries=-1) for actor in self.remote_collectors]
        starting = {call.remote(): idx for idx, call in enumerate(calls)}
        while starting:
            ready, _ = ray.wait(list(starting), timeout=_LOOK_SECONDS)
            for reference in ready:
                _answer_of(starting.pop(reference), reference, "could not start")
            waited, late = time.monotonic() - begin, list(starting.values())
            if late and waited > limit:
                raise SyncTimeoutError(f"{self._not_started(late, limit)} (frames_timeout= raises the limit)")
            if late and waited > warn_after:
                _log.warning("%s", self._not_started(late, warn_after))
                warn_after = math.inf

    def _make_collector(self, create: Any, *, other_params: Any, **options: Any) -> Any:
        """Start an actor with the next index; TorchRL counts from 0 in each call of ``add_collectors``."""
        other_params["worker_idx"] = len(self._remote_collectors)
        return super()._make_collector(create, other_params=other_params, **options)

    def _not_started(self, workers: list[int], seconds: float) -> str:
        return (
            f"the actors of workers {workers} did not start in {seconds:g} s; does the cluster have what "
            f"{self._actor_options} asks for?"
        )

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        return RayWeightSyncScheme()

    def update_policy_weights_(
        self, policy_or_weights: Any = None, **options: Any
    ) -> SyncReport | dict[str, SyncReport] | None:
        """Update the policies of the actors; the first call connects the schemes."""
        if self._policy_service is not None:  # a policy in a service, not in the actors
            self._weight_update_impl(policy_or_weights, **options)
            return None
        return super().update_policy_weights_(policy_or_weights, **options)

    def _update(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        if self._learner is not None:
            raise LifecycleError("the learner of the trainer sends the policy of this collector")
        self._lazy_initialize_weight_sync()
        try:
            return super()._update(request)
        except SyncFailedError as error:
            found = error.failures.items()
            self._missed.update(idx for idx, why in found if isinstance(why, LinkClosedError))
            raise

    def _lazy_initialize_weight_sync(self) -> None:
        """Connect the schemes, unless they are connected.

        TorchRL looks up a receiver by a path, in which a model id such as ``"policy.model"`` ends at its dot.
        """
        if self._weight_sync_initialized:
            return
        schemes = self._updates.schemes.values()
        calls = [actor.__ray_call__.remote(_connect) for actor in self.remote_collectors if schemes]
        connect_actors(schemes, calls)
        self._weight_sync_initialized = True

    def _learner_weight_sync(self, *, new_generation: bool = False) -> Any:
        """Return the sender of the policy for a trainer of TorchRL whose learners are Ray actors.

        The trainer calls this again, with ``new_generation``, when it has started new learners.

        Raises:
            LifecycleError: this collector has sent its policy itself.
            TypeError: the scheme of the policy is no :class:`~weight_update.RayWeightSyncScheme`.
        """
        if self._policy_service is not None:  # TorchRL's, with TorchRL's scheme
            return super()._learner_weight_sync(new_generation=new_generation)
        if self._learner is not None and not new_generation:
            return self._learner
        if self._learner is None and self._weight_sync_initialized:
            raise LifecycleError("this collector sends its policy itself; give the trainer a new collector")
        scheme = self._updates.schemes.get("policy")
        if not isinstance(scheme, RayWeightSyncScheme):
            raise TypeError(
                f"the scheme of the policy is {scheme!r:.60}; learners in Ray actors need a "
                "RayWeightSyncScheme"
            )
        self._external_weight_sender = self._weight_sync_initialized = True
        self._learner = hand_over(scheme, self.remote_collectors)
        return self._learner

    # -- data --------------------------------------------------------------------------------------

    def _sync_iterator(self) -> Iterator[TensorDictBase | None]:
        self._updates.require_open()
        while self._goes_on():
            self._update_after(None)
            pending = {self._ask(idx): idx for idx in range(len(self.remote_collectors))}
            batches: dict[int, Any] = {}
            while pending:
                idx, batch = self._next_of(pending)
                batches[idx] = batch
            yield self._counted([batches[idx] for idx in sorted(batches)])
        if self._collection_thread is None:
            self.shutdown(shutdown_ray=False)

    def _async_iterator(self) -> Iterator[TensorDictBase | None]:
        self._updates.require_open()
        pending = {self._ask(idx): idx for idx in range(len(self.remote_collectors))}
        while self._goes_on():
            idx, batch = self._next_of(pending)
            self.collected_frames += self.frames_per_batch
            yield batch
            del batch  # its memory, while the next one is awaited
            self._update_after(idx)
            pending[self._ask(idx)] = idx
        while pending:  # batches that actors are still collecting
            self._finished(pending)
        if self._collection_thread is None:
            self.shutdown(shutdown_ray=False)

    def _run_collection_loop(self) -> None:
        """Collect in the thread of ``start()``; after an error, which TorchRL logs, later calls raise it."""
        try:
            super()._run_collection_loop()
        except Exception as error:  # noqa: BLE001 - it is raised in the thread of the program
            if not self._updates.ended:
                self._updates.ended_because = error
                self._updates.begin_end()

    def _goes_on(self) -> bool:
        unfinished = self.total_frames < 0 or self.collected_frames < self.total_frames
        return bool(unfinished) and not self._stop_event.is_set()

    def _update_after(self, worker_ids: int | None) -> None:
        if not self.update_after_each_batch and self.max_weight_update_interval < 0:
            return
        try:
            self.update_policy_weights_(worker_ids=worker_ids)
        except SyncFailedError as error:
            if not error.failures or not self._missed.issuperset(error.failures):
                raise
            _log.warning("an update did not reach workers %s", sorted(error.failures))

    def _ask(self, idx: int, **options: Any) -> Any:
        """Ask an actor for its next batch, with options of :meth:`_collect`. Ray repeats it if need be."""
        if idx in self._missed and not options and self._is_unlinked(idx):
            options = self._joining(idx)
        self._missed.discard(idx)
        call = self.remote_collectors[idx].__ray_call__.options(max_task_retries=-1)
        return call.remote(self._collect, bool(self._updates.schemes), **options)

    @staticmethod
    def _collect(
        collector: Any, needs_receivers: bool, *, receivers: Any = None, connect: bool = False
    ) -> tuple[bool, Any]:
        """Return whether a collector has the receivers that it needs, and its next batch if so.

        It runs in an actor. Without receivers, the collector is a new one: Ray has restarted the actor.
        ``receivers`` are registered, and connected if ``connect``, before the batch is collected.
        """
        if receivers:
            collector.register_scheme_receiver(receivers, synchronize_weights=connect)
        try:
            joined = bool(collector._receiver_schemes)
        except AttributeError:  # no receiver was registered
            joined = False
        ready = joined or not needs_receivers
        return ready, collector.next() if ready else None

    def _next_of(self, pending: dict[Any, int]) -> tuple[int, Any]:
        """Remove the first finished batch from ``pending``; return its worker and the batch."""
        while True:
            idx, reference = self._finished(pending)
            lost = f"is lost (Ray restarts its actor if {self._actor_options} has max_restarts)"
            has_receivers, batch = _answer_of(idx, reference, lost)
            if has_receivers:
                return idx, batch
            pending[self._ask(idx, **self._joining(idx))] = idx

    def _is_unlinked(self, idx: int) -> bool:
        """Return whether a worker has no link, and has not joined again."""
        return any(one.worker_versions.get(idx, 0) is None for one in self._updates.schemes.values())

    def _joining(self, idx: int) -> dict[str, Any]:
        """Return the options with which an actor joins again, usually because Ray has restarted it."""
        if self._learner is not None:
            raise WorkerError(
                f"Ray restarted the actor of worker {idx}, which has lost its weights, and the trainer's "
                "learner cannot give them again: make a new collector"
            )
        _log.warning(
            "worker %d has lost its link (has Ray restarted it?); it joins again before it collects", idx
        )
        return {"receivers": self._updates.schemes, "connect": self._weight_sync_initialized}

    def _finished(self, pending: dict[Any, int]) -> tuple[int, Any]:
        """Remove the first finished call from ``pending``; return its worker and reference."""
        import ray

        ready: list[Any] = []
        while not ready:
            self._waits.require_in_time()
            start = time.monotonic()
            ready, _ = ray.wait(list(pending), timeout=_LOOK_SECONDS)
            self._waits.add(time.monotonic() - start, pending.values())
        idx = pending.pop(ready[0])
        self._waits.end(idx)
        return idx, ready[0]

    def _counted(self, batches: list[Any]) -> TensorDictBase | None:
        """Return the batches of all actors as one, or None if they went into a replay buffer."""
        if batches[0] is None:
            self.collected_frames += self.frames_per_batch
            return None
        join = torch.stack if batches[0].batch_size else torch.cat
        data: TensorDictBase = join(batches)
        self.collected_frames += data.numel()
        return data

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors; raises LifecycleError after the shutdown."""
        if not self._remote_collectors:
            self._updates.require_open()
        return self._remote_collectors

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a ``state_dict`` on the actors; the next update gets a number above the restored versions."""
        super().load_state_dict(state_dict)
        states = [state_dict] if isinstance(state_dict, Mapping) else state_dict
        versions = [version for state in states if isinstance(version := state.get(KEY), int)]
        if versions:
            self._updates.continue_from(max(versions))

    # -- end ---------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:
        """Shut down as in TorchRL, and end the schemes of this collector. It may be called twice."""
        self._updates.begin_end()
        close_all(partial(super().shutdown, timeout, shutdown_ray), self._end_schemes)

    async def async_shutdown(self, shutdown_ray: bool = False) -> None:
        """Shut down as in TorchRL, and end the schemes."""
        self._updates.begin_end()
        try:
            await super().async_shutdown(shutdown_ray=shutdown_ray)
        finally:
            self._end_schemes()

    def _give_up(self) -> None:
        ends = [] if self._runtime_lease is None else [self._runtime_lease.release]
        close_all(self.stop_remote_collectors, self._end_schemes, *ends)


def _connect(collector: Any) -> None:
    """Connect the receivers of a collector. It runs in an actor."""
    for scheme in collector._receiver_schemes.values():
        if not scheme.synchronized_on_receiver:
            scheme.connect()


def _answer_of(idx: int, reference: Any, trouble: str) -> Any:
    """Return the result of a call of worker ``idx``; raise WorkerError with ``trouble`` if its actor died."""
    import ray

    try:
        return ray.get(reference)
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise WorkerError(f"worker {idx} {trouble}: {error}") from error
