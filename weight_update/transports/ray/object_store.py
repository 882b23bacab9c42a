"""Payloads of one sender in Ray's object store."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from weight_update.errors import NotEnoughMemoryError
from weight_update.text import brief
from weight_update.transports.ray.rendezvous import call_ray, import_ray
from weight_update.wire.frames import WeightChunk


class RayObjectStore:
    """Payloads of one sender in Ray's object store. Each is put there once, whatever the number of links.

    An object is released when its chunk is garbage-collected, or a chunk of a later version is put.
    """

    def __init__(self) -> None:
        self._refs: WeakKeyDictionary[WeightChunk, Any] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def put(self, chunk: WeightChunk) -> Any:
        """Return the reference of a payload, copied if it is new; NotEnoughMemoryError if it has no room."""
        errors = import_ray().exceptions
        assert chunk.payload is not None
        with self._lock:
            ref = self._refs.get(chunk)
            if ref is None:
                # Ray may write into the memory of earlier versions; new memory takes several times as long.
                # Workers that still read an object keep it.
                version = chunk.header["version"]
                for old in [one for one in self._refs if one.header["version"] < version]:
                    del self._refs[old]
                try:
                    ref = self._refs[chunk] = call_ray("put", chunk.payload.numpy())
                except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
                    raise NotEnoughMemoryError(
                        f"Ray's object store has no room for {chunk.payload_bytes / 1e6:.1f} MB; give "
                        f"ray.init more object_store_memory, or send less at once ({brief(error)})"
                    ) from None
            return ref

    def forget(self) -> None:
        """Put every payload again from now on, because Ray lost an object."""
        with self._lock:
            self._refs.clear()
