"""Workers for tests that are Ray actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from weight_update.schemes import WeightSyncScheme
from weight_update.testing.workers import (
    ANSWER_SECONDS,
    Body,
    Worker,
    WorkerDiedError,
    dumps,
    loads,
    outcome,
    result_of,
)
from weight_update.transports.ray.rendezvous import require_ray

START_SECONDS = 240.0
"""Seconds that Ray may take to start an actor, which imports torch, on a machine that others use too."""
_idle: dict[str, list[Any]] = {}
"""Idle actors by job; starting an actor takes seconds, because it imports torch."""


class BodyActor:
    """An actor that has one :class:`Body` after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.body: Any = None

    def begin(self, scheme: WeightSyncScheme, index: int) -> None:
        """Replace the body."""
        self.body = Body(scheme, index)

    def do(self, message: bytes) -> bytes:
        """Call a method of the body; return the outcome, serialized."""
        command, args, kwargs = loads(message)
        return outcome(getattr(self.body, command), args, kwargs)


class RayWorker(Worker):
    """The handle of one worker in a Ray actor.

    Args:
        scheme: given to the actor as a user would; None if :meth:`begin` is called later.
        index: of the worker.
        actor: result of :func:`new_actor`; by default one that may have been used before.
    """

    def __init__(self, scheme: WeightSyncScheme | None, index: int, actor: Any = None) -> None:
        self.index, self.name = index, f"worker {index}"
        self._pool = _pool() if actor is None else []
        self.actor = actor or (self._pool.pop() if self._pool else new_actor())
        self.runner = SimpleNamespace(
            kill=lambda: require_ray().kill(self.actor),
            join=lambda timeout=None: None,  # there is nothing to wait for
        )
        self._stopped = False
        self._calls: list[Any] = []
        if scheme is not None:
            self.begin(scheme)

    def begin(self, scheme: WeightSyncScheme) -> None:
        """Give the actor its scheme."""
        require_ray().get(self.actor.begin.remote(scheme, self.index), timeout=START_SECONDS)

    def post(self, command: str, *args: Any, **kwargs: Any) -> None:
        self._calls.append(self.actor.do.remote(dumps((command, args, kwargs))))

    def answer(self, timeout: float = ANSWER_SECONDS) -> Any:
        ray = require_ray()
        try:
            answer = ray.get(self._calls.pop(0), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise WorkerDiedError(f"{self.name} gave no answer within {timeout} s") from None
        except ray.exceptions.RayActorError as error:
            raise WorkerDiedError(f"{self.name} is gone") from error
        return result_of(answer)

    def busy(self, seconds: float = 0.0) -> bool:
        done, _ = require_ray().wait(self._calls[:1], timeout=seconds)
        return not done

    def stop(self) -> None:
        """Shut the scheme down; the actor is kept for the next test, or killed if it does not answer."""
        if self._stopped:
            return
        self._stopped = True
        self._calls.clear()
        try:
            self.call("shutdown")
            self._pool.append(self.actor)
        except WorkerDiedError:
            self.runner.kill()


def keep_spare() -> None:
    """Begin to start an actor for the next worker, unless there is one; do not wait for it."""
    pool = _pool()
    if not pool:
        pool.append(new_actor())


def _pool() -> list[Any]:
    return _idle.setdefault(require_ray().get_runtime_context().get_job_id(), [])


def new_actor(cls: type[BodyActor] = BodyActor) -> Any:
    """Begin to start an actor for :class:`RayWorker`."""
    return require_ray().remote(cls).options(num_cpus=0).remote()
