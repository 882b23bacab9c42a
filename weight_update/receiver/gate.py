"""The moment of the swap: no update lands while a forward pass runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import os
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from weight_update.errors import LifecycleError, LinkClosedError, SyncTimeoutError

__all__ = ["Gate", "Hold", "shared_gate"]

_F = TypeVar("_F", bound=Callable[..., Any])
_LOOK_SECONDS = 0.05
"""Interval at which a waiting update looks for forward passes that ended without leaving."""
_FINISH_SECONDS = 5.0
"""How long an interrupted caller of :meth:`Gate.run` waits for an update that has begun."""

# A call that returns one of these has not done its work yet.
_UNFINISHED = (
    types.CoroutineType,
    types.GeneratorType,
    types.AsyncGeneratorType,
    asyncio.Future,
    concurrent.futures.Future,
)


class _Stay:
    """One stretch of time inside a gate: a forward pass, a ``hold()``, or an update.

    Args:
        gate: which gate.
        ends_with: a frame of the caller or a :class:`Hold`. The stretch does not outlast it, even if an
            interrupt kept the caller from leaving; None if only :meth:`Gate.leave` ends the stretch.

    Attributes:
        frame: ``ends_with``, if it is a frame.
        hold: a weak reference to ``ends_with``, if it is a hold.
        outer: the stretch that was entered before it in this context, and has not ended.
        thread: the thread that entered.
        wake: called when a stretch that had to wait for an update may begin.
    """

    __slots__ = ("frame", "gate", "hold", "outer", "thread", "wake")

    def __init__(self, gate: Gate, ends_with: types.FrameType | Hold | None = None) -> None:
        self.gate = gate
        self.frame = ends_with if isinstance(ends_with, types.FrameType) else None
        self.hold = weakref.ref(ends_with) if isinstance(ends_with, Hold) else None
        self.thread = threading.get_ident()
        self.wake: Callable[[], Any] | None = None
        self.outer: _Stay | None = _current.get()
        while self.outer is not None and not self.outer.lasts:
            self.outer = self.outer.outer

    @property
    def lasts(self) -> bool:
        return self in self.gate._inside

    def within(self, gate: Gate) -> bool:
        """Whether it is nested in another stretch inside ``gate``."""
        outer = self.outer
        while outer is not None:
            if outer.gate is gate and outer.lasts:
                return True
            outer = outer.outer
        return False


# Unlike a dict of threads it tells coroutines apart, and follows them into tasks and threads of asyncio.
_current: contextvars.ContextVar[_Stay | None] = contextvars.ContextVar("weight_update_stay", default=None)
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """Lets forward passes in at any time, and an update when nobody is inside.

    Threads that compute call :meth:`enter` and :meth:`leave` (nested calls are fine). An update goes
    through :meth:`run`. Those who come while an update waits get in after it, so a worker that computes
    without pause does not starve updates; those who waited for one update get in before the next.

    Signal handlers run in the main thread, between any two instructions, and may raise. An update
    therefore never runs in the main thread; and an update that waits asks whether the forward passes it waits
    for still run, as an interrupted one does not say that it ended.
    """

    def __init__(self) -> None:
        self._reset()
        _gates.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come back while it is held
        self._changed = threading.Condition(self._lock)  # updates wait for it
        self._inside: set[_Stay] = set()
        self._entering: list[_Stay] = []
        self._jobs: deque[_Stay] = deque()  # updates, the first of which may be running

    # -- forward passes ----------------------------------------------------------------------------

    def enter(self, frame: types.FrameType | None = None) -> _Stay:
        """Begin a stretch in which no update lands.

        Args:
            frame: a frame of the caller that the stretch does not outlast, if there is one.

        Returns:
            what :meth:`leave` takes.
        """
        stay = _Stay(self, frame)
        self._begin(stay)
        return stay

    def _begin(self, stay: _Stay) -> None:
        try:
            if not self._admit(stay, blocks=True):
                latch = threading.Lock()
                latch.acquire()
                if not self._admit(stay, latch.release, blocks=True):
                    latch.acquire()  # outside of the lock: an exception may come out of it
        except BaseException:
            self.leave(stay)
            raise

    def leave(self, stay: _Stay | None = None) -> None:
        """End it, in any thread; updates that waited land now.

        Args:
            stay: what :meth:`enter` returned; None ends the last stretch that this context began.

        Raises:
            LifecycleError: ``stay`` is None, and this context is not inside.
        """
        if stay is None:
            stay = self._last(lambda _: True)
            if stay is None:
                raise LifecycleError(
                    "leave() without enter() in this thread or coroutine; give leave() what enter() returned"
                )
        if _current.get() is stay:
            _current.set(stay.outer)
        with self._lock:
            stay.frame = None
            self._inside.discard(stay)
            if stay in self._entering:
                self._entering.remove(stay)
            if self._jobs:
                self._changed.notify_all()

    def hold(self) -> Hold:
        """:meth:`enter` and :meth:`leave` as a context manager, for ``with`` and for ``async with``."""
        return Hold(self)

    def _admit(self, stay: _Stay, wake: Callable[[], Any] | None = None, *, blocks: bool) -> bool:
        """Let ``stay`` begin, unless it has to wait for an update; True if it begins.

        Args:
            stay: of the caller.
            wake: called later, when ``stay`` begins after the update; None if the caller will ask again.
            blocks: the caller blocks its thread while it waits. It does not have to wait for an update which
                itself waits for that thread.
        """
        _current.set(stay)
        with self._lock:
            if not self._jobs or stay.within(self) or (blocks and self._has_thread(stay.thread)):
                self._inside.add(stay)
                return True
            if wake is not None:
                stay.wake = wake
                self._entering.append(stay)
            return False

    def _has_thread(self, thread: int) -> bool:
        return any(one.thread == thread for one in list(self._inside))

    def _last(self, wanted: Callable[[_Stay], bool]) -> _Stay | None:
        """Return the stretch inside this gate that this context began last; None if there is none."""
        stay = _current.get()
        while stay is not None and not (stay.gate is self and stay.lasts and wanted(stay)):
            stay = stay.outer
        return stay

    # -- updates -----------------------------------------------------------------------------------

    def run(
        self,
        action: Callable[[], None],
        timeout: float | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> float:
        """Run ``action`` while nobody is inside; its exception is raised here.

        Called by the main thread, it is run by another one, for which the caller waits. There it has the
        caller's grad mode, inference mode, CUDA device and CUDA stream, and a copy of the caller's context
        variables; autocast and the default device (``torch.device()`` as a context manager) do not reach it.
        An exception of a signal handler (KeyboardInterrupt) is raised here when ``action`` has ended, and
        prevents an ``action`` that has not begun.

        Args:
            action: short; forward passes wait while it runs. It is inside the gate itself.
            timeout: seconds to wait for a moment with nobody inside.
            given_up: ends the wait when it is true; asked again after :meth:`look_again`.

        Returns:
            seconds for which it kept forward passes out.

        Raises:
            SyncTimeoutError: somebody stayed inside for ``timeout`` seconds; ``action`` was not run.
            LinkClosedError: the wait was given up; ``action`` was not run.
            LifecycleError: the calling thread is inside itself.
        """
        thread = threading.get_ident()
        interrupted = self._changed._is_owned()  # type: ignore[attr-defined]  # a signal handler of enter()
        with self._lock:
            self._drop_gone()
            if interrupted or self._last(lambda _: True) or self._has_thread(thread):
                raise LifecycleError("an update cannot land inside hold() or a forward pass of this thread")
        if thread != threading.main_thread().ident:
            return self._run(action, timeout, given_up)
        left: list[bool] = []

        def leave() -> None:
            left.append(True)
            self.look_again()

        return _run_apart(lambda: self._run(action, timeout, lambda: bool(left) or given_up()), leave)

    def _run(self, action: Callable[[], None], timeout: float | None, given_up: Callable[[], bool]) -> float:
        job = _Stay(self)
        with self._lock:
            self._jobs.append(job)
            try:
                self._await_turn(job, timeout, given_up)
            except BaseException:
                self._jobs.remove(job)
                if not self._jobs:
                    self._let_in()
                self._changed.notify_all()
                raise
            self._inside.add(job)
        _current.set(job)
        start = time.perf_counter()
        try:
            action()
        finally:
            seconds = time.perf_counter() - start
            _current.set(job.outer)
            with self._lock:
                self._inside.discard(job)
                self._jobs.popleft()
                self._let_in()
                self._changed.notify_all()
        return seconds

    def _await_turn(self, job: _Stay, timeout: float | None, given_up: Callable[[], bool]) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._drop_gone()
            if self._jobs[0] is job and not self._inside:
                return
            if given_up():
                raise LinkClosedError("the receiver was shut down while an update waited")
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise SyncTimeoutError(f"hold() or a forward pass took longer than {timeout} s")
            self._changed.wait(min(left, _LOOK_SECONDS))

    def _let_in(self) -> None:
        """Let those in who waited for the update before."""
        for stay in self._entering:
            self._inside.add(stay)
            assert stay.wake is not None
            stay.wake()
        self._entering.clear()

    def _drop_gone(self) -> None:
        """Forget stretches whose end nobody told: an interrupt ended them, or their whole thread."""
        for stay in list(self._inside):
            if stay.frame is not None:
                gone = _has_ended(stay.frame)
            else:
                gone = stay.hold is not None and stay.hold() is None
            if gone:
                stay.frame = None
                self._inside.discard(stay)

    def look_again(self) -> None:
        """Let waits that were given up end now."""
        with self._lock:
            self._changed.notify_all()

    # -- what holds by itself ----------------------------------------------------------------------

    def guard(self, module: nn.Module) -> Callable[[], None]:
        """Hold the gate during every forward pass of ``module``; returns what undoes it."""
        handles = [
            module.register_forward_pre_hook(_Enter(self), prepend=True),
            module.register_forward_hook(_Leave(self), always_call=True),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def guarded(self, function: _F) -> _F:
        """Return ``function`` so that it holds the gate during each call.

        A coroutine function holds until its await ends; a generator or an asynchronous generator holds from
        its first item until it ends or is closed.
        """
        body: Any = function
        while isinstance(body, functools.partial):
            body = body.func
        body = body.forward if isinstance(body, nn.Module) else body
        kinds = {
            inspect.iscoroutinefunction: self._guarded_coroutine,
            inspect.isgeneratorfunction: self._guarded_generator,
            inspect.isasyncgenfunction: self._guarded_async_generator,
        }
        wrap = next((make for kind, make in kinds.items() if _is_a(kind, body)), self._guarded_call)
        copied = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
        return functools.wraps(function, updated=copied)(wrap(function))  # type: ignore[return-value]

    def _guarded_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            stay = self.enter(sys._getframe())
            try:
                result = function(*args, **kwargs)
            finally:
                self.leave(stay)
            if isinstance(result, _UNFINISHED):
                _refuse(result, f"{_name_of(function)}() given to guarded()")
            return result

        return held

    def _guarded_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def held(*args: Any, **kwargs: Any) -> Any:
            async with self.hold():
                return await function(*args, **kwargs)

        return held

    def _guarded_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with self.hold():
                return (yield from function(*args, **kwargs))

        return held

    def _guarded_async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def held(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            async with self.hold(), contextlib.aclosing(function(*args, **kwargs)) as source:
                step = source.asend(None)
                while True:
                    try:
                        item = await step
                    except StopAsyncIteration:
                        return
                    try:
                        step = source.asend((yield item))
                    except Exception as error:  # noqa: BLE001 - it was thrown in for the source
                        step = source.athrow(error)

        return held


class Hold:
    """Context manager, synchronous or asynchronous, that keeps updates out of a gate; also a decorator.

    It may be left by another thread or coroutine than the one that entered. In coroutines of which more than
    one holds at a time it is to be entered by ``async with``.

    Args:
        gate: which gate.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._stays: list[_Stay] = []

    def __enter__(self) -> None:
        """Wait for an update that runs or waits.

        Raises:
            LifecycleError: another coroutine of this thread holds; it could not go on if this one waited.
        """
        gate = self._gate
        stay = _Stay(gate, self)
        if gate._inside and asyncio._get_running_loop() is not None:
            holding = [
                one for one in list(gate._inside) if one.hold is not None and one.thread == stay.thread
            ]
            if holding and not stay.within(gate):
                raise LifecycleError(
                    "another coroutine of this thread is inside hold(), so this one cannot wait for an "
                    "update; use `async with scheme.hold():` in both"
                )
        self._stays.append(stay)
        gate._begin(stay)

    def __exit__(self, *exc_info: object) -> None:
        """Let updates in."""
        self._gate.leave(self._stays[-1])
        del self._stays[-1]

    async def __aenter__(self) -> None:
        """Wait for an update that runs or waits; other coroutines go on."""
        loop = asyncio.get_running_loop()
        admitted = loop.create_future()
        stay = _Stay(self._gate, self)
        self._stays.append(stay)
        try:
            if not self._gate._admit(stay, functools.partial(_tell, loop, admitted), blocks=False):
                await admitted
        except BaseException:
            self._stays.remove(stay)
            self._gate.leave(stay)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        """Let updates in."""
        self._gate.leave(self._stays[-1])
        del self._stays[-1]

    def __call__(self, function: _F) -> _F:
        """Return ``function`` so that it holds during each call; see :meth:`Gate.guarded`."""
        return self._gate.guarded(function)


def _tell(loop: asyncio.AbstractEventLoop, admitted: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, admitted)


def _settle(admitted: asyncio.Future[None]) -> None:
    if not admitted.done():  # else it was cancelled
        admitted.set_result(None)


def _has_ended(frame: types.FrameType) -> bool:
    """Whether the call that ``frame`` belongs to is over, in whichever thread; empties it then."""
    try:
        frame.clear()
    except RuntimeError:  # it is executing
        return False
    return True


def _run_apart(action: Callable[[], float], leave: Callable[[], None]) -> float:
    """Run ``action`` in a thread of its own, where no signal handler can interrupt it.

    Args:
        action: what to run.
        leave: called when the wait for it is interrupted.
    """
    results: list[float] = []
    errors: list[BaseException] = []
    ended = threading.Lock()  # not Thread.join, which does not survive an interrupt
    ended.acquire()

    as_here = _as_here(action)

    def run() -> None:
        try:
            results.append(as_here())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)
        ended.release()

    thread = threading.Thread(target=run, name="weight_update-switch", daemon=True)
    try:
        with contextlib.suppress(RuntimeError):  # the process ends, or has as many threads as it may have
            thread.start()
        if thread.ident is not None:
            ended.acquire()
    except BaseException:
        leave()
        ended.acquire(timeout=_FINISH_SECONDS)
        raise
    if thread.ident is None:
        return action()
    if errors:
        raise errors[0]
    return results[0]


def _as_here(action: Callable[[], float]) -> Callable[[], float]:
    """Return ``action`` so that it runs in another thread with the state of this one."""
    context = contextvars.copy_context()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    on_stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_stream = torch.cuda.stream(torch.cuda.current_stream())

    def run() -> float:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), on_stream:
            return context.run(action)

    return run


def _is_a(kind: Callable[[Any], bool], function: Any) -> bool:
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004 - an instance's own


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _refuse(result: Any, source: str) -> NoReturn:
    if isinstance(result, types.CoroutineType | types.GeneratorType):
        result.close()
    raise TypeError(
        f"{source} returned a {type(result).__name__}, whose work is not done when the call returns, so an "
        "update could land in the middle; give guarded() the coroutine function or generator function itself"
    )


class _Hook:
    """A hook that a copy of the module does not inherit: the copy is not kept up to date."""

    def __init__(self, gate: Gate | None) -> None:
        self.gate = gate

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.gate is not None:
            _enter(self.gate)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.gate is not None:
            _leave(self.gate)
            if isinstance(output, _UNFINISHED):
                _refuse(output, f"forward() of {type(module).__name__}")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(gate: Gate) -> None:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename in _HOOKS:
        frame = frame.f_back
    gate.enter(frame)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(gate: Gate) -> None:
    stay = gate._last(lambda one: one.frame is not None)
    if stay is not None:  # else the hooks came while the pass ran
        gate.leave(stay)


# Files of the frames between a hook and the forward pass that calls it.
_HOOKS = {_enter.__code__.co_filename, __file__}


def _reset_all() -> None:
    for gate in list(_gates):
        gate._reset()


# A forked child must not inherit a gate that another thread of its parent held just then.
os.register_at_fork(after_in_child=_reset_all)

_shared: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_gate(name: str | None) -> Gate:
    """The gate that all receivers of one group in this process share; a new one for None."""
    if name is None:
        return Gate()
    with _shared_lock:
        gate = _shared.get(name)
        if gate is None:
            gate = _shared[name] = Gate()
        return gate
