"""Errors for arguments that cannot work: each names the argument and a cure."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from faults_tools import Processes, WorkerRaised, join
from torch import nn

from weight_update import (
    DenseEncoding,
    DistributedWeightSyncScheme,
    LifecycleError,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    SyncFailedError,
    Synchronizer,
    TrainerClient,
    UnsupportedSourceError,
    WeightStrategy,
    WeightSyncScheme,
    WholeEncoding,
    register_encoding,
)
from weight_update.encodings import base as encodings
from weight_update.synchronizer import CheckpointStore


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_number_of_workers(number: Any) -> None:
    with pytest.raises(ValueError, match=rf"num_workers is an integer of at least 1, not {number!r}"):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), num_workers=number)


def test_number_of_workers_beside_devices() -> None:
    with pytest.raises(
        ValueError, match="num_workers=3 does not go with 1 devices; give one for each worker"
    ):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), num_workers=3, devices=["cpu"])
    with pytest.raises(ValueError, match="does not go with 0 devices"):
        SharedMemWeightSyncScheme().init_on_sender(model=nn.Linear(2, 2), devices=[])


@pytest.mark.parametrize("index", [-1, 1.0, "0"])
def test_index_of_a_worker(index: Any) -> None:
    with pytest.raises(ValueError, match=rf"worker_idx is an integer of at least 0, not {index!r}"):
        SharedMemWeightSyncScheme().init_on_receiver(model=nn.Linear(2, 2), worker_idx=index)
    receiver = SharedMemWeightSyncScheme()
    receiver.init_on_receiver(model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="worker_idx is an integer"):
        receiver.connect(worker_idx=index)


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_calls_after_shutdown(scheme: type[WeightSyncScheme]) -> None:
    sender = scheme()
    sender.init_on_sender(model=nn.Linear(2, 2), num_workers=1)
    sender.shutdown()
    for call in (sender.connect, sender.send):
        with pytest.raises(LifecycleError, match="was shut down; make a new scheme"):
            call()


def test_an_encoding_whose_name_is_taken() -> None:
    class Another(WholeEncoding):
        name = "dense/1"

    class Nameless(WholeEncoding):
        pass

    with pytest.raises(ValueError, match="'dense/1' of Another is taken by DenseEncoding; choose another"):
        register_encoding(Another)
    with pytest.raises(ValueError, match="Nameless needs a class attribute name"):
        register_encoding(Nameless)


def test_a_class_instead_of_an_encoding() -> None:
    with pytest.raises(ValueError, match="pass an object, not its class"):
        WeightStrategy(encoding=PatchEncoding)


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
    with Synchronizer("memory", "trainer_driven") as synchronizer, pytest.raises(ValueError, match=message):
        synchronizer.serve(port=port)
    if port == 65536:
        with pytest.raises(ValueError, match=message):
            TrainerClient(f"127.0.0.1:{port}", nn.Linear(2, 2), token="secret")


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
