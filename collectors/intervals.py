"""Updates that a collector makes by itself at intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from collectors.remote import Remote


class Intervals(Remote):
    """A mixin for collectors with ``max_weight_update_interval``.

    Attributes:
        max_weight_update_interval: number of batches after which a worker without a new version is updated;
            -1 for never.
    """

    max_weight_update_interval: int
    _unchanged: Mapping[int, tuple[int | None, int]] = {}

    def _update_stale(self) -> None:
        """Update workers without a new version; called after each batch."""
        if self.max_weight_update_interval > -1:
            stale = [idx for idx in range(self.num_workers) if self._is_stale(idx)]
            if stale:
                self._update_workers(stale)
                self._unchanged = {**self._unchanged, **{idx: (self._version_of(idx), 0) for idx in stale}}

    def _is_stale(self, idx: int) -> bool:
        """Return whether a worker is due for an update; count the batches since its version changed."""
        version = self._version_of(idx)
        before, count = self._unchanged.get(idx, (version, 0))
        count = count + 1 if version == before else 0
        self._unchanged = {**self._unchanged, idx: (version, count)}
        return bool(count > self.max_weight_update_interval)

    def _version_of(self, idx: int) -> int | None:
        scheme = self._schemes.get("policy")
        return None if scheme is None else scheme.worker_versions.get(idx)

    def _update_workers(self, worker_ids: list[int] | None = None) -> Any:
        if self._legacy_weight_updater:
            self.update_policy_weights_(worker_ids=worker_ids)
        else:
            self._send_all(worker_ids)


def endless(total_frames: float) -> float:
    """Return ``total_frames``, or infinity for a negative number."""
    return math.inf if total_frames < 0 else total_frames
