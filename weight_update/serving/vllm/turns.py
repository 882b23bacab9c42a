"""Turns of two threads: the receiver's has weights, and vLLM's runs the model that they are loaded into."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from weight_update.errors import LifecycleError, SyncTimeoutError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOK_SECONDS = 0.5
"""Interval at which a wait looks whether the sender still lives."""
_PATIENCE_SECONDS = 30.0
"""Seconds after which an update that vLLM did not ask for is logged."""
_CLOSED = "vLLM shut its weight transfer down"


# Not the thread: if the main thread connects, the receiver switches weights in a thread of its own, in the
# context of the main thread, which waits.
_inline: contextvars.ContextVar[Turns | None] = contextvars.ContextVar(
    "weight_update_vllm_inline", default=None
)


class Turns:
    """Loads updates in the thread that runs the model, when that thread asks for them.

    Workers of one model must change versions between the same two steps. Therefore an update waits in
    :meth:`admit` until vLLM's call of ``update_weights``, which reaches all workers between two steps.

    Attributes:
        version: version that was loaded last; None before the first, and after one that failed.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._changed = threading.Condition()
        self._closed = False
        # set by the thread that serves
        self._owner: int | None = None  # that thread, during a call
        self._target: int | None = None  # the version it takes; None is the next one
        # set by the receiver's thread
        self._work: tuple[Callable[[], Any], Future[Any]] | None = None
        self._error: BaseException | None = None
        self._reached = False
        self._waiting: int | None = None  # the version in admit()

    @property
    def is_inline(self) -> bool:
        """Whether the caller is inside :meth:`inline`; a switch of weights is part of its caller."""
        return _inline.get() is self

    # -- in the receiver's thread ------------------------------------------------------------------

    def admit(self, version: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait until vLLM asks for ``version``; ``check`` may raise an error that ends the wait.

        Raises:
            LifecycleError: :meth:`close` was called.
        """
        logged, since = False, time.monotonic()
        with self._changed:
            self._waiting = version
            self._changed.notify_all()
            try:
                while not self._takes(version):
                    if self._closed:
                        raise LifecycleError(_CLOSED)
                    check()
                    if not logged and time.monotonic() - since > _PATIENCE_SECONDS:
                        logged = True
                        _log.warning(
                            "version %d waits for vLLM's update_weights(); the trainer must call it, or give "
                            "init_info(control=<URL of the server>)",
                            version,
                        )
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self._waiting = None

    def _takes(self, version: int) -> bool:
        serves = self._owner is not None and (self._target is None or version <= self._target)
        return not self._closed and (serves or self.is_inline)

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``, called in the thread that serves.

        Raises:
            LifecycleError: no thread serves; the call of ``update_weights`` ended before its update did.
        """
        if self.is_inline or self._owner == threading.get_ident():
            return work()
        answer: Future[_T] = Future()
        with self._changed:
            self._work = work, answer
            self._changed.notify_all()
            self._changed.wait_for(lambda: answer.done() or self._owner is None)
            if not answer.done():
                self._work = None
                raise LifecycleError("vLLM's update_weights() ended before its update was loaded")
        return answer.result()

    def settle(self, version: int | None, error: BaseException | None = None) -> None:
        """Note that ``version`` was loaded; with None, that loading failed with ``error``."""
        with self._changed:
            self.version, self._error = version, error
            self._reached = True
            self._changed.notify_all()

    # -- in the thread that runs the model ---------------------------------------------------------

    @contextlib.contextmanager
    def inline(self) -> Iterator[None]:
        """Return a context manager in which this thread is the receiver's, too, and takes any version."""
        token = _inline.set(self)
        try:
            yield
        finally:
            _inline.reset(token)

    def serve(self, target: int | None, timeout: float, check: Callable[[], None]) -> int:
        """Load updates until ``target`` is in force, or the next one if it is None; return its number.

        Args:
            target: number of the version.
            timeout: seconds to wait for the version to arrive and load.
            check: called now and then; it raises an error if no update can come.

        Raises:
            LifecycleError: a newer version has come or is in force, or :meth:`close` was called.
            SyncTimeoutError: the version did not come in time.
            Exception: loading failed.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._owner, self._target = threading.get_ident(), target
            self._error, self._reached = None, False
            self._changed.notify_all()
            try:
                while not self._is_done(target):
                    if self._work is not None:
                        self._call()
                        continue
                    check()
                    if time.monotonic() > deadline:
                        raise SyncTimeoutError(_late(target, timeout))
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self._owner = None
                self._changed.notify_all()
            assert self.version is not None
            return self.version

    def _is_done(self, target: int | None) -> bool:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise LifecycleError(_CLOSED)
        if target is None:
            return self._reached and self.version is not None
        if self.version == target:
            return True
        ahead = self._waiting if self._waiting is not None else self.version
        if ahead is not None and ahead > target:
            raise LifecycleError(
                f"vLLM was asked for version {target}, but this worker has version {ahead}; call "
                f"update_weights with version {ahead}, and send nothing before it returns"
            )
        return False

    def _call(self) -> None:
        assert self._work is not None
        (work, answer), self._work = self._work, None
        self._changed.release()  # close() does not wait for the work
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the receiver's thread raises it
            answer.set_exception(error)
        finally:
            self._changed.acquire()
        self._changed.notify_all()

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _late(target: int | None, timeout: float) -> str:
    what = "no update arrived" if target is None else f"version {target} did not arrive"
    return f"{what} within {timeout:g} s; has the trainer called send()? (or raise timeout=)"
