"""Workers that are programs of their own, on hosts of their own, and know an address, a port and a token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts_processes import HostsProcesses
from torch import nn

from weight_update.wire.memory import digest

HERE = Path(__file__).parent


def start(procs: HostsProcesses, host: str, port: int, index: int) -> subprocess.Popen[str]:
    address = procs.network.address["trainer"]
    program = [sys.executable, "-W", "error", str(HERE / "hosts_worker.py"), address, str(port), str(index)]
    return subprocess.Popen(
        ["ip", "netns", "exec", procs.network.namespace(host), *program],
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "WEIGHT_UPDATE_TOKEN": "secret",
            "WEIGHT_UPDATE_HOST": host,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_programs_follow_the_trainer_and_exit_in_order(procs: HostsProcesses) -> None:
    model = nn.Linear(256, 256)
    scheme = procs.trainer(token="secret")
    scheme.init_on_sender(model=model, num_workers=2)
    programs = [start(procs, host, scheme.port, index) for index, host in enumerate(("one", "two"))]
    scheme.connect(timeout=60.0)
    digests = {0: digest(model.weight.detach())}
    for version in (1, 2, 3):
        torch.nn.init.normal_(model.weight)
        scheme.send()
        digests[version] = digest(model.weight.detach())
    scheme.shutdown()
    for program in programs:
        out, complaints = program.communicate(timeout=30.0)
        assert program.returncode == 0, complaints
        *told, end = (json.loads(line) for line in out.splitlines())
        assert {one["version"]: one["weight"] for one in told}.items() <= digests.items()
        assert told[-1]["version"] == 3
        assert end == {"end": "the sender was shut down"}
