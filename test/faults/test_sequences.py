"""Random sequences of the operations of each scheme: ``SEQUENCES=100`` runs so many more of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interpreters import ROOT, run_python
from marks import random_interrupts

from benchmarks.network import why_not

PROGRAM = Path(__file__).with_name("sequences.py")
PATHS = [str(ROOT / folder) for folder in ("", "test", "test/faults", "test/soak")]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(PATHS), "TORCH_CPP_LOG_LEVEL": "FATAL"}
SEEDS = range(3 + int(os.environ.get("SEQUENCES", "0")))
QUICK = ("shared_mem", "multiprocess", "distributed", "hosts", "rpc")
SEQUENCES = [
    *[(scheme, [seed]) for scheme in QUICK for seed in SEEDS],
    *[("ray", [*SEEDS[first : first + 5]]) for first in SEEDS[::5]],  # Ray takes long to start
]


@random_interrupts
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scheme", "seeds"), SEQUENCES, ids=str)
def test_sequences(scheme: str, seeds: list[int]) -> None:
    if scheme == "ray":
        pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
    if scheme == "hosts" and (reason := why_not()) is not None:
        pytest.skip(reason)
    done = run_python(PROGRAM, scheme, *seeds, env=ENVIRONMENT, timeout=580.0, merged=True)
    assert done.returncode == 0, done.stdout
