"""Scheme for torch.distributed: workers on this machine or on others, started in any way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import Unpack

from weight_update.errors import LifecycleError, SyncTimeoutError
from weight_update.schemes.collector import first_worker_of
from weight_update.schemes.options import RemoteOptions, takes_options_of
from weight_update.schemes.remote import RemoteWeightSyncScheme, Whereabouts
from weight_update.strategy.strategy import WeightStrategy
from weight_update.text import brief, format_seconds
from weight_update.threads import call_in_thread
from weight_update.transports.base import TransportBackend
from weight_update.transports.distributed.relay.nccl import require_known

_GRACE_SECONDS = 0.2  # beyond the timeout, for the store's own answer
_WITHDRAW_SECONDS = 2.0  # that shutdown() waits for the store


class DistributedWeightSyncScheme(RemoteWeightSyncScheme, backend="distributed"):
    """Scheme for workers on any machine, over TCP.

    It needs no process group. If there is a default process group, no weights travel through it.

    A worker finds the sender through the scheme that is pickled to it after ``init_on_sender``. If each
    process creates its own scheme, as under torchrun, give all of them the same ``address``, ``port`` and
    ``token``. Or initialize torch.distributed first; workers then ask the store of the default process group.

    The arguments are those of :class:`RemoteWeightSyncScheme`. A number in the place of ``strategy`` is the
    ``timeout``, as in TorchRL.
    """

    @takes_options_of(RemoteWeightSyncScheme.__init__)
    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        strategy: str | WeightStrategy | float = "tensordict",
        **options: Unpack[RemoteOptions],
    ) -> None:
        try:
            require_known(backend)
        except ValueError as error:
            raise ValueError(
                f"{error}; the first argument is the backend, as in TorchRL: give a strategy by name, such "
                "as strategy='state_dict' or strategy=WeightStrategy(encoding='patch')"
            ) from None
        if isinstance(strategy, (int, float)):
            options, strategy = RemoteOptions(timeout=strategy, **options), "tensordict"
        super().__init__(strategy, backend, sync, **options)

    def open_sender(self, workers: Sequence[int], ctx: Any) -> dict[int, TransportBackend]:
        self._first_worker = first_worker_of(self.context)  # a worker of TorchRL passes its rank
        return super().open_sender(workers, ctx)

    def announce(self, where: Whereabouts) -> None:
        """Announce the sender in the store of the default group, until :meth:`shutdown`."""
        if dist.is_initialized():
            text = json.dumps(astuple(where))
            _default_store().set(self._notice, text)
            self._process.announced.callback(_withdraw, self._notice, text)

    def look_up(self, timeout: float) -> Whereabouts:
        """Return the announcement in the store of the default group."""
        if not dist.is_initialized():
            raise LifecycleError(
                "this scheme does not know where its sender is: pass it to the worker after "
                "init_on_sender(), or give both sides address, port and token, or initialize "
                "torch.distributed"
            )
        store = _default_store()

        def ask() -> bytes:
            store.wait([self._notice], timedelta(seconds=timeout))
            return bytes(store.get(self._notice))

        asked = call_in_thread("weight_update-look-up", ask, in_order=True)  # the store may be stopped
        try:
            answer = asked.result(timeout + _GRACE_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever the store raises
            raise SyncTimeoutError(
                f"no sender of {self._notice!r} announced itself in the store of the default process group "
                f"within {format_seconds(timeout)} ({brief(error) or 'the store does not answer'})"
            ) from None
        return Whereabouts(*json.loads(answer))

    @property
    def _notice(self) -> str:
        return f"weight_update/{self._model_name}"


def _withdraw(notice: str, text: str) -> None:
    """Remove an announcement: workers then wait for the next one. A newer one is left alone."""

    def remove() -> None:
        store = _default_store()
        if store.check([notice]) and store.get(notice) == text.encode():
            store.delete_key(notice)

    if dist.is_initialized():
        with contextlib.suppress(Exception):  # a store that is gone or stopped has nothing to ask
            call_in_thread("weight_update-withdraw", remove, in_order=True).result(_WITHDRAW_SECONDS)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
