"""``update_policy_weights_`` for all collectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectors.requests import Request, send
from weight_update import SyncReport, WeightSyncScheme

__all__ = ["Updating"]


class Updating:
    """A mixin for TorchRL's collectors, placed before them."""

    _weight_sync_schemes: dict[str, WeightSyncScheme] | None
    _legacy_weight_updater: bool

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> SyncReport | dict[str, SyncReport] | None:
        """Update the models that collect data.

        Args:
            policy_or_weights: module, TensorDict, dict or state_dict; or a dict from worker indices to
                separate weights. None to read the policy given to the collector.
            weights: the same as ``policy_or_weights``.
            policy: the same as ``policy_or_weights``.
            worker_ids: index or device of a worker, or a list of them; None for all workers.
            model_id: id of the model; None for ``"policy"``.
            weights_dict: weights by model id, for several models at once: every worker applies all of them
                together, or no worker changes.
            policy_weights: old name of ``policy_or_weights``.

        Returns:
            Report of the update; with ``weights_dict``, reports by model id. None with a legacy
            ``weight_updater``.

        Raises:
            ValueError: the arguments contradict each other.
            KeyError: a model has no scheme.
            SchemaMismatchError: the weights do not fit; nothing changed.
            SyncFailedError: workers failed, died or were late; the error names them.
        """
        request = Request.of(
            policy_or_weights,
            weights=weights,
            policy=policy,
            worker_ids=worker_ids,
            model_id=model_id,
            weights_dict=weights_dict,
            policy_weights=policy_weights,
        )
        if self._legacy_weight_updater:
            self._update_by_legacy(request)
            return None
        if self._weight_sync_schemes:
            return self._send(self._weight_sync_schemes, request)
        return self._update_without_scheme(request)

    def _send(
        self, schemes: Mapping[str, WeightSyncScheme], request: Request
    ) -> SyncReport | dict[str, SyncReport]:
        return send(schemes, request)

    def _update_by_legacy(self, request: Request) -> None:
        if request.several or set(request.weights) != {"policy"}:
            raise ValueError("a weight_updater serves one model; use weight_sync_schemes for several")
        updater: Any = self
        updater.weight_updater(policy_or_weights=request.weights["policy"], worker_ids=request.worker_ids)

    def _update_without_scheme(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        raise NotImplementedError
