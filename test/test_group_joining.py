"""Late joiners of several models that are sent together: they get the models one by one, then all at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from weight_update import (
    BucketEncoding,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
    group_schemes,
    send_together,
)
from weight_update.schemes.sender_side import _SourceReader
from weight_update.sender.handle import SendHandle
from weight_update.testing import mlp
from weight_update.testing.processes import wait_until

STRATEGIES = {
    "dense": WeightStrategy("state_dict"),
    "patch": WeightStrategy("state_dict", encoding="patch"),
    "pipeline": WeightStrategy("state_dict", encoding=BucketEncoding(bucket_size=4096), max_in_flight=2),
}
LATE = 1


class Fleet:
    """Two schemes of a group. Worker 0, and the late joiner 1, are in this process."""

    def __init__(self, strategy: WeightStrategy, dtype: torch.dtype = torch.float32) -> None:
        self.senders = [SharedMemWeightSyncScheme(strategy, timeout=5.0) for _ in range(2)]
        self.receivers: dict[tuple[int, int], WeightSyncScheme] = {}
        self.number = 1
        group_schemes(self.senders)
        with ThreadPoolExecutor(1) as pool:
            for place, sender in enumerate(self.senders):
                sender.init_on_sender(model=mlp(1), num_workers=1)
                joining = pool.submit(self.join, place, 0, dtype)
                sender.connect()
                joining.result()

    def join(self, place: int, idx: int = LATE, dtype: torch.dtype = torch.float32) -> None:
        """Connect the receiver of one model."""
        receiver = copy.copy(self.senders[place])
        receiver.init_on_receiver(model=mlp(2).to(dtype), worker_idx=idx)
        receiver.connect(timeout=20.0)
        self.receivers[place, idx] = receiver

    def send(self) -> list[set[int]]:
        """Send other weights of both models together; return the workers that applied each model."""
        self.number += 1
        reports = send_together({sender: mlp(self.number) for sender in self.senders})
        return [set(reports[sender].apply_seconds) for sender in self.senders]

    def await_complete(self) -> None:
        """Wait until the senders know that the late joiner has both models."""
        wait_until(lambda: all(LATE in sender._sender.late_joiners for sender in self.senders))

    def late_versions(self) -> list[int | None]:
        return [self.receivers[place, LATE].version for place in range(2)]

    def require_equal(self) -> None:
        """Compare the weights of all workers with those that were sent last."""
        sent = mlp(self.number).state_dict()
        for receiver in self.receivers.values():
            for name, mine in receiver.model.state_dict().items():
                assert torch.equal(mine, sent[name].to(mine.dtype))

    def close(self) -> None:
        for scheme in (*self.receivers.values(), *self.senders):
            scheme.shutdown()


@pytest.fixture(params=["dense", "patch"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    found = Fleet(STRATEGIES[request.param])
    yield found
    found.close()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_late_joiner_of_its_own_dtype_joins_while_models_are_only_sent_together(kind: str) -> None:
    """Neither the trainer nor worker 0 has its dtype, so that its first weights come with an update."""
    fleet = Fleet(STRATEGIES[kind], torch.float64)
    try:
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(lambda: [fleet.join(place, dtype=torch.bfloat16) for place in range(2)])
            deadline = time.monotonic() + 20.0
            while not joining.done():
                assert time.monotonic() < deadline
                assert all(0 in applied for applied in fleet.send())
            joining.result()
        fleet.await_complete()
        assert fleet.send() == [{0, LATE}, {0, LATE}]
        fleet.require_equal()
    finally:
        fleet.close()


def test_a_late_joiner_that_has_one_model_gets_its_updates_alone(fleet: Fleet) -> None:
    fleet.join(0)
    assert fleet.send() == [{0}, {0}]
    wait_until(lambda: fleet.receivers[0, LATE].version == 1)
    fleet.join(1)
    assert fleet.late_versions() == [1, 1]
    fleet.require_equal()
    fleet.await_complete()
    assert fleet.send() == [{0, LATE}, {0, LATE}]
    fleet.require_equal()


def test_one_that_joins_before_the_commit_gets_the_update_after_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = SendHandle.wait_staged

    def wait_and_join(handle: SendHandle, *arguments: Any) -> Any:
        monkeypatch.setattr(SendHandle, "wait_staged", wait)
        for place in range(2):
            fleet.join(place)
        assert fleet.late_versions() == [0, 0]
        return wait(handle, *arguments)

    monkeypatch.setattr(SendHandle, "wait_staged", wait_and_join)
    assert fleet.send() == [{0}, {0}]
    wait_until(lambda: fleet.late_versions() == [1, 1])
    fleet.require_equal()
    fleet.await_complete()
    assert fleet.send() == [{0, LATE}, {0, LATE}]


def test_one_that_joins_while_weights_are_read_gets_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the encoding of the update with worker 0."""
    read = _SourceReader.read

    def read_and_join(reader: _SourceReader, *arguments: Any) -> Any:
        monkeypatch.setattr(_SourceReader, "read", read)
        found = read(reader, *arguments)
        for place in range(2):
            fleet.join(place)
        return found

    monkeypatch.setattr(_SourceReader, "read", read_and_join)
    assert fleet.send() == [{0}, {0}]
    wait_until(lambda: fleet.late_versions() == [1, 1])
    fleet.await_complete()
    assert fleet.send() == [{0, LATE}, {0, LATE}]
    fleet.require_equal()
    assert [len(sender._sender._groups.all()) for sender in fleet.senders] == [1, 1]


def test_a_late_joiner_that_came_back_takes_part_again(fleet: Fleet) -> None:
    for place in range(2):
        fleet.join(place)
    fleet.await_complete()
    assert fleet.send() == [{0, LATE}, {0, LATE}]
    worker = fleet.senders[0]._sender.table[LATE]
    before = worker.connections
    fleet.receivers[0, LATE]._receiver.link.disconnect()
    wait_until(lambda: worker.connections > before and worker.joined)
    fleet.await_complete()
    assert fleet.send() == [{0, LATE}, {0, LATE}]
    fleet.require_equal()
