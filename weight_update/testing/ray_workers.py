"""Workers for tests that are Ray actors."""

from __future__ import annotations

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


class _Stage:
    """An actor that has one :class:`Body` after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._body: Any = None

    def begin(self, scheme: WeightSyncScheme, index: int) -> None:
        self._body = Body(scheme, index)

    def do(self, message: bytes) -> bytes:
        command, args, kwargs = loads(message)
        return outcome(getattr(self._body, command), args, kwargs)


class RayWorker(Worker):
    """The handle of one worker in a Ray actor.

    Args:
        scheme: given to the actor as a user would.
        index: of the worker.
    """

    def __init__(self, scheme: WeightSyncScheme, index: int) -> None:
        ray = require_ray()
        self.index, self.name = index, f"worker {index}"
        self._pool = _pool()
        self.actor = self._pool.pop() if self._pool else _new_actor()
        self.runner = _Runner(self.actor)
        self._stopped = False
        self._calls: list[Any] = []
        ray.get(self.actor.begin.remote(scheme, index), timeout=START_SECONDS)

    def post(self, command: str, *args: Any, **kwargs: Any) -> None:
        self._calls.append(self.actor.do.remote(dumps((command, args, kwargs))))

    def answer(self, timeout: float = ANSWER_SECONDS) -> Any:
        ray = require_ray()
        try:
            answer = ray.get(self._calls.pop(0), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise WorkerDiedError(f"worker {self.index} gave no answer within {timeout} s") from None
        except ray.exceptions.RayActorError as error:
            raise WorkerDiedError(f"worker {self.index} is gone") from error
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
        pool.append(_new_actor())


def _pool() -> list[Any]:
    return _idle.setdefault(require_ray().get_runtime_context().get_job_id(), [])


def _new_actor() -> Any:
    return require_ray().remote(_Stage).options(num_cpus=0).remote()


class _Runner:
    """The methods of a process that tests use."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def kill(self) -> None:
        require_ray().kill(self._actor)

    def join(self, timeout: float | None = None) -> None:
        """Return at once; there is nothing to wait for."""
