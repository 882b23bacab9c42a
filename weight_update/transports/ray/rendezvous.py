"""Ray actor through which the two ends of links exchange their addresses and messages.

No other module imports ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from weight_update.errors import LifecycleError, LinkClosedError, SyncTimeoutError, optional
from weight_update.text import format_seconds

POLL_SECONDS = 20.0
"""Seconds after which a call that waits in the actor is made again."""
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0
_ENDED = "Ray was shut down in this process"
_ENDING_SECONDS = 5.0
"""Most seconds between the end of Ray's core in a process and the end of ``ray.shutdown()``."""


def import_ray() -> Any:
    """Return the ``ray`` module; ImportError if Ray is not installed."""
    return optional("ray", "ray")


def require_ray() -> Any:
    """Return the ``ray`` module; LifecycleError if Ray was not initialized here, or was shut down."""
    if not ray_runs():
        raise LifecycleError("Ray does not run in this process; call ray.init() first")
    return import_ray()


def ray_runs() -> bool:
    """Return whether Ray was initialized in this process, and not shut down since."""
    return bool(import_ray().is_initialized())


@contextlib.contextmanager
def until_ray_ends() -> Iterator[None]:
    """Raise LinkClosedError in place of any error of a call of Ray if Ray was shut down in this process.

    ``ray.shutdown()`` ends a wait by SystemExit, which would end a background thread in silence, or the
    program with status 0. The error then comes when ``ray.shutdown()`` is done, so that nobody calls Ray in
    the middle of it.
    """
    try:
        yield
    except SystemExit as error:
        if getattr(error, "ray_terminate_msg", None) is None:
            raise  # of a signal handler
        deadline = time.monotonic() + _ENDING_SECONDS
        while ray_runs() and time.monotonic() < deadline:
            time.sleep(0.01)  # Ray has no event for it
        raise LinkClosedError(_ENDED) from None
    except Exception:
        if ray_runs():
            raise
        raise LinkClosedError(_ENDED) from None


class _Channel:
    """Messages of one connection, in an inbox for each end."""

    def __init__(self) -> None:
        self.inboxes: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.delivered = [0, 0]  # number of messages taken by each end
        self.sent: list[int | None] = [None, None]  # number of messages put by an end that has finished
        self.changed = asyncio.Condition()

    def finished(self, end: int) -> bool:
        return self.sent[end] is not None

    def exhausted(self, end: int, taken: int) -> bool:
        """Return whether no message can come for ``end``, which has taken ``taken`` messages."""
        sent = self.sent[1 - end]
        return self.finished(end) or (sent is not None and taken >= sent)

    async def notify(self) -> None:
        """Wake the calls that wait for a change."""
        async with self.changed:
            self.changed.notify_all()


class RendezvousActor:
    """Class of the Ray actor. Each scheme has one; it lives as long as the sender's process or its scheme.

    A connection has two ends, 0 for the sender and 1 for the worker. The end that puts messages numbers them,
    because Ray may start the calls of an asynchronous actor in another order.
    """

    def __init__(self) -> None:
        self._whereabouts: Any = None
        self._announced = asyncio.Event()
        self._channels: dict[str, _Channel] = {}
        self._join_requests: asyncio.Queue[Any] = asyncio.Queue()

    async def announce(self, data: str, where: Any) -> None:
        """Keep the whereabouts of the sender for workers whose scheme has the same ``data``."""
        self._whereabouts = data, where
        self._announced.set()

    async def look_up(self, seconds: float | None) -> Any:
        """Return what was announced, or None if nothing was announced within ``seconds``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._announced.wait(), seconds)
        return self._whereabouts

    async def request_join(self, connection: str, message: bytes, refs: list[Any]) -> None:
        """Open a connection; the sender receives ``message`` and ``refs`` as a join request."""
        self._channels.setdefault(connection, _Channel())
        self._join_requests.put_nowait((connection, message, refs))

    async def next_join_request(self, seconds: float) -> Any:
        """Return the next join request, or None if there was none within ``seconds``."""
        try:
            return await asyncio.wait_for(self._join_requests.get(), seconds)
        except asyncio.TimeoutError:
            return None

    async def put(self, connection: str, end: int, number: int, message: bytes, refs: list[Any]) -> None:
        """Leave a message for ``end``, with references to objects in Ray's store."""
        channel = self._channels.get(connection)
        if channel is not None and not channel.finished(end):
            channel.inboxes[end][number] = (message, refs)
            await channel.notify()

    async def take(self, connection: str, end: int, first: int, seconds: float) -> tuple[list[Any], bool]:
        """Return the messages for ``end`` from number ``first`` on, and whether no more will come.

        Waits up to ``seconds`` for a message. Messages before ``first`` have arrived and are dropped.
        """
        channel = self._channels.get(connection)
        if channel is None:
            return [], True
        inbox = channel.inboxes[end]
        for number in [number for number in inbox if number < first]:
            del inbox[number]
        async with channel.changed:
            with contextlib.suppress(asyncio.TimeoutError):
                ready = channel.changed.wait_for(lambda: first in inbox or channel.exhausted(end, first))
                await asyncio.wait_for(ready, seconds)
        found = []
        while first in inbox:
            found.append(inbox[first])
            first += 1
        if found:
            channel.delivered[end] = first
            await channel.notify()
        return found, not found and channel.exhausted(end, first)

    async def finish(self, connection: str, end: int, sent: int) -> None:
        """Note that ``end`` has left after ``sent`` messages; drop the messages that wait for it."""
        channel = self._channels.get(connection)
        if channel is None or channel.finished(end):
            return
        channel.sent[end] = sent
        channel.inboxes[end].clear()
        await channel.notify()
        if channel.finished(1 - end):
            self._channels.pop(connection, None)

    async def watch(self, connection: str) -> None:
        """Wait until an end has finished.

        The sender holds the reference of the worker's call of this method; Ray declares it lost at once when
        the worker's process dies.
        """
        channel = self._channels.setdefault(connection, _Channel())
        async with channel.changed:
            await channel.changed.wait_for(lambda: channel.finished(0) or channel.finished(1))

    async def drain(self, seconds: float) -> None:
        """Wait up to ``seconds`` until workers have taken their messages or have finished."""

        async def taken(channel: _Channel) -> None:
            async with channel.changed:
                await channel.changed.wait_for(
                    lambda: channel.finished(1) or max(channel.inboxes[1], default=-1) < channel.delivered[1]
                )

        waits = [asyncio.create_task(taken(channel)) for channel in self._channels.values()]
        if waits:
            await asyncio.wait(waits, timeout=seconds)


def start_rendezvous(name: str, namespace: str | None) -> Any:
    """Start the actor on this node; return its handle without waiting for it.

    Raises:
        LifecycleError: another sender has an actor of this name.
    """
    ray = require_ray()
    strategies = ray.util.scheduling_strategies
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    cloudpickle, me = ray.cloudpickle, sys.modules[__name__]
    cloudpickle.register_pickle_by_value(me)  # its process then starts without importing torch
    try:
        remote = ray.remote(RendezvousActor).options(
            name=name, namespace=namespace, num_cpus=0, max_concurrency=10_000, scheduling_strategy=here
        )
        return remote.remote()
    except ValueError as error:
        raise LifecycleError(
            f"another sender of scheme {name!r} runs in Ray namespace {namespace!r}: give this scheme "
            "another name=, or shut the other one down"
        ) from error
    finally:
        cloudpickle.unregister_pickle_by_value(me)


def find_rendezvous(
    name: str, namespace: str | None, timeout: float, require_open: Callable[[], None]
) -> Any:
    """Wait for the actor that the sender started and return its handle; SyncTimeoutError if none comes.

    ``require_open`` raises if the caller was closed meanwhile.
    """
    deadline = time.monotonic() + timeout
    while True:
        require_open()
        ray = require_ray()
        try:
            return named_actor(name, namespace)
        except ValueError:
            if time.monotonic() > deadline:
                place = namespace or ray.get_runtime_context().namespace
                raise SyncTimeoutError(
                    f"no sender of scheme {name!r} in Ray namespace {place!r} within "
                    f"{format_seconds(timeout)}; has it called init_on_sender(), and is it in this namespace "
                    "(namespace=...)?"
                ) from None
            time.sleep(_LOOK_SECONDS)  # Ray has no event for the naming of an actor


def look_up(actor: Any, data: str, timeout: float | None) -> Any:
    """Wait for the sender's announcement, and return it.

    Raises:
        LifecycleError: the sender's scheme has other ``data``.
        LinkClosedError: the actor or Ray is gone.
        SyncTimeoutError: there was no announcement within ``timeout`` seconds.
    """
    grace = None if timeout is None else timeout + _GRACE_SECONDS  # for the actor's own answer
    found = ask(call(actor.look_up, timeout), grace)
    if found is None:
        raise SyncTimeoutError("no sender announced itself in time")
    theirs, where = found
    if theirs != data:
        raise LifecycleError(f"the sender's scheme has data={theirs!r}, and this one {data!r}: give both one")
    return where


def running_ray() -> Any:
    """Return the ``ray`` module for a link in use; LinkClosedError if Ray was shut down in this process."""
    if not ray_runs():
        raise LinkClosedError(_ENDED)
    return import_ray()


def call(method: Any, *arguments: Any) -> Any:
    """Call a method of an actor, and return the reference of its result; LinkClosedError if Ray is gone."""
    running_ray()
    submit = getattr(method._remote, "__wrapped__", None)  # see call_ray(); Ray's client has none
    with until_ray_ends():
        return method.remote(*arguments) if submit is None else submit(method, arguments, {})


def call_ray(name: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the ``ray`` module, and return its result; LinkClosedError if Ray is gone.

    It does not start a new Ray if another thread has just shut Ray down.
    """
    function = getattr(running_ray(), name)
    with until_ray_ends():
        return getattr(function, "__wrapped__", function)(*arguments, **options)


def result_of(reference: Any, timeout: float | None = None) -> Any:
    """Return the object of a reference; LinkClosedError if Ray is gone, else the errors of ``ray.get()``."""
    return call_ray("get", reference, timeout=timeout)


def ask(reference: Any, timeout: float | None) -> Any:
    """Return the result of a call; LinkClosedError if the actor or Ray is gone, or answers too late."""
    try:
        return result_of(reference, timeout)
    except import_ray().exceptions.RayError as error:
        raise LinkClosedError(
            f"the named actor of the scheme, which ends with the sender, does not answer ({one_line(error)})"
        ) from None


def is_done(reference: Any, timeout: float | None) -> bool:
    """Return whether a call has ended within ``timeout`` seconds; LinkClosedError if Ray is gone."""
    try:
        return bool(call_ray("wait", [reference], timeout=timeout)[0])
    except import_ray().exceptions.RaySystemError:
        raise LinkClosedError(_ENDED) from None


def named_actor(name: str, namespace: str | None) -> Any:
    """Return the handle of an actor; ValueError if there is none, LinkClosedError if Ray is gone."""
    return call_ray("get_actor", name, namespace=namespace)


def node_id() -> str:
    """Return Ray's id of this node; LinkClosedError if Ray is gone."""
    with until_ray_ends():
        return str(call_ray("get_runtime_context").get_node_id())


def tell(method: Any, *arguments: Any) -> None:
    """Call a method of an actor without waiting; do nothing if Ray has ended, even if it was started anew."""
    with contextlib.suppress(Exception):  # a new Ray does not know the actor
        call(method, *arguments)


def kill(actor: Any) -> None:
    """End an actor, unless Ray was shut down."""
    with contextlib.suppress(LinkClosedError):
        call_ray("kill", actor)


def stop_rendezvous(actor: Any) -> None:
    """End the actor after workers have taken their messages; do nothing if its Ray has ended."""
    with contextlib.suppress(Exception):  # a new Ray does not know the actor
        is_done(call(actor.drain, _GRACE_SECONDS), 2 * _GRACE_SECONDS)
        kill(actor)


def one_line(error: Exception) -> str:
    """Return the beginning of an error's message in one line."""
    return " ".join(str(error).split())[:300]
