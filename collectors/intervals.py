"""Updates that a collector makes by itself, from time to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectors.remote import Remote

__all__ = ["Intervals"]


class Intervals(Remote):
    """Mixed into collectors that have ``max_weight_update_interval``.

    Attributes:
        max_weight_update_interval: a worker that got no new version while more batches than this were yielded
            is updated; -1 never.
    """

    max_weight_update_interval: int
    _unchanged: Mapping[int, tuple[int | None, int]] = {}

    def _update_stale(self) -> None:
        """Call it after each batch."""
        if self.max_weight_update_interval > -1:
            stale = [idx for idx in range(self.num_workers) if self._is_stale(idx)]
            if stale:
                self._update_workers(stale)
                self._unchanged = {**self._unchanged, **{idx: (self._version_of(idx), 0) for idx in stale}}

    def _is_stale(self, idx: int) -> bool:
        """Count the batches since a worker got another version."""
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
