"""The gate and calls whose work goes on after they return: coroutines, generators, tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import LifecycleError, SyncTimeoutError
from weight_update.receiver.gate import Gate

WAIT = 10.0


class Update(threading.Thread):
    """An update that waits for its turn in a thread of its own."""

    def __init__(self, gate: Gate, timeout: float = WAIT) -> None:
        super().__init__(daemon=True)
        self.gate, self.timeout, self.landed, self.error = gate, timeout, threading.Event(), ""
        self.start()
        while not gate._updates and self.is_alive():
            pass

    def run(self) -> None:
        try:
            self.gate.run(self.landed.set, self.timeout)
        except SyncTimeoutError as error:
            self.error = str(error)

    def lands(self) -> bool:
        return self.landed.wait(WAIT)


def in_a_thread(function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a thread, which ends in time."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), WAIT)


# -- guarded() -----------------------------------------------------------------------------------------


def test_a_coroutine_function_holds_until_its_await_ends() -> None:
    gate = Gate()

    @gate.guarded
    async def infer(given: int, *, more: int = 0) -> tuple[int, bool]:
        update = Update(gate)
        await asyncio.sleep(0.05)
        return given + more, update.landed.is_set()

    assert inspect.iscoroutinefunction(infer)
    assert asyncio.run(infer(1, more=2)) == (3, False)
    landed: list[int] = []
    gate.run(lambda: landed.append(1), WAIT)
    assert landed == [1]


class Streaming(nn.Module):
    async def forward(self, gate: Gate) -> bool:
        update = Update(gate)
        await asyncio.sleep(0.05)
        return update.landed.is_set()


@pytest.mark.parametrize("wrap", [lambda module: module, functools.partial])
def test_a_module_whose_forward_is_a_coroutine_function(wrap: Callable[[nn.Module], Any]) -> None:
    gate = Gate()
    assert asyncio.run(gate.guarded(wrap(Streaming()))(gate)) is False


def test_a_generator_function_holds_until_it_ends() -> None:
    gate = Gate()

    @gate.guarded
    def tokens() -> Iterator[int]:
        got = yield 1
        yield got

    assert inspect.isgeneratorfunction(tokens)
    stream = tokens()
    gate.run(lambda: None, WAIT)  # it did not begin
    assert next(stream) == 1
    update = Update(gate)
    assert stream.send(2) == 2
    assert not update.landed.is_set()
    assert list(stream) == []
    assert update.lands()


def test_a_generator_that_is_closed_lets_updates_in() -> None:
    gate = Gate()
    stream = gate.guarded(lambda: (yield 1))()
    assert next(stream) == 1
    update = Update(gate)
    assert not update.landed.is_set()
    stream.close()
    assert update.lands()


def test_an_asynchronous_generator_holds_until_it_ends() -> None:
    gate, log = Gate(), []

    @gate.guarded
    async def tokens() -> AsyncIterator[int]:
        try:
            got = yield 1
            await asyncio.sleep(0)
            yield got
        except ValueError as error:
            yield str(error)
        finally:
            log.append("ended")

    async def main() -> None:
        stream = tokens()
        assert await anext(stream) == 1
        update = Update(gate)
        assert await stream.asend(2) == 2
        assert not update.landed.is_set()
        assert await stream.athrow(ValueError("three")) == "three"
        assert [one async for one in stream] == []
        assert log == ["ended"]
        await until(update.landed.is_set)
        stream = tokens()
        await anext(stream)
        update = Update(gate)
        await stream.aclose()
        assert log == ["ended", "ended"]
        await until(update.landed.is_set)

    assert inspect.isasyncgenfunction(tokens)
    asyncio.run(main())


async def later() -> int:
    return 1


def test_a_call_whose_end_cannot_be_known_is_refused() -> None:
    gate, loop = Gate(), asyncio.new_event_loop()

    def infer() -> Awaitable[int]:
        return later()

    for function in (infer, lambda: (x for x in "ab"), loop.create_future):
        with pytest.raises(TypeError, match="guarded"):
            gate.guarded(function)()
    loop.close()
    gate.run(lambda: None, WAIT)


def test_a_guarded_module_whose_forward_is_a_coroutine_function_is_refused() -> None:
    gate, module = Gate(), Streaming()
    gate.guard(module)
    with pytest.raises(TypeError, match=r"Streaming.*guarded"):
        module(gate)
    gate.run(lambda: None, WAIT)


def test_guarded_keeps_what_a_function_says_of_itself() -> None:
    def infer(given: torch.Tensor) -> torch.Tensor:
        """Infer."""
        return given

    infer.tag = 1  # type: ignore[attr-defined]
    held = Gate().guarded(infer)
    assert (held.__name__, held.__doc__, held.tag) == ("infer", "Infer.", 1)  # type: ignore[attr-defined]
    assert inspect.signature(held) == inspect.signature(infer)
    linear = nn.Linear(2, 2)
    held = Gate().guarded(linear)
    assert held.__wrapped__ is linear  # type: ignore[attr-defined]
    assert "_parameters" not in vars(held)


# -- hold() --------------------------------------------------------------------------------------------


def test_coroutines_that_hold_in_turns_do_not_starve_updates() -> None:
    gate = Gate()

    async def rollout(stop: asyncio.Event) -> None:
        while not stop.is_set():
            async with gate.hold():
                await asyncio.sleep(0.003)

    async def main() -> None:
        stop = asyncio.Event()
        rollouts = [asyncio.create_task(rollout(stop)) for _ in range(3)]
        for _ in range(10):
            await asyncio.to_thread(Update(gate).lands)
        stop.set()
        await asyncio.gather(*rollouts)

    asyncio.run(asyncio.wait_for(main(), 3 * WAIT))


def test_a_second_coroutine_that_would_block_the_first_is_refused() -> None:
    gate = Gate()

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            with gate.hold():
                entered.set()
                await leave.wait()

        task = asyncio.create_task(first())
        await entered.wait()
        with pytest.raises(LifecycleError, match="async with"), gate.hold():
            pass
        update = Update(gate)
        assert gate.guarded(lambda: 1)() == 1  # ends before another coroutine of this thread goes on
        assert not update.landed.is_set()
        leave.set()
        await task
        await until(update.landed.is_set)

    asyncio.run(main())


def test_tasks_and_threads_that_begin_inside_are_inside() -> None:
    gate = Gate()
    infer = gate.guarded(later)

    async def main() -> None:
        async with gate.hold():
            update = Update(gate)
            assert await asyncio.gather(infer(), infer()) == [1, 1]
            assert await asyncio.to_thread(gate.guarded(lambda: 1)) == 1
            assert not update.landed.is_set()
        await until(update.landed.is_set)

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_coroutine_that_is_cancelled_while_it_waits() -> None:
    gate = Gate()
    section = gate.enter()
    update = Update(gate)

    async def main() -> None:
        waiting = asyncio.create_task(gate.guarded(later)())
        await until(lambda: gate._waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.leave(section)
        await until(update.landed.is_set)

    in_a_thread(asyncio.run, main())
    assert not gate._inside


def test_held_in_one_thread_and_left_in_another() -> None:
    gate = Gate()
    hold = gate.hold()
    hold.__enter__()
    thread = threading.Thread(target=hold.__exit__)
    update = Update(gate)
    assert not update.landed.is_set()
    thread.start()
    assert update.lands()
    thread.join(WAIT)
    gate.run(lambda: None, WAIT)


def test_leaving_what_another_thread_entered_needs_what_enter_returned() -> None:
    gate = Gate()
    section = gate.enter()
    caught: list[str] = []

    def leave() -> None:
        try:
            gate.leave()
        except LifecycleError as error:
            caught.append(str(error))
        gate.leave(section)

    in_a_thread(leave)
    assert "enter() returned" in caught[0]
    gate.run(lambda: None, WAIT)


def test_hold_as_a_decorator() -> None:
    gate = Gate()

    @gate.hold()
    async def infer() -> bool:
        update = Update(gate)
        await asyncio.sleep(0.02)
        return update.landed.is_set()

    assert asyncio.run(infer()) is False


def test_a_hold_that_nobody_can_leave_any_more_ends() -> None:
    gate = Gate()
    gate.hold().__enter__()
    gate.run(lambda: None, WAIT)


def test_an_update_holds_and_computes_itself() -> None:
    gate, module = Gate(), nn.Linear(2, 2)
    gate.guard(module)
    seen = []

    def action() -> None:
        with gate.hold():
            seen.append(module(torch.ones(1, 2)).shape)
        with pytest.raises(LifecycleError):
            gate.run(lambda: None)

    gate.run(action, WAIT)
    in_a_thread(gate.run, action, WAIT)
    assert seen == [(1, 2), (1, 2)]


def test_a_thread_that_died_in_a_forward_pass() -> None:
    gate = Gate()

    class Dying(nn.Module):
        def forward(self) -> None:
            raise SystemExit

    module = Dying()
    gate.guard(module)

    def die() -> None:
        with contextlib.suppress(SystemExit):
            module()

    in_a_thread(die)
    gate.run(lambda: None, WAIT)


def test_a_compiled_forward_pass_that_raises() -> None:
    gate = Gate()

    class Failing(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            given = given + 1
            if given.sum() > 0:
                raise ValueError("no")
            return given

    module = Failing()
    gate.guard(module)
    compiled = torch.compile(module, backend="eager")
    compiled(-torch.ones(3) * 2)
    with pytest.raises(ValueError, match="no"):
        compiled(torch.ones(3))
    gate.run(lambda: None, WAIT)


def test_a_compiled_forward_pass_keeps_updates_out() -> None:
    gate, updates = Gate(), []

    @torch.compiler.disable
    def look() -> None:
        updates.append(Update(gate))
        updates[-1].landed.wait(0.12)  # longer than an update waits before it looks again
        updates.append(updates.pop().landed.is_set())

    class Model(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            given = given * 2
            look()
            return given + 1

    module = Model()
    gate.guard(module)
    compiled = torch.compile(module, backend="eager")
    for _ in range(2):
        compiled(torch.ones(3))
    assert updates == [False, False]
    gate.run(lambda: None, WAIT)
