"""Reading from a multiprocessing queue whose writer or reader may be killed in the middle of an item."""

from __future__ import annotations

import functools
import operator
import os
import queue
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

_LONG = b"\xff" * 4  # prefix of an item of 2 GiB or more, before eight bytes with its size
_READ_BYTES = 1 << 16  # capacity of a pipe
_release = operator.methodcaller("release")


class QueueReader:
    """Reads the items of a queue of ``multiprocessing``; the only reader of the queue.

    ``get()`` of the queue waits for the rest of an item without a limit of time, and reads an item in two
    parts. A worker killed between the two would leave the second part to its successor. Here, one call reads
    all that is in the pipe. An item of at most 16 KiB is written at once, so a killed worker leaves no part
    of it. A longer one can still be cut.

    Where a signal handler must not run between two steps, one call of C does both.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._unread = bytearray()  # bytes of the next items
        self._held: list[bool] = []  # [True] while the lock is held, also after an interrupted call

    def get(self, timeout: float) -> Any:
        """Return the next item.

        Raises:
            queue.Empty: no whole item came within ``timeout`` seconds.
            OSError, ValueError, EOFError: the queue was closed.
        """
        source = self._source
        if source._closed:
            raise EOFError
        deadline, held = time.monotonic() + timeout, self._held
        try:
            if not held:
                held.extend(filter(None, map(source._rlock.acquire, [True], [timeout])))
            if not held:
                raise queue.Empty
            while (size := _item_size(self._unread)) > len(self._unread):
                if not source._reader.poll(max(deadline - time.monotonic(), 0.0)):
                    raise queue.Empty
                before, part = len(self._unread), map(os.read, [source._reader.fileno()], [_READ_BYTES])
                functools.reduce(operator.iadd, part, self._unread)
                if len(self._unread) == before:
                    raise EOFError
            whole, self._unread = self._unread[:size], self._unread[size:]
            source._sem.release()
        finally:
            if held:
                held[:] = filter(None, map(_release, [source._rlock]))
        return ForkingPickler.loads(memoryview(whole)[_prefix_size(whole) :])


def _prefix_size(item: bytearray) -> int:
    """Return the number of bytes that tell the size of a pickled item, as ``Connection.send_bytes`` does."""
    return 12 if item[:4] == _LONG else 4


def _item_size(item: bytearray) -> int:
    """Return the size of an item with its prefix, or of the prefix as long as that is not whole."""
    prefix = _prefix_size(item)
    if len(item) < prefix:
        return prefix
    return prefix + int.from_bytes(item[4:12] if prefix == 12 else item[:4], "big")
