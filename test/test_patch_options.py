"""Selection, bootstrap, dtypes and configuration of patches, over a scheme."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from marks import slow
from test_patch import SMALL, Frozen, Yard, net, one_yard, poke, same, yard  # noqa: F401 - fixtures too
from torch import nn

from weight_update import (
    BucketEncoding,
    MemoryWeightSyncScheme,
    PatchEncoding,
    SchemaMismatchError,
    SyncFailedError,
    SyncTimeoutError,
    WeightStrategy,
    group_schemes,
    send_together,
)
from weight_update.testing import fingerprint, scramble

BF16 = torch.bfloat16


def cast(model: Any, dtype: torch.dtype = BF16) -> Any:
    return copy.deepcopy(model).to(dtype)


def patches(select: Any = None, convert: Any = None, **options: Any) -> WeightStrategy:
    return WeightStrategy(encoding=PatchEncoding(**options), select=select, convert=convert)


# -- the first weights ---------------------------------------------------------------------------------


def test_equal_weights_need_not_travel(yard: Yard) -> None:  # noqa: F811
    source = net(1)
    procs = yard.procs(source, [copy.deepcopy(source), copy.deepcopy(source)], patches(init_sync=False))
    assert procs.ask("version") == [0, 0]
    group = procs.scheme._sender.table[0].group  # type: ignore[union-attr]
    assert sum(chunk.payload_bytes for chunk in group.kept[0].chunks) < 200  # type: ignore[union-attr]
    poke(source, 3)
    report = procs.scheme.send()
    assert report.encoding == "patch"
    assert report.wire_bytes < 2 * SMALL
    same(procs, source)


def test_different_weights_are_an_error_on_both_sides(yard: Yard) -> None:  # noqa: F811
    source, other = net(1), net(1)
    with torch.no_grad():
        other[1].bias[3] += 1.0
    models = [copy.deepcopy(source), copy.deepcopy(other)]
    procs = yard.procs(source, models, patches(init_sync=False), connect=False)
    errors = procs.try_connect()
    assert errors[0] is None
    assert isinstance(errors[1], SchemaMismatchError)
    assert errors[1].problems == ("1.bias: differs from the sender's",)
    assert isinstance(errors[None], SyncFailedError)
    assert "1.bias" in str(errors[None])
    assert list(errors[None].failures) == [1]
    same(procs, source, other)
    procs.workers[1].call("replace_model", copy.deepcopy(source))
    procs.workers[1].post("connect")
    procs.scheme.connect()
    procs.workers[1].answer()
    poke(source, 3)
    assert procs.scheme.send().encoding == "patch"
    same(procs, source)


def test_whoever_joins_later_is_sent_all(yard: Yard) -> None:  # noqa: F811
    source = net(1)
    late = net(5)
    procs = yard.procs(source, [copy.deepcopy(source), late], patches(init_sync=False), connect=False)
    procs.workers[0].post("connect")
    with pytest.raises(SyncTimeoutError):
        procs.scheme.connect(timeout=0.5)
    procs.workers[0].answer()
    poke(source, 3)
    procs.scheme.send(worker_ids=0)
    for step in range(2):
        with pytest.raises(SyncFailedError):
            procs.scheme.send()
        poke(source, step)
    procs.workers[1].call("connect")
    procs.scheme.send()
    same(procs, source)


def test_only_prefixes_travel(yard: Yard) -> None:  # noqa: F811
    source = Frozen(1)
    target = copy.deepcopy(source)
    scramble(target.head, 5, finite=True)
    procs = yard.procs(source, [target], patches(init_sync_prefixes=["head"]))
    group = procs.scheme._sender.table[0].group  # type: ignore[union-attr]
    sent = sum(chunk.payload_bytes for chunk in group.kept[0].chunks)  # type: ignore[union-attr]
    head = sum(4 * one.numel() for one in source.head.parameters())
    assert head < sent < head + 500
    assert procs.scheme.last_report is not None
    assert procs.scheme.last_report.encoding == "patch"  # not all weights
    same(procs, source)
    poke(source, 3)
    procs.scheme.send()
    same(procs, source)


def test_prefixes_that_do_not_cover_a_difference(one_yard: Yard) -> None:  # noqa: F811
    source = Frozen(1)
    procs = one_yard.procs(source, [Frozen(2)], patches(init_sync_prefixes=["head", "cache"]), connect=False)
    error = procs.try_connect()[0]
    assert isinstance(error, SchemaMismatchError)
    assert {line.partition(":")[0] for line in error.problems} == {"body.weight", "body.bias", "steps"}


def test_a_prefix_of_the_second_name_of_a_tied_weight(one_yard: Yard) -> None:  # noqa: F811
    def tied(seed: int) -> nn.ModuleDict:
        model = nn.ModuleDict({"inner": nn.Linear(4, 4, bias=False), "output": nn.Linear(4, 4, bias=False)})
        model["output"].weight = model["inner"].weight
        scramble(model, seed, finite=True)
        return model

    source = tied(1)
    procs = one_yard.procs(source, [tied(2)], patches(init_sync_prefixes=["output"]))
    same(procs, source)


def test_an_unknown_prefix_is_an_error_at_once() -> None:
    scheme = MemoryWeightSyncScheme(patches(init_sync_prefixes=["head", "tail"]))
    with pytest.raises(ValueError, match=r"'tail'.*body, .*head"):
        scheme.init_on_sender(model=Frozen(1), num_workers=1)
    scheme.init_on_sender(model=nn.ModuleDict({"head": net(1), "tail": net(2)}), num_workers=1)
    scheme.shutdown()


# -- selection -----------------------------------------------------------------------------------------


def test_the_frozen_part_is_sent_once(yard: Yard) -> None:  # noqa: F811
    source = Frozen(1)
    procs = yard.procs(source, [Frozen(2)], patches("trainable"))
    same(procs, source)
    before = copy.deepcopy(source)
    with torch.no_grad():
        for tensor in [*source.parameters(), *source.buffers()]:
            tensor.add_(1.0)
    report = procs.scheme.send()
    chosen = [*source.head.parameters(), source.steps]
    assert report.encoding == "patch"
    assert report.changed_fraction == 1.0
    assert report.wire_bytes < sum(4 * one.numel() for one in chosen) + 500
    before.head, before.steps = source.head, source.steps
    same(procs, before)


@pytest.mark.parametrize(
    "select", [["head"], lambda name, tensor: tensor.shape[-1] == 256 or name == "head.bias"]
)
def test_prefixes_and_functions_select(one_yard: Yard, select: Any) -> None:  # noqa: F811
    source = Frozen(1)
    procs = one_yard.procs(source, [Frozen(2)], patches(select))
    before = copy.deepcopy(source)
    scramble(source, 7, finite=True)
    procs.scheme.send()
    before.head = source.head
    if callable(select):
        before.body.bias = source.body.bias
    same(procs, before)


def test_a_selection_of_nothing_is_an_error() -> None:
    for select in (lambda name, tensor: False, ["nothing"]):
        scheme = MemoryWeightSyncScheme(patches(select))
        with pytest.raises(ValueError, match=r"nothing|chooses none"):
            scheme.init_on_sender(model=Frozen(1), num_workers=1)
    scheme = MemoryWeightSyncScheme(patches("trainable"))
    with pytest.raises(ValueError, match="chooses none"):
        scheme.init_on_sender(model=net(1).requires_grad_(False), num_workers=1)


def test_what_is_sent_may_be_only_what_is_selected(yard: Yard) -> None:  # noqa: F811
    source = Frozen(1)
    procs = yard.procs(source, [Frozen(2)], patches("trainable"))
    given = {"head.weight": torch.randn(4, 256), "head.bias": torch.randn(4), "steps": torch.ones(3)}
    assert procs.scheme.send(given).encoding == "patch"
    source.load_state_dict({**source.state_dict(), **given})
    same(procs, source)
    with pytest.raises(SchemaMismatchError, match="steps"):
        procs.scheme.send({name: value for name, value in given.items() if name != "steps"})
    same(procs, source)


@pytest.mark.parametrize("encoding", ["dense", "bucket"])
def test_whole_updates_leave_other_weights_alone(one_yard: Yard, encoding: str) -> None:  # noqa: F811
    source, target = Frozen(1), Frozen(2)
    procs = one_yard.procs(source, [target], WeightStrategy(encoding=encoding, select=["head"]))
    expected = copy.deepcopy(target)
    for step in range(3):
        expected.head = source.head
        same(procs, expected)
        poke(source.head, step)
        assert procs.scheme.send().dense_bytes == sum(4 * one.numel() for one in source.head.parameters())


# -- conversion and dtypes -----------------------------------------------------------------------------


def renamed(items: Iterator[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in items:
        if name == "body.weight":
            yield "policy.upper", value[:128]
            yield "policy.lower", value[128:]
        else:
            yield f"policy.{name}", value


def test_weights_renamed_and_split(yard: Yard) -> None:  # noqa: F811
    source = Frozen(1)
    procs = yard.procs(source, [dict(_renamed(Frozen(2)))], patches(["head", "body.weight"], renamed))
    expected = _renamed(source)
    same(procs, expected)
    scramble(source, 3, finite=True)
    report = procs.scheme.send()
    assert report.encoding == "bucket"
    poke(source, 4)
    assert procs.scheme.send().encoding == "patch"
    chosen = ("policy.head", "policy.upper", "policy.lower")
    expected.update({name: value for name, value in _renamed(source).items() if name.startswith(chosen)})
    same(procs, expected)


def _renamed(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = WeightStrategy().named(model).tensors
    return {name: value.detach().clone() for name, value in renamed(iter(tensors.items()))}


def test_each_worker_gets_its_own_dtype(yard: Yard) -> None:  # noqa: F811
    source = net(1)
    procs = yard.procs(source, [net(2), cast(net(3)), cast(net(4), torch.float16)])
    for step in range(3):
        same(procs, source, cast(source), cast(source, torch.float16))
        poke(source, step)
        report = procs.scheme.send()
        assert report.encoding == "patch"
        assert report.dense_bytes == sum((4 + 2 + 2) * one.numel() for one in source.parameters())
    same(procs, source, cast(source), cast(source, torch.float16))


def test_half_the_bytes_for_half_the_dtype(one_yard: Yard) -> None:  # noqa: F811
    reports = {}
    for dtype in (torch.float32, BF16):
        source = net(1)
        procs = one_yard.procs(source, [cast(net(2), dtype)])
        poke(source, 3, 0.1)
        reports[dtype] = procs.scheme.send()
        same(procs, cast(source, dtype))
    full, half = reports[torch.float32], reports[BF16]
    assert half.dense_bytes * 2 == full.dense_bytes
    assert half.wire_bytes < 0.7 * full.wire_bytes  # positions cost the same


def test_a_change_too_small_for_the_dtype_is_none(one_yard: Yard) -> None:  # noqa: F811
    source = net(1)
    procs = one_yard.procs(source, [cast(net(2))])
    with torch.no_grad():
        source[0].weight.mul_(1 + 1e-7)
    assert procs.scheme.send().changed_fraction < 0.01
    same(procs, cast(source))


@pytest.mark.parametrize("stable", [False, slow(True)], ids=["pointing", "copying"])
def test_a_late_worker_of_another_dtype(yard: Yard, stable: bool) -> None:  # noqa: F811
    source = net(1)
    procs = yard.procs(source, [net(2), cast(net(3))], connect=False, stable_addresses=stable)
    procs.workers[0].post("connect")
    with pytest.raises(SyncTimeoutError):
        procs.scheme.connect(timeout=0.5)
    procs.workers[0].answer()
    poke(source, 3)
    procs.scheme.send(worker_ids=0)
    procs.workers[1].call("connect")
    for step in range(3):
        poke(source, step)
        assert procs.scheme.send().encoding == "patch"
        same(procs, source, cast(source))


def test_a_worker_that_comes_back_with_another_dtype(yard: Yard) -> None:  # noqa: F811
    """The trainer has only half-precision copies: what it needs comes with the next update."""
    if yard._method == "thread":
        pytest.skip("a link in memory ends with its worker")
    scheme, source = yard.scheme(timeout=2.0), net(1)
    group_schemes([scheme])
    procs = yard.start(scheme, source, [cast(net(2)), cast(net(3))])
    for dtype, send in (
        (torch.float32, scheme.send),
        (torch.float16, lambda: send_together({scheme: None})),
    ):
        procs.workers.pop(0).stop()
        procs.hire(0, cast(net(4), dtype)).post("connect")
        procs.workers.reverse()
        poke(source, 5)
        deadline = time.monotonic() + 10.0
        while procs.workers[0].busy():
            assert time.monotonic() < deadline
            with contextlib.suppress(SyncFailedError):  # it may not be there yet
                send()
        procs.workers[0].answer()
        for step in range(2):
            poke(source, step)
            scheme.send()
            same(procs, cast(source, dtype), cast(source))


# -- configuration -------------------------------------------------------------------------------------

PATCH = {
    "type": "patch",
    "patch": {
        "snapshot_device": "cpu",
        "transport_device": "cpu",
        "delta_encoding": True,
        "compression": "none",
        "init_sync": {"enabled": True, "prefixes": None, "bucket_size": 134217728},
    },
}
BUCKET = {
    "type": "bucket",
    "bucket": {
        "bucket_size": 536870912,
        "bucket_dtype": None,
        "bucket_device": "cpu",
        "is_agent": False,
        "load_instant": True,
    },
}


@pytest.mark.parametrize(
    "config", [PATCH, BUCKET, {"weight_syncer": PATCH}], ids=["patch", "bucket", "around"]
)
def test_a_configuration_of_rlinf(one_yard: Yard, config: dict[str, Any]) -> None:  # noqa: F811
    strategy = WeightStrategy.from_config(config)
    assert (strategy.extract_as, strategy.select) == ("state_dict", "trainable")
    kind = BucketEncoding if config is BUCKET else PatchEncoding
    assert isinstance(strategy.encoding, kind)
    source, target = Frozen(1), Frozen(2)
    target.body.load_state_dict(source.body.state_dict())
    procs = one_yard.procs(source, [target], strategy)
    poke(source.head, 3)
    report = procs.scheme.send()
    assert report.encoding == ("bucket" if config is BUCKET else "patch")
    assert procs.ask("fingerprint") == [fingerprint(source, strategy)]


@pytest.mark.parametrize("config", [PATCH, BUCKET], ids=["patch", "bucket"])
def test_options_of_collective_groups_are_accepted_and_change_nothing(config: dict[str, Any]) -> None:
    shared = {"use_ring_sync": True, "nccl_max_ctas": 16, "nccl_min_ctas": 1}
    with pytest.warns(
        UserWarning, match="use_ring_sync, nccl_max_ctas, nccl_min_ctas .* change nothing here"
    ):
        strategy = WeightStrategy.from_config({**config, **shared})
    assert strategy.encoding == WeightStrategy.from_config(config).encoding


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_short_names_of_dtypes(short: str, dtype: torch.dtype) -> None:
    encoding = WeightStrategy.from_config({"type": "bucket", "bucket": {"bucket_dtype": short}}).encoding
    assert isinstance(encoding, BucketEncoding)
    assert encoding.dtype == dtype
    assert encoding == BucketEncoding(bucket_dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "patch", "patches": {}}, "patches.*known: type, patch, bucket"),
        ({"type": "full"}, "'full'.*known: patch, bucket"),
        ({}, "None.*known: patch, bucket"),
        ({"type": "patch", "patch": {"delta": True}}, "delta.*delta_encoding"),
        ({"type": "patch", "patch": {"compression": "gzip"}}, "gzip.*lz4"),
        ({"type": "patch", "patch": {"snapshot_device": "tpu"}}, "tpu.*cpu, cuda"),
        ({"type": "patch", "patch": {"transport_device": 3}}, "3.*cpu, cuda"),
        ({"type": "patch", "patch": {"delta_encoding": "yes"}}, "delta_encoding.*'yes'"),
        ({"type": "patch", "patch": {"init_sync": {"on": True}}}, "on.*enabled, prefixes, bucket_size"),
        ({"type": "patch", "patch": {"init_sync": True}}, "init_sync"),
        ({"type": "patch", "patch": {"init_sync": {"enabled": "no"}}}, "init_sync.*'no'"),
        ({"type": "patch", "patch": {"init_sync": {"prefixes": "head"}}}, "list of prefixes.*'head'"),
        ({"type": "patch", "patch": {"init_sync": {"bucket_size": 0}}}, "bucket_size.*0"),
        ({"type": "patch", "patch": {"init_sync": {"bucket_size": "128M"}}}, "bucket_size.*'128M'"),
        ({"type": "bucket", "bucket": {"size": 1}}, "size.*bucket_size"),
        ({"type": "bucket", "bucket": {"bucket_size": "1G"}}, "bucket_size.*'1G'"),
        ({"type": "bucket", "bucket": {"bucket_dtype": "int8"}}, "int8.*bfloat16"),
        ({"type": "bucket", "bucket": {"bucket_device": "tpu"}}, "tpu"),
        ({"type": "bucket", "bucket": {"load_instant": "false"}}, "load_instant.*'false'"),
        ({"type": "bucket", "bucket": {"is_agent": True}}, "convert"),
    ],
)
def test_a_wrong_configuration_says_what_is_known(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightStrategy.from_config(config)
