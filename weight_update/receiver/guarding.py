"""Holding a gate during calls: by hooks on a module, or by a wrapper around a function."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

_F = TypeVar("_F", bound=Callable[..., Any])

# A call that returns one of these has not done its work yet.
_UNFINISHED = (
    types.CoroutineType,
    types.GeneratorType,
    types.AsyncGeneratorType,
    asyncio.Future,
    concurrent.futures.Future,
)


class CallGuard:
    """The part of a gate that holds it during calls; see :class:`~weight_update.Gate`."""

    enter: Callable[..., Any]
    leave: Callable[..., None]
    hold: Callable[[], Any]
    _leave_call: Callable[[], None]

    def guard(self, module: nn.Module) -> Callable[[], None]:
        """Hold the gate during every forward pass of ``module``; return a function that ends this."""
        handles = [
            module.register_forward_pre_hook(_Hook(self, _enter), prepend=True),
            module.register_forward_hook(_Hook(self, _leave), always_call=True),
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def guarded(self, function: _F) -> _F:
        """Return ``function``, changed to hold the gate during each call.

        A coroutine function holds until its await ends; a generator or an asynchronous generator holds from
        its first item until it ends or is closed.
        """
        if not callable(function):
            raise TypeError(f"guarded() takes a function or a module, not {function!r:.60}")
        body: Any = function
        while isinstance(body, functools.partial):
            body = body.func
        body = body.forward if isinstance(body, nn.Module) else body
        kinds = {
            inspect.iscoroutinefunction: _guarded_coroutine,
            inspect.isgeneratorfunction: _guarded_generator,
            inspect.isasyncgenfunction: _guarded_async_generator,
        }
        own: Any = getattr(body, "__call__", None)  # noqa: B004 - an instance's own
        wrap = next((make for kind, make in kinds.items() if kind(body) or kind(own)), _guarded_call)
        copied = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
        return functools.wraps(function, updated=copied)(wrap(self, function))  # type: ignore[return-value]


# -- functions -----------------------------------------------------------------------------------------


def _guarded_call(gate: CallGuard, function: Callable[..., Any]) -> Callable[..., Any]:
    def held(*args: Any, **kwargs: Any) -> Any:
        section = gate.enter(sys._getframe())
        try:
            result = function(*args, **kwargs)
        finally:
            gate.leave(section)
        if isinstance(result, _UNFINISHED):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            _refuse(result, f"{name}() given to guarded()")
        return result

    return held


def _guarded_coroutine(gate: CallGuard, function: Callable[..., Any]) -> Callable[..., Any]:
    async def held(*args: Any, **kwargs: Any) -> Any:
        async with gate.hold():
            return await function(*args, **kwargs)

    return held


def _guarded_generator(gate: CallGuard, function: Callable[..., Any]) -> Callable[..., Any]:
    def held(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with gate.hold():
            return (yield from function(*args, **kwargs))

    return held


def _guarded_async_generator(gate: CallGuard, function: Callable[..., Any]) -> Callable[..., Any]:
    async def held(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        async with gate.hold(), contextlib.aclosing(function(*args, **kwargs)) as source:
            step = source.asend(None)
            while True:
                try:
                    item = await step
                except StopAsyncIteration:
                    return
                try:
                    step = source.asend((yield item))
                except Exception as error:  # noqa: BLE001 - the caller threw it in for the source
                    step = source.athrow(error)

    return held


def _refuse(result: Any, source: str) -> NoReturn:
    if isinstance(result, types.CoroutineType | types.GeneratorType):
        result.close()
    raise TypeError(
        f"{source} returned an object of type {type(result).__name__}, whose work is not done when the call "
        "returns, so an update could land in the middle; give guarded() the coroutine function or generator "
        "function itself"
    )


# -- modules -------------------------------------------------------------------------------------------


class _Hook:
    """A hook that a copy of the module does not inherit, because updates do not reach the copy."""

    def __init__(self, gate: CallGuard | None, act: Callable[[CallGuard], None]) -> None:
        self.gate, self.act = gate, act

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None, self.act)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self.act)

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.gate is not None:
            self.act(self.gate)
            if isinstance(output, _UNFINISHED):
                _refuse(output, f"forward() of {type(module).__name__}")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(gate: CallGuard) -> None:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename in _HOOK_FILES:
        frame = frame.f_back
    gate.enter(frame)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(gate: CallGuard) -> None:
    gate._leave_call()


# Files of the frames between a hook and the forward pass that calls it.
_HOOK_FILES = {_enter.__code__.co_filename, __file__}
