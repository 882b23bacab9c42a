"""Point-to-point groups whose payloads travel through NCCL, and the choice of a backend."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from weight_update.errors import LinkClosedError
from weight_update.text import brief
from weight_update.transports.distributed.relay.gloo import Pending, PointToPointGroup
from weight_update.transports.distributed.store import PrefixStore, disown, own

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()
_dist: Any = dist  # its ProcessGroupNCCL exists only in a PyTorch with NCCL


def require_nccl() -> None:
    """Check that this process can use NCCL.

    Raises:
        ValueError: it cannot.
    """
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ValueError("backend 'nccl' needs CUDA and a PyTorch with NCCL; use backend='gloo' here")


class NcclGroup(PointToPointGroup):
    """A group that sends each piece over the CUDA devices current at its two ends, which must differ.

    Each piece costs a copy to the device and a copy from it beside the transfer. That pays where the network
    between GPUs is much faster than gloo over TCP. Control messages and the detection of a lost end stay with
    gloo.
    """

    _nccl: Any = None

    def connect(self) -> None:
        try:
            require_nccl()
        except ValueError as error:
            raise LinkClosedError(str(error)) from None
        super().connect()
        try:
            self._device = torch.device("cuda", torch.cuda.current_device())
            with _errors_reach_the_caller():
                store = PrefixStore(f"{self._name}/nccl", self._store.c10d())
                self._nccl = own(_dist.ProcessGroupNCCL(store, self._rank, 2))
        except RuntimeError as error:
            self.release()
            raise LinkClosedError(f"no NCCL connection ({brief(error)})") from None

    def begin_push(self, piece: torch.Tensor) -> Pending:
        staged = piece.to(self._device)
        return self._begin_nccl("send", staged)

    def begin_pull(self, into: torch.Tensor) -> Pending:
        staged = torch.empty_like(into, device=self._device)
        pending = self._begin_nccl("recv", staged)
        pending.then = lambda: into.copy_(staged)
        return pending

    def release(self) -> None:
        disown(self._nccl)
        self._nccl = None
        super().release()

    def _begin_nccl(self, way: str, staged: torch.Tensor) -> Pending:
        to = [staged], self._other, 0
        problem = "it was closed"
        try:
            if self._nccl is not None:
                pending = Pending(self._nccl.send(*to) if way == "send" else self._nccl.recv(*to))
                with self._beginning:
                    self._pending.add(pending)
                return pending
        except RuntimeError as error:
            problem = brief(error)
        raise LinkClosedError(f"the other end is gone ({problem})")


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


_GROUPS: dict[str, type[PointToPointGroup]] = {"gloo": PointToPointGroup, "nccl": NcclGroup}


def group_class(backend: str) -> type[PointToPointGroup]:
    """Return the class of groups for a backend.

    Raises:
        ValueError: the backend is unknown.
    """
    if backend not in _GROUPS:
        known = ", ".join(map(repr, _GROUPS))
        hint = "" if isinstance(backend, str) else "; a strategy is given as strategy="
        raise ValueError(f"unknown backend {backend!r:.60} (known: {known}{hint})")
    return _GROUPS[backend]


def require_backend(backend: str) -> None:
    """Check that this process can use a backend.

    Raises:
        ValueError: the backend is unknown, or cannot be used here; the message names the known ones.
    """
    if group_class(backend) is NcclGroup:
        require_nccl()
