"""A small Ray actor where the two ends of links meet: whereabouts and mailboxes.

This is the only module that imports ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from weight_update.errors import LifecycleError, LinkClosedError, SyncTimeoutError

__all__ = [
    "POLL_SECONDS",
    "Board",
    "ask",
    "close_board",
    "find_board",
    "open_board",
    "ray_runs",
    "require_ray",
    "running_ray",
    "with_ray",
]

POLL_SECONDS = 20.0
"""A call that waits in the actor is made anew after so long."""
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0


def require_ray() -> Any:
    """The ``ray`` module, ready to be used in this process.

    Raises:
        ImportError: it is not installed.
        LifecycleError: it was not initialized, or was shut down.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('Ray is needed: pip install "weight-update[ray]"', name="ray") from None
    if not ray.is_initialized():
        raise LifecycleError("Ray does not run in this process; call ray.init() first")
    return ray


class _Line:
    """Messages of one connection, for each of its two ends, and whether an end has finished."""

    def __init__(self) -> None:
        self.boxes: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.handed = [0, 0]  # to each end: how many
        self.sent: list[int | None] = [None, None]  # by an end that has finished: how many
        self.changed = asyncio.Condition()

    def finished(self, end: int) -> bool:
        return self.sent[end] is not None

    def exhausted(self, end: int, taken: int) -> bool:
        """Whether ``end``, which took so many, has nothing more to wait for."""
        sent = self.sent[1 - end]
        return self.finished(end) or (sent is not None and taken >= sent)


class Board:
    """What runs in the actor. One for each scheme; it lives as long as the sender's process or its scheme.

    A connection ("line") has two ends, 0 for the sender and 1 for the worker. Messages are numbered by
    whoever puts them: Ray may begin the calls of an asynchronous actor in another order.
    """

    def __init__(self) -> None:
        self._where: Any = None
        self._announced = asyncio.Event()
        self._lines: dict[str, _Line] = {}
        self._knocks: asyncio.Queue[Any] = asyncio.Queue()

    async def announce(self, where: Any) -> None:
        """Keep the whereabouts of the sender for :meth:`look_up`."""
        self._where = where
        self._announced.set()

    async def look_up(self, seconds: float) -> Any:
        """What was announced, or None if nothing was within ``seconds``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._announced.wait(), seconds)
        return self._where

    async def knock(self, line: str, message: bytes, refs: list[Any]) -> None:
        """Begin a line; the sender finds ``message`` and ``refs`` at its door."""
        self._line(line)
        self._knocks.put_nowait((line, message, refs))

    async def door(self, seconds: float) -> Any:
        """The next knock, or None if there was none within ``seconds``."""
        try:
            return await asyncio.wait_for(self._knocks.get(), seconds)
        except asyncio.TimeoutError:
            return None

    async def put(self, line: str, end: int, number: int, message: bytes, refs: list[Any]) -> None:
        """Leave a message for ``end``, with references to objects in Ray's store."""
        kept = self._lines.get(line)
        if kept is not None and not kept.finished(end):
            kept.boxes[end][number] = (message, refs)
            await _tell(kept)

    async def take(self, line: str, end: int, first: int, seconds: float) -> tuple[list[Any], bool]:
        """The messages for ``end`` from number ``first`` on, and whether there will be no more.

        Waits up to ``seconds`` for one. Those before ``first`` have arrived and are forgotten.
        """
        kept = self._lines.get(line)
        if kept is None:
            return [], True
        box = kept.boxes[end]
        for number in [number for number in box if number < first]:
            del box[number]
        async with kept.changed:
            with contextlib.suppress(asyncio.TimeoutError):
                ready = kept.changed.wait_for(lambda: first in box or kept.exhausted(end, first))
                await asyncio.wait_for(ready, seconds)
        found = []
        while first in box:
            found.append(box[first])
            first += 1
        if found:
            kept.handed[end] = first
            await _tell(kept)
        return found, not found and kept.exhausted(end, first)

    async def finish(self, line: str, end: int, sent: int) -> None:
        """``end`` has left after so many messages; what is still meant for it is dropped."""
        kept = self._lines.get(line)
        if kept is None or kept.finished(end):
            return
        kept.sent[end] = sent
        kept.boxes[end].clear()
        await _tell(kept)
        if kept.finished(1 - end):
            self._lines.pop(line, None)

    async def watch(self, line: str) -> None:
        """Wait until an end has finished.

        The sender holds the reference of the worker's call of this; Ray declares it lost at once when the
        worker's process dies.
        """
        kept = self._line(line)
        async with kept.changed:
            await kept.changed.wait_for(lambda: kept.finished(0) or kept.finished(1))

    async def settle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until workers have taken what was left for them, or have finished."""

        async def taken(kept: _Line) -> None:
            async with kept.changed:
                await kept.changed.wait_for(
                    lambda: kept.finished(1) or max(kept.boxes[1], default=-1) < kept.handed[1]
                )

        waits = [asyncio.create_task(taken(kept)) for kept in self._lines.values()]
        if waits:
            await asyncio.wait(waits, timeout=seconds)

    def _line(self, name: str) -> _Line:
        return self._lines.setdefault(name, _Line())


async def _tell(line: _Line) -> None:
    async with line.changed:
        line.changed.notify_all()


def open_board(name: str, namespace: str | None) -> Any:
    """Start the actor, on this node; returns its handle without waiting for it."""
    ray = require_ray()
    strategies = ray.util.scheduling_strategies
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    cloudpickle, me = ray.cloudpickle, sys.modules[__name__]
    cloudpickle.register_pickle_by_value(me)  # its process then starts without importing torch
    try:
        remote = ray.remote(Board).options(
            name=name,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=10_000,
            scheduling_strategy=here,
        )
        return remote.remote()
    finally:
        cloudpickle.unregister_pickle_by_value(me)


def find_board(name: str, namespace: str | None, timeout: float) -> Any:
    """The handle of the actor that the sender started; waits for it.

    Raises:
        SyncTimeoutError: there is none after ``timeout`` seconds.
    """
    ray = require_ray()
    deadline = time.monotonic() + timeout
    while True:
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            if time.monotonic() > deadline:
                place = namespace or ray.get_runtime_context().namespace
                raise SyncTimeoutError(
                    f"no sender of scheme {name!r} in Ray namespace {place!r} within "
                    f"{round(timeout, 1):g} s; has it called init_on_sender(), and is it in this namespace "
                    "(namespace=...)?"
                ) from None
            time.sleep(_LOOK_SECONDS)  # Ray tells nobody that an actor was named


def running_ray() -> Any:
    """As :func:`require_ray`, for links that are in use.

    Raises:
        LinkClosedError: Ray was shut down in this process.
    """
    try:
        return require_ray()
    except LifecycleError:
        raise LinkClosedError("Ray was shut down in this process") from None


def ask(call: Any, timeout: float | None) -> Any:
    """The result of a call of the board.

    Raises:
        LinkClosedError: the board is gone, or Ray is, or gave no answer in time.
    """
    ray = running_ray()
    try:
        return ray.get(call, timeout=timeout)
    except ray.exceptions.RayError as error:
        raise LinkClosedError(f"the sender is gone ({_brief(error)})") from None


def ray_runs() -> bool:
    """Whether Ray has not ended in this process."""
    try:
        require_ray()
    except LifecycleError:
        return False
    return True


def with_ray(call: Callable[[], object]) -> None:
    """Do something with Ray, unless it has ended."""
    if ray_runs():
        call()


def close_board(board: Any) -> None:
    """End the actor, after workers have taken what was left for them; nothing to do if Ray has ended."""
    with contextlib.suppress(LifecycleError):
        ray = require_ray()
        ray.wait([board.settle.remote(_GRACE_SECONDS)], timeout=2 * _GRACE_SECONDS)
        ray.kill(board)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
