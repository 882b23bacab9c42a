"""Real worlds of torch.distributed.rpc: workers find the sender and are called; processes come and go."""

from __future__ import annotations

import time

import pytest
import rpc_parts as parts
import torch
from faults_tools import Stripes, fill
from marks import quick_for
from rpc_parts import World, in_world
from torch import nn

from weight_update import (
    BucketEncoding,
    LinkClosedError,
    PatchEncoding,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
    WorkerError,
)
from weight_update.testing import Zoo, fingerprint, mlp

CODED = {
    "bucket": BucketEncoding(bucket_size=256),
    "patch": PatchEncoding(),
    "patch, relative, zstd": PatchEncoding(values="relative", compression="zstd"),
    "patch, lz4": PatchEncoding(compression="lz4"),
}


# -- finding the sender --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", quick_for(["sender", "receivers"], "sender"))
@in_world()
def test_workers_find_the_sender(world: World, first: str) -> None:
    if first == "sender":
        scheme = world.sender(mlp(1))
        world.post_join(mlp(2))
    else:
        world.post_join(mlp(2))
        time.sleep(0.3)
        scheme = world.sender(mlp(1))
    scheme.connect()
    world.answers()
    assert world.seen() == [fingerprint(mlp(1))] * 2
    scheme.send(mlp(3))
    assert world.seen() == [fingerprint(mlp(3))] * 2
    assert scheme.worker_versions == {0: 1, 1: 1}


@pytest.mark.parametrize("name", quick_for(CODED, "patch"))
@in_world()
def test_same_bits(world: World, name: str) -> None:
    source, strategy = Zoo(1), WeightStrategy(encoding=CODED[name])
    scheme = world.sender(source, called=True, strategy=strategy)
    world.connect(scheme, Zoo(2), strategy=strategy)
    for seed in range(3):
        source.load_state_dict(Zoo(10 + seed).state_dict())
        scheme.send()
        assert world.seen() == [fingerprint(source)] * 2
        with torch.no_grad():
            source.inner.bias[: seed + 1].add_(1)
        report = scheme.send()
        assert report.encoding == strategy.encoding.label
        assert world.seen() == [fingerprint(source)] * 2
        assert all(calls[-1] == {"policy": fingerprint(source)} for calls in world.ask(parts.calls_of))


@in_world()
def test_nobody_announces_a_sender(world: World) -> None:
    world.post_join(mlp(2), within=0.5)
    for worker in world.workers:
        with pytest.raises(SyncTimeoutError, match=r"within 0\.5 s.*sender="):
            worker.answer()


@in_world()
def test_a_sender_that_is_not_there(world: World) -> None:
    world.workers[0].post("run", parts.join, mlp(2), "policy", {"sender": "nobody"})
    with pytest.raises(LinkClosedError, match="'nobody' cannot be asked"):
        world.workers[0].answer()


@in_world()
def test_wrong_shapes_and_missing_keys(world: World) -> None:
    scheme = world.sender(mlp(1))
    bad = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
    world.post_join(bad)
    with pytest.raises(SchemaMismatchError) as caught:
        scheme.connect()
    assert sorted({line.partition(":")[0] for line in caught.value.problems}) == ["0.weight", "2.bias"]
    for worker in world.workers:
        with pytest.raises(SchemaMismatchError):
            worker.answer()


# -- calls ---------------------------------------------------------------------------------------------


@in_world()
def test_the_call_sees_what_was_sent(world: World) -> None:
    scheme = world.sender(mlp(1), called=True)
    world.connect(scheme, mlp(2))
    assert world.ask(parts.calls_of) == [[], []]  # the weights of a worker that joins need no call
    scheme.send(mlp(3))
    scheme.send(mlp(4), worker_ids=1)
    sent = [{"policy": fingerprint(mlp(seed))} for seed in (3, 4)]
    assert world.ask(parts.calls_of) == [sent[:1], sent]


@pytest.mark.slow
@in_world()
def test_two_models(world: World) -> None:
    schemes = {key: world.sender(mlp(seed), called=True, model_id=key) for seed, key in enumerate(("a", "b"))}
    for key, scheme in schemes.items():
        world.connect(scheme, mlp(9), model_id=key)
    for seed, key in enumerate(schemes):
        assert world.seen(key) == [fingerprint(mlp(seed))] * 2
    schemes["b"].send(mlp(5))
    assert world.seen("a") == [fingerprint(mlp(0))] * 2
    assert world.ask(parts.calls_of) == [[{"a": None, "b": fingerprint(mlp(5))}]] * 2
    schemes["b"].shutdown()
    schemes["a"].send(mlp(6))
    assert world.seen("a") == [fingerprint(mlp(6))] * 2


@pytest.mark.parametrize("name", quick_for(["dense", "patch"], "dense"))
@in_world()
def test_what_a_call_raises_reaches_send(world: World, name: str) -> None:
    strategy = WeightStrategy(encoding=name)
    scheme = world.sender(mlp(1), called=True, strategy=strategy)
    world.connect(scheme, mlp(2), strategy=strategy)
    world.run(0, parts.make_trouble, "raise")
    with pytest.raises(SyncFailedError, match="told to raise") as caught:
        scheme.send(mlp(3))
    assert {idx: type(error) for idx, error in caught.value.failures.items()} == {0: WorkerError}
    assert "_receive_weights_scheme" in str(caught.value.failures[0])
    assert world.seen() == [fingerprint(mlp(3))] * 2
    world.run(0, parts.make_trouble, None)
    for seed in (4, 5):
        scheme.send(mlp(seed))
        assert world.seen() == [fingerprint(mlp(seed))] * 2


@in_world(workers=1)
def test_a_call_that_may_take_years(world: World) -> None:
    scheme = world.sender(mlp(1), called=True, timeout=1e9)
    world.connect(scheme, mlp(2))
    scheme.send(mlp(3))
    assert world.seen(only=[0]) == [fingerprint(mlp(3))]


@in_world(workers=1)
def test_a_call_that_raises_an_error_without_a_message(world: World) -> None:
    scheme = world.sender(mlp(1), called=True, timeout=5.0)
    world.connect(scheme, mlp(2))
    world.run(0, parts.make_trouble, "raise what cannot be read")
    with pytest.raises(SyncFailedError, match=r"could not be called through RPC.*\(ValueError: "):
        scheme.send(mlp(3))


@pytest.mark.slow
@in_world()
def test_calls_do_not_pile_up(world: World) -> None:
    scheme = world.sender(mlp(0), called=True, sync=False)
    world.connect(scheme, mlp(2))
    for seed in range(200):
        scheme.send(mlp(seed))
    report = scheme.send_async(mlp(200)).wait()
    assert report.version == 201
    assert world.seen() == [fingerprint(mlp(200))] * 2
    for calls in world.ask(parts.calls_of):
        assert 0 < len(calls) <= 201
        assert calls[-1] == {"policy": fingerprint(mlp(200))}


@pytest.mark.slow
@in_world()
def test_no_forward_pass_sees_two_versions(world: World) -> None:
    model = Stripes(24, 2000)
    scheme = world.sender(model, called=True)
    world.connect(scheme, model)
    world.ask(parts.compute)
    for value in range(1, 40):
        scheme.send(fill(model, value))
    for seen in world.ask(parts.end_compute):
        assert (seen["torn"], seen["error"]) == ([], "")
        assert seen["count"] > 20
