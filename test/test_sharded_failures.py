"""Sharded trainers: after a call that failed, the ranks are in step for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shard_parts import Body, FailingConverter, Ranks, running, set_failing, whole_kinds
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from weight_update import BucketEncoding, ConversionError

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


def make_large(body: Body) -> None:
    mesh = DeviceMesh.from_group(body.groups[0, 1], "cpu", mesh=[0, 1])
    body.net = {
        name: distribute_tensor(torch.arange(rows * COLUMNS).view(rows, COLUMNS).float(), mesh, [Shard(0)])
        for name, rows in ROWS.items()
    }


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        ranks.all("group", [0, 1])
        yield ranks


MODEL = {name: torch.zeros(rows, COLUMNS) for name, rows in ROWS.items()}
IN_FLIGHT = {"encoding": BucketEncoding(bucket_size=4 << 20), "max_in_flight": 2}
IN_BATCHES = {"shards": {"batch_bytes": 8 * COLUMNS}}


@pytest.mark.parametrize("options", [IN_FLIGHT, {}], ids=["in flight", "whole"])
def test_a_converter_that_fails_while_a_batch_is_on_its_way(two: Ranks, options: dict[str, Any]) -> None:
    two.all("run", make_large)
    options = {**options, **IN_BATCHES, "convert": FailingConverter()}
    with running(two, "shared_mem", size=2, workers=1, model=MODEL, **options) as (worker,):
        two.all("run", set_failing, True)
        leader, follower = two.each("call", "send")
        assert isinstance(leader, ValueError)
        assert str(follower) == "rank 0 of the trainer failed: ValueError: no such format"
        two.all("run", set_failing, False)
        two.all("call", "send")
        assert worker.call("fingerprint") == two.all("run", whole_kinds)[0]


def test_a_converter_that_refills_its_memory_leaves_all_ranks_in_step(two: Ranks) -> None:
    two.all("run", make_large)
    options = {**IN_BATCHES, "convert": RefillingConverter()}
    with running(two, "shared_mem", size=2, workers=1, model=MODEL, **options) as (worker,):
        two.all("run", set_refilling, True)
        errors = two.each("call", "send")
        assert [type(error) for error in errors] == [ConversionError] * 2, errors
        two.all("run", set_refilling, False)
        two.all("call", "send")
        assert worker.call("fingerprint") == two.all("run", whole_kinds)[0]
