"""The connection of schemes with Ray actors, and the sender of a trainer of TorchRL that learns in one."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from weight_update import RayWeightSyncScheme, SyncFailedError, SyncTimeoutError, WeightSyncScheme


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
        scheme, actors = self._scheme, self._remote_collectors
        scheme.init_on_sender(weights=weights, remote_collectors=actors)
        calls = [actor._connect_weights_scheme.remote(model_version=self._version) for actor in actors]
        connect_actors([scheme], calls)
        scheme.continue_from(self._version)

    def send(self, weights: Any) -> None:
        """Send an update that has the learner's version, or the next number if that version was sent."""
        self._scheme.continue_from(max(self._version - 1, 0))
        self._scheme.send(weights)

    def shutdown(self) -> None:
        """Shut down the scheme."""
        self._scheme.shutdown()


def connect_actors(schemes: Collection[WeightSyncScheme], calls: Sequence[Any]) -> None:
    """Connect senders that are not connected, while ``calls`` connect the receivers of each actor.

    Raises:
        SyncFailedError: as :meth:`~weight_update.WeightSyncScheme.connect`.
        ray.exceptions.RayTaskError: the first error that an actor raised; it is not waited for.
        SyncTimeoutError: actors did not connect within ``connect_timeout``; it names them.
    """
    import ray

    answers = [call.future() for call in calls]
    before = {scheme: scheme.worker_alive for scheme in schemes}
    for scheme, alive in before.items():
        scheme.worker_alive = partial(_may_connect, answers, alive)
    try:
        for scheme in schemes:
            if not scheme.synchronized_on_sender:
                scheme.connect()
    except SyncFailedError as error:  # it says only that an actor failed
        for failure in map(_failure_of, answers):
            if isinstance(failure, ray.exceptions.RayTaskError):
                raise failure from error
        raise
    finally:
        for scheme, alive in before.items():
            scheme.worker_alive = alive
    limit = max((scheme.connect_timeout for scheme in schemes), default=0.0)
    try:
        ray.get(calls, timeout=limit)
    except ray.exceptions.GetTimeoutError:
        late = [idx for idx, answer in enumerate(answers) if not answer.done()]
        raise SyncTimeoutError(
            f"the actors of workers {late} did not connect in {limit:g} s (connect_timeout= raises the limit)"
        ) from None


def _failure_of(answer: Future[None]) -> BaseException | None:
    return answer.exception() if answer.done() else None


def _may_connect(answers: Sequence[Future[None]], alive: Any, idx: int) -> bool:
    """Return False if the call of an actor has failed, or if the worker has certainly ended."""
    failed = idx < len(answers) and _failure_of(answers[idx]) is not None  # others may be no actors
    return not failed and bool(alive(idx))


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
