"""Receivers that are inference engines."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_parts import Notebook, Pointing, calls, kept, loaded, received, set_in_engine
from marks import quick_for
from pairs import connect_pair

from weight_update import (
    BucketEncoding,
    FormatError,
    InferenceEngine,
    LifecycleError,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    SyncTimeoutError,
    TransportError,
    UnsupportedSourceError,
    WeightSchema,
    WeightStrategy,
    WeightSyncScheme,
    group_schemes,
    send_together,
)
from weight_update.encodings.bucket import Joiner
from weight_update.engines import ExclusiveEngine
from weight_update.receiver import group_commit, targets
from weight_update.receiver.updates import UpdateHandler
from weight_update.testing import Apart, WorkerProcesses, Zoo, fingerprint, mlp, random_bits, scramble
from weight_update.testing.models import Brittle
from weight_update.testing.processes import wait_until
from weight_update.testing.workers import Method

SCHEMES: dict[str, tuple[type[WeightSyncScheme], Method]] = {
    "shared_mem": (SharedMemWeightSyncScheme, "fork"),
    "distributed": (Apart, "fork"),
    "memory": (MemoryWeightSyncScheme, "thread"),
}
SMALL = BucketEncoding(bucket_size=256)
ENCODINGS: dict[str, Any] = {
    "dense": "dense",
    "bucket": SMALL,
    "kept buckets": BucketEncoding(bucket_size=256, load_instant=False),
    "patch": PatchEncoding(init_sync_bucket_size=256),
}
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def strategy(encoding: Any = SMALL, limit: int | None = None, **options: Any) -> WeightStrategy:
    return WeightStrategy("state_dict", encoding=encoding, max_in_flight=limit, **options)


def tensors_of(source: Any) -> dict[str, str]:
    """Return the fingerprint of the weights that engines get: no extra state."""
    return fingerprint(WeightStrategy("state_dict").named(source).tensors)


@pytest.fixture
def hire(hired: Callable[..., WorkerProcesses]) -> Callable[..., WorkerProcesses]:
    def build(
        source: Any, *engines: InferenceEngine, kind: str = "shared_mem", **options: Any
    ) -> WorkerProcesses:
        connects = options.pop("connects", True)
        cls, method = SCHEMES[kind]
        scheme = cls(**{"timeout": 20.0, "connect_timeout": 30.0, **options})
        return hired(scheme, engines, method, model=source, connect=connects)

    return build


def in_order(noted: list[tuple[str, Any]], version: int) -> list[str]:
    """Check that ``noted`` are the calls of one update; return the names of all weights loaded."""
    assert noted[0] == ("begin", version)
    assert noted[-1] == ("finish", version)
    assert {kind for kind, _ in noted[1:-1]} == {"load"}
    return [name for _, names in noted[1:-1] for name in names]


# -- what engines are given ----------------------------------------------------------------------------


CASES = [
    pytest.param(kind, encoding, marks=[pytest.mark.slow] * (kind == "distributed" and encoding != "bucket"))
    for kind in SCHEMES
    for encoding in ENCODINGS
]


@pytest.mark.parametrize(("kind", "encoding"), CASES)
@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
def test_calls_and_bits(hire: Any, kind: str, encoding: str, in_chunks: bool) -> None:
    source = Zoo(1)
    procs = hire(source, Notebook(in_chunks), kind=kind, strategy=strategy(ENCODINGS[encoding]))
    names = list(WeightStrategy("state_dict").named(source).tensors)
    for version in range(4):
        if version == 1:
            source.scalar.data.fill_(17.0)  # as a patch, if there are patches
        elif version:
            source.load_state_dict(Zoo(10 + version).state_dict())
        if version:
            assert procs.scheme.send().version == version
        (noted,) = procs.ask("run", calls)
        assert sorted(in_order(noted, version)) == sorted(names)
        if not in_chunks or encoding in ("dense", "patch"):
            assert len(noted) == 3
            assert noted[1] == ("load", names)
        else:
            assert len(noted) > 6
            assert all(loaded_names for _, loaded_names in noted[1:-1])
        assert procs.ask("run", loaded) == [tensors_of(source)]
        assert procs.ask("version") == [version]


@pytest.mark.parametrize(("kind", "encoding"), CASES)
def test_tensors_that_an_engine_keeps(hire: Any, kind: str, encoding: str) -> None:
    source = Zoo(1)
    procs = hire(source, Pointing(), Pointing(), kind=kind, strategy=strategy(ENCODINGS[encoding]))
    for version in range(1, 6):
        source.load_state_dict(Zoo(10 + version).state_dict())
        assert procs.scheme.send().version == version
        assert procs.ask("run", kept) == [tensors_of(source)] * 2
    procs.scheme.shutdown()
    assert procs.ask("run", kept) == [tensors_of(source)] * 2


@pytest.mark.parametrize("kind", quick_for(SCHEMES, "memory", "shared_mem"))
@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
def test_sent_chunk_by_chunk(hire: Any, kind: str, in_chunks: bool) -> None:
    source, engines = Zoo(1), [Notebook(in_chunks) for _ in range(2)]
    procs = hire(source, *engines, kind=kind, strategy=strategy(limit=2))
    for seed in range(3):
        source.load_state_dict(Zoo(10 + seed).state_dict())
        report = procs.scheme.send()
        assert set(report.apply_seconds) == set(report.stall_seconds) == {0, 1}
        assert procs.ask("run", loaded) == [tensors_of(source)] * 2
        assert procs.scheme.worker_versions == {0: seed + 1, 1: seed + 1}


@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
@pytest.mark.parametrize("travels", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("expected", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_expected(
    hire: Any, travels: torch.dtype, expected: torch.dtype, in_chunks: bool
) -> None:
    source = mlp(1)
    engine = Notebook(in_chunks, mlp(2).to(expected).to("meta").state_dict())
    encoding = BucketEncoding(bucket_size=64, bucket_dtype=travels)
    procs = hire(source, engine, kind="memory", strategy=strategy(encoding))
    there = {name: value.to(travels).to(expected) for name, value in source.state_dict().items()}
    assert procs.ask("run", loaded) == [fingerprint(there)]


def test_a_wider_dtype_than_the_senders(hire: Any) -> None:
    source = mlp(1).bfloat16()
    procs = hire(source, Notebook(expected=mlp(2).state_dict()), strategy=strategy("dense"))
    there = {name: value.float() for name, value in source.state_dict().items()}
    assert procs.ask("run", loaded) == [fingerprint(there)]
    assert procs.scheme.send().dense_bytes == sum(2 * value.numel() for value in there.values())


def test_names_are_those_of_the_conversion(hire: Any) -> None:
    def renamed(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            yield f"model.{name}", 2 * tensor

    source = mlp(1)
    procs = hire(source, Notebook(True), strategy=strategy(limit=2, convert=renamed))
    there = {f"model.{name}": 2 * value for name, value in source.state_dict().items()}
    assert procs.ask("run", loaded) == [fingerprint(there)]


def test_receive_tells_of_versions_and_hands_out_nothing(hire: Any) -> None:
    source = mlp(1)
    procs = hire(source, Notebook(), strategy=strategy())
    assert procs.ask("run", received, 0.0) == [None]
    procs.scheme.send()
    assert procs.ask("run", received, 10.0) == [{}]


def test_hold_keeps_out_what_is_staged_and_not_what_comes_in_chunks(hire: Any) -> None:
    source = mlp(1)
    procs = hire(source, Notebook(), Notebook(True), strategy=strategy(), sync=False)
    for worker in procs.workers:
        worker.call("hold")
    handle = procs.scheme.send_async()
    while procs.scheme.worker_versions[1] != 1:
        time.sleep(0.01)
    assert procs.scheme.worker_versions[0] == 0
    procs.workers[0].call("release")
    handle.wait(10.0)
    assert procs.ask("version") == [1, 1]


@pytest.fixture
def group() -> Iterator[Callable[..., list[MemoryWeightSyncScheme]]]:
    """Connect senders of one group with one receiver for each of these models."""
    ends: list[WeightSyncScheme] = []

    def build(sources: list[Any], models: list[Any]) -> list[MemoryWeightSyncScheme]:
        schemes = [MemoryWeightSyncScheme(strategy(), timeout=20.0) for _ in sources]
        group_schemes(schemes)
        for scheme, source, model in zip(schemes, sources, models, strict=True):
            ends.append(scheme)
            ends.append(connect_pair(scheme, source, model))
        return schemes

    yield build
    for end in reversed(ends):
        end.shutdown()


def test_several_models_as_one_step_are_staged(group: Any) -> None:
    """All models of a worker switch at one moment, also with an engine that loads in chunks."""
    sources, engines = [mlp(1), mlp(2)], [Notebook(True), Notebook()]
    schemes = group(sources, engines)
    for source, engine in zip(sources, engines, strict=True):
        scramble(source, 5, finite=True)
        engine.calls.clear()
    send_together(dict.fromkeys(schemes))
    assert [engine.calls for engine in engines] == [[("begin", 1), ("load", NAMES), ("finish", 1)]] * 2
    assert [fingerprint(engine.loaded) for engine in engines] == [tensors_of(one) for one in sources]


def test_an_engine_that_fails_in_a_step_of_several_models(group: Any) -> None:
    sources, model, engine, last = [mlp(1), mlp(2), mlp(3)], mlp(4), Notebook(), mlp(5)
    schemes = group(sources, [model, engine, last])
    before = [tensors_of(model), tensors_of(last)]
    for source in sources:
        scramble(source, 6, finite=True)
    engine.fails = 2
    with pytest.raises(SyncFailedError, match="the engine broke"):
        send_together(dict.fromkeys(schemes))
    assert [tensors_of(model), tensors_of(last)] == before
    send_together(dict.fromkeys(schemes))
    have = [tensors_of(model), fingerprint(engine.loaded), tensors_of(last)]
    assert have == [tensors_of(source) for source in sources]


def test_an_engine_that_loaded_before_another_one_failed_is_of_no_known_version(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot go back, so the sender must not take it for one that has the version before."""
    sources, engines = [mlp(1), mlp(2)], [Notebook(), Notebook()]
    schemes = group(sources, engines)
    commit = UpdateHandler._commit

    def second_is_last(handler: UpdateHandler, version: int) -> None:
        if handler.staging.target._engine is engines[1]:
            wait_until(lambda: group_commit._pending)
        commit(handler, version)

    monkeypatch.setattr(UpdateHandler, "_commit", second_is_last)
    scramble(sources[0], 6, finite=True)
    engines[1].fails = 2
    with pytest.raises(SyncFailedError, match="the engine broke"):
        send_together(dict.fromkeys(schemes))
    assert fingerprint(engines[0].loaded) == tensors_of(sources[0])
    assert [scheme.worker_versions for scheme in schemes] == [{0: None}, {0: None}]
    send_together(dict.fromkeys(schemes))
    assert [fingerprint(engine.loaded) for engine in engines] == [tensors_of(one) for one in sources]


def test_extra_state_stays_if_the_engine_of_another_model_fails(group: Any) -> None:
    sources, model, engine = [Brittle(1), mlp(2)], Brittle(3), Notebook()
    schemes = group(sources, [model, engine])
    sources[0].note = "new"
    engine.fails = 2
    with pytest.raises(SyncFailedError, match="the engine broke"):
        send_together(dict.fromkeys(schemes))
    assert model.note == "fresh"
    send_together(dict.fromkeys(schemes))
    assert model.note == "new"


# -- what is agreed on before --------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2])
def test_weights_that_are_not_those_expected(hire: Any, limit: int | None) -> None:
    expected = mlp(1).state_dict()
    expected["extra"] = torch.zeros(3)
    expected["0.bias"] = torch.zeros(9)
    del expected["2.weight"]
    engine = Notebook(limit is not None, expected)
    procs = hire(mlp(1), engine, kind="memory", strategy=strategy(limit=limit), connects=False)
    errors = procs.try_connect()
    for error in errors.values():
        assert isinstance(error, SchemaMismatchError)
        assert sorted(line.partition(":")[0] for line in error.problems) == ["0.bias", "2.weight", "extra"]
    assert procs.ask("run", calls) == [[]]
    procs.workers[0].call("run", set_in_engine, "expected", mlp(1).state_dict())
    procs.connect()
    assert procs.ask("run", loaded) == [tensors_of(mlp(1))]


def test_patches_need_weights_to_begin_with(hire: Any) -> None:
    encoding = PatchEncoding(init_sync=False)
    procs = hire(mlp(1), Notebook(), strategy=strategy(encoding), connects=False)
    errors = procs.try_connect()
    assert "init_sync=False needs" in str(errors[0])


def test_an_engine_is_not_written_past_its_scheme(hire: Any) -> None:
    procs = hire(mlp(1), Notebook(), kind="memory", strategy=strategy())
    with pytest.raises(UnsupportedSourceError, match="Notebook"):
        procs.workers[0].call("apply_weights", mlp(2).state_dict())
    for other in (Notebook(), mlp(2)):
        with pytest.raises(LifecycleError, match="create a receiver for the new engine"):
            procs.workers[0].call("replace_model", other)
    procs.scheme.send()


# -- failures ------------------------------------------------------------------------------------------

WAYS = {
    "staged dense": (False, "dense", None),
    "staged patch": (False, PatchEncoding(), None),
    "staged, sent in chunks": (False, SMALL, 2),
    "in chunks": (True, SMALL, None),
    "in chunks, sent so": (True, SMALL, 2),
}


@pytest.mark.parametrize("place", quick_for([0, 3, "finish"], 3))
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_fails(hire: Any, way: str, place: int | str) -> None:
    in_chunks, encoding, limit = WAYS[way]
    source, engines = mlp(1), [Notebook(in_chunks) for _ in range(2)]
    procs = hire(source, *engines, strategy=strategy(encoding, limit))
    procs.ask("run", calls)
    procs.workers[0].call("run", set_in_engine, "fails", place)
    with torch.no_grad():
        source[0].weight[0, :2] += 1.0
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send()
    assert list(caught.value.failures) == [0]
    message = str(caught.value.failures[0])
    assert f"the engine broke at {place}" in message
    assert "in _fail_at" in message, "the traceback of the worker"
    assert procs.ask("version") == [None, 1]
    assert list(procs.scheme.worker_versions.values()) == [None, 1]
    noted, others = procs.ask("run", calls)
    assert (noted[0], noted[-1]) == (("begin", 1), ("abort", 1))
    in_order(others, 1)
    assert procs.workers[0].call("run", received, 0.0) is None
    with torch.no_grad():
        source[2].bias += 1.0
    report = procs.scheme.send()
    assert report.version == 2
    assert procs.ask("run", loaded) == [tensors_of(source)] * 2
    assert procs.ask("version") == [2, 2]
    assert sorted(in_order(procs.workers[0].call("run", calls), 2)) == sorted(NAMES)
    assert procs.workers[0].call("run", received, 0.0) == {}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_does_not_begin_keeps_its_version(hire: Any, way: str) -> None:
    in_chunks, encoding, limit = WAYS[way]
    source = mlp(1)
    procs = hire(source, Notebook(in_chunks), kind="memory", strategy=strategy(encoding, limit))
    before = procs.ask("run", loaded)
    procs.ask("run", calls)
    procs.workers[0].call("run", set_in_engine, "fails", "begin")
    scramble(source, 2, finite=True)
    with pytest.raises(SyncFailedError, match="the engine broke at begin"):
        procs.scheme.send()
    assert (procs.ask("run", calls), procs.ask("version"), procs.ask("run", loaded)) == ([[]], [0], before)
    procs.scheme.send()
    assert procs.ask("run", loaded) == [tensors_of(source)]


@pytest.mark.parametrize("place", ["begin", 3, "finish"])
@pytest.mark.parametrize("kind", [TransportError, FormatError])
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_whose_server_is_gone(hire: Any, way: str, place: int | str, kind: type[Exception]) -> None:
    """An engine's TransportError is an error of the update, and not of the link to the sender."""
    in_chunks, encoding, limit = WAYS[way]
    source = mlp(1)
    procs = hire(source, Notebook(in_chunks), kind="memory", strategy=strategy(encoding, limit))
    procs.workers[0].call("run", set_in_engine, "fails", place)
    procs.workers[0].call("run", set_in_engine, "error", kind)
    with torch.no_grad():
        source[0].weight[0, :2] += 1.0
    with pytest.raises(SyncFailedError, match=f"{kind.__name__}: the engine broke at {place}"):
        procs.scheme.send()
    assert procs.ask("version") == [0 if place == "begin" else None]
    procs.scheme.send()
    assert procs.ask("run", loaded) == [tensors_of(source)]


@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
def test_weights_that_an_engine_leaves(hire: Any, in_chunks: bool) -> None:
    procs = hire(mlp(1), Notebook(in_chunks), strategy=strategy(BucketEncoding(bucket_size=1 << 20)))
    procs.workers[0].call("run", set_in_engine, "skips", 1)
    with pytest.raises(SyncFailedError, match="before it took all weights") as caught:
        procs.scheme.send()
    assert "0.bias" in str(caught.value)
    assert procs.ask("version") == [None]
    procs.scheme.send()
    assert procs.ask("version") == [2]


@pytest.mark.parametrize("in_chunks", [False, True], ids=["staged", "in chunks"])
def test_a_conversion_that_fails_midway(hire: Any, in_chunks: bool) -> None:
    broken: list[str] = []

    def fragile(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            if name in broken:
                raise ZeroDivisionError("the conversion broke")
            yield name, tensor

    source = mlp(1)
    procs = hire(source, Notebook(in_chunks), strategy=strategy(BucketEncoding(64), 1, convert=fragile))
    procs.ask("run", calls)
    broken.append("2.bias")
    with pytest.raises(ZeroDivisionError, match="the conversion broke"):
        procs.scheme.send()
    (noted,) = procs.ask("run", calls)
    if in_chunks:
        until = time.monotonic() + 10.0
        while noted[-1] != ("abort", 1) and time.monotonic() < until:  # the frame takes a moment
            noted += procs.workers[0].call("run", calls)
        assert (noted[0], noted[-1]) == (("begin", 1), ("abort", 1))
    else:
        assert noted == []
    assert procs.ask("version") == [None if in_chunks else 0]
    until = time.monotonic() + 10.0
    while procs.scheme.worker_versions != {0: None if in_chunks else 0} and time.monotonic() < until:
        time.sleep(0.01)
    assert procs.scheme.worker_versions == {0: None if in_chunks else 0}
    broken.clear()
    scramble(source, 3, finite=True)
    procs.scheme.send()
    assert procs.ask("run", loaded) == [tensors_of(source)]


def test_a_worker_that_leaves_midway_aborts(hire: Any) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def halting(items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            if name == "2.bias" and reached.is_set():
                assert goes_on.wait(20.0)
            yield name, tensor

    procs = hire(mlp(1), Notebook(True), strategy=strategy(BucketEncoding(64), 1, convert=halting))
    procs.ask("run", calls)
    reached.set()
    errors: list[BaseException | None] = []

    def send() -> None:
        with pytest.raises(SyncFailedError) as caught:
            procs.scheme.send()
        errors.append(caught.value)

    thread = threading.Thread(target=send)
    thread.start()
    noted: list[tuple[str, Any]] = []
    while len(noted) < 3:
        noted += procs.workers[0].call("run", calls)
    procs.workers[0].call("shutdown")
    assert procs.workers[0].call("run", calls)[-1:] == [("abort", 1)]
    goes_on.set()
    thread.join(20.0)
    assert [list(error.failures) for error in errors] == [[0]]


@pytest.mark.parametrize("kind", quick_for(["shared_mem", "distributed"], "shared_mem"))
def test_a_worker_killed_midway_and_started_again(hire: Any, kind: str) -> None:
    source, engines = mlp(1), [Notebook(True) for _ in range(2)]
    procs = hire(source, *engines, kind=kind, strategy=strategy(BucketEncoding(64)))
    procs.workers[0].call("run", set_in_engine, "stays", 2)
    killer = threading.Timer(0.5, os.kill, (procs.workers[0].runner.pid, signal.SIGKILL))
    killer.start()
    scramble(source, 2, finite=True)
    with pytest.raises(SyncFailedError) as caught:
        procs.scheme.send()
    assert list(caught.value.failures) == [0]
    assert procs.workers[1].call("run", loaded) == tensors_of(source)
    procs.workers[0].stop()
    del procs.workers[0]
    again = procs.hire(0, Notebook(True))
    again.call("connect")
    assert again.call("run", loaded) == tensors_of(source)
    scramble(source, 3, finite=True)
    procs.scheme.send()
    assert procs.ask("run", loaded) == [tensors_of(source)] * 2


# -- tensors put together from parts -------------------------------------------------------------------


class Idle(ExclusiveEngine):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights)


def test_generation_and_updates_take_turns() -> None:
    engine = Idle(timeout=0.05)
    engine.begin_update(0)
    late = r"an update or other generation took longer than 0\.05 s"
    with pytest.raises(SyncTimeoutError, match=late), engine.generating():
        pass
    engine.finish_update(0)
    with engine.generating(), pytest.raises(SyncTimeoutError, match=late), engine.generating():
        pass
    with engine.generating(), pytest.raises(SyncTimeoutError, match="generation took longer"):
        engine.begin_update(1)
    engine.begin_update(1)
    engine.finish_update(1)
    assert engine.version == 1


def test_an_update_goes_before_the_next_generation() -> None:
    engine = Idle(timeout=10.0)
    engine.begin_update(0)
    engine.finish_update(0)

    def update() -> None:
        engine.begin_update(1)
        order.append("update")
        engine.finish_update(1)

    for _ in range(50):
        order: list[str] = []
        updating = threading.Thread(target=update)
        with engine.generating():
            updating.start()
            time.sleep(0.01)  # now it waits
        with engine.generating():
            order.append("generation")
        updating.join(10.0)
        assert order == ["update", "generation"]


def test_an_update_that_gives_up_lets_generation_continue() -> None:
    engine = Idle(timeout=10.0)
    engine.begin_update(0)
    engine.finish_update(0)
    engine.timeout = 0.1
    with engine.generating(), pytest.raises(SyncTimeoutError):
        engine.begin_update(1)
    with engine.generating():
        assert engine.version == 0


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_any_size(seed: int) -> None:
    chance = random.Random(seed)
    named = {f"t{i}": random_bits((chance.randrange(40),), torch.int32, i) for i in range(30)}
    named["tied"] = named["t3"]
    schema = WeightSchema.of(named)
    flat = torch.zeros(schema.nbytes, dtype=torch.uint8)
    for view, value in zip(schema.views(flat), named.values(), strict=True):
        view.copy_(value)
    joiner = Joiner(schema)
    for _ in range(3):
        start, found = 0, {}
        while start < schema.nbytes:
            stop = min(start + 64 * chance.randrange(1, 5), schema.nbytes)
            part = flat[start:stop].clone()
            ended = {schema.names[i]: value.clone() for i, value in joiner.take(start, part)}
            part.fill_(255)
            assert not ended.keys() & found.keys()
            found.update(ended)
            start = stop
        assert joiner._begun.numel() == 0, "it keeps no memory of the last tensor"
        assert fingerprint(found) == fingerprint(named)


@pytest.mark.parametrize("in_chunks", [True, False])
def test_reads_of_an_engine_on_a_gpu_are_over_before_memory_is_reused(
    in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots on a GPU, an engine returns before its copies have run; without a GPU there is no wait."""
    engine = Notebook(in_chunks)
    monkeypatch.setattr(targets, "await_gpu", lambda memory: engine.calls.append(("await", memory.numel())))
    with MemoryWeightSyncScheme(strategy(limit=2)) as scheme, connect_pair(scheme, mlp(1), engine):
        made = [call for call, _ in engine.calls]
    loads = made.count("load")
    assert loads > 1 if in_chunks else loads == 1
    first = ["load", "await"] * loads if in_chunks else ["load"]
    assert made == ["begin", *first, "finish", *([] if in_chunks else ["await"])]
