"""``update_policy_weights_`` for all collectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectors.requests import Request, send
from weight_update import SyncReport, WeightSyncScheme

__all__ = ["Updating"]


class Updating:
    """Mixed into TorchRL's collectors, before them."""

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
        """Bring the models that collect data to new weights.

        Args:
            policy_or_weights: module, TensorDict, dict or state_dict; or a dict of worker indices for
                different weights each; None reads the policy given to the collector.
            weights: the same, by name.
            policy: the same, by name.
            worker_ids: index or device of a worker, or a list of them; None for all.
            model_id: which model; None is ``"policy"``.
            weights_dict: weights by model id, for several models at once: on every worker all of them are
                applied at one moment, or nothing changes on any worker.
            policy_weights: the old name of ``policy_or_weights``.

        Returns:
            what the update did; with ``weights_dict``, by model id. None with a legacy ``weight_updater``.

        Raises:
            ValueError: contradicting arguments.
            KeyError: a model without a scheme.
            SchemaMismatchError: the weights do not fit; nothing changed.
            SyncFailedError: workers failed, died or were late; it names them.
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
