"""Without the packages of an extra: its names can be imported, and using them says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import run_python

ROOT = Path(__file__).resolve().parent.parent
RAY = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from torch import nn
from collectors import RayCollector
from weight_update import (
    ExplorerClient, RayModuleTransformScheme, RayTransport, RayWeightSyncScheme, Synchronizer
)

policy = nn.Linear(1, 1)
calls = [
    lambda: RayWeightSyncScheme().init_on_sender(model=policy, num_workers=1),
    lambda: RayWeightSyncScheme(data="object_store").init_on_sender(model=policy, num_workers=1),
    lambda: connect(RayWeightSyncScheme()),
    lambda: RayModuleTransformScheme(model=policy).init_on_sender(ray_transform=Transform()),
    lambda: RayCollector([None], policy, frames_per_batch=1),
    lambda: Synchronizer("memory").as_ray_actor("actor"),
    lambda: ExplorerClient("ray:actor", policy),
]

class Transform:
    _actor = object()

def connect(scheme):
    scheme.init_on_receiver(model=policy, worker_idx=0)
    scheme.connect()

for call in calls:
    try:
        call()
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow  # test_compression.py has a quick one
def test_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAY],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert all('pip install "weight-update[ray]"' in line for line in lines)


def test_pytest() -> None:
    done = run_python("-c", "import sys; sys.modules['pytest'] = None; import weight_update.testing")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: cannot import pytest (")
    assert done.stderr.endswith('): pip install "weight-update[test]"\n')
