"""The collector of one process for language models.

The other public names that TorchRL has in a module of this name are here, too.
"""

from __future__ import annotations

from typing import Any

import torchrl.collectors.llm
from torchrl.collectors.llm import RayLLMCollector, vLLMUpdater, vLLMUpdaterV2
from torchrl.envs import AsyncEnvPool

from collectors.single import Collector
from collectors.versions import FrameVersion, choose_tracking, writes_version
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
        track_policy_version = choose_tracking(track_policy_version, options.get("replay_buffer"))
        if track_policy_version is True:
            untracked = writes_version(policy) or isinstance(env, AsyncEnvPool)
            track_policy_version = False if untracked else FrameVersion()
        self._given_schemes = weight_sync_schemes
        collector: Any = super()
        collector.__init__(
            env,
            policy=policy,
            track_policy_version=track_policy_version,
            weight_updater=weight_updater,
            **options,
        )

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
