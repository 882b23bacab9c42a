"""The collectors for language models: in this process, and in a Ray actor.

The other public names that TorchRL has in a module of this name are here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torchrl.collectors.llm
from tensordict import TensorDictBase
from torchrl.collectors.llm import vLLMUpdater, vLLMUpdaterV2
from torchrl.envs import AsyncEnvPool

from collectors.ray import RayCollector
from collectors.single import Collector
from collectors.versions import FrameVersion, choose_tracking, stamp_outcomes, writes_version
from collectors.waiting import FRAMES_TIMEOUT
from weight_update import WeightSyncScheme

__all__ = ["LLMCollector", "RayLLMCollector", "vLLMUpdater", "vLLMUpdaterV2"]


class _WithSchemes(Collector):
    """A base that passes on the schemes, which TorchRL's ``LLMCollector`` does not."""

    _given_schemes: dict[str, WeightSyncScheme] | None

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **options,
            weight_sync_schemes=self._given_schemes,
            track_policy_version=False,  # TorchRL's LLMCollector sets it up
            auto_register_policy_transforms=False,  # and has no such option, but TorchRL warns without it
        )


class LLMCollector(torchrl.collectors.llm.LLMCollector, _WithSchemes):
    """TorchRL's ``LLMCollector``, with schemes, and with the exact version of the policy in its data.

    A call of the policy, which generates a whole answer, sees one version of the weights. An update that
    arrives meanwhile waits for the end of the call.

    Args:
        env: as in TorchRL.
        policy: as in TorchRL, such as a ``TransformersWrapper``. With a scheme for ``"policy"``, the
            collector runs a copy of it. A scheme for ``"policy.model"`` updates the ``transformers`` model
            inside the wrapper, by the names of that model, without a copy.
        track_policy_version: as for :class:`~collectors.Collector`. With an ``AsyncEnvPool``, True has no
            effect.
        weight_sync_schemes: as for :class:`~collectors.Collector`.
        weight_updater: as for :class:`~collectors.Collector`.
        options: all other options of TorchRL's ``LLMCollector``.
    """

    policy_version = Collector.policy_version
    increment_version = Collector.increment_version

    def __init__(
        self,
        env: Any,
        *,
        policy: Any = None,
        track_policy_version: Any = None,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_updater: Any = None,
        **options: Any,
    ) -> None:
        tracks = choose_tracking(track_policy_version, options.get("replay_buffer"))
        self._given_schemes = weight_sync_schemes
        collector: Any = super()
        collector.__init__(
            env,
            policy=policy,
            track_policy_version=False if tracks is True else tracks,
            weight_updater=weight_updater,
            **options,
        )
        if tracks is True and not (writes_version(policy) or isinstance(env, AsyncEnvPool)):
            self.policy_version_tracker = FrameVersion()
            stamp_outcomes(self.env)

    @property
    def rollout(self) -> Any:
        """The function that collects a batch, as in TorchRL."""
        self._install_policy_call()
        return super().rollout

    def _copies_policy(self, model_id: str) -> bool:
        return model_id == "policy"

    def get_model(self, model_id: str) -> Any:
        """Return a model by id, as in TorchRL."""
        return self._wrapped_policy_uncompiled if model_id == "policy" else super().get_model(model_id)

    def _install_policy_call(self) -> None:
        super()._install_policy_call()
        self.policy = self._wrapped_policy_maybe_compiled  # which TorchRL's LLMCollector calls


class _ActorCollector(LLMCollector):
    """An ``LLMCollector`` that takes the arguments that TorchRL's ``RayCollector`` gives to its actors.

    It uses the named ones; ``llm_options`` are the options of :class:`LLMCollector`.
    """

    def __init__(
        self,
        env: Any,
        *,
        policy: Any = None,
        policy_factory: Any = None,
        replay_buffer: Any = None,
        worker_idx: int,
        llm_options: dict[str, Any],
        **_unused: Any,
    ) -> None:
        super().__init__(
            env, policy=policy, policy_factory=policy_factory, replay_buffer=replay_buffer, **llm_options
        )
        self.worker_idx = worker_idx


class RayLLMCollector(RayCollector):
    """TorchRL's ``RayLLMCollector``, whose actor runs an :class:`~collectors.LLMCollector` with schemes.

    It is a :class:`~collectors.RayCollector` with one actor: schemes connect at the first
    ``update_policy_weights_``, an actor that Ray restarts gets the newest weights before it collects again,
    and the same errors are raised. Unlike TorchRL's class, its iteration ends after ``total_dialog_turns``.

    Args:
        env: environment, or a function that makes it in the actor.
        policy: as for ``LLMCollector``; the actor runs a copy.
        policy_factory: function that makes the policy in the actor. With a scheme for ``"policy"``, the
            trainer also calls it once.
        dialog_turns_per_batch: as in TorchRL.
        total_dialog_turns: number of dialog turns; -1 for no end.
        replay_buffer: a ``RayReplayBuffer``, which the actor fills; each batch is then None.
        sync_iter: whether the actor waits until the program asks for the next batch. If False, it collects
            one batch while the program uses the one before. ``start()`` does not wait either.
        weight_sync_schemes: as for :class:`~collectors.RayCollector`.
        weight_updater: as for :class:`~collectors.RayCollector`, so it sends from the trainer.
        frames_timeout: as for :class:`~collectors.RayCollector`.
        ray_init_config: as in TorchRL.
        remote_config: options of the actor, such as ``{"num_gpus": 1}``; without any, those of TorchRL's
            ``RayCollector``.
        num_cpus: the same as ``remote_config["num_cpus"]``, which takes precedence.
        num_gpus: the same as ``remote_config["num_gpus"]``, which takes precedence.
        options: all other options of :class:`~collectors.LLMCollector`.

    Raises:
        ImportError: Ray is not installed.
        SyncTimeoutError: the actor did not start in time, or collected no batch in ``frames_timeout``
            seconds.
        WorkerError: the actor has died, or could not start. Also raised while iterating.
    """

    _actor_options = "remote_config"
    _passes_options_to = LLMCollector

    def __init__(
        self,
        env: Any,
        *,
        policy: Any = None,
        policy_factory: Any = None,
        dialog_turns_per_batch: int,
        total_dialog_turns: int = -1,
        replay_buffer: Any = None,
        sync_iter: bool = True,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        weight_updater: Any = None,
        frames_timeout: float = FRAMES_TIMEOUT,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        **options: Any,
    ) -> None:
        asked = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        of_actor = {key: one for key, one in asked.items() if one is not None} | (remote_config or {})
        turns = {"dialog_turns_per_batch": dialog_turns_per_batch, "total_dialog_turns": total_dialog_turns}
        super().__init__(
            [env],
            policy,
            policy_factory=policy_factory,
            collector_class=_ActorCollector,
            collector_kwargs={"llm_options": {**turns, **options}},
            frames_per_batch=dialog_turns_per_batch,
            total_frames=total_dialog_turns,
            sync=sync_iter,
            replay_buffer=replay_buffer,
            weight_sync_schemes=weight_sync_schemes,
            weight_updater=weight_updater,
            frames_timeout=frames_timeout,
            ray_init_config=ray_init_config,
            remote_configs=of_actor or None,
        )

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield the batches of the actor as they are; None if they went into the replay buffer."""
        self._updates.require_open()
        pending: dict[Any, int] = {}
        while self._goes_on():
            _, (turns, batch) = self._next_of(pending or {self._ask(0): 0})
            if not turns:  # batches that were asked for in an earlier iteration were the last
                break
            self.collected_frames += turns
            ahead = self._goes_on() and not self._sync
            pending = {self._ask(0): 0} if ahead else {}
            yield batch
            del batch  # its memory, while the next one is awaited
        if self._collection_thread is None:
            self.shutdown(shutdown_ray=False)

    @staticmethod
    def _collect(collector: Any, needs_receivers: bool, **options: Any) -> tuple[bool, Any]:
        """Return, in place of the batch, the number of dialog turns that it took and the batch."""
        before = collector.stats()["frames"]
        ready, batch = RayCollector._collect(collector, needs_receivers, **options)
        return ready, (collector.stats()["frames"] - before, batch)

    @property
    def dialog_turns_per_batch(self) -> int:
        """Number of dialog turns of a batch."""
        return int(self.frames_per_batch)

    @property
    def total_dialog_turns(self) -> int:
        """Number of dialog turns after which the iteration ends; -1 for no end."""
        return int(self.total_frames)

    def is_running(self) -> bool:
        """Return whether ``start()`` was called, and its collection has not ended."""
        return self._collection_thread is not None and bool(self._collection_thread.is_alive())

    def set_postproc(self, postproc: Any) -> None:
        """Set the post-processing of the actor's batches, if it has none."""
        self.map_fn("set_postproc", [(postproc,)])

    def increment_version(self) -> None:
        """Count an update that no scheme has sent, such as one by an inference engine's own means."""
        self.map_fn("increment_version")

    def async_shutdown(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """Shut down, without ``await``, as TorchRL's ``RayLLMCollector``."""
        self.shutdown(timeout)
