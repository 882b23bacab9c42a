"""The gate: no update lands while a forward pass runs."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from weight_update.errors import LifecycleError, LinkClosedError, SyncTimeoutError
from weight_update.receiver.guarding import CallGuard
from weight_update.receiver.uninterrupted import run_uninterrupted

_F = TypeVar("_F", bound=Callable[..., Any])
_LOOK_SECONDS = 0.05
"""Interval at which a waiting update looks for forward passes that ended without leaving."""

_APPLYING_SECONDS = 0.001
"""Interval at which a signal handler looks for the end of the update that it waits for."""


class _Section:
    """A critical section of a gate: a forward pass, a ``hold()``, or an update.

    It does not outlast its ``frame`` or ``hold``, even if an interrupt kept the caller from leaving. Without
    them, only :meth:`Gate.leave` ends it.
    """

    __slots__ = ("frame", "gate", "hold", "outer", "thread", "wake")

    def __init__(self, gate: Gate, frame: types.FrameType | None = None, hold: Hold | None = None) -> None:
        self.gate: Gate = gate
        self.frame: types.FrameType | None = frame  # of the caller, if it is a forward pass
        self.hold: weakref.ref[Hold] | None = None if hold is None else weakref.ref(hold)
        self.thread: int = threading.get_ident()
        self.wake: Callable[[], Any] = lambda: None  # called if it had to wait for an update, and may begin
        # Section that this context entered before and that has not ended.
        self.outer: _Section | None = _innermost(_current.get())

    def within(self, gate: Gate) -> bool:
        """Return whether the section is nested in another section of ``gate``."""
        return _innermost(self.outer, lambda one: one.gate is gate) is not None


def _innermost(section: _Section | None, wanted: Callable[..., bool] = lambda _: True) -> _Section | None:
    """Return the innermost of ``section`` and those around it that is active and wanted; None without one."""
    while section is not None and not (section in section.gate._inside and wanted(section)):
        section = section.outer
    return section


# Unlike a dict of threads, a context variable tells coroutines apart, and follows them into tasks and
# threads of asyncio.
_current: contextvars.ContextVar[_Section | None] = contextvars.ContextVar(
    "weight_update_section", default=None
)
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate(CallGuard):
    """Lock that admits forward passes at any time, and an update only when no forward pass runs.

    Threads that compute call :meth:`enter` and :meth:`leave`; nested calls are fine. An update goes through
    :meth:`run`. A forward pass that begins while an update waits is admitted after it, so a worker that
    computes without pause does not starve updates. A forward pass that waited for one update is admitted
    before the next. While an update waits for a hold, forward passes begin at once, because the hold may wait
    for them.

    Signal handlers run in the main thread, between any two instructions, and may raise. An update
    therefore never runs in the main thread. An update that waits also checks whether the forward passes
    it waits for still run, because an interrupted one does not report its end.
    """

    def __init__(self) -> None:
        self._updates: deque[_Section] = deque()  # the first one may be running
        self._inside: set[_Section] = set()
        self._reset()
        _gates.add(self)

    def _reset(self) -> None:
        self._is_torn = bool(self._updates) and self._updates[0] in self._inside  # forked during an update
        self._lock = threading.RLock()  # a signal handler may enter again while it is held
        self._changed = threading.Condition(self._lock)  # updates wait for it
        self._inside = set()
        self._waiting: list[_Section] = []  # sections that begin after the update
        self._is_applying = False
        self._updates = deque()

    # -- forward passes ----------------------------------------------------------------------------

    def enter(self, frame: types.FrameType | None = None) -> _Section:
        """Begin a section in which no update is applied, and return it for :meth:`leave`.

        The section does not outlast ``frame``, the frame of the caller, if there is one.
        """
        section = _Section(self, frame)
        self._begin(section)
        return section

    def _begin(self, section: _Section) -> None:
        try:
            latch = threading.Lock()
            latch.acquire()
            if not self._admit(section, latch.release, blocks=True):
                latch.acquire()  # outside of the gate's lock: an exception may come out of it
        except BaseException:
            self.leave(section)
            raise

    def leave(self, section: _Section | None = None) -> None:
        """End a section, in any thread; an update that waited is applied now.

        Args:
            section: section that :meth:`enter` returned; None ends the last one that this context began.

        Raises:
            LifecycleError: ``section`` is None, and this context is in no section.
        """
        if section is None:
            section = _innermost(_current.get(), lambda one: one.gate is self)
            if section is None:
                raise LifecycleError(
                    "leave() without enter() in this thread or coroutine; give leave() what enter() returned"
                )
        if _current.get() is section:
            _current.set(section.outer)
        with self._lock:
            section.frame = None
            self._inside.discard(section)
            if section in self._waiting:
                self._waiting.remove(section)
            if self._updates:
                self._changed.notify_all()

    def _leave_call(self) -> None:
        """End the last section that this context began for a call, if there is one.

        There is none after a forward pass that was running when the hooks were registered.
        """
        section = _innermost(_current.get(), lambda one: one.gate is self and one.frame is not None)
        if section is not None:
            self.leave(section)

    def hold(self) -> Hold:
        """Return a context manager, for ``with`` and ``async with``, that enters and leaves."""
        return Hold(self)

    def _admit(self, section: _Section, wake: Callable[[], Any], *, blocks: bool) -> bool:
        """Let a section begin unless it has to wait for an update; return whether it began.

        Otherwise ``wake`` is called when it begins, after the update. A caller that ``blocks`` its thread
        does not wait for an update that itself waits for it.

        Raises:
            LifecycleError: this process was forked in the middle of an update.
        """
        if self._is_torn:
            raise LifecycleError(
                "this process was forked while an update was being applied, so its weights are a mixture of "
                "two versions; fork inside hold(), or connect a receiver here"
            )
        _current.set(section)
        interrupted = self._changed._is_owned()  # type: ignore[attr-defined]  # by a signal handler
        with self._lock:
            while interrupted and self._is_applying:  # the update needs the lock afterwards, not before
                time.sleep(_APPLYING_SECONDS)
            if (
                not self._updates
                or interrupted
                or section.within(self)
                or (blocks and self._has_thread(section.thread))
                or (section.hold is None and any(one.hold is not None for one in self._inside))
            ):
                self._inside.add(section)
                return True
            section.wake = wake
            self._waiting.append(section)
            return False

    def _has_thread(self, thread: int) -> bool:
        return any(section.thread == thread for section in list(self._inside))

    # -- updates -----------------------------------------------------------------------------------

    def run(
        self,
        action: Callable[[], None],
        timeout: float | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> float:
        """Run ``action`` while nobody is inside; raise its exception here.

        If the main thread calls, another thread runs the action while the caller waits. The action has the
        caller's grad mode, inference mode, CUDA device and CUDA stream, and a copy of its context
        variables; autocast and the default device (``torch.device()`` as a context manager) do not reach it.
        An exception of a signal handler (KeyboardInterrupt) is raised here when the action has ended, and
        prevents an action that has not begun.

        Args:
            action: function that takes little time, because forward passes wait for it. It is inside the
                gate itself.
            timeout: seconds to wait for a moment with nobody inside.
            given_up: ends the wait when it returns True; it is called again after :meth:`look_again`.

        Returns:
            seconds for which the action kept forward passes out.

        Raises:
            SyncTimeoutError: somebody stayed inside for ``timeout`` seconds; ``action`` was not run.
            LinkClosedError: the wait was given up; ``action`` was not run.
            LifecycleError: the calling thread is inside.
        """
        self.require_outside()
        if threading.current_thread() is not threading.main_thread():
            return self._run(action, timeout, given_up)
        left: list[bool] = []

        def leave() -> None:
            left.append(True)
            self.look_again()

        return run_uninterrupted(lambda: self._run(action, timeout, lambda: bool(left) or given_up()), leave)

    def require_outside(self) -> None:
        """Raise LifecycleError if the calling thread is inside, so that it cannot wait for an update."""
        interrupted = self._changed._is_owned()  # type: ignore[attr-defined]  # a signal handler of enter()
        with self._lock:
            self._drop_ended()
            section = _innermost(_current.get(), lambda one: one.gate is self)
            if interrupted or section or self._has_thread(threading.get_ident()):
                raise LifecycleError(
                    "an update cannot be applied inside hold() or a forward pass of this thread"
                )

    def _run(self, action: Callable[[], None], timeout: float | None, given_up: Callable[[], bool]) -> float:
        update = _Section(self)
        with self._lock:
            self._updates.append(update)
            try:
                self._await_turn(update, timeout, given_up)
            except BaseException:
                self._updates.remove(update)
                if not self._updates:
                    self._admit_waiting()
                self._changed.notify_all()
                raise
            self._inside.add(update)
            self._is_applying = True
        _current.set(update)
        start = time.perf_counter()
        try:
            action()
            self._is_torn = False
        finally:
            self._is_applying = False
            seconds = time.perf_counter() - start
            _current.set(update.outer)
            with self._lock:
                self._inside.discard(update)
                self._updates.popleft()
                self._admit_waiting()
                if self._updates:
                    self._changed.notify_all()
        return seconds

    def _await_turn(self, update: _Section, timeout: float | None, given_up: Callable[[], bool]) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._drop_ended()
            if self._updates[0] is update and not self._inside:
                return
            if given_up():
                raise LinkClosedError("the receiver was shut down while an update waited")
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                running = self._updates[0] in self._inside
                what = "another update" if running else "hold() or a forward pass"
                raise SyncTimeoutError(f"{what} took longer than {timeout:g} s")
            self._changed.wait(min(left, _LOOK_SECONDS))

    def _admit_waiting(self) -> None:
        """Begin the sections that waited for the update before."""
        for section in self._waiting:
            self._inside.add(section)
            section.wake()
        self._waiting.clear()

    def _drop_ended(self) -> None:
        """Drop sections that ended without leaving, by an interrupt or with their thread."""
        for section in list(self._inside):
            if section.frame is not None:
                ended = _has_ended(section.frame)
            else:
                ended = section.hold is not None and section.hold() is None
            if ended:
                section.frame = None
                self._inside.discard(section)

    def look_again(self) -> None:
        """Make updates that wait call their ``given_up`` now."""
        with self._lock:
            self._changed.notify_all()


class Hold:
    """Context manager, synchronous or asynchronous, that keeps updates out of a gate; also a decorator.

    Another thread or coroutine than the one that entered may leave it. Coroutines of which more than one
    holds at a time must enter it by ``async with``.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._sections: list[_Section] = []

    def __enter__(self) -> None:
        """Wait for an update that runs or waits.

        Raises:
            LifecycleError: another coroutine of this thread holds; it could not go on if this one waited.
        """
        gate = self._gate
        section = _Section(gate, hold=self)
        if gate._inside and asyncio._get_running_loop() is not None:
            holding = any(one.hold is not None and one.thread == section.thread for one in list(gate._inside))
            if holding and not section.within(gate):
                raise LifecycleError(
                    "another coroutine of this thread is inside hold(), so this one cannot wait for an "
                    "update; use `async with scheme.hold():` in both"
                )
        self._sections.append(section)
        gate._begin(section)

    def __exit__(self, *exc_info: object) -> None:
        """Let updates land."""
        mine = _innermost(_current.get(), lambda one: one in self._sections)
        if mine is None:  # it began in another thread or coroutine
            self._gate.leave(self._sections.pop())
        else:  # others may use this object at the same time
            self._gate.leave(mine)
            self._sections.remove(mine)

    async def __aenter__(self) -> None:
        """Wait for an update that runs or waits; other coroutines go on."""
        loop = asyncio.get_running_loop()
        admitted = loop.create_future()
        section = _Section(self._gate, hold=self)
        self._sections.append(section)
        try:
            if not self._gate._admit(section, functools.partial(_notify, loop, admitted), blocks=False):
                await admitted
        except BaseException:
            self._sections.remove(section)
            self._gate.leave(section)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        """Let updates land."""
        self.__exit__()

    def __call__(self, function: _F) -> _F:
        """Return ``function`` so that it holds during each call; see :meth:`Gate.guarded`."""
        return self._gate.guarded(function)


def _notify(loop: asyncio.AbstractEventLoop, admitted: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, admitted)


def _settle(admitted: asyncio.Future[None]) -> None:
    if not admitted.done():  # else it was cancelled
        admitted.set_result(None)


def _has_ended(frame: types.FrameType) -> bool:
    """Return whether the call of ``frame`` is over, in whichever thread; clear the frame then."""
    try:
        frame.clear()
    except RuntimeError:  # it is executing
        return False
    return True


def _reset_all() -> None:
    for gate in list(_gates):
        gate._reset()


# A forked child must not inherit a gate that another thread of its parent held just then.
os.register_at_fork(after_in_child=_reset_all)

_shared: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_gate(name: str | None) -> Gate:
    """Return the gate that all receivers of one group in this process share; a new one for None."""
    if name is None:
        return Gate()
    with _shared_lock:
        return _shared.setdefault(name, Gate())
