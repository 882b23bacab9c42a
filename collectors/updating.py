"""The base of all collectors: updates of their models, observers, iteration and the end."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from collectors.requests import Request, require_ours, send
from collectors.updates import ENDED, Updates, close_all
from collectors.versions import policy_scheme
from weight_update import LifecycleError, Observer, SyncReport, WeightSyncScheme


class Updating:
    """The base of all collectors, placed before TorchRL's class.

    ``__init__`` of a collector makes ``_updates`` first, and calls :meth:`_adopt`, if it has workers, before
    TorchRL's ``__init__``. ``shutdown`` calls ``_updates.begin_end()`` first, and :meth:`_end_schemes` last.
    """

    _updates: Updates
    _legacy_weight_updater: bool
    policy_version: Any

    def __bool__(self) -> bool:
        """Return True.

        Ray calls ``bool()`` after an error in an actor. Without this method, that would call ``len()``, which
        raises for an endless collector.
        """
        return True

    # -- updates -----------------------------------------------------------------------------------

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
        self._updates.require_open()
        if self._updates.schemes:
            return self._send(request)
        reports = self._update_without_scheme(request)
        self._updates.tell(next(iter(reports.values())) if isinstance(reports, dict) else reports)
        return reports

    def _send(self, request: Request) -> SyncReport | dict[str, SyncReport]:
        return send(self._updates.schemes, request)

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
        raise LifecycleError(
            "this collector has no weight_sync_schemes, so it cannot reach the policies of its workers; if "
            'these have weights, give weight_sync_schemes={"policy": scheme}'
        )

    def register_scheme_receiver(
        self, weight_recv_schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Register receivers as in TorchRL; a collector's own schemes pass weights on to its workers."""
        require_ours(weight_recv_schemes)
        self._updates.receivers.update(weight_recv_schemes)
        torchrl_collector: Any = super()
        torchrl_collector.register_scheme_receiver(
            weight_recv_schemes, synchronize_weights=synchronize_weights
        )

    # -- workers -----------------------------------------------------------------------------------

    def _adopt(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Take over schemes that send to workers, which ask :meth:`_worker_alive`."""
        self._updates.adopt(schemes)
        for scheme in schemes.values():
            scheme.worker_alive = partial(_alive, weakref.ref(self))
        self._end_later()

    def _worker_alive(self, worker_idx: int) -> bool:
        """Return False only if the process of a worker has certainly ended."""
        return True

    # -- observers and iteration -------------------------------------------------------------------

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Have a function called for every update, every change of a worker and every batch, from now on.

        A separate thread calls the function. It gets the reports and events of each scheme of this collector
        (see :meth:`~weight_update.WeightSyncScheme.add_observer`), and a :class:`~weight_update.PolicyLag`
        for each batch that iterating over this collector yields. An error that the function raises is logged.

        Returns:
            a function that removes the observer.

        Raises:
            LifecycleError: this collector was shut down.
        """
        return self._updates.add_observer(observer)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches; an error ends the collector, as in TorchRL.

        Raises:
            LifecycleError: this collector was shut down, perhaps by another thread meanwhile.
        """
        collector: Any = self
        self._iteration_started = True
        whole = collector.trajs_per_batch is not None
        ended = self._updates.ended
        try:
            with closing(collector._iter_by_trajectories() if whole else collector.iterator()) as batches:
                for batch in batches:
                    self._updates.tell_lag(batch, self._newest_version)
                    yield batch
                    ended = self._updates.ended
        except Exception as error:
            if ended or self._updates.ended_elsewhere:  # TorchRL's code may end it, too
                raise LifecycleError(ENDED) from error
            self._updates.ended_because = error
            if not self._updates.ended:
                collector.shutdown()
            raise

    def start(self) -> None:
        """Collect in the background, as in TorchRL.

        Raises:
            LifecycleError: this collector was shut down.
        """
        self._updates.require_open()
        collector: Any = super()
        collector.start()

    def _newest_version(self) -> int | None:
        """Return the newest version of the policy that was sent; None if the collector does not know it."""
        scheme = policy_scheme(self._updates.schemes)
        if scheme is None:
            return None
        sent = 0 if scheme.last_report is None else scheme.last_report.version
        return max(sent, self.policy_version or 0)

    # -- end ---------------------------------------------------------------------------------------

    def _end_schemes(self) -> None:
        """Shut down all schemes, then end the observers."""
        self._updates.close()

    def _end_later(self) -> None:
        """Have this collector shut down when the interpreter exits, if it was not before."""
        _live.add(self)

    def _end_at_exit(self) -> None:
        collector: Any = self
        collector.shutdown()

    def _disown(self) -> None:
        _live.discard(self)


_live: weakref.WeakSet[Updating] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Shut down collectors before ``multiprocessing`` waits for workers, and before threads are lost."""
    close_all(*(collector._end_at_exit for collector in list(_live)))


def _alive(collector: weakref.ref[Updating], worker_idx: int) -> bool:
    """Return whether a worker may be alive, also after the collector is gone."""
    owner = collector()
    return owner is None or owner._worker_alive(worker_idx)
