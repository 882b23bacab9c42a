"""NCCL between hosts; needs a CUDA device for the sender and one for each worker, or shares one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import SyncFailedError
from weight_update.schemes.base import End
from weight_update.testing import Apart, fingerprint
from weight_update.testing.worker_processes import start_workers
from weight_update.transports import TransportBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OwnDevices(Apart):
    """NCCL, too, believes that workers are on hosts of their own, and lets them share a device."""

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if end == "receiver":
            os.environ["NCCL_HOSTID"] = f"host {worker_idx}"
            torch.cuda.set_device((worker_idx + 1) % torch.cuda.device_count())
        return super().create_transport(worker_idx=worker_idx, end=end)


def large(value: float) -> nn.Module:
    net = nn.Linear(1500, 2000)
    nn.init.constant_(net.weight, value)
    return net


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_go_through_nccl(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "sender")
    options: dict[str, Any] = {"backend": "nccl", "timeout": 60.0}
    source = large(0.0)
    scheme = OwnDevices(**options)
    with start_workers(scheme, [large(-1.0)] * workers, "spawn", model=source) as procs:
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(source.weight, value)
            before = scheme.network_bytes
            report = scheme.send()
            assert procs.ask("fingerprint") == [fingerprint(source)] * workers
            assert scheme.network_bytes - before == report.wire_bytes


def test_a_worker_that_is_killed_delays_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "sender")
    source = large(0.0)
    scheme = OwnDevices(backend="nccl", timeout=20.0)
    with start_workers(scheme, [large(-1.0)] * 2, "spawn", model=source) as procs:
        start = time.monotonic()
        victim = procs.workers.pop(0)
        os.kill(victim.runner.pid, signal.SIGKILL)
        victim.runner.join(10.0)
        for value in (1.0, 2.0):
            nn.init.constant_(source.weight, value)
            with contextlib.suppress(SyncFailedError):
                scheme.send()
            assert procs.workers[0].call("fingerprint") == fingerprint(source)
    assert time.monotonic() - start < 20.0
