"""The sender of a policy when a trainer of TorchRL learns in Ray actors."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from weight_update import RayWeightSyncScheme, SyncFailedError


class LearnerSender:
    """Sender of the policy of a :class:`~collectors.RayCollector`, in the actor that learns.

    TorchRL's trainers with ``learner_backend="ray"`` pass it to that actor, which calls it like TorchRL's
    scheme.

    Args:
        scheme: a scheme that is not initialized.
        actors: handles of the actors that collect, in the order of their indices.
    """

    def __init__(self, scheme: RayWeightSyncScheme, actors: Sequence[Any]) -> None:
        self._scheme = scheme
        self._remote_collectors = list(actors)
        self._version = 0

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether :meth:`connect` succeeded."""
        return self._scheme.synchronized_on_sender

    def init_on_sender(self, **options: Any) -> None:
        """Do nothing: the learner gives weights to :meth:`connect`, which initializes the scheme."""

    def _set_model_version(self, version: int) -> None:
        self._version = version

    def connect(self, weights: Any) -> None:
        """Connect the actors, and give them the first weights. Their frames get the learner's version.

        Raises:
            SyncFailedError: as :meth:`~weight_update.WeightSyncScheme.connect`.
            Exception: the first error of an actor.
        """
        import ray

        scheme, actors = self._scheme, self._remote_collectors
        scheme.init_on_sender(weights=weights, remote_collectors=actors)
        calls = [actor._connect_weights_scheme.remote(model_version=self._version) for actor in actors]
        answers = [call.future() for call in calls]
        actor_alive: Any = scheme.worker_alive
        scheme.worker_alive = lambda idx: not _failed(answers[idx]) and actor_alive(idx)
        try:
            scheme.connect()
        except SyncFailedError as error:  # it says only that an actor failed
            for answer in filter(_failed, answers):
                raise answer.exception() or error from error
            raise
        finally:
            scheme.worker_alive = actor_alive
        ray.get(calls, timeout=scheme.timeout)
        scheme.continue_from(self._version)

    def send(self, weights: Any) -> None:
        """Send an update that has the learner's version, or the next number if that version was sent."""
        self._scheme.continue_from(max(self._version - 1, 0))
        self._scheme.send(weights)

    def shutdown(self) -> None:
        """Shut down the scheme."""
        self._scheme.shutdown()


def _failed(answer: Future[None]) -> bool:
    return answer.done() and answer.exception() is not None


def hand_over(scheme: RayWeightSyncScheme, actors: Sequence[Any]) -> LearnerSender:
    """End ``scheme`` in this process, and prepare the actors for a sender in another process."""
    import ray

    scheme.shutdown()
    receiver = copy.copy(scheme)
    receiver.name = f"{scheme.name}-{uuid.uuid4().hex[:8]}"  # of a sender before it, the actor may still end
    calls = [
        actor.register_scheme_receiver.remote({"policy": receiver}, synchronize_weights=False)
        for actor in actors
    ]
    ray.get(calls, timeout=scheme.connect_timeout)
    sender = copy.copy(receiver)
    sender.strategy = scheme.strategy  # the receivers' is only a part of it
    return LearnerSender(sender, actors)
