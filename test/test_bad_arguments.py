"""Errors for arguments that cannot work: each names the argument and a cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weight_update import (
    DistributedWeightSyncScheme,
    LifecycleError,
    MultiProcessWeightSyncScheme,
    PatchEncoding,
    SharedMemWeightSyncScheme,
    Synchronizer,
    TrainerClient,
    UnsupportedSourceError,
    WeightStrategy,
    WeightSyncScheme,
    WholeEncoding,
    register_encoding,
)
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
