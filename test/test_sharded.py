"""Sharded trainers: all ranks call send(), one of them talks to the workers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import shard_parts
import torch
import torch.distributed as dist
from marks import slow
from shard_parts import (
    BUCKETS,
    Body,
    ColumnParallel,
    KillingConverter,
    Net,
    Ranks,
    added,
    count_bytes,
    evaluate,
    free_port,
    hollow_kinds,
    make_columns,
    make_kinds,
    make_tensor_parallel,
    peaks,
    rename_on_second,
    running,
    send_shards,
    set_victim,
    whole_kinds,
    whole_weights,
)

from weight_update import (
    GatherShards,
    LifecycleError,
    SchemaMismatchError,
    SyncFailedError,
    Synchronizer,
    SyncTimeoutError,
    TrainerClient,
    UnsupportedSourceError,
    WeightStrategy,
)
from weight_update.convert import rename
from weight_update.sharded import ranks as ranks_module
from weight_update.testing.models import fingerprint
from weight_update.testing.processes import freeze, wait_until


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        ranks.all("group", [0, 1])
        ranks.all("group", [0, 1, 2, 3])
        yield ranks


def same(fingerprint: dict[str, str], expected: dict[str, str]) -> bool:
    return {name: fingerprint[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "size", "workers", "options"),
    [
        slow("distributed", 2, 3, BUCKETS),
        slow("distributed", 4, 2, BUCKETS),
        ("shared_mem", 2, 2, {}),
        ("shared_mem", 2, 1, {"encoding": "patch"}),
    ],
)
def test_workers_have_the_weights_of_all_ranks(
    four: Ranks, kind: str, size: int, workers: int, options: dict[str, Any]
) -> None:
    four.all("make", 1, size, of=size)
    with running(four, kind, size=size, workers=workers, **options) as procs:
        for steps in (1, 2):
            four.all("train", steps, of=size)
            reports = four.all("call", "send", of=size)
            expected = four.all("whole", of=size)[0]
            assert [report.version for report in reports] == [steps] * size
            assert all(same(worker.call("fingerprint"), expected) for worker in procs)
        assert four.all("get", "version", of=size) == [2] * size
        assert four.all("get", "worker_versions", of=size) == [dict.fromkeys(range(workers), 2)] * size


@pytest.mark.parametrize("options", [{}, BUCKETS], ids=["whole", "in chunks"])
def test_tied_weights_that_pass_a_converter_stay_tied(four: Ranks, options: dict[str, Any]) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=1, **options, convert=rename([("^no weight$", "")])) as procs:
        four.all("train", 1, of=2)
        four.all("call", "send", of=2)
        expected = {name: value for name, value in four.all("whole", of=2)[0].items() if "_extra" not in name}
        assert same(procs[0].call("fingerprint"), expected)


def test_every_kind_of_shard(four: Ranks) -> None:
    four.all("run", make_kinds)
    expected = four.all("run", whole_kinds)[0]
    model = four.all("run", hollow_kinds)[0]
    with running(four, size=4, workers=1, model=model, **BUCKETS, shards={"batch_bytes": 300}) as procs:
        assert procs[0].call("fingerprint") == expected
        four.all("call", "send")
        assert procs[0].call("fingerprint") == expected


def test_fsdp_over_tensor_parallel(four: Ranks) -> None:
    four.all("run", make_tensor_parallel)
    with running(four, "shared_mem", size=4, workers=1) as procs:
        assert same(procs[0].call("fingerprint"), four.all("whole")[0])


def test_what_a_forward_pass_left_whole_is_sharded_again(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=1, **BUCKETS) as procs:
        four.all("run", evaluate, of=2)
        four.all("call", "send", of=2)
        assert same(procs[0].call("fingerprint"), four.all("whole", of=2)[0])
        assert procs[0].call("version") == 1


def test_only_selected_weights(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=1, select=["layers.1", "norm"], **BUCKETS) as procs:
        expected = four.all("whole", of=2)[0]
        found = procs[0].call("fingerprint")
        untouched = fingerprint(Net(7))
        for name in expected:
            chosen = name.startswith(("layers.1.", "norm."))
            assert found[name] == (expected if chosen else untouched)[name], name


def test_memory_is_bounded_by_batches(four: Ranks) -> None:
    four.all("make", 1, 4)
    batch = 13 * 6 * 4  # the largest tensor; all together are three times as large
    with running(four, size=4, workers=1, **BUCKETS, shards={"batch_bytes": batch}):
        four.all("run", count_bytes)
        four.all("call", "send")
        (whole, parts), *others = four.all("run", peaks)
    assert 0 < whole + parts <= 2 * batch + 64 * 4 * 4, "memory of parts is aligned"
    assert all(whole == 0 and parts < batch for whole, parts in others)


@pytest.mark.parametrize("options", [BUCKETS, {}], ids=["in flight", "whole"])
def test_shards_that_one_rank_sends_are_not_converted(four: Ranks, options: dict[str, Any]) -> None:
    four.all("make", 1, 2, of=2)
    (error,) = four.each("run", send_shards, options, of=1)
    assert isinstance(error, UnsupportedSourceError)
    assert str(error).startswith("these weights are sharded (DTensor)")


def test_names_that_differ_are_an_error_on_all_ranks(four: Ranks) -> None:
    four.all("make", 1, 2, rename_on_second, of=2)
    errors = four.each("init", "distributed", 2, 1, free_port(), {}, of=2)
    assert all(isinstance(error, SchemaMismatchError) for error in errors), errors
    assert errors[0].problems == errors[1].problems
    assert set(errors[0].problems) == {
        "layers.1.weight: rank 1 does not have it",
        "layers.1.strange: rank 0 does not have it",
    }


def published(body: Body, whole: bool, gathers: bool) -> int | None:
    """Return the version that a trainer's client of this rank publishes."""
    source = (lambda: {"weight": torch.ones(3)}) if whole else body.net
    strategy = WeightStrategy(gather=GatherShards(body.groups[0, 1]) if gathers else None)
    synchronizer = Synchronizer("memory", "fixed", sync_interval=1)
    with synchronizer, TrainerClient(synchronizer, source, strategy=strategy, timeout=5.0) as trainer:
        return trainer.blocking.sync_weight()["version"]


def test_a_client_of_a_synchronizer_publishes_whole_weights(four: Ranks) -> None:
    """It would wait for other ranks, which cannot have clients of the same synchronizer."""
    four.all("make", 1, 2, of=2)
    for whole, gathers in ((False, False), (False, True), (True, True)):
        (error,) = four.each("run", published, whole, gathers, of=1)
        assert isinstance(error, UnsupportedSourceError)
        assert "give the client of one rank a function that returns the whole weights" in str(error)
    assert four.all("run", published, True, False, of=1) == [0]


def test_a_worker_that_died_is_named_on_all_ranks(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=2, **BUCKETS) as procs:
        procs[1].runner.kill()
        procs[1].runner.join()
        four.all("train", 1, of=2)
        errors = four.each("call", "send", of=2)
        assert [type(error) for error in errors] == [SyncFailedError] * 2
        assert str(errors[0]) == str(errors[1])
        assert [list(error.failures) for error in errors] == [[1], [1]]
        assert same(procs[0].call("fingerprint"), four.all("whole", of=2)[0])
        procs[0].runner.kill()
        procs[0].runner.join()
        errors = four.each("call", "send", of=2)
        assert [sorted(error.failures) for error in errors] == [[0, 1], [0, 1]]
        assert four.all("get", "worker_versions", of=2) == [{0: None, 1: None}] * 2


def test_without_waiting_an_error_comes_later_and_on_all_ranks(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=2, sync=False, **BUCKETS) as procs:
        procs[1].runner.kill()
        procs[1].runner.join()
        four.all("call", "send", of=2)
        errors = four.each("call", "send", of=2)
        assert [type(error) for error in errors] == [SyncFailedError] * 2, errors
        assert [list(error.failures) for error in errors] == [[1], [1]]


def columns_on_the_leader(items: Iterator[Any]) -> Iterator[Any]:
    """Gather by collectives that give the whole weights to rank 0 alone."""
    for name, tensor in items:
        found = [torch.empty_like(tensor) for _ in range(2)] if dist.get_rank() == 0 else None
        dist.gather(tensor, found, 0, shard_parts.BODY.groups[0, 1])
        yield (name, torch.cat(found, 1)) if found else ("", None)


@pytest.mark.parametrize("gather", [ColumnParallel([0, 1]), columns_on_the_leader], ids=["all", "leader"])
def test_a_way_of_gathering_of_ones_own(four: Ranks, gather: Any) -> None:
    four.all("run", make_columns, 2, of=2)
    model = {f"w{i}": Net().frozen.new_zeros(2, 6).float() for i in range(4)}
    shards = {"gather": gather}
    with running(four, size=2, workers=1, model=model, shards=shards, **BUCKETS) as procs:
        rows = [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0], [3.0, 4.0, 5.0, 13.0, 14.0, 15.0]]
        four.all("call", "send", of=2)
        expected = {f"w{i}": model["w0"].new_tensor(rows) + 100 * i for i in range(4)}
        assert procs[0].call("fingerprint") == fingerprint(expected)


def test_the_leader_can_have_all_of_it(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, "shared_mem", size=2, workers=1) as procs:
        expected = procs[0].call("fingerprint")
        assert four.all("run", whole_weights, of=2) == [expected, None]


@pytest.mark.parametrize("workers", [1, 0])
def test_a_late_joiner_has_the_next_version(four: Ranks, workers: int) -> None:
    indices = [*range(workers), 5]
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=workers, encoding="bucket") as procs, added(four, 5) as late:
        for steps in range(2):
            expected = four.all("whole", of=2)[0]
            assert all(same(worker.call("fingerprint"), expected) for worker in [*procs, late])
            four.all("train", 1, of=2)
            reports = four.all("call", "send", of=2)
            assert [sorted(report.apply_seconds) for report in reports] == [indices] * 2
            assert four.all("get", "worker_versions", of=2) == [dict.fromkeys(indices, steps + 1)] * 2


def test_a_late_joiner_of_another_dtype_gets_the_weights_that_updates_do_not_carry(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    options = {"model": Net(7).bfloat16(), "encoding": "patch", "select": "trainable"}
    with running(four, size=2, workers=1, **options), added(four, 5, joined=False) as late:
        wait_until(lambda: 5 in four.all("get", "worker_versions", of=1)[0])
        four.all("train", 1, of=2)
        four.all("call", "send", of=2)
        late.answer()
        for _ in range(2):
            assert same(late.call("fingerprint"), four.all("whole", of=2)[0])
            four.all("train", 1, of=2)
            four.all("call", "send", of=2)


@pytest.mark.slow
def test_nothing_is_left_open(four: Ranks) -> None:
    counts = []
    for _ in range(3):
        four.all("make", 1, 2, of=2)
        with running(four, size=2, workers=1, **BUCKETS):
            four.all("call", "send", of=2)
        counts.append(four.all("descriptors", of=2))
    assert counts[1] == counts[2]


def test_calls_that_differ_are_an_error(four: Ranks) -> None:
    four.all("make", 1, 2, of=2)
    with running(four, size=2, workers=1, **BUCKETS):
        for rank, call in enumerate(("send", "prepare_weights")):
            four.all_ranks[rank].post("call", call)
        leader, follower = four.answers(2)
        text = (
            "this rank called prepare_weights() where rank 0 called send(), send_async() or send_together()"
        )
        assert isinstance(follower, LifecycleError)
        assert str(follower) == text
        assert isinstance(leader, LifecycleError)
        assert "rank 1" in str(leader)
        four.all("call", "send", of=2)  # they are still in step


@pytest.mark.parametrize(
    ("call", "step", "text"),
    [
        (
            "send",
            "wait",
            r"rank called send\(\), send_async\(\) or .* 0 called send\(\) with sync=True, .* wait\(\)",
        ),
        ("wait", "outcomes", r"called send\(\) with sync=True, .* rank 0 called send\(\) with sync=False$"),
        ("connect", "wait_staged", r"called connect\(\) where rank 0 called send_together\(\)$"),
    ],
)
def test_steps_that_differ_are_named_by_the_calls_of_users(call: str, step: str, text: str) -> None:
    """One rank has ``sync=True``, or does not wait for a handle."""
    ranks = object.__new__(ranks_module.Ranks)
    ranks.members = [0, 1]
    ranks.listen = lambda: {"step": step}  # type: ignore[method-assign]
    with pytest.raises(LifecycleError, match=text):
        ranks._begin_to_follow(call, lambda: None)


def test_a_rank_that_does_not_call_is_named(four: Ranks) -> None:
    four.all("make", 1, 4)
    with running(four, size=4, workers=1, timeout=1.5, **BUCKETS):
        four.post("call", "send", of=3)
        errors = four.answers(3)
        assert [type(error) for error in errors] == [SyncTimeoutError] * 3
        assert all(str(error).startswith("rank 3 of the trainer took no part") for error in errors), errors


@pytest.mark.parametrize("options", [slow(BUCKETS), {}], ids=["in flight", "whole"])
def test_a_rank_that_dies_while_the_leader_converts_is_named_in_time(options: dict[str, Any]) -> None:
    """The others have given their parts, and wait for the leader."""
    with Ranks(3) as ranks:
        ranks.all("group", [0, 1, 2])
        ranks.all("make", 1, 3)
        with running(ranks, size=3, workers=1, convert=KillingConverter(), **options) as procs:
            ranks.all("run", set_victim, ranks.pid(2), of=1)
            for _ in range(2):
                start = time.monotonic()
                ranks.post("call", "send")
                errors = ranks.answers(2)
                assert time.monotonic() - start < 10
                assert [type(error) for error in errors] == [SyncFailedError] * 2
                assert all(str(error).startswith("rank 2 of the trainer is gone") for error in errors), errors
            assert procs[0].call("version") in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_dies_at_any_moment_ends_the_call(seed: int) -> None:
    chance = random.Random(seed)
    with Ranks(3) as ranks:
        ranks.all("group", [0, 1, 2])
        ranks.all("make", 1, 3)
        with running(ranks, size=3, workers=1, timeout=5.0, shards={"batch_bytes": 300}, **BUCKETS):
            killer = threading.Timer(chance.uniform(0.0, 0.3), ranks.kill, [2])
            killer.start()
            errors: list[Any] = []
            while len(errors) < 2:  # a rank that had just ended its call hears of it in the next one
                ranks.post("call", "send")
                errors = [answer for answer in ranks.answers(2) if isinstance(answer, Exception)]
            killer.join()
            assert [type(error) for error in errors] == [SyncFailedError] * 2
            assert all(str(error).startswith("rank 2 of the trainer is gone") for error in errors), errors


@pytest.mark.slow
def test_when_the_leader_dies_the_others_hear_of_it() -> None:
    with Ranks(3) as ranks:
        ranks.all("group", [0, 1, 2])
        ranks.all("make", 1, 3)
        with running(ranks, size=3, workers=1, **BUCKETS):
            ranks.kill(0)
            start = time.monotonic()
            ranks.post("call", "send")
            _, *errors = ranks.answers()
            assert time.monotonic() - start < 10
            assert [type(error) for error in errors] == [SyncFailedError] * 2
            assert all(str(error).startswith("rank 0 of the trainer is gone") for error in errors), errors


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named() -> None:
    with Ranks(3) as ranks:
        ranks.all("group", [0, 1, 2])
        ranks.all("make", 1, 3)
        with running(ranks, size=3, workers=1, timeout=2.0, **BUCKETS) as procs:
            freeze(ranks.pid(2))
            ranks.post("call", "send", of=2)
            errors = ranks.answers(2)
            ranks.kill(2)
            assert [type(error) for error in errors] == [SyncTimeoutError] * 2
            assert all(str(error).startswith("rank 2 of the trainer took no part") for error in errors), (
                errors
            )
            assert procs[0].call("version") == 0
