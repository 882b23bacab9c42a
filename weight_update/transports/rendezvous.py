"""Store through which the two ends of a process group find each other."""

from __future__ import annotations

import logging
import struct
import time
from datetime import timedelta

from weight_update.errors import FormatError, SyncTimeoutError
from weight_update.transports.distributed.signed_queue import SignedQueue, UnsignedError
from weight_update.transports.distributed.store import Store, StoreBase
from weight_update.transports.inherited_sockets import InheritedSockets, listening_sockets
from weight_update.transports.rate_limit import RateLimitedLog

_log = RateLimitedLog(logging.getLogger(__name__))
_SIZE = struct.Struct("<I")  # of a key


class SignedRendezvous(StoreBase):  # type: ignore[misc] # it has no type stubs
    """A torch.distributed store for a group of two, whose ends send each other every value that they set.

    The values are signed; unsigned messages in ``store`` are ignored. ``sockets`` receives the addresses that
    the two ends of the group listen on. The values of the other end may take ``seconds`` from now on: the
    timeout that gloo gives to :meth:`wait` is meant for one step of a connection.
    """

    def __init__(
        self, store: Store, name: str, token: str, rank: int, sockets: InheritedSockets, seconds: float
    ) -> None:
        super().__init__()
        self._deadline = time.monotonic() + seconds
        self._outbox = SignedQueue(store, f"{name}/{rank}", token)
        self._inbox = SignedQueue(store, f"{name}/{1 - rank}", token)
        self._values: dict[str, bytes] = {}
        self._sockets = sockets
        self._address_slice: slice | None = None  # position of the listening address in a value

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value for both ends."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        for address in listening_sockets():
            if address in value:
                start = value.index(address)
                self._address_slice = slice(start, start + len(address))
                self._sockets.local.append(address)
        self._values[key] = value
        name = key.encode()
        self._outbox.put(_SIZE.pack(len(name)) + name + value)

    def get(self, key: str) -> bytes:
        """Return a value that was waited for."""
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all ``keys`` are set.

        Raises:
            SyncTimeoutError: they were not set in time.
        """
        del timeout
        while not all(key in self._values for key in keys):
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise SyncTimeoutError("the other end did not come in time")
            try:
                message = self._inbox.take(left)
            except UnsignedError as error:
                _log.warning("ignored a message in the rendezvous of two ends: %s", error)
            else:
                if message is not None:
                    self._keep(message)

    def close(self) -> None:
        """Stop waiting for values."""
        self._inbox.close()

    def _keep(self, message: bytes) -> None:
        if len(message) < _SIZE.size:
            raise FormatError(f"a message of {len(message)} bytes is too short")
        end = _SIZE.size + _SIZE.unpack_from(message)[0]
        key, value = message[_SIZE.size : end].decode(), message[end:]
        self._values[key] = value
        if self._address_slice is not None:
            self._sockets.remote.append(value[self._address_slice])
