"""The version of the policy that computed each action, in the data."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.envs.llm.transforms import PolicyVersion

from weight_update import WeightSyncScheme

__all__ = ["KEY", "FrameVersion", "VersionSource", "stamp"]

KEY = "policy_version"


class FrameVersion(PolicyVersion):
    """Copies the version that stands beside an action to the outcome of that action.

    The collector writes the version into the tensordict when it calls the policy. TorchRL's own transform
    instead reads the version at hand when the environment has stepped, after which an update may have come.

    Attributes:
        version: the last version written.
    """

    def __init__(self) -> None:
        super().__init__(version_type="int")

    def _step(self, tensordict: TensorDictBase | None, next_tensordict: TensorDictBase) -> TensorDictBase:
        version = None if tensordict is None else tensordict.get(KEY, None)
        if version is None:
            stamp(next_tensordict, int(self.version))
        else:
            next_tensordict.set(KEY, version.clone())
        return next_tensordict


class VersionSource:
    """Tells the version in force: that of a receiver, or without one the number of updates counted here."""

    def __init__(self) -> None:
        self.scheme: WeightSyncScheme | None = None
        self.count = 0

    def now(self) -> int:
        """The version in force."""
        return self.count if self.scheme is None else self.scheme.version or 0


def stamp(data: TensorDictBase, version: int) -> None:
    """Write ``version`` into ``data``, one int64 for each element of its batch."""
    data.set(KEY, torch.full(data.shape, version, dtype=torch.int64, device=data.device))
