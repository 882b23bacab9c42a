"""The version of the policy that computed each action, in the data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl.envs import EnvBase
from torchrl.envs.llm.transforms import PolicyVersion

from collectors.requests import real
from weight_update import WeightSyncScheme

KEY = "policy_version"


class FrameVersion(PolicyVersion):
    """The ``policy_version_tracker`` of a collector that writes the version of each action.

    The collector writes it into the tensordict when it calls the policy; :func:`stamp_outcomes` copies it to
    the outcome. TorchRL's transform would read the current version after the step of the environment, when an
    update may have come.
    """

    def __init__(self) -> None:
        super().__init__(version_type="int")


def choose_tracking(chosen: Any, replay_buffer: Any) -> Any:
    """Return ``chosen``, or if it is None, whether ``replay_buffer`` can store versions.

    It cannot if it was filled with frames that have no int64 version. A buffer in a Ray actor is not
    examined.
    """
    if chosen is not None:
        return chosen
    storage: Any = getattr(replay_buffer, "_storage", None)  # absent: in an actor, or not initialized yet
    if not getattr(storage, "initialized", False):
        return True
    frames = storage.get(slice(0, 1))
    version = frames.get(("next", KEY), None) if is_tensor_collection(frames) else None
    return isinstance(version, torch.Tensor) and version.dtype == torch.int64


class VersionSource:
    """A source of the version in force: the version of a scheme, or else the number of updates.

    Attributes:
        scheme: the scheme of the policy, if there is one.
        count: the number of updates without a scheme.
    """

    def __init__(self, scheme: WeightSyncScheme | None = None) -> None:
        self.scheme = scheme
        self.count = 0
        self._restored: tuple[int, int] | None = None

    def now(self) -> int:
        """Return the version in force."""
        if self.scheme is None:
            return self.count
        version = self.scheme.version or 0
        if self._restored is not None and self._restored[0] == version:
            return self._restored[1]
        return version

    def restore(self, version: int) -> None:
        """Use the version of a ``state_dict`` until the next update."""
        self.count = version
        if self.scheme is not None:
            self._restored = self.scheme.version or 0, version


def stamp(data: TensorDictBase, version: int) -> None:
    """Write ``version`` into ``data``, one int64 for each element of its batch."""
    data.set(KEY, torch.full(data.shape, version, dtype=torch.int64, device=data.device))


_STEP = "step_and_maybe_reset"


class _StampingStep:
    """The step of an environment, which also copies the version of an action to the outcome of that action.

    It belongs to the environment, and follows it into copies and pickles.

    Attributes:
        own: step that a program assigned to this environment, such as a compiled one; None for the method.
    """

    def __init__(self, env: EnvBase, own: Any) -> None:
        self._env, self.own = env, own

    def __call__(self, data: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        step = partial(type(self._env).step_and_maybe_reset, self._env) if self.own is None else self.own
        output, following = step(data)
        version = output.get(KEY, None)
        if version is not None:
            output.get("next").set(KEY, version.clone())
        return output, following


def stamp_outcomes(env: EnvBase) -> None:
    """Have each step of ``env`` copy the version of its action to the outcome of that action.

    A transform would do the same, but an environment with a transform takes longer for each step.
    """
    unstamp_outcomes(env)  # of another collector, or of the environment that this one is a copy of
    env.step_and_maybe_reset = _StampingStep(env, vars(env).get(_STEP))


def unstamp_outcomes(env: EnvBase | None) -> None:
    """Give ``env`` its own step back."""
    step = None if env is None else vars(env).get(_STEP)
    if not isinstance(step, _StampingStep):
        return
    del vars(env)[_STEP]
    if step.own is not None:
        vars(env)[_STEP] = step.own


def versions_of(batch: Any) -> torch.Tensor | None:
    """Return the versions of all frames of a batch, without padding; None if frames have no numbers."""
    try:
        versions = batch.get(KEY, None) if isinstance(batch, TensorDictBase) else None
    except RuntimeError:  # a lazy stack of trajectories of unequal lengths
        return None
    if not isinstance(versions, torch.Tensor) or versions.is_floating_point():
        return None
    mask = batch.get(("collector", "mask"), None)
    found = versions.flatten() if mask is None else versions[mask]
    return found if found.numel() else None


def in_policy(model_id: str) -> bool:
    """Return whether the model of this path is the policy or a part of it."""
    return model_id == "policy" or model_id.startswith(("policy.", "policy["))


def policy_scheme(schemes: Mapping[str, WeightSyncScheme]) -> WeightSyncScheme | None:
    """Return the scheme whose versions frames have: that of the policy, or else of its first part."""
    parts = {model_id: scheme for model_id, scheme in real(schemes).items() if in_policy(model_id)}
    return parts.get("policy", next(iter(parts.values()), None))


def writes_version(policy: Any) -> bool:
    """Return whether a policy writes ``"policy_version"`` itself."""
    return KEY in (getattr(policy, "out_keys", None) or ())
