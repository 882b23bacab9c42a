"""Updates cross hosts bit for bit; workers come and go on any of them."""

from __future__ import annotations

import pytest
import torch
from faults_tools import (
    Stripes,
    assert_whole,
    compute,
    end_compute,
    fill,
    join,
    version_of,
    weights_of,
)
from hosts_processes import HostsProcesses
from marks import slow
from torch import nn

from weight_update import SyncFailedError, WeightStrategy


def make_net() -> nn.Module:
    """600 KB in two dtypes: more than what travels with a signal."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256, bias=False))
    net[2].to(torch.bfloat16)
    return net


def assert_equal(workers, model) -> None:
    expected = model.state_dict()
    for worker in workers:
        found = worker.call(weights_of)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), (
                name
            )


@torch.no_grad()
def change_few(model: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        flat = value.view(-1)
        places = torch.randperm(flat.numel(), generator=random)[: max(1, flat.numel() // 100)]
        flat[places] = torch.randn(places.numel(), generator=random).to(flat.dtype)


@pytest.mark.parametrize("encoding", [slow("dense"), slow("bucket"), "patch"])
def test_bit_exact_on_three_hosts(procs: HostsProcesses, encoding: str) -> None:
    scheme, model = procs.trainer(strategy=WeightStrategy("state_dict", encoding=encoding)), make_net()
    workers = procs.launch_on(["one", "one", "two", "trainer"], scheme, model, make_net)
    assert_equal(workers, model)
    for seed in range(4):
        change_few(model, seed)
        report = scheme.send()
        assert report.encoding == encoding
        assert sorted(report.apply_seconds) == [0, 1, 2, 3]
        assert_equal(workers, model)


@pytest.mark.slow
def test_restarted_on_another_host(procs: HostsProcesses) -> None:
    def big() -> Stripes:
        return Stripes(24, 4096)

    scheme, model = procs.trainer(), big()
    stays, moves = procs.launch_on(["one", "two"], scheme, model, big)
    stays.call(compute)
    scheme.send(fill(model, 1))
    moves.kill()
    with pytest.raises(SyncFailedError, match="worker 1"):
        scheme.send(fill(model, 2))
    moved = procs.start_on("one", scheme, 1, big)
    assert moved.call(join) == 2
    assert {float(value.max()) for value in moved.call(weights_of).values()} == {2.0}
    assert scheme.send(fill(model, 3)).apply_seconds.keys() == {0, 1}
    assert [worker.call(version_of) for worker in (stays, moved)] == [3, 3]
    assert_whole(stays.call(end_compute))
