"""How weights travel for a synchronizer: through our schemes, to whoever is to have them now."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from weight_update.errors import (
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnknownWorkerError,
    WeightSyncError,
)
from weight_update.schemes import (
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from weight_update.sender.handle import SendHandle
from weight_update.strategy.strategy import WeightStrategy

__all__ = ["Endpoint", "Publisher", "Subscriber", "Transfer", "key_of"]

Endpoint = dict[str, Any]
"""What a receiver needs to find an :class:`Publisher`: plain values."""

_log = logging.getLogger(__name__)
_PLACEHOLDER = (1 << 31) - 1
"""Index of the receiver beside the sender; explorers are workers under their own ids."""


class Transfer:
    """Weights that were sent to explorers.

    Args:
        handle: of the update.
        gone: ids of explorers that were meant but are not connected.

    Attributes:
        ids: of the explorers that it was sent to.
        number: of the update, as the scheme counts.
        nbytes: bytes that were written or sent.
    """

    def __init__(self, handle: SendHandle, gone: frozenset[int] = frozenset()) -> None:
        self._handle, self._gone = handle, gone
        self.ids = frozenset(handle.workers) - {_PLACEHOLDER}
        self.number, self.nbytes = handle.version, handle.report.wire_bytes

    def settle(self, ids: Iterable[int]) -> dict[int, str]:
        """Wait until explorers have it in force, or have failed; why those did, by id."""
        wanted = set(ids)
        failures = dict.fromkeys(wanted & self._gone, "it is not connected to the sender")
        try:
            report = self._handle.of(*(wanted - self._gone)).wait()
        except SyncFailedError as error:
            failures.update({idx: str(why) for idx, why in error.failures.items()})
            report = self._handle.report
        left = {id for id in wanted - set(failures) if id not in report.apply_seconds}
        return failures | dict.fromkeys(left, "it left before it had applied it")

    def failures(self) -> dict[int, str]:
        """What is known by now."""
        return {idx: str(why) for idx, why in self._handle.failures().items()}


class Publisher:
    """The sending end: explorers join at any time and are sent weights when it is their turn.

    A scheme counts its first workers before any explorer is there. Its only one is a placeholder: a receiver
    beside the sender that has no model and only looks at the memory that is sent.

    Args:
        source: module, TensorDict, dict or callable that is read at each :meth:`send`.
        address: of the interface to listen on; None lets in processes of this machine only, through shared
            memory.
        strategy: see :class:`~weight_update.WeightSyncScheme`.
        timeout: seconds an explorer may take to apply what it is sent.
        backend: what weights go through to other hosts; see
            :class:`~weight_update.DistributedWeightSyncScheme`.
    """

    def __init__(
        self,
        source: Any,
        address: str | None,
        strategy: str | WeightStrategy,
        timeout: float,
        backend: str = "gloo",
    ) -> None:
        token = secrets.token_hex(16)
        self.endpoint: Endpoint = {"token": token, "address": address, "port": 0, "shared": address is None}
        self._scheme = _scheme(self.endpoint, strategy, timeout, backend)
        self._sending = threading.Lock()
        self._last: Transfer | None = None
        self._scheme.init_on_sender(params_map={_PLACEHOLDER: source})
        if isinstance(self._scheme, DistributedWeightSyncScheme):
            self.endpoint["port"] = self._scheme.port
        else:
            self.endpoint["address"] = self._scheme.address
        with contextlib.ExitStack() as undo:
            undo.callback(self._scheme.shutdown)
            self._placeholder = Subscriber(self.endpoint, _PLACEHOLDER, None, strategy, timeout)
            undo.callback(self._placeholder.close)
            self._open(timeout)
            undo.pop_all()

    def _open(self, timeout: float) -> None:
        joining = threading.Thread(
            target=self._placeholder.join, args=(timeout,), name="weight_update-placeholder"
        )
        joining.start()
        try:
            self._scheme.connect(timeout=timeout)
        finally:
            joining.join()

    def here(self) -> list[int]:
        """Ids of the explorers that joined."""
        return [idx for idx in self._scheme.worker_versions if idx != _PLACEHOLDER]

    def send(self, ids: Iterable[int], weights: Any = None) -> Transfer:
        """Send weights to explorers; does not wait for them.

        Args:
            ids: of the explorers.
            weights: None reads the source.

        Raises:
            WeightSyncError: the weights cannot be sent at all; nobody has them.
        """
        wanted = frozenset(ids)
        with self._sending:
            while True:
                here = wanted & set(self.here())
                try:
                    handle = self._scheme.send_async(weights, [_PLACEHOLDER, *here])
                except UnknownWorkerError:
                    if here <= set(self.here()):
                        raise
                else:  # else one of them left just now
                    return Transfer(handle, wanted - here)

    def spread(self, weights: Any = None, but: Iterable[int] = ()) -> Transfer:
        """Send weights to all who joined, ``but`` some, and wait for nobody."""
        if self._last is not None and (bad := self._last.failures()):
            _log.warning("an update in the background was not applied: %s", bad)
        self._last = self.send(set(self.here()) - set(but), weights)
        return self._last

    def close(self) -> None:
        """End all links."""
        try:
            self._placeholder.close()
        finally:
            self._scheme.shutdown()


class Subscriber:
    """The receiving end at one explorer, or at a synchronizer that holds the newest weights.

    Args:
        endpoint: of the publisher.
        id: of the explorer.
        model: kept current by what is sent; None keeps the weights only.
        strategy: see :class:`~weight_update.WeightSyncScheme`.
        timeout: seconds an update waits for the model's forward pass to end.
    """

    def __init__(
        self, endpoint: Endpoint, id: int, model: Any, strategy: str | WeightStrategy, timeout: float
    ) -> None:
        self.endpoint = endpoint
        self._scheme = _scheme(endpoint, strategy, timeout)
        self._scheme.init_on_receiver(model=model, worker_idx=id)

    def join(self, timeout: float) -> str | None:
        """Connect; None, or why it did not succeed.

        Raises:
            SchemaMismatchError: the model has other weights than the sender.
        """
        try:
            self._scheme.connect(timeout=timeout)
        except (TransportError, SyncTimeoutError) as error:
            return str(error)
        return None

    @property
    def held(self) -> list[Any] | None:
        """Which update is in force, so that the other end understands it; None for none."""
        version = self._scheme.version
        return None if version is None else [key_of(self.endpoint), version]

    @property
    def scheme(self) -> WeightSyncScheme:
        """The scheme underneath."""
        return self._scheme

    def lives(self) -> bool:
        """Whether the other end is still there."""
        try:
            self._scheme.receive(0)
        except WeightSyncError:
            return False
        return True

    def close(self) -> None:
        """Leave; the model keeps its weights."""
        self._scheme.shutdown()


def key_of(endpoint: Endpoint) -> str:
    """Tells outlets apart; it is no secret."""
    return hashlib.sha256(endpoint["token"].encode()).hexdigest()[:8]


def _scheme(
    endpoint: Endpoint, strategy: str | WeightStrategy, timeout: float, backend: str = "gloo"
) -> SharedMemWeightSyncScheme | DistributedWeightSyncScheme:
    if endpoint["shared"]:
        return SharedMemWeightSyncScheme(
            strategy, address=endpoint["address"], token=endpoint["token"], timeout=timeout
        )
    return DistributedWeightSyncScheme(
        backend,
        strategy=strategy,
        address=endpoint["address"],
        port=endpoint["port"],
        token=endpoint["token"],
        timeout=timeout,
    )
