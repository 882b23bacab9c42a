"""Transfers of weights for a synchronizer, through the schemes, to those whose turn it is."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from weight_update.errors import SyncFailedError, UnknownWorkerError, undo_on_error
from weight_update.report import Event, WorkerEvent
from weight_update.schemes import DistributedWeightSyncScheme, SharedMemWeightSyncScheme
from weight_update.sender.handle import SendHandle
from weight_update.strategy.strategy import WeightStrategy
from weight_update.synchronizer.state import remember

Endpoint = dict[str, Any]
"""Where a subscriber finds a :class:`Publisher`: plain values."""

_log = logging.getLogger(__name__)
_TRACEBACK = re.compile(r"\n\n(?:Traceback|  \+ Exception Group Traceback) \(most recent call last\):")
_LONGEST = 80_000
"""Characters that the reasons of one transfer have together: they go through messages of at most 1 MiB."""


class Publisher:
    """The sending end: explorers join at any time and are sent weights when it is their turn.

    Args:
        source: module, TensorDict, dict or callable that is read at each :meth:`send`.
        address: address of the interface to listen on; None lets in processes of this machine only, through
            shared memory.
        tell: function that is told, in another thread, of an explorer that is sent all weights instead of a
            patch.

    Attributes:
        endpoint: where subscribers find it.
    """

    def __init__(
        self,
        source: Any,
        address: str | None,
        strategy: WeightStrategy,
        timeout: float,
        backend: str = "gloo",
        tell: Callable[[WorkerEvent], None] = lambda event: None,
    ) -> None:
        token = secrets.token_hex(16)
        self.endpoint: Endpoint = {"token": token, "address": address, "port": 0, "shared": address is None}
        self._scheme = _scheme(self.endpoint, strategy, timeout, backend)
        self._tell = tell
        self._sending = threading.Lock()
        self._last: SendHandle | None = None  # of the last update that was spread
        self._versions: dict[int | None, int] = {}  # for events, by number of the update
        self._unobserve: Callable[[], None] | None = None
        self._scheme.init_on_sender(weights=source, num_workers=0)
        if isinstance(self._scheme, DistributedWeightSyncScheme):
            self.endpoint["port"] = self._scheme.port
        else:
            self.endpoint["address"] = self._scheme.address
        with undo_on_error(self._scheme.shutdown):
            self._scheme.connect(timeout=timeout)

    def joined(self) -> list[int]:
        """Return the ids of the explorers that are connected."""
        return list(self._scheme.worker_versions)

    def send(
        self, ids: Iterable[int], weights: Any = None, *, spread: bool = False, observe: int | None = None
    ) -> SendHandle:
        """Send ``weights``, or the source, to explorers, and do not wait; after an error none has them.

        Args:
            ids: ids of the explorers.
            weights: weights in place of those of the source.
            spread: whether all others that are connected get them as well.
            observe: version by which ``tell`` hears of this update; None for an update that it does not hear
                of, which costs nothing extra.
        """
        wanted = frozenset(ids)
        with self._sending:
            self._observe(observe is not None)
            if spread and self._last is not None and (bad := self._last.failures()):
                reasons = {idx: _without_traceback(why) for idx, why in bad.items()}
                _log.warning("explorers did not apply an earlier update: %s", reasons)
            while True:
                joined = frozenset(self.joined())
                here = joined if spread else wanted & joined
                try:
                    handle = self._scheme.send_async(weights, [*here])
                    break
                except UnknownWorkerError:  # unless one of them left just now, it is an error
                    if here <= set(self.joined()):
                        raise
            if observe is not None:
                remember(self._versions, handle.version, observe)
            if spread:
                self._last = handle
            return handle

    def _observe(self, observed: bool) -> None:
        """Observe the scheme, or end this."""
        if observed and self._unobserve is None:
            sending, versions, tell = self._sending, self._versions, self._tell  # and not self: it is freed

            def tell_full(event: Event) -> None:
                if isinstance(event, WorkerEvent) and event.kind == "full_update":
                    with sending:  # send() may be about to note it
                        version = versions.get(event.version)
                    if version is not None:  # the update is one to hear of
                        tell(replace(event, version=version))

            self._unobserve = self._scheme.add_observer(tell_full)
        elif not observed and self._unobserve is not None:
            self._unobserve()
            self._unobserve = None

    def close(self) -> None:
        """Close all links."""
        self._scheme.shutdown()


class Subscriber:
    """The receiving end at one explorer, or at a synchronizer that holds the newest weights.

    Making one connects it. ``model`` is kept current; None keeps the weights only. ``timeout`` is the number
    of seconds for connecting, and that an update waits for the model's forward pass to end; with
    ``late_updates_wait``, it then waits on. Subscribers of one ``group`` share a gate.

    Raises:
        SchemaMismatchError: the model has other weights than the sender.
        TransportError, SyncTimeoutError: the sender cannot be reached.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        id: int,
        model: Any,
        strategy: WeightStrategy,
        timeout: float,
        group: str | None = None,
        *,
        late_updates_wait: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.scheme = _scheme(endpoint, strategy, timeout)
        self.scheme.group = group
        self.scheme.late_updates_wait = late_updates_wait
        self.scheme.init_on_receiver(model=model, worker_idx=id)
        with undo_on_error(self.scheme.shutdown):
            self.scheme.connect(timeout=timeout)
        # The model, which the program may keep, would keep the receiver alive.
        self._finalizer = weakref.finalize(self, self.scheme.shutdown)

    def close(self) -> None:
        """Leave; the model keeps its weights."""
        self._finalizer()


def settle(update: SendHandle, ids: Iterable[int]) -> dict[int, str]:
    """Wait until explorers have an update in force or have failed; return why some failed, by id."""
    wanted, sent = set(ids), set(update.workers)
    failures = dict.fromkeys(wanted - sent, "it is not connected to the sender")
    try:
        update.of(*(wanted & sent)).wait()
    except SyncFailedError as error:
        failures.update({idx: _without_traceback(why) for idx, why in error.failures.items()})
    left = {id for id in wanted - set(failures) if id not in update.report.apply_seconds}
    return shortened(failures | dict.fromkeys(left, "it left before it had applied it"))


def _without_traceback(why: Exception) -> str:
    """Return the message of an error, without the traceback that a worker's error has."""
    return _TRACEBACK.split(str(why), maxsplit=1)[0]


def shortened(failures: Mapping[int, str]) -> dict[int, str]:
    """Return failures, with reasons cut off so that all of them fit into a message to the synchronizer."""
    most = _LONGEST // max(len(failures), 1)
    return {id: why if len(why) <= most else f"{why[:most]} ..." for id, why in failures.items()}


def is_loopback(address: str | None) -> bool:
    """Return whether only processes of this machine reach ``address``; None is no address at all."""
    if address is None or address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a name


def key_of(endpoint: Endpoint) -> str:
    """Return a key that tells publishers apart; it is no secret."""
    return hashlib.sha256(endpoint["token"].encode()).hexdigest()[:8]


def require_no_pipeline(strategy: WeightStrategy) -> None:
    """Raise ValueError if updates by ``strategy`` are not kept for explorers that join."""
    if strategy.max_in_flight is not None:
        raise ValueError(
            "max_in_flight keeps no weights for explorers that join, so NCCL and MEMORY cannot use it; give "
            "a strategy without it, or use SyncMethod.CHECKPOINT"
        )


def _scheme(
    endpoint: Endpoint, strategy: WeightStrategy, timeout: float, backend: str = "gloo"
) -> SharedMemWeightSyncScheme | DistributedWeightSyncScheme:
    address, token = endpoint["address"], endpoint["token"]
    require_no_pipeline(strategy)
    if endpoint["shared"]:
        return SharedMemWeightSyncScheme(strategy, address=address, token=token, timeout=timeout)
    port = endpoint["port"]
    return DistributedWeightSyncScheme(
        backend, strategy=strategy, address=address, port=port, token=token, timeout=timeout
    )
