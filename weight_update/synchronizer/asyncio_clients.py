"""The clients for asyncio. Their ``blocking`` attribute is the same client without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from weight_update.arguments import TOKEN, given_token
from weight_update.errors import Closing
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.blocking_clients import BlockingExplorer, BlockingTrainer, Metrics
from weight_update.synchronizer.plan import RunningStatus, SyncPlan
from weight_update.synchronizer.ray_actor import RayChannel, RayHost
from weight_update.synchronizer.rpc import Channel, LocalChannel, Server, SocketChannel
from weight_update.synchronizer.synchronizer import Synchronizer

Where = Synchronizer | Server | RayHost | str
_GIVE_UP_SECONDS = 0.1
"""Seconds after which the end of a wait is asked for again: the call may have begun to wait just then."""
_P = TypeVar("_P", BlockingTrainer, BlockingExplorer)
_T = TypeVar("_T")


class _AsyncClient(Closing, Generic[_P]):
    """A client that waits in threads of its own, never in the event loop."""

    def __init__(self, blocking: _P) -> None:
        self.blocking: _P = blocking
        self._threads = ThreadPoolExecutor(4, thread_name_prefix=f"weight_update-{blocking.role}")

    @property
    def step(self) -> int:
        """Number of steps done so far; write ``client.step += 1`` after each step."""
        return self.blocking.step

    @step.setter
    def step(self, step: int) -> None:
        self.blocking.step = step

    @property
    def version(self) -> int | None:
        """Version in force in an explorer, as far as it knows; newest version that a trainer published."""
        return self.blocking.version

    @property
    def plan(self) -> SyncPlan:
        """The synchronizer's plan."""
        return self.blocking.plan

    async def need_sync(self) -> bool:
        """Return whether ``sync_weight`` should be called now.

        Raises:
            LinkClosedError: the synchronizer was not there for ``timeout`` seconds.
        """
        return await self._run(self.blocking.need_sync)

    async def sync_weight(self) -> Metrics:
        """Synchronize; return when that is done, or has failed.

        If the task is cancelled, the client stops waiting.

        Returns:
            the metrics. They have a ``reason`` only if no version came that is new enough; the next step may
            then try again. In FULLY_ASYNC with NCCL, the trainer's version may still be on its way; it counts
            as published when the first explorer has it.

        Raises:
            SchemaMismatchError: the model is not the trainer's (explorer), or the weights have other names,
                shapes or dtypes than at the start (trainer).
            LifecycleError: this side is closed, another client took its place, or the task is inside
                ``hold()``. A hold also covers the tasks that were created inside it, until it ends.
        """
        try:
            context = contextvars.copy_context()  # of the task, which may be inside hold()
            call = self._threads.submit(context.run, self.blocking.sync_weight)
        except RuntimeError:  # closed: the call raises that, and does nothing else
            return self.blocking.sync_weight()
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # closed: there is no wait to end any more
                self._threads.submit(self._give_up, call)
            raise

    def _give_up(self, call: futures.Future[Metrics]) -> None:
        """End the wait of a call of ``sync_weight``, also if the call has not begun to wait yet."""
        while not call.done():
            self.blocking.give_up()
            futures.wait([call], _GIVE_UP_SECONDS)

    async def notify(self, status: RunningStatus | str) -> None:
        """Set the status of this client in the synchronizer.

        REQUIRE_SYNC announces that this client wants to synchronize, without waiting. RUNNING withdraws the
        announcement. STOPPED wakes all clients that wait for this one; the next ``need_sync`` or
        ``sync_weight`` ends this status.
        """
        await self._run(lambda: self.blocking.notify(status))

    async def status(self) -> dict[str, Any]:
        """Return the state of the trainer and of all explorers.

        Returns:
            ``"trainer"``: a :class:`RunningStatus`; ``"explorers"``: a :class:`RunningStatus` by explorer id;
            ``"versions"``: version in force by explorer id; ``"version"`` and ``"step"``: the newest
            published version, and the trainer step at which it was made.
        """
        return await self._run(self.blocking.status)

    async def latest_version(self) -> int | None:
        """Return the newest published version; None before the first."""
        return await self._run(self.blocking.latest_version)

    def close(self) -> None:
        """Leave, and wake all clients that wait for this one. It may be called twice."""
        self.blocking.close()
        self._threads.shutdown(wait=False)

    async def _run(self, call: Callable[[], _T]) -> _T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError:  # closed: the call raises that, and does nothing else
            return call()
        return await running


class TrainerClient(_AsyncClient[BlockingTrainer]):
    """The trainer's side of a :class:`Synchronizer`.

    Call ``if await trainer.need_sync(): await trainer.sync_weight()`` after each step and while waiting for
    samples, as Trinity-RFT's trainer does. Without asyncio: ``trainer.blocking.need_sync()``, and so on.

    Call ``blocking`` from long-lived threads: ``lease`` seconds (see :class:`Synchronizer`) after the end of
    the thread that last used the client, the client counts as gone until its next call. Calls with ``await``
    run in threads of the client, which live until it is closed.

    Args:
        where: synchronizer to use: a :class:`Synchronizer` of this process; a server or its address,
            ``"host:port"``; or an actor or its address, ``"ray:<name>"``.
        model: module, TensorDict, dict or callable that weights are read from. If several ranks hold parts of
            the weights, gather them on all ranks, and give the client of one rank a function that returns
            the whole weights.
        token: token of the server; None takes the environment's ``WEIGHT_UPDATE_TOKEN``.
        address: address at which explorers or the synchronizer reach this process; None for the address of
            the interface that leads to the synchronizer.
        backend: backend that carries weights to explorers on other hosts, with NCCL as the method: ``"gloo"``
            (TCP), or ``"nccl"``, which needs a different CUDA device for each process. On one host, processes
            share memory.
        strategy: strategy of the weights; see :class:`~weight_update.WeightStrategy`.
        timeout: seconds that ``sync_weight`` waits for explorers, and that every call waits for an answer of
            the synchronizer.
        transfer_timeout: seconds that a transfer may take.
        step: number of steps done already. None for 0 or, if a FIXED plan has published versions, for the
            step of the newest version, because explorers depend on it.

    Raises:
        LinkClosedError: there is no synchronizer.
        JoinRefusedError: it has another token.
        TypeError: ``where`` is no synchronizer, or a timeout is no number.
        UnsupportedSourceError: weights cannot be read from ``model``, or several ranks hold parts of them.
        ValueError: the backend is unknown, or cannot be used here or with this method; or the address stands
            for all interfaces, as 0.0.0.0 does.
    """

    def __init__(
        self,
        where: Where,
        model: Any,
        *,
        token: str | None = None,
        address: str | None = None,
        backend: str = "gloo",
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int | None = None,
    ) -> None:
        options: dict[str, Any] = {"timeout": timeout, "transfer_timeout": transfer_timeout, "step": step}
        options |= {"address": address, "backend": backend, "strategy": strategy}
        super().__init__(BlockingTrainer(_channel_to(where, token), model, **options))


class ExplorerClient(_AsyncClient[BlockingExplorer]):
    """An explorer's side of a :class:`Synchronizer`.

    Call ``if await explorer.need_sync(): await explorer.sync_weight()`` after each step. Without asyncio:
    ``explorer.blocking.need_sync()``, and so on. :class:`TrainerClient` describes ``where`` and ``token``,
    and the threads from which ``blocking`` may be called.

    Args:
        model: module, TensorDict or dict to update, between its forward passes. With NCCL and MEMORY, also an
            :class:`~weight_update.InferenceEngine`.
        id: number of this explorer, at least 0, which stays the same after a restart. None takes the first
            free number.
        strategy: the same strategy as the trainer's.
        timeout: seconds that ``sync_weight`` waits for weights, and that every call waits for an answer of
            the synchronizer.
        transfer_timeout: seconds that a transfer may take.
        step: number of steps done already.

    Raises:
        LinkClosedError: there is no synchronizer.
        JoinRefusedError: it has another token.
        TypeError: ``where`` is no synchronizer, or a timeout is no number.
        ValueError: ``id`` is not an integer of at least 0, or a timeout is not above 0.
        UnsupportedSourceError: the model is an engine, and the method is CHECKPOINT.
    """

    def __init__(
        self,
        where: Where,
        model: Any,
        *,
        id: int | None = None,
        token: str | None = None,
        strategy: str | WeightStrategy = "tensordict",
        timeout: float = 60.0,
        transfer_timeout: float = 60.0,
        step: int = 0,
    ) -> None:
        options: dict[str, Any] = {"timeout": timeout, "transfer_timeout": transfer_timeout, "step": step}
        options |= {"id": id, "strategy": strategy}
        super().__init__(BlockingExplorer(_channel_to(where, token), model, **options))

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager inside which no update is applied, for use in FULLY_ASYNC."""
        return self.blocking.hold()

    @property
    def id(self) -> int:
        """Id of this explorer."""
        assert self.blocking.id is not None
        return self.blocking.id


def _channel_to(where: Where, token: str | None) -> Channel:
    if isinstance(where, Synchronizer):
        return LocalChannel(where.service)
    if isinstance(where, Server):
        return SocketChannel(where.address, where.token)
    address: object = where.address if isinstance(where, RayHost) else where
    if not isinstance(address, str):
        raise TypeError(
            "a client takes a Synchronizer, a server or its address 'host:port', or an actor or its address "
            f"'ray:<name>', got {where!r:.60}"
        )
    if address.startswith("ray:"):
        return RayChannel(address)
    token = given_token(token)
    if token is None:
        raise ValueError(f"give the server's token, or set {TOKEN} in the environment")
    return SocketChannel(address, token)
