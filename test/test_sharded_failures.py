"""Sharded trainers: after a call that failed, the ranks are in step for the next one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_parts import (
    Body,
    ColumnParallel,
    FailingConverter,
    Ranks,
    free_port,
    make_columns,
    running,
    set_failing,
    whole_kinds,
)
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from weight_update import (
    BucketEncoding,
    ConversionError,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    UnsupportedSourceError,
)
from weight_update.convert import gather_tensor_parallel
from weight_update.sharded import gathering, links
from weight_update.testing.processes import freeze

ROWS = {"first": 2, "second": 2, "third": 2, "fourth": 1 << 14}
"""Number of rows of each weight; the last is much larger than the buffers of a socket."""
COLUMNS = 1 << 9


class RefillingConverter:
    """A converter that gives the same memory for all weights in the ranks in which ``refills`` is set."""

    refills = False

    def __call__(self, items: Iterator[Any]) -> Iterator[Any]:
        memory = torch.empty(max(ROWS.values()) * COLUMNS)
        for name, tensor in items:
            if RefillingConverter.refills:
                yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
            else:
                yield name, tensor


def set_refilling(body: Body, refills: bool) -> None:
    RefillingConverter.refills = refills


def make_large(body: Body, size: int) -> None:
    members = list(range(size))
    mesh = DeviceMesh.from_group(body.groups[tuple(members)], "cpu", mesh=members)
    body.net = {
        name: distribute_tensor(torch.arange(rows * COLUMNS).view(rows, COLUMNS).float(), mesh, [Shard(0)])
        for name, rows in ROWS.items()
    }


def twice(items: Iterator[Any]) -> Iterator[Any]:
    """Gather each weight twice, under the same name."""
    for item in items:
        yield item
        yield item


cat, empty = torch.cat, torch.empty
WHOLE_BYTES = 48
"""Size of a weight of ``make_columns`` of two ranks."""


def set_room(body: Body, without: int | None) -> None:
    """Have a rank lack memory for one whole weight; None ends this."""

    def cat_without(*args: Any, out: Any = None) -> torch.Tensor:
        if out is None:
            raise MemoryError("no room")
        return cat(*args, out=out)

    def empty_without(size: Any, **options: Any) -> torch.Tensor:
        if size == WHOLE_BYTES:
            raise MemoryError("no room")
        return empty(size, **options)

    if dist.get_rank() == without:
        torch.cat, torch.empty = cat_without, empty_without
    else:
        torch.cat, torch.empty = cat, empty


flat = gathering._flat


def set_memory(body: Body, is_short: bool) -> None:
    """Have the second rank lack memory for large parts."""

    def short(shapes: Any) -> Any:
        memory, views = flat(shapes)
        if memory.numel() > 1 << 20:
            raise MemoryError("short of memory")
        return memory, views

    if dist.get_rank() == 1:
        gathering._flat = short if is_short else flat


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        ranks.all("group", [0, 1])
        ranks.all("group", [0, 1, 2])
        yield ranks


MODEL = {name: torch.zeros(rows, COLUMNS) for name, rows in ROWS.items()}
IN_FLIGHT = {"encoding": BucketEncoding(bucket_size=4 << 20), "max_in_flight": 2}
IN_BATCHES = {"shards": {"batch_bytes": 8 * COLUMNS}}


@pytest.mark.parametrize("options", [IN_FLIGHT, {}], ids=["in flight", "whole"])
def test_a_converter_that_fails_while_a_batch_is_on_its_way(three: Ranks, options: dict[str, Any]) -> None:
    three.all("run", make_large, 2, of=2)
    options = {**options, **IN_BATCHES, "convert": FailingConverter()}
    with running(three, "shared_mem", size=2, workers=1, model=MODEL, **options) as (worker,):
        three.all("run", set_failing, True, of=2)
        leader, follower = three.each("call", "send", of=2)
        assert isinstance(leader, ValueError)
        assert str(follower) == "rank 0 of the trainer failed: ValueError: no such format"
        three.all("run", set_failing, False, of=2)
        three.all("call", "send", of=2)
        assert worker.call("fingerprint") == three.all("run", whole_kinds, of=2)[0]


def test_a_converter_that_refills_its_memory_leaves_all_ranks_in_step(three: Ranks) -> None:
    three.all("run", make_large, 2, of=2)
    options = {**IN_BATCHES, "convert": RefillingConverter()}
    with running(three, "shared_mem", size=2, workers=1, model=MODEL, **options) as (worker,):
        three.all("run", set_refilling, True, of=2)
        errors = three.each("call", "send", of=2)
        assert [type(error) for error in errors] == [ConversionError] * 2, errors
        three.all("run", set_refilling, False, of=2)
        three.all("call", "send", of=2)
        assert worker.call("fingerprint") == three.all("run", whole_kinds, of=2)[0]


@pytest.mark.parametrize(
    ("gather", "message"),
    [
        (gather_tensor_parallel, "gather gave an object of type partial, .*has to be called first"),
        (twice, "gather gives 'w0' twice"),
    ],
)
def test_a_gather_function_that_gives_no_pairs_or_a_name_twice(
    three: Ranks, gather: Any, message: str
) -> None:
    three.all("run", make_columns, 2, of=2)
    errors = three.each("init", "shared_mem", 2, 1, 0, {"shards": {"gather": gather}}, of=2)
    three.each("call", "shutdown", of=2)
    assert [type(error) for error in errors] == [UnsupportedSourceError] * 2, errors
    assert all(re.search(message, str(error)) for error in errors), errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_a_whole_weight(three: Ranks, rank: int) -> None:
    """It gathers by itself, and meets the other ranks in each weight."""
    three.all("run", make_columns, 2, of=2)
    model = {f"w{i}": torch.zeros(2, 6) for i in range(4)}
    with running(
        three, "shared_mem", size=2, workers=1, model=model, shards={"gather": ColumnParallel([0, 1])}
    ):
        three.all("run", set_room, rank, of=2)
        began = time.monotonic()
        errors = three.each("call", "send", of=2)
        assert time.monotonic() - began < 10.0
        assert type(errors[rank]) is MemoryError, errors
        assert f"rank {rank}" in str(errors[1 - rank])
        assert "no room" in str(errors[1 - rank])
        three.all("run", set_room, None, of=2)
        three.all("call", "send", of=2)


def test_a_rank_that_fails_while_another_gives_its_parts(three: Ranks) -> None:
    three.all("run", make_large, 3)
    with running(three, "shared_mem", size=3, workers=1, model=MODEL, **IN_BATCHES) as (worker,):
        three.all("run", set_memory, True)
        leader, second, third = three.each("call", "send")
        assert isinstance(second, MemoryError)
        assert isinstance(leader, SyncFailedError)
        assert str(leader) == "rank 1 of the trainer failed: MemoryError: short of memory"
        assert "rank 1 of the trainer failed: MemoryError: short of memory" in str(third)
        three.all("run", set_memory, False)
        three.all("call", "send")
        assert worker.call("fingerprint") == three.all("run", whole_kinds)[0]


def test_without_workers_the_ranks_stay_in_step(three: Ranks) -> None:
    """The leader then takes no more weights after the first chunk."""
    three.all("run", make_large, 2, of=2)
    options = {"encoding": BucketEncoding(bucket_size=3 * 8 * COLUMNS), "max_in_flight": 2, **IN_BATCHES}
    with running(three, size=2, workers=1, model=MODEL, **options) as (worker,):
        worker.runner.kill()
        worker.runner.join()
        for _ in range(3):
            errors = three.each("call", "send", of=2)
            assert [list(error.failures) for error in errors] == [[0], [0]], errors


def reports_kept(body: Body) -> int:
    """Return the number of messages to the leader that this rank keeps because they may be on their way."""
    side = body.scheme._process.sender  # type: ignore[union-attr]
    assert side is not None
    assert side.ranks is not None
    return len(side.ranks._reports)


def test_reports_that_the_leader_has_are_not_kept(three: Ranks) -> None:
    three.all("run", make_large, 2, of=2)
    options = {**IN_BATCHES, "convert": FailingConverter()}
    with running(three, "shared_mem", size=2, workers=1, model=MODEL, **options):
        for fails in (False, True, False, False):
            three.all("run", set_failing, fails, of=2)
            three.each("call", "send", of=2)
        assert three.all("run", reports_kept, of=2)[1] <= 2


def make_whole_on_first(body: Body) -> None:
    whole = body.net["second"].full_tensor()
    if dist.get_rank() == 0:
        body.net["second"] = whole


def test_a_weight_that_only_the_leader_has_whole_is_an_error_on_all_ranks(three: Ranks) -> None:
    three.all("run", make_large, 2, of=2)
    three.all("run", make_whole_on_first, of=2)
    errors = three.each("init", "shared_mem", 2, 1, free_port(), {}, of=2)
    assert all(isinstance(error, SchemaMismatchError) for error in errors), errors
    text = "second: rank 1 has float32[2, 512] (2,) (Shard(dim=0),), rank 0 float32[2, 512] whole"
    assert [error.problems for error in errors] == [(text,)] * 2


class InterruptingConverter:
    """A converter that sends a signal to processes, if there are any, at the first tensor."""

    victims: tuple[int, ...] = ()

    def __call__(self, items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == 0:
                for victim in InterruptingConverter.victims:
                    time.sleep(0.5)  # the other rank waits for the next message meanwhile
                    os.kill(victim, signal.SIGUSR1)
            yield item


class Interrupted(Exception):
    """An error of a signal handler."""


def set_victims(body: Body, pids: tuple[int, ...]) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted("by a signal")

    signal.signal(signal.SIGUSR1, interrupt)
    InterruptingConverter.victims = pids


@pytest.mark.parametrize("interrupted", [[1], [1, 0]], ids=["one", "all"])
def test_ranks_that_a_signal_handler_interrupts_are_in_step_for_the_next_call(
    three: Ranks, interrupted: list[int]
) -> None:
    """The second rank waits for the leader, which converts."""
    three.all("run", make_large, 2, of=2)
    options = {**IN_BATCHES, "convert": InterruptingConverter()}
    with running(three, "shared_mem", size=2, workers=1, model=MODEL, **options) as (worker,):
        three.all("run", set_victims, tuple(map(three.pid, interrupted)), of=2)
        leader, follower = three.each("call", "send", of=2)
        assert isinstance(follower, Interrupted)
        if 0 in interrupted:
            assert isinstance(leader, Interrupted)
        else:
            assert str(leader) == "rank 1 of the trainer failed: Interrupted: by a signal"
        three.all("run", set_victims, (), of=2)
        three.all("call", "send", of=2)
        assert worker.call("fingerprint") == three.all("run", whole_kinds, of=2)[0]


@pytest.mark.slow
def test_a_leader_that_is_stopped_with_the_store_is_named_in_time() -> None:
    """The store of the default process group is in its process."""
    with Ranks(3) as ranks:
        ranks.all("group", [0, 1, 2])
        ranks.all("make", 1, 3)
        with running(ranks, size=3, workers=1, timeout=1.0):
            freeze(ranks.pid(0))
            for rank in ranks.all_ranks[1:]:
                rank.post("call", "send")
            waiting = [rank.busy(20.0) for rank in ranks.all_ranks[1:]]
            ranks.kill(0)
            assert not any(waiting)
            _, *errors = ranks.answers()
            assert [type(error) for error in errors] == [SyncTimeoutError] * 2
            assert all(str(error).startswith("rank 0 of the trainer took no part") for error in errors), (
                errors
            )


def test_a_rank_is_lost_though_no_thread_can_ask_for_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(links, "start_thread", refuse)
    ranks = object.__new__(links.RankLinks)
    ranks.members, ranks.me, ranks.broken, ranks._gone = [0, 1], 1, None, set()
    lost = ranks._lost(0, RuntimeError("connection closed by peer"))
    assert str(lost) == "rank 0 of the trainer is gone (connection closed by peer)"
    assert isinstance(ranks.broken, SyncFailedError)
