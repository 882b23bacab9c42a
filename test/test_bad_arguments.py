"""Errors for arguments that cannot work: each names the argument and a cure."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults_tools import Processes, Worker, WorkerRaised, join, version_of
from pairs import connect_pair
from tensordict import TensorDict
from torch import nn

from weight_update import (
    BucketEncoding,
    DenseEncoding,
    DistributedWeightSyncScheme,
    ExplorerClient,
    InferenceEngine,
    JoinRefusedError,
    LifecycleError,
    LinkClosedError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    PatchEncoding,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SchemaMismatchError,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    Synchronizer,
    SyncTimeoutError,
    TrainerClient,
    TransportBackend,
    UnknownWorkerError,
    UnsupportedSourceError,
    WeightStrategy,
    WeightSyncScheme,
    WholeEncoding,
    group_schemes,
    register_compression,
    register_encoding,
    send_together,
)
from weight_update.compression import AnsCompression, Compression, NoCompression
from weight_update.convert import cast, gather_tensor_parallel
from weight_update.encodings import base as encodings
from weight_update.observers import ChromeTraceObserver, CsvObserver, LogObserver, PrometheusObserver
from weight_update.receiver.gate import Gate
from weight_update.schemes.base import End
from weight_update.synchronizer import CheckpointStore
from weight_update.testing.models import Brittle


@pytest.mark.parametrize("number", [-1, 1.5, "2"])
def test_number_of_workers(number: Any) -> None:
    with pytest.raises(ValueError, match=rf"num_workers is an integer of at least 0, not {number!r}"):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), num_workers=number)


@pytest.mark.parametrize(
    "kind",
    [
        DistributedWeightSyncScheme,
        MemoryWeightSyncScheme,
        MultiProcessWeightSyncScheme,
        NoWeightSyncScheme,
        SharedMemWeightSyncScheme,
    ],
)
def test_a_scheme_that_does_not_initialize_its_base(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tag = "mine"

    model, message = nn.Linear(2, 2), r"^Mine\.__init__\(\) has to call super\(\)\.__init__\(\)$"
    with Mine() as scheme, pytest.raises(LifecycleError, match=message):
        scheme.init_on_sender(model=model, num_workers=1)
    with Mine() as scheme, pytest.raises(LifecycleError, match=message):
        scheme.init_on_receiver(model=model, worker_idx=0)


@pytest.mark.parametrize(
    "kind",
    [
        DistributedWeightSyncScheme,
        MemoryWeightSyncScheme,
        MultiProcessWeightSyncScheme,
        RPCWeightSyncScheme,
        SharedMemWeightSyncScheme,
    ],
)
def test_an_option_that_a_scheme_does_not_take(kind: Any) -> None:
    name = kind.__name__
    with pytest.raises(
        TypeError, match=rf"{name}\(\) takes no encoding, select: .*=WeightStrategy\(encoding="
    ):
        kind(encoding="patch", select="trainable")
    with pytest.raises(TypeError, match=rf"{name}\(\) takes no timeuot: .* sync, .*timeout, connect_timeout"):
        kind(timeuot=3.0)


def test_a_converter_that_cannot_be_pickled_to_a_worker() -> None:
    strategy = WeightStrategy("state_dict", convert=lambda weights: weights)
    with SharedMemWeightSyncScheme(strategy) as scheme:
        process = multiprocessing.get_context("spawn").Process(target=repr, args=(scheme,))
        message = (
            r"Can't .*<lambda>.*: call init_on_sender\(\) before the workers start.* or give convert= a func"
        )
        with pytest.raises(LifecycleError, match=message):
            process.start()
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        assert pickle.loads(pickle.dumps(scheme)).strategy.convert is None
        forked = multiprocessing.get_context("fork").Process(target=pickle.dumps, args=(scheme,))
        forked.start()
        forked.join()
        assert forked.exitcode == 0


def test_a_way_of_gathering_without_its_options() -> None:
    with pytest.raises(ValueError, match=r"gather= takes a GatherShards, .*\(gather=function\), not partial"):
        WeightStrategy(gather=gather_tensor_parallel())  # type: ignore[arg-type]


def test_the_name_of_a_start_method_instead_of_a_context() -> None:
    with pytest.raises(TypeError, match=r"give ctx= a context, .*get_context\(\) returns, not .* type str"):
        MultiProcessWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), num_workers=1, ctx="spawn")


def test_no_workers() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="of MultiProcessWeightSyncScheme cannot join later; give their num"):
        MultiProcessWeightSyncScheme().init_on_sender(model=model, num_workers=0)
    with pytest.raises(ValueError, match="device_map_fn needs workers from the start: give num_workers"):
        SharedMemWeightSyncScheme().init_on_sender(
            model=model, num_workers=0, device_map_fn=lambda idx, weights: weights
        )
    with pytest.raises(ValueError, match="num_workers is an integer of at least 1, not 0"):
        SharedMemWeightSyncScheme().init_on_sender(context=Context(), model_id="policy", num_workers=0)


def test_a_transport_that_cannot_be_made_leaves_no_listener() -> None:
    class Fails(SharedMemWeightSyncScheme):
        def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
            raise ZeroDivisionError(f"no memory for worker {worker_idx}")

    before = len(os.listdir("/proc/self/fd"))
    scheme = Fails()
    with pytest.raises(ZeroDivisionError, match="no memory for worker -1"):
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("indices", [[], ["0"], [-1], [-1, 0]])
def test_indices_of_a_params_map(indices: list[Any]) -> None:
    with pytest.raises(ValueError, match="params_map maps worker indices"):
        SharedMemWeightSyncScheme().init_on_sender(params_map=dict.fromkeys(indices, nn.Linear(2, 2)))


class Context:
    policy = nn.Linear(2, 2)


def test_number_of_workers_beside_devices() -> None:
    with pytest.raises(ValueError, match="num_workers=3 does not go with 1 device; give one for each worker"):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), num_workers=3, devices=["cpu"])
    with pytest.raises(ValueError, match="does not go with 0 devices"):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), devices=[])


@pytest.mark.parametrize("index", [-1, 1.0, "0", True])
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, DistributedWeightSyncScheme])
def test_index_of_a_worker(kind: type[WeightSyncScheme], index: Any) -> None:
    with pytest.raises(ValueError, match=rf"worker_idx is an integer of at least 0, not {index!r}"):
        kind().init_on_receiver(model=nn.Linear(2, 2), worker_idx=index)
    receiver = kind()
    receiver.init_on_receiver(model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="worker_idx is an integer"):
        receiver.connect(worker_idx=index)


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_calls_after_shutdown(scheme: type[WeightSyncScheme]) -> None:
    sender = scheme()
    sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    sender.shutdown()
    for call in (sender.connect, sender.send, partial(sender.init_on_sender, model=nn.Linear(2, 2))):
        with pytest.raises(LifecycleError, match="was shut down; make a new scheme"):
            call()


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1, "1"])
def test_a_timeout_that_nobody_can_wait(timeout: Any) -> None:
    sender = SharedMemWeightSyncScheme()
    with sender, connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2)) as receiver:
        handle = sender.send_async()
        for wait in (handle.wait, receiver.receive):
            with pytest.raises((TypeError, ValueError), match="timeout is a number of seconds"):
                wait(timeout)
        assert handle.wait(10.0).version == 1


@pytest.mark.parametrize(
    "kind", [MemoryWeightSyncScheme, SharedMemWeightSyncScheme, DistributedWeightSyncScheme]
)
def test_a_timeout_of_years(kind: type[WeightSyncScheme]) -> None:
    sender, years = kind(timeout=1e9, connect_timeout=1e9), 1e9
    with sender, connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2)) as receiver:
        assert sender.send().version == 1
        assert sender.send_async().wait(years).version == 2
        assert receiver.receive(years) is not None


def test_extra_state_that_fits_into_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_update.wire.frames.MAX_HEADER_BYTES", 1 << 16)
    source, target, sender = Brittle(1), Brittle(2), SharedMemWeightSyncScheme(timeout=10.0)
    with sender, connect_pair(sender, source, target):
        source.note = "x" * (1 << 16)
        with pytest.raises(UnsupportedSourceError, match=r"65\.6 kB of extra state do not fit"):
            sender.send()
        source.note = "short"
        sender.send()
        assert target.note == "short"


@pytest.mark.parametrize("option", ["lease", "transfer_timeout"])
@pytest.mark.parametrize("seconds", [0, -5, None])
def test_a_synchronizer_that_cannot_wait(option: str, seconds: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{option} is a (positive )?number of seconds"):
        Synchronizer("memory", **{option: seconds})


@pytest.mark.parametrize("client", [TrainerClient, ExplorerClient])
@pytest.mark.parametrize("option", ["timeout", "transfer_timeout"])
@pytest.mark.parametrize("seconds", [0, float("nan"), None, "1"])
def test_a_client_that_cannot_wait(client: Any, option: str, seconds: Any) -> None:
    with (
        Synchronizer("memory") as where,
        pytest.raises((TypeError, ValueError), match=f"{option} is a (positive )?number of seconds"),
    ):
        client(where, nn.Linear(2, 2), **{option: seconds})


@pytest.mark.parametrize("client", [TrainerClient, ExplorerClient])
@pytest.mark.parametrize("where", [5, None, nn.Linear(2, 2)])
def test_a_client_of_something_that_is_no_synchronizer(client: Any, where: Any) -> None:
    with pytest.raises(TypeError, match=r"a client takes a Synchronizer, .*'host:port', .*, got "):
        client(where, nn.Linear(2, 2))


@pytest.mark.parametrize("number", [-1, 1.0, "a", False])
def test_the_id_of_an_explorer(number: Any) -> None:
    message = f"id is an integer of at least 0, not {number!r}"
    with Synchronizer("memory") as where, pytest.raises(ValueError, match=message):
        ExplorerClient(where, nn.Linear(2, 2), id=number)


@pytest.mark.parametrize("workers", [5, object(), threading.current_thread()])
def test_worker_alive_without_processes(workers: Any) -> None:
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(TypeError, match="worker_alive takes a list or dict of processes, or a function"):
            scheme.worker_alive = workers
        assert scheme.worker_alive is None
        scheme.worker_alive = [workers]
        if not hasattr(workers, "is_alive"):
            with pytest.raises(TypeError, match="worker_alive takes processes or a function"):
                scheme.connect(timeout=1.0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            [nn.Linear(2, 2)],
            "cannot write weights into an object of type list; give an nn.Module, a TensorDict or a dict",
        ),
        (nn.Linear, r"Linear is a class; give an instance: Linear\(...\)"),
        (lambda: nn.Linear(2, 2), "cannot write weights into an object of type function"),
    ],
)
def test_a_model_that_cannot_take_weights(model: Any, message: str) -> None:
    with SharedMemWeightSyncScheme() as scheme:
        with pytest.raises(UnsupportedSourceError, match=message):
            scheme.init_on_receiver(model=model, worker_idx=0)
        scheme.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)


@pytest.mark.parametrize("make", [dict, lambda entries: TensorDict(entries)], ids=["dict", "TensorDict"])
def test_a_target_with_two_entries_of_one_name(make: Callable[[dict[str, Any]], Any]) -> None:
    target = make({"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}})
    message = r"'a\.b' is the name of two different entries of the target"
    with pytest.raises(UnsupportedSourceError, match=message):
        WeightStrategy().apply_weights(target, {"a": {"b": torch.ones(2)}})
    assert not target["a.b"].any()
    assert not target["a"]["b"].any()


def test_guarding_something_that_cannot_be_called() -> None:
    with pytest.raises(TypeError, match=r"guarded\(\) takes a function or a module, not 3"):
        Gate().guarded(3)  # type: ignore[type-var]


@pytest.mark.parametrize("token", ["", 5, b"x"])
def test_a_token_that_is_no_secret(token: Any) -> None:
    for make in (SharedMemWeightSyncScheme, DistributedWeightSyncScheme, Synchronizer("memory").serve):
        with pytest.raises((TypeError, ValueError), match=r"token is (empty|a string)"):
            make(token=token)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", None, 5])
@pytest.mark.parametrize("kind", [DistributedWeightSyncScheme, RayWeightSyncScheme])
def test_an_address_that_no_worker_can_connect_to(kind: type[WeightSyncScheme], address: Any) -> None:
    options: dict[str, Any] = {"address": address}
    with pytest.raises(
        (TypeError, ValueError), match=r"address=.* all interfaces.*; give|address is a string"
    ):
        kind(**options)


@pytest.mark.parametrize("address", ["10.0.0.5:29650", "http://trainer", "[::1]"])
def test_an_address_with_a_port(address: str) -> None:
    for make in (DistributedWeightSyncScheme, Synchronizer("memory").serve):
        with pytest.raises(ValueError, match="no name or address of a machine; leave the port out, or give"):
            make(address=address)


@pytest.mark.parametrize("where", ["http://127.0.0.1:29650", "127.0.0.1:29650/", "127.0.0.1"])
def test_a_synchronizer_by_another_kind_of_address(where: str) -> None:
    with pytest.raises(ValueError, match=f"a synchronizer's address is host:port, got {where!r}"):
        TrainerClient(where, nn.Linear(2, 2), token="t")


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ValueError, match=r"directory=.*taken' is a file; give a directory"):
        Synchronizer("checkpoint", directory=tmp_path / "taken")


def test_checkpoints_without_a_directory() -> None:
    with pytest.raises(ValueError, match=r"SyncMethod.CHECKPOINT needs directory="):
        Synchronizer("checkpoint")


@pytest.mark.parametrize("kind", [CheckpointStore, partial(Synchronizer, "checkpoint")])
def test_a_directory_that_is_a_url(
    kind: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"'s3://bucket/run' is a URL; give a directory .* or use ObjectStore"
    ):
        kind(directory="s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["3", 1.5, None, -1])
def test_a_version_to_continue_from(version: Any) -> None:
    sender = SharedMemWeightSyncScheme()
    with sender, connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"version is an integer of at least 0, not {version!r}"):
            sender.continue_from(version)
        sender.continue_from(7)
        assert sender.send().version == 8


@pytest.mark.parametrize("option", ["sync", "stable_addresses"])
@pytest.mark.parametrize("given", ["no", None, 1])
def test_an_option_that_is_neither_true_nor_false(option: str, given: Any) -> None:
    options: dict[str, Any] = {option: given}
    with pytest.raises(ValueError, match=f"{option} is True or False, got {given!r}"):
        SharedMemWeightSyncScheme(**options)


@pytest.mark.parametrize(
    ("register", "base", "taken"),
    [
        (register_encoding, WholeEncoding, DenseEncoding),
        (register_compression, Compression, AnsCompression),
    ],
)
def test_a_name_that_is_taken_or_missing(register: Any, base: type, taken: Any) -> None:
    another, nameless = type("Another", (base,), {"name": taken.name}), type("Nameless", (base,), {})
    message = f"'{taken.name}' of Another is taken by {taken.__name__}; choose another"
    with pytest.raises(ValueError, match=message):
        register(another)
    with pytest.raises(ValueError, match="Nameless needs a class attribute name"):
        register(nameless)


@pytest.mark.parametrize("name", ["a_long_compression/1", "größe/1"])
def test_a_name_of_a_compression_that_does_not_fit_into_a_patch(name: str) -> None:
    with pytest.raises(ValueError, match=f"a compression has at most 15 ASCII characters: '{name}'"):
        register_compression(type("Mine", (Compression,), {"name": name}))


def test_a_class_instead_of_an_object() -> None:
    message = r"^{0} is a class; give an instance: {0}\(...\)$"
    with pytest.raises(TypeError, match=message.format("PatchEncoding")):
        WeightStrategy(encoding=PatchEncoding)
    with pytest.raises(TypeError, match=message.format("AnsCompression")):
        PatchEncoding(compression=AnsCompression)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message.format("WeightStrategy")):
        SharedMemWeightSyncScheme(strategy=WeightStrategy)  # type: ignore[arg-type]


def test_an_unknown_method_of_a_synchronizer() -> None:
    with pytest.raises(ValueError, match=r"unknown SyncMethod 'mem' .known: 'nccl', 'memory', 'checkpoint'"):
        Synchronizer("mem", "fixed")


def test_extra_state_under_another_name(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedSourceError, match="whose last part is '_extra_state', such as"):
        CheckpointStore(tmp_path).publish(0, {"weight": torch.ones(2), "my_extra_state": 3}, step=0)


@pytest.mark.parametrize("port", [-1, 65536, "80"])
def test_a_number_that_is_no_port(port: Any) -> None:
    message = rf"port is an integer from 0 to 65535, not {port!r}"
    with pytest.raises(ValueError, match=message):
        DistributedWeightSyncScheme(port=port)
    with pytest.raises(ValueError, match=message):
        PrometheusObserver(port=port)
    with Synchronizer("memory", "trainer_driven") as synchronizer, pytest.raises(ValueError, match=message):
        synchronizer.serve(port=port)
    if port == 65536:
        with pytest.raises(ValueError, match=message):
            TrainerClient(f"127.0.0.1:{port}", nn.Linear(2, 2), token="secret")


@pytest.mark.parametrize("weights", [nn.Linear(2, 2), [torch.ones(2)], None, {0: torch.ones(2)}])
def test_a_checkpoint_of_other_things_than_a_dict(weights: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSourceError, match=r"a dict of tensors by name, such as module.state_dict"):
        CheckpointStore(tmp_path).publish(0, weights, step=0)


def test_a_checkpoint_without_values(tmp_path: Path) -> None:
    store, hollow = CheckpointStore(tmp_path), nn.Linear(2, 2, device="meta")
    with pytest.raises(UnsupportedSourceError, match=r"on the meta device, .*: weight, bias"):
        store.publish(0, hollow.state_dict(), step=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [1.0, "1", True, torch.tensor(1), {"a": torch.ones(99)}])
def test_a_checkpoint_with_a_number_that_is_no_int(number: Any, tmp_path: Path) -> None:
    """Readers would not find its file."""
    store, weights = CheckpointStore(tmp_path), {"weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"version is an integer from 0 to .*, not .{1,40}$"):
        store.publish(number, weights, step=0)
    with pytest.raises(ValueError, match=r"step is an integer of at least 0, not .{1,40}$"):
        store.publish(0, weights, step=number)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_with_numbers_of_numpy(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=np.int64(1), lease_seconds=np.float32(60.0))
    store.publish(np.int64(2), {"weight": torch.ones(2)}, step=np.int64(3))
    newest = store.wait_newer(np.int64(1), np.float64(0.0))
    assert newest is not None
    assert (newest.version, newest.step) == (2, 3)
    with store.reading(np.int64(2)) as weights:
        assert (weights["weight"] == 1).all()


def test_a_checkpoint_that_was_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for version in range(2):
        store.publish(version, {"weight": torch.ones(2)}, step=0)
    for version in (0, 99):
        message = (
            rf"no version {version} in {tmp_path} \(it was removed, or never published\); latest\(\) gives "
            "the newest$"
        )
        with pytest.raises(FileNotFoundError, match=message), store.reading(version):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
@pytest.mark.parametrize(
    "strategy",
    [
        WeightStrategy(encoding=BucketEncoding(bucket_device="cuda")),
        WeightStrategy(encoding=BucketEncoding(bucket_device="cuda"), max_in_flight=2),
        WeightStrategy(encoding=PatchEncoding(snapshot_device="cuda")),
    ],
    ids=["buckets", "in flight", "snapshot"],
)
def test_a_device_that_the_machine_lacks(strategy: WeightStrategy) -> None:
    with pytest.raises(ValueError, match=r"_device='cuda' needs a CUDA device; .*'cpu' here"):
        SharedMemWeightSyncScheme(strategy).init_on_sender(model=nn.Linear(2, 2), num_workers=1)


class NeedsCuda(NoCompression):
    device = "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_compression_on_a_gpu_that_the_machine_lacks() -> None:
    """The encoding itself may be made anywhere; without compression, the transport device does not matter."""
    compressed = PatchEncoding(transport_device="cuda", compression=NeedsCuda())
    message = "compression='none' works on a GPU, and there is no CUDA device here; .*_device='cpu'$"
    with pytest.raises(ValueError, match=message):
        SharedMemWeightSyncScheme(WeightStrategy(encoding=compressed)).init_on_sender(
            model=nn.Linear(2, 2), num_workers=1
        )
    strategy, model = WeightStrategy(encoding=PatchEncoding(transport_device="cuda")), nn.Linear(64, 64)
    with MemoryWeightSyncScheme(strategy) as scheme, connect_pair(scheme, model, nn.Linear(64, 64)):
        with torch.no_grad():
            model.weight[0, 0] += 1.0
        assert scheme.send().encoding == "patch"


@pytest.mark.parametrize("size", [1e6, 63, "1 MB"])
def test_a_size_that_is_no_integer(size: Any) -> None:
    with pytest.raises(ValueError, match=r"bucket_size is an integer number of bytes, at least 64: "):
        BucketEncoding(bucket_size=size)


@pytest.mark.parametrize("given", ["patch", "state_dict", PatchEncoding(), WeightStrategy(), 600.0, None])
def test_something_else_in_the_place_of_the_backend(given: Any) -> None:
    shown = repr(given) if isinstance(given, str) else f"of type {type(given).__name__}"
    message = (
        rf"^unknown backend {shown} \(known: 'gloo', 'nccl'\); the first argument is the backend, as in "
        "TorchRL: give a strategy by name, such as strategy='state_dict' or "
    )
    with pytest.raises(ValueError, match=message):
        DistributedWeightSyncScheme(given)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    scheme = SharedMemWeightSyncScheme(directory=str(missing))
    message = (
        rf"cannot keep shared memory in directory='{missing}' \(No such .*; give .* leave directory= out$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    message = rf"cannot write path='{missing}' \(No such .*; give path= a file in a directory that exi"
    for observer in (CsvObserver, ChromeTraceObserver):
        with pytest.raises(FileNotFoundError, match=message):
            observer(missing)


def test_a_timeout_in_the_place_of_the_strategy() -> None:
    scheme = DistributedWeightSyncScheme("gloo", True, 600, address="127.0.0.1")
    assert (scheme.timeout, scheme.strategy_str) == (600.0, "tensordict")
    with pytest.raises(TypeError, match="multiple values for keyword argument 'timeout'"):
        DistributedWeightSyncScheme("gloo", True, 600.0, timeout=60.0)
    with pytest.raises(ValueError, match="timeout is a positive number of seconds"):
        DistributedWeightSyncScheme("gloo", True, 0.0)


@contextmanager
def connected_thread(
    kind: type[WeightSyncScheme], source: nn.Module, target: nn.Module
) -> Iterator[WeightSyncScheme]:
    """Connect a sender and one receiver, both in this process."""
    with kind(timeout=10.0, connect_timeout=10.0) as sender, connect_pair(sender, source, target):
        yield sender


def test_devices_of_workers_that_are_not_known() -> None:
    message = "give init_on_sender devices= beside model= or weights=, or the collector policy_device="
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    with (
        connected_thread(MemoryWeightSyncScheme, *models) as sender,
        pytest.raises(UnknownWorkerError, match=message),
    ):
        sender.send(worker_ids="cuda:0")


@pytest.mark.parametrize("given", [0.9, [None], [[0]], {0: 1}.keys(), np.array([0]), True, [False]])
def test_workers_that_are_no_indices(given: Any) -> None:
    message = "is neither a worker index nor a device; worker_ids= takes one of these, or a list"
    with (
        connected_thread(MemoryWeightSyncScheme, nn.Linear(2, 2), nn.Linear(2, 2)) as sender,
        pytest.raises(UnknownWorkerError, match=message),
    ):
        sender.send(worker_ids=given)


class ContextWith:
    """A context that names its workers."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


def test_a_context_whose_devices_are_texts() -> None:
    context = ContextWith(policy=nn.Linear(2, 2), num_workers=2, policy_device=["cpu", "meta"])
    with SharedMemWeightSyncScheme(connect_timeout=0.1) as scheme:
        scheme.init_on_sender(model_id="policy", context=context)
        with pytest.raises(SyncTimeoutError):
            scheme.connect()
        assert scheme.send_async(worker_ids="meta").workers == (1,)


def test_a_context_with_too_few_factories() -> None:
    context = ContextWith(policy=None, num_workers=3, policy_factory=[lambda: nn.Linear(2, 2), lambda: None])
    message = "policy_factory has 2 functions for 3 workers; give one, or one for each worker"
    with pytest.raises(ValueError, match=message):
        SharedMemWeightSyncScheme().init_on_sender(model_id="policy", context=context)


def test_workers_that_lack_weights_of_their_own() -> None:
    message = r"no weights for workers \[0\] of worker_ids=0; weights are given for \[1\]"
    with (
        connected_thread(MemoryWeightSyncScheme, nn.Linear(2, 2), nn.Linear(2, 2)) as sender,
        pytest.raises(UnknownWorkerError, match=message),
    ):
        sender.send({1: nn.Linear(2, 2)}, worker_ids=0)


@pytest.mark.parametrize(
    ("num_workers", "lacking"), [(2, r"workers \[1\]"), (0, "workers that join later")], ids=str
)
def test_first_weights_that_lack_a_worker(num_workers: int, lacking: str) -> None:
    with MemoryWeightSyncScheme() as sender:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=num_workers)
        with pytest.raises(UnknownWorkerError, match=f"no weights for {lacking}; weights are given for "):
            sender.connect(weights={0: nn.Linear(2, 2)}, timeout=5.0)


ODD_TENSORS = {
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("encoding", ["dense", "patch"])
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_a_tensor_that_is_not_plain(kind: str, encoding: str) -> None:
    scheme = SharedMemWeightSyncScheme(WeightStrategy(encoding=encoding))
    message = (
        rf"'a\.b' is a .*{kind} tensor .*, such as the result of (to_dense|to_padded_tensor|dequantize)\(\)"
    )
    with pytest.raises(UnsupportedSourceError, match=message):
        scheme.init_on_sender(weights={"a": {"b": ODD_TENSORS[kind]()}}, num_workers=1)


def test_a_sparse_tensor_that_convert_makes_plain() -> None:
    strategy = WeightStrategy(convert=lambda items: ((name, one.to_dense()) for name, one in items))
    with SharedMemWeightSyncScheme(strategy) as scheme:
        scheme.init_on_sender(weights={"a": ODD_TENSORS["sparse_coo"]()}, num_workers=1)


@pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
@pytest.mark.parametrize("options", [{}, {"encoding": "patch", "select": "trainable"}, {"convert": iter}])
def test_a_lazy_module_that_was_not_run(extract_as: Any, options: dict[str, Any]) -> None:
    scheme = SharedMemWeightSyncScheme(WeightStrategy(extract_as, **options))
    with pytest.raises(UnsupportedSourceError, match=r"not initialized, .*: 0.weight, 0.bias; call"):
        scheme.init_on_sender(model=nn.Sequential(nn.LazyLinear(2)), num_workers=1)


def test_a_worker_with_a_lazy_module_that_was_not_run() -> None:
    with pytest.raises(UnsupportedSourceError, match=r"not initialized, .*: weight, bias; call"):
        connect_worker(nn.LazyLinear(2))


def connect_worker(target: Any) -> None:
    """Have a worker connect with ``target``; it waits for a sender, to tell it of an error."""
    with MemoryWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        receiver = copy.copy(scheme)
        receiver.init_on_receiver(model=target, worker_idx=0)
        receiver.connect(timeout=0.2)


class Forgetful(MemoryWeightSyncScheme):
    end = "sender"

    def create_transport(self, *, worker_idx: int, end: Any) -> Any:
        made = super().create_transport(worker_idx=worker_idx, end=end)
        return None if end == self.end else made


def test_a_scheme_that_makes_no_transport() -> None:
    message = r"Forgetful.create_transport\(\) returned None; return a TransportBackend"
    with pytest.raises(TypeError, match=message):
        Forgetful().init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    with Forgetful() as sender:
        sender.end = "receiver"
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with copy.copy(sender) as receiver:
            receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            with pytest.raises(TypeError, match=message):
                receiver.connect()


@pytest.mark.parametrize(
    "change",
    [
        lambda links: None,
        lambda links: list(links.values()),
        lambda links: {0: links[0]},
        lambda links: {**links, 2: links[1]},
        lambda links: {0: links[0], 1: links[0]},
        lambda links: {0: links[0], 1: None},
    ],
    ids=["nothing", "a list", "too few", "too many", "one for two", "no transport"],
)
def test_a_scheme_that_opens_other_links_than_those_of_its_workers(change: Callable[..., Any]) -> None:
    class Opening(MemoryWeightSyncScheme):
        def open_sender(self, workers: Any, ctx: Any) -> Any:
            return change(super().open_sender(workers, ctx))

    message = r"Opening.open_sender\(\) returned .*; return a dict .* for each of the workers \[0, 1\]"
    with Opening() as scheme, pytest.raises(TypeError, match=message):
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=2)


@pytest.mark.parametrize("kind", [MemoryWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_an_index_that_another_receiver_of_the_process_has(kind: type[WeightSyncScheme]) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    with connected_thread(kind, source, target) as sender:
        with copy.copy(sender) as second:
            second.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            with pytest.raises(JoinRefusedError, match=r"another receiver .*: give each receiver an index"):
                second.connect()
        nn.init.ones_(source.weight)
        assert sender.send().version == 1
        assert torch.equal(target.weight, source.weight)


class Mine(DenseEncoding):
    name = "mine/1"


def forget_mine() -> nn.Module:
    del encodings._registry[Mine.name]
    return nn.Linear(2, 2)


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_an_encoding_that_a_worker_does_not_know(kind: type[WeightSyncScheme]) -> None:
    message = r"unknown encoding 'mine/1' .*call register_encoding\(\) in every process"
    register_encoding(Mine)
    try:
        with closing(Processes()) as processes:
            scheme = processes.scheme(kind, strategy=WeightStrategy(encoding=Mine()), timeout=20.0)
            scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
            worker = processes.start(scheme, 0, forget_mine)
            worker.begin(join)
            with pytest.raises(SyncFailedError, match=f"worker 0: .*{message}"):
                scheme.connect()
            with pytest.raises(WorkerRaised, match=message):
                worker.result()
    finally:
        del encodings._registry[Mine.name]


class Choosy(DenseEncoding):
    def encoder(self, schema: Any) -> Any:
        if torch.float16 in schema.dtypes:
            raise ValueError("float16 is not supported; convert the model")
        return super().encoder(schema)


def convert_and_connect(me: Worker) -> None:
    me.model.float()
    me.scheme.connect()


def test_an_encoding_that_fails_for_a_worker() -> None:
    message = "float16 is not supported; convert the model"
    with closing(Processes()) as processes:
        scheme = processes.scheme(
            SharedMemWeightSyncScheme, strategy=WeightStrategy(encoding=Choosy()), timeout=20.0
        )
        scheme.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        worker = processes.start(scheme, 0, lambda: nn.Linear(2, 2).half())
        worker.begin(join)
        with pytest.raises(SyncFailedError, match=f"worker 0: {message}"):
            scheme.connect()
        with pytest.raises(
            WorkerRaised, match=f"JoinRefusedError: the sender refused this worker: {message}"
        ):
            worker.result()
        worker.call(convert_and_connect)  # the sender still serves workers that return
        assert scheme.send().version == worker.call(version_of) == 1


@pytest.mark.parametrize("device", ["gpu", 3.5, "cuda:x"])
def test_a_device_that_does_not_exist(device: Any) -> None:
    with pytest.raises(ValueError, match=f"devices has {device!r}, which is no device; give a list"):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), devices=[device])


class Policy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def test_a_class_instead_of_a_model() -> None:
    message = r"Policy is a class; give an instance: Policy\(...\)"
    for given in ({"model": Policy}, {"weights": Policy}):
        with pytest.raises(UnsupportedSourceError, match=message):
            SharedMemWeightSyncScheme().init_on_sender(num_workers=1, **given)
    with pytest.raises(UnsupportedSourceError, match=message):
        WeightStrategy().apply_weights(Policy, Policy())
    with pytest.raises(TypeError, match=r"LogObserver is a class; give an instance: LogObserver\(...\)"):
        SharedMemWeightSyncScheme().add_observer(LogObserver)


@pytest.mark.parametrize("schemes", [{"a": SharedMemWeightSyncScheme()}, SharedMemWeightSyncScheme(), "ab"])
def test_a_group_that_is_no_list(schemes: Any) -> None:
    with pytest.raises(TypeError, match="group_schemes takes a list of schemes, such as"):
        group_schemes(schemes)


def test_models_sent_together_without_their_weights() -> None:
    actor, critic = SharedMemWeightSyncScheme(), SharedMemWeightSyncScheme()
    message = r"^send_together takes a dict of weights by scheme, such as \{actor: None, critic: None\}"
    odd = (
        ([actor, critic], ", not list"),
        ({"actor": None}, "; 'actor' is no scheme"),
        ({}, "; this one is empty"),
    )
    for given, problem in odd:
        with pytest.raises(TypeError, match=f"{message}{problem}$"):
            send_together(given)  # type: ignore[arg-type]


def test_a_synchronizer_is_not_pickled() -> None:
    with (
        Synchronizer("memory") as where,
        pytest.raises(TypeError, match="a Synchronizer stays in its process"),
    ):
        pickle.dumps(where)


@pytest.mark.parametrize("step", [1.5, "1", "", True, False, -1])
@pytest.mark.parametrize("kind", [TrainerClient, ExplorerClient])
def test_a_step_that_is_no_number_of_steps(kind: Any, step: Any) -> None:
    message = f"step is an integer of at least 0, not {step!r}"
    with Synchronizer("memory") as where:
        with pytest.raises(ValueError, match=message):
            kind(where, nn.Linear(2, 2), step=step)
        client = kind(where, nn.Linear(2, 2))
        with pytest.raises(ValueError, match=message):
            client.step = step
        client.blocking.close()


class Engine(InferenceEngine):
    def __init__(self, expected: Any = None) -> None:
        self.expected = expected

    def begin_update(self, version: int) -> None: ...
    def finish_update(self, version: int) -> None: ...

    def load_weights(self, weights: Any) -> None:
        list(weights)

    def expected_weights(self) -> Any:
        return self.expected


ARRAYS = {"weight": np.ones((2, 2)), "bias": torch.ones(2)}


@pytest.mark.parametrize("target", [ARRAYS, {"a": ARRAYS}, Engine(ARRAYS)], ids=["dict", "nested", "engine"])
def test_a_worker_with_arrays_of_numpy(target: Any) -> None:
    with pytest.raises(UnsupportedSourceError, match=r"'(a\.)?weight' is of type ndarray; weights are tens"):
        connect_worker(target)


def test_an_engine_that_expects_a_list() -> None:
    message = r"^Engine\.expected_weights\(\) returned an object of type list; return a dict of tensors "
    with pytest.raises(UnsupportedSourceError, match=message):
        connect_worker(Engine([("weight", torch.ones(2, 2))]))


def test_a_tied_worker_of_weights_that_a_converter_unties() -> None:
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    strategy = WeightStrategy("state_dict", convert=cast(torch.bfloat16))
    message = (
        r"two different tensors in the sender; tie them there, and let neither clone\(\) nor a converter"
    )
    with MemoryWeightSyncScheme(strategy) as sender, pytest.raises(SchemaMismatchError, match=message):
        connect_pair(sender, tied, copy.deepcopy(tied))


def test_copies_of_tied_weights() -> None:
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    with MemoryWeightSyncScheme() as sender:
        _receiver = connect_pair(sender, tied, copy.deepcopy(tied))
        with pytest.raises(SchemaMismatchError, match=r"tie them there, and let neither clone\(\)"):
            sender.send({name: weight.clone() for name, weight in tied.state_dict().items()})
        assert sender.send(copy.deepcopy(tied)).version == 1


def test_weights_for_an_engine_from_elsewhere_than_its_sender() -> None:
    message = r"write weights into an object of type Engine; give .* \(an InferenceEngine takes weights only "
    with MemoryWeightSyncScheme() as sender:
        receiver = connect_pair(sender, nn.Linear(2, 2), Engine())
        with pytest.raises(UnsupportedSourceError, match=message):
            receiver.apply_weights(nn.Linear(2, 2))


def test_wait_without_time() -> None:
    with MemoryWeightSyncScheme() as sender:
        receiver = connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2))
        with receiver.hold():
            handle = sender.send_async()
            with pytest.raises(
                SyncFailedError, match=r"has not applied it yet; wait\(\) longer, or ask done\(\)"
            ):
                handle.wait(0)
        assert handle.wait(10.0).version == 1


def test_send_after_connect_failed() -> None:
    with MemoryWeightSyncScheme() as sender:
        sender.init_on_sender(model=nn.Linear(2, 2, device="meta"), num_workers=1)
        with pytest.raises(UnsupportedSourceError, match="on the meta device"):
            sender.connect()
        message = r"not connected \(connect\(\) failed: Unsupp.*: on the meta .*\); call connect\(\) first"
        with pytest.raises(LifecycleError, match=message):
            sender.send()
        with pytest.raises(SyncTimeoutError):
            sender.connect(weights=nn.Linear(2, 2), timeout=0.1)
        with pytest.raises(
            SyncFailedError, match=r"worker 0: it is not connected; has it called connect\(\)\?"
        ):
            sender.send(nn.Linear(2, 2))


def test_a_host_name_that_is_no_string() -> None:
    with pytest.raises(TypeError, match="host is a name of this host, such as 'node-1', not 3"):
        DistributedWeightSyncScheme(host=3)  # type: ignore[arg-type]


def test_calls_that_belong_to_the_other_end() -> None:
    with MemoryWeightSyncScheme() as sender:
        receiver = connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2))
        for call in (receiver.send, receiver.send_async):
            with pytest.raises(LifecycleError, match=r"this is a receiver; .* are for the sender"):
                call()
        for end in (sender, receiver):
            message = "connected already, .*; give each model, collector and worker its own scheme"
            with pytest.raises(LifecycleError, match=message):
                end.connect()


def test_connect_again_after_the_sender_is_gone() -> None:
    with MemoryWeightSyncScheme() as sender:
        receiver = connect_pair(sender, nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(LinkClosedError):
        receiver.receive(10.0)
    with pytest.raises(LifecycleError, match="create a new scheme to join again after LinkClosedError"):
        receiver.connect()


@pytest.mark.parametrize(
    "strategy", [{}, {"encoding": "bucket", "max_in_flight": 2}], ids=["whole", "pipeline"]
)
def test_first_weights_that_differ_are_compared_with_those_of_the_source(strategy: dict[str, Any]) -> None:
    """It is connect() that raises the error: nothing was agreed on in an earlier one."""
    with MemoryWeightSyncScheme(WeightStrategy(**strategy)) as sender, ThreadPoolExecutor(1) as pool:
        sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
        with copy.copy(sender) as receiver:
            receiver.init_on_receiver(model=nn.Linear(2, 2), worker_idx=0)
            joins = pool.submit(receiver.connect, timeout=5.0)
            with pytest.raises(SchemaMismatchError, match="are not those of this scheme's model"):
                sender.connect(weights=nn.Linear(3, 2), timeout=5.0)
            assert isinstance(joins.exception(10.0), JoinRefusedError)


class WithRrefs:
    """A context whose collectors are more than the workers that the sender is given."""

    policy, collector_rrefs = nn.Linear(2, 2), ["first", "second"]


@pytest.mark.parametrize(
    "given",
    [
        {"model": nn.Linear(2, 2), "worker_rrefs": {1: "second"}},
        {"context": WithRrefs(), "model_id": "policy"},
    ],
    ids=["worker_rrefs", "context"],
)
def test_references_of_workers_that_do_not_exist(given: dict[str, Any]) -> None:
    message = (
        r"for workers \[1\] \(in worker_rrefs=, or else in collector_rrefs of the context\), .* are \[0\]"
    )
    with RPCWeightSyncScheme() as scheme, pytest.raises(ValueError, match=message):
        scheme.init_on_sender(num_workers=1, **given)
