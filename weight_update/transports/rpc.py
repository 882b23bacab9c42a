"""Links whose sender calls the worker through torch.distributed.rpc after each update."""

from __future__ import annotations

import contextlib
import traceback
from concurrent import futures
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed import rpc

from weight_update.arguments import refuse_arguments
from weight_update.errors import LinkClosedError
from weight_update.text import brief
from weight_update.transports.base import Allocate
from weight_update.transports.distributed.transport import DistributedTransport
from weight_update.transports.reconnecting import LinkConnection
from weight_update.transports.socket_stream import deadline_of, seconds_left
from weight_update.wire.frames import Kind, WeightChunk

_TORCHRL = ("collector_info", "collector_rref", "collector_class")
_REFERENCE = (
    "an RRef tells where the worker is, so give rref= alone; or let RPCWeightSyncScheme create both ends, "
    "and give its init_on_sender() worker_rrefs="
)

called_for: ContextVar[str | None] = ContextVar("called_for", default=None)
"""Id of the updated model, in a worker while its sender calls it; None otherwise."""


class RPCTransport(DistributedTransport):
    """The sender's end of a link to a worker that is called through RPC after each update.

    The call runs ``_receive_weights_scheme()`` of the worker's object. The update counts as applied when the
    call has returned; an exception in it counts as a failure of the update. So there is at most one call at a
    time. The first weights of a worker that joins are applied without a call.

    A worker whose process ended and was started again is not the process that RPC knows; it gets its updates
    without calls.

    Args:
        rref: reference to the worker's object; None makes no calls.
        model_id: id of the model that this link updates.
        timeout: seconds that a call may take.
        link: arguments of :class:`DistributedTransport`.
    """

    def __init__(
        self, rref: Any = None, *, model_id: str = "policy", timeout: float = 60.0, **link: Any
    ) -> None:
        refuse_arguments(self, {name: link[name] for name in _TORCHRL if name in link}, _REFERENCE)
        if type(rref).__name__ == "WorkerInfo":  # TorchRL's first argument
            raise TypeError(f"rref is an RRef, got a WorkerInfo: {_REFERENCE}")
        super().__init__(**link)
        self._rref, self._model_id, self._timeout = rref, model_id, timeout
        self._pid: int | None = None
        self._has_weights = False
        self._call: tuple[LinkConnection | None, futures.Future[WeightChunk]] | None = None

    def recv_chunk(
        self, timeout: float | None = None, allocate: Allocate | None = None
    ) -> WeightChunk | None:
        """Return the next chunk, or None on timeout; APPLIED comes when the call has returned."""
        deadline = deadline_of(timeout)
        if self._call is None:
            connection = self._connection
            chunk = super().recv_chunk(timeout, allocate)
            if chunk is None or not self._wants_call(chunk):
                return chunk
            self._call = connection, _call(self._rref, self._model_id, chunk, self._timeout)
            self._abandon_old_call()  # the connection may have ended meanwhile
        try:
            outcome = self._call[1].result(seconds_left(deadline))
        except futures.TimeoutError:
            return None
        except futures.CancelledError:
            self._call = None
            raise LinkClosedError("its connection ended during a call") from None
        self._call = None
        return outcome

    @property
    def arrivals(self) -> None:
        """None: an APPLIED that arrived does not count before the call has returned."""

    def take_over(self, connection: LinkConnection, hello: WeightChunk | None = None) -> None:
        super().take_over(connection, hello)
        self._abandon_old_call()

    def _drop(self, connection: LinkConnection | None) -> None:
        super()._drop(connection)
        self._abandon_old_call()

    def _abandon_old_call(self) -> None:
        """End the wait for a call whose connection is not the present one."""
        call = self._call
        if call is not None and call[0] is not self._connection:
            call[1].cancel()

    def _wants_call(self, chunk: WeightChunk) -> bool:
        if chunk.kind is Kind.HELLO:
            if self._pid not in (None, chunk.header["pid"]):
                self._rref = None
            self._pid, self._has_weights = chunk.header["pid"], False
        if chunk.kind is not Kind.APPLIED:
            return False
        had_weights, self._has_weights = self._has_weights, True
        return had_weights and self._rref is not None


def _call(rref: Any, model_id: str, applied: WeightChunk, timeout: float) -> futures.Future[WeightChunk]:
    """Call a worker that has sent ``applied``; return that chunk, or FAILED, when the call has returned."""
    outcome: futures.Future[WeightChunk] = futures.Future()

    def end(future: Any) -> None:  # in a thread of RPC
        try:
            failure = future.value()
        except Exception as error:  # noqa: BLE001 - RPC raises what _receive() has raised
            problem = (
                f"the update is in force, but the worker's _receive_weights_scheme() could not be called "
                f"through RPC, or did not return within {timeout:g} s ({brief(error)})"
            )
            failure = problem, ""
        chunk = applied
        if failure is not None:
            problem, text = failure
            header = {"version": applied.header["version"], "error": problem, "traceback": text, "kept": True}
            chunk = WeightChunk(Kind.FAILED, header)
        with contextlib.suppress(futures.InvalidStateError):  # the link was closed meanwhile
            outcome.set_result(chunk)

    try:
        call = rpc.rpc_async(rref.owner(), _receive, args=(rref, model_id), timeout=timeout)
    except RuntimeError as error:
        call = torch.futures.Future()
        call.set_exception(error)
    call.then(end)
    return outcome


def _receive(rref: Any, model_id: str) -> tuple[str, str] | None:
    """Call the worker's object, in the worker; return its error and traceback, or None."""
    before = called_for.set(model_id)
    try:
        rref.local_value()._receive_weights_scheme()
    except Exception as error:  # noqa: BLE001 - the sender reports any error
        text = "".join(traceback.format_exception(error))
        return f"_receive_weights_scheme() raised {type(error).__name__}: {error}", text
    finally:
        called_for.reset(before)
    return None
