"""Connections whose payloads travel through NCCL, and the choice of a backend."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.text import brief
from weight_update.transports.distributed.relay.payload_stream import PIECE, STALLED, PayloadStream
from weight_update.transports.distributed.store import StoreBase, disown, own
from weight_update.transports.distributed.transfer import Checksum
from weight_update.transports.signed_stream import SignedStream
from weight_update.wire.memory import gpu_in_use

_log = logging.getLogger(__name__)
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()
_dist: Any = dist  # its ProcessGroupNCCL exists only in a PyTorch with NCCL


def require_nccl() -> None:
    """Raise ValueError if this process cannot use NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ValueError("backend 'nccl' needs CUDA and a PyTorch with NCCL; use backend='gloo' here")


class NcclStream(PayloadStream):
    """A connection that sends each piece over the CUDA devices that its two ends use, which must differ.

    Each piece costs a copy to the device and a copy from it beside the transfer. That pays where the network
    between GPUs is much faster than TCP. Messages stay on the TCP connection, as does the exchange of
    NCCL's addresses, which therefore only a process that knows the token can take part in.

    A thread in which NCCL waits for the other end to connect cannot be interrupted: :meth:`close` does not
    end it. All threads that call this class are daemon threads, so they do not keep the process alive.

    Args:
        rank: 0 at the end that sends payloads, and 1 at the other.

    Raises:
        LinkClosedError: no connection of NCCL could be made.
    """

    sent_piece: ClassVar[int] = PIECE  # the other end receives that many bytes at a time

    def __init__(self, signed: SignedStream, rank: int) -> None:
        super().__init__(signed)
        self._other = 1 - rank
        self._nccl: Any = None
        self._store = own(_ExchangeStore(signed))  # the group refers to the C++ half only
        try:
            require_nccl()
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._device = torch.device("cuda", gpu_in_use())
            with _errors_reach_the_caller():
                self._nccl = own(_dist.ProcessGroupNCCL(self._store, rank, 2))
        except (ValueError, RuntimeError) as error:
            self.close()
            raise LinkClosedError(f"no NCCL connection ({brief(error)})") from None

    def push(self, piece: torch.Tensor, patience: float, total: Checksum | None = None) -> None:
        self._wait("send", piece.to(self._device), patience)
        if total is not None:
            total.add(piece)

    def pull(self, into: torch.Tensor, patience: float, total: Checksum) -> None:
        staged = torch.empty_like(into, device=self._device)
        self._wait("recv", staged, patience)
        into.copy_(staged)
        total.add(into)

    def push_now(self, piece: torch.Tensor) -> int:
        self.push(piece, STALLED)
        return piece.numel()

    def close(self) -> None:
        super().close()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            try:
                nccl.abort()
            except RuntimeError as error:  # it has a limit of time of its own
                _log.warning("NCCL did not end a connection: %s", brief(error))
        disown(nccl)
        disown(self._store)

    def _wait(self, way: str, staged: torch.Tensor, patience: float) -> None:
        group = self._nccl
        if group is None:
            raise LinkClosedError("this end was closed")
        try:
            getattr(group, way)([staged], self._other, 0).wait(timedelta(seconds=patience))
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            problem = str(error)
            if "imed out" in problem or "timing out" in problem:
                raise SyncTimeoutError(f"the other end did not take part for {patience:g} s") from None
            raise LinkClosedError(f"the other end is gone ({brief(error)})") from None


class _ExchangeStore(StoreBase):  # type: ignore[misc] # it has no type stubs
    """A store of torch.distributed for two ranks, each of which sends the other what it sets."""

    def __init__(self, signed: SignedStream) -> None:
        super().__init__()
        self._signed = signed
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value for both ranks."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = raw
        self._signed.send_json({"key": key, "value": raw.hex()}, STALLED)

    def get(self, key: str) -> bytes:
        """Return a value; wait for it where the other rank sets it."""
        self.wait([key], timedelta(seconds=STALLED))
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are here; NCCL's watchdog asks."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        while not self.check(keys):
            message = self._signed.receive_json(timeout.total_seconds())
            self._values[message["key"]] = bytes.fromhex(message["value"])


@contextlib.contextmanager
def _errors_reach_the_caller() -> Iterator[None]:
    """Let groups made inside report a failure to the waiting caller instead of ending the process."""
    with _environment:
        before = os.environ.get(_ERRORS)
        os.environ[_ERRORS] = "0"
        try:
            yield
        finally:
            del os.environ[_ERRORS]
            if before is not None:
                os.environ[_ERRORS] = before


_BACKENDS = ("gloo", "nccl")


def payload_stream(signed: SignedStream, backend: str, rank: int) -> PayloadStream:
    """Return the payload stream of a backend; rank 0 sends payloads.

    Payloads in host memory need no process group: with ``"gloo"`` they travel over the TCP connection itself.
    """
    return NcclStream(signed, rank) if backend == "nccl" else PayloadStream(signed)


def require_known(backend: str) -> None:
    """Raise ValueError if the backend is unknown; the message names the known ones."""
    if backend not in _BACKENDS:
        known = ", ".join(map(repr, _BACKENDS))
        given = repr(backend) if isinstance(backend, str) else f"of type {type(backend).__name__}"
        raise ValueError(f"unknown backend {given:.60} (known: {known})")


def require_backend(backend: str) -> None:
    """Check that this process can use a backend; raise ValueError if it is unknown or cannot be used."""
    require_known(backend)
    if backend == "nccl":
        require_nccl()
