"""Without Ray: its names can be imported, and using them says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from torch import nn
from collectors import RayCollector
from weight_update import RayModuleTransformScheme, RayTransport, RayWeightSyncScheme

policy = nn.Linear(1, 1)
calls = [
    lambda: RayWeightSyncScheme().init_on_sender(model=policy, num_workers=1),
    lambda: RayWeightSyncScheme(data="object_store").init_on_sender(model=policy, num_workers=1),
    lambda: connect(RayWeightSyncScheme()),
    lambda: RayCollector([None], policy, frames_per_batch=1),
]

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
def test_the_error_names_the_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all('pip install "weight-update[ray]"' in line for line in lines)
