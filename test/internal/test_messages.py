"""Messages and signatures: errors name the cure, reports show the update, options can be listed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from pairs import connect_pair
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import weight_update
from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MemoryWeightSyncScheme,
    PatchEncoding,
    RPCWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
    testing,
)

SCHEMES = [
    one
    for one in vars(weight_update).values()
    if issubclass(type(one), type)  # Python 3.10 takes Callable[...] for an instance of type
    and issubclass(one, WeightSyncScheme)
    and one.__name__ != "NoWeightSyncScheme"
]


@pytest.fixture
def connected() -> Iterator[Callable[..., MemoryWeightSyncScheme]]:
    """Return a function that connects a sender and one receiver in this process."""
    with ExitStack() as stack:

        def connect(source: nn.Module, target: nn.Module, strategy: Any = "state_dict") -> Any:
            sender = stack.enter_context(MemoryWeightSyncScheme(strategy, connect_timeout=10.0))
            stack.enter_context(connect_pair(sender, source, target))
            return sender

        yield connect


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("method", ["__init__", "init_on_sender", "init_on_receiver", "connect", "send"])
def test_signatures_list_their_options(scheme: type[WeightSyncScheme], method: str) -> None:
    parameters = inspect.signature(getattr(scheme, method)).parameters
    assert [one.name for one in parameters.values() if one.kind is one.VAR_KEYWORD] == []
    if method == "__init__":
        for name, option in inspect.signature(WeightSyncScheme).parameters.items():
            assert parameters[name].default == option.default, name


NO_TIMES = [
    ("60", TypeError),
    (True, TypeError),
    (0, ValueError),
    (-1.0, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
]


@pytest.mark.parametrize("option", ["timeout", "connect_timeout"])
@pytest.mark.parametrize(("given", "kind"), [(None, TypeError), *NO_TIMES])
def test_a_timeout_is_a_number_of_seconds(option: str, given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"^{option} is a .*number of seconds.*got {given!r}"):
        SharedMemWeightSyncScheme(**{option: given})


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, RPCWeightSyncScheme])
@pytest.mark.parametrize(("given", "kind"), NO_TIMES)
def test_the_timeout_of_connect_is_a_number_of_seconds(
    scheme: type[WeightSyncScheme], given: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"^timeout is a .*number of seconds.*got {given!r}"):
        scheme().connect(timeout=given)


@pytest.mark.parametrize("number", [np.float32, np.int64, Fraction])
def test_a_timeout_may_be_any_real_number(number: Callable[[int], Any]) -> None:
    sender = MemoryWeightSyncScheme(timeout=number(5), connect_timeout=number(10))
    receiver = copy.copy(sender)
    with ExitStack() as stack:
        for scheme in (sender, receiver):
            stack.callback(scheme.shutdown)
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
        with ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(receiver.connect, timeout=number(20))
            sender.connect(timeout=number(20))
            theirs.result()
        assert sender.send().version == 1


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict", WeightStrategy()], ids=str)
def test_a_strategy_in_the_place_of_the_backend(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"first argument is the backend.*strategy="):
        DistributedWeightSyncScheme(strategy)


def test_a_scheme_that_was_made_in_the_worker() -> None:
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
    with pytest.raises(
        LifecycleError, match=r"pass it to the worker after init_on_sender\(\), or give address="
    ):
        scheme.connect(timeout=1.0)


def test_a_compiled_model_is_recognized(connected: Callable[..., MemoryWeightSyncScheme]) -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it imports its compiler
        compiled = torch.compile(model)
    with pytest.raises(SchemaMismatchError, match=r"names of worker 0 contain _orig_mod\..*was wrapped"):
        connected(model, compiled)


def test_a_wrapped_model_is_recognized_in_send(connected: Callable[..., MemoryWeightSyncScheme]) -> None:
    model = nn.Linear(2, 2)
    scheme = connected(model, copy.deepcopy(model))
    wrapped = nn.DataParallel(model)
    with pytest.raises(
        SchemaMismatchError, match=r"names of the weights given contain module\..*was wrapped"
    ):
        scheme.send(wrapped)
    with pytest.raises(SchemaMismatchError) as other:
        scheme.send(nn.Linear(3, 3))
    assert "wrapped" not in str(other.value)


def test_activation_checkpointing_is_recognized(connected: Callable[..., MemoryWeightSyncScheme]) -> None:
    source = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))  # type: ignore[no-untyped-call]
    with pytest.raises(
        SchemaMismatchError, match=r"sender contain _checkpoint_wrapped_module\..*was wrapped"
    ):
        connected(source, nn.Sequential(nn.Linear(2, 2)), "tensordict")


def test_a_wrapper_around_a_tensordict_module_is_recognized(
    connected: Callable[..., MemoryWeightSyncScheme],
) -> None:
    policy = TensorDictModule(nn.Linear(2, 2), in_keys=["observation"], out_keys=["action"])
    scheme = connected(policy, copy.deepcopy(policy))
    with pytest.raises(
        SchemaMismatchError, match=r"names of the weights given contain module\.,.*was wrapped"
    ):
        scheme.send(nn.DataParallel(policy))


def test_a_report_of_a_patch_says_what_changed(connected: Callable[..., MemoryWeightSyncScheme]) -> None:
    pytest.importorskip("zstandard")
    model = nn.Linear(256, 256, bias=False)
    strategy = WeightStrategy("state_dict", encoding=PatchEncoding(compression="zstd"))
    scheme = connected(model, copy.deepcopy(model), strategy)
    with torch.no_grad():
        model.weight[0] += 1
    report = scheme.send()
    assert report.compression == "zstd"
    text = str(report)
    assert text.startswith("version 1: patch (zstd), ")
    assert f"of 262 kB ({1 / 256:.2%} changed), applied by 1 worker, longest stall " in text
    with torch.no_grad():
        model.weight += 1
    assert scheme.send().compression == ""


def test_a_report_says_how_long_the_longest_stall_was() -> None:
    report = SyncReport(3, "dense", dense_bytes=8, wire_bytes=8, stall_seconds={0: 0.001, 1: 0.0125})
    assert str(report) == "version 3: dense, 8 B, longest stall 12.50 ms"


def test_reports_of_several_models_are_as_short_as_one() -> None:
    report = SyncReport(3, "dense", wire_bytes=8, seconds={"encode": 1 / 3000})
    assert repr({"actor": report}) == f"{{'actor': SyncReport({report})}}"
    assert repr(report) == "SyncReport(version 3: dense, 8 B; took 0.33 ms (encode 0.33))"


@pytest.mark.parametrize(
    ("contract", "method"),
    [
        (testing.TransportContract, "make_ends"),
        (testing.EncodingContract, "make_encoding"),
        (testing.CompressionContract, "make_compression"),
        (testing.StrategyContract, "make_strategy"),
        (testing.SchemeContract, "make_scheme"),
        (testing.LateJoinerContract, "make_scheme"),
    ],
)
def test_a_contract_says_which_method_is_missing(contract: type, method: str) -> None:
    unfinished = type("TestMine", (contract,), {})()
    with pytest.raises(NotImplementedError, match=rf"write TestMine\.{method}\(self.*\): it returns "):
        getattr(unfinished, method)()
