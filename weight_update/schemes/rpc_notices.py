"""Announcements of senders to the workers of an RPC world."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid

from torch.distributed import rpc

from weight_update.errors import LinkClosedError, SyncTimeoutError
from weight_update.schemes.remote import Whereabouts
from weight_update.text import brief, format_seconds

_LEAST_SECONDS = 0.001  # RPC waits for ever with 0

_lock = threading.Lock()
_posted: dict[str, Whereabouts] = {}
_askers: dict[str, list[tuple[str, str]]] = {}
"""Workers that asked for a missing announcement: name of the worker and of its question."""
_questions: dict[str, queue.SimpleQueue[Whereabouts | None]] = {}


def own_name() -> str | None:
    """Return the name of this process in its RPC world; None outside of one."""
    try:
        return str(rpc.get_worker_info().name)
    except RuntimeError:
        return None


def post(key: str, where: Whereabouts) -> None:
    """Announce ``where`` under ``key`` to all workers that asked or will ask; does not wait."""
    with _lock:
        _posted[key] = where
        askers = _askers.pop(key, [])
    for name, question in askers:
        with contextlib.suppress(RuntimeError):  # a worker that has left needs no answer
            rpc.rpc_async(name, _take_answer, args=(question, where))


def withdraw(key: str, where: Whereabouts) -> None:
    """Withdraw an announcement, unless another one has replaced it."""
    with _lock:
        if _posted.get(key) == where:
            del _posted[key]


class Question:
    """A request for the announcement of an RPC worker. No thread of RPC waits, on either side."""

    def __init__(self, key: str) -> None:
        self._key, self._name = key, uuid.uuid4().hex
        self._answers: queue.SimpleQueue[Whereabouts | None] = queue.SimpleQueue()

    def ask(self, sender: str | int, timeout: float) -> Whereabouts:
        """Wait for the answer of the worker with the name or rank ``sender``.

        Raises:
            LinkClosedError: that worker cannot be asked, or :meth:`close` was called.
            SyncTimeoutError: that worker announced nothing in time.
        """
        _questions[self._name] = self._answers
        deadline = time.monotonic() + timeout
        try:
            limit = max(timeout, _LEAST_SECONDS)
            where = rpc.rpc_sync(sender, _answer, args=(self._key, own_name(), self._name), timeout=limit)
            found = where or self._answers.get(timeout=max(deadline - time.monotonic(), 0.0))
        except RuntimeError as error:
            raise LinkClosedError(f"RPC worker {sender!r} cannot be asked ({brief(error)})") from None
        except queue.Empty:
            raise SyncTimeoutError(
                f"RPC worker {sender!r} announced no sender of {self._key!r} within "
                f"{format_seconds(timeout)}; if the sender is another worker, give its name: sender=..."
            ) from None
        finally:
            _questions.pop(self._name, None)
        if found is None:
            raise LinkClosedError("this end was closed")
        return found

    def close(self) -> None:
        """Make :meth:`ask` raise."""
        self._answers.put(None)


def _answer(key: str, asker: str, question: str) -> Whereabouts | None:
    """Return the announcement, in the sender; without one return None and remember the asker."""
    with _lock:
        if key not in _posted:
            _askers.setdefault(key, []).append((asker, question))
        return _posted.get(key)


def _take_answer(question: str, where: Whereabouts) -> None:
    """Take the answer to a question, in the worker that asked."""
    waiting = _questions.get(question)
    if waiting is not None:
        waiting.put(where)
