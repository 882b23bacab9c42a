"""``update_policy_weights_`` for all collectors."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from collectors.closing import close_all
from collectors.observing import Observed
from collectors.requests import Request, group_once, own, require_ours, require_unused, send
from collectors.signatures import signature_of
from weight_update import LifecycleError, SyncReport, WeightSyncScheme


class Updating(Observed):
    """A mixin for TorchRL's collectors, placed before them."""

    _legacy_weight_updater: bool
    _receivers: dict[str, WeightSyncScheme]

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
            weights_dict: weights by model id, for several models at once: each worker applies all of them
                together.
            policy_weights: old name of ``policy_or_weights``.

        Returns:
            Report of the update; with ``weights_dict``, reports by model id. None with a legacy
            ``weight_updater`` that sends by no scheme.

        Raises:
            ValueError: the arguments contradict each other.
            KeyError: a model has no scheme.
            SchemaMismatchError: the weights do not fit; nothing changed.
            SyncFailedError: workers failed, died or were late; the error names them.
            LifecycleError: this collector was shut down.
        """
        given = {
            "policy_or_weights": policy_or_weights,
            "weights": weights,
            "policy": policy,
            "weights_dict": weights_dict,
            "policy_weights": policy_weights,
        }
        request = Request.of(given, model_id, worker_ids)
        return self._update_by_legacy(request) if self._legacy_weight_updater else self._update(request)

    def _update(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        """Send by the schemes, or update the models of this process."""
        self._require_open()
        if self._weight_sync_schemes:
            return self._send(self._weight_sync_schemes, request)
        reports = self._update_without_scheme(request)
        self._tell_observers(next(iter(reports.values())) if isinstance(reports, dict) else reports)
        return reports

    def _send(
        self, schemes: Mapping[str, WeightSyncScheme], request: Request
    ) -> SyncReport | dict[str, SyncReport]:
        return send(schemes, request)

    def _update_by_legacy(self, request: Request) -> SyncReport | None:
        if request.several or set(request.weights) != {"policy"}:
            raise ValueError(
                "a weight_updater serves only the model 'policy', without weights_dict=; use "
                "weight_sync_schemes for others"
            )
        collector: Any = self
        report = collector.weight_updater(
            policy_or_weights=request.weights["policy"], worker_ids=request.worker_ids
        )
        return report if isinstance(report, SyncReport) else None

    def _update_without_scheme(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        raise NotImplementedError

    def _end_schemes(self) -> None:
        """Shut down all schemes, then end the observers."""
        self._mark_ended()
        schemes = (*self._receivers.values(), *(self._weight_sync_schemes or {}).values())
        close_all(*(scheme.shutdown for scheme in schemes), self._end_observers)

    def _end_later(self) -> None:
        """Have this collector shut down when the interpreter exits, if it was not before."""
        _live.add(self)

    def _end_at_exit(self) -> None:
        collector: Any = self
        collector.shutdown()


class WithWorkers(Updating):
    """A mixin for collectors whose models are in other processes; it ends these at exit."""

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = signature_of(cls)  # for help(), where a metaclass or **options hide it

    def _adopt(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Check and group the schemes that send to the workers."""
        self._receivers = {}
        require_unused(schemes)
        own(schemes.values())
        group_once(schemes.values())
        self._end_later()

    def _watch(self, schemes: Iterable[WeightSyncScheme]) -> None:
        """Have schemes ask :meth:`_worker_alive`."""
        for scheme in schemes:
            scheme.worker_alive = partial(_alive, weakref.ref(self))

    def _worker_alive(self, worker_idx: int) -> bool:
        """Return False only if the process of a worker has certainly ended."""
        return True

    def register_scheme_receiver(
        self, weight_recv_schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Register receivers as in TorchRL; this collector's own schemes pass weights on to its workers."""
        require_ours(weight_recv_schemes)
        self._receivers.update(weight_recv_schemes)
        torchrl_collector: Any = super()
        torchrl_collector.register_scheme_receiver(
            weight_recv_schemes, synchronize_weights=synchronize_weights
        )

    def _update_without_scheme(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        raise LifecycleError(
            "this collector has no weight_sync_schemes, so it cannot reach the policies of its workers; if "
            'these have weights, give weight_sync_schemes={"policy": scheme}'
        )

    def _disown(self) -> None:
        _live.discard(self)


_live: weakref.WeakSet[Updating] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Shut down collectors before ``multiprocessing`` waits for workers, and before threads are lost."""
    close_all(*(collector._end_at_exit for collector in list(_live)))


def _alive(collector: weakref.ref[WithWorkers], worker_idx: int) -> bool:
    """Return whether a worker may be alive, also after the collector is gone."""
    owner = collector()
    return owner is None or owner._worker_alive(worker_idx)
