"""Random sequences of the operations of each scheme: ``SEQUENCES=100`` runs so many more of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interpreters import ROOT, run_python

from benchmarks.network import why_not

PROGRAM = Path(__file__).with_name("sequences.py")
PATHS = [str(ROOT / folder) for folder in ("", "test", "test/faults", "test/soak")]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(PATHS), "TORCH_CPP_LOG_LEVEL": "FATAL"}
EACH = 3
MORE = range(EACH, EACH + int(os.environ.get("SEQUENCES", "0")))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [*range(EACH), *MORE])
@pytest.mark.parametrize("scheme", ["shared_mem", "multiprocess", "distributed", "hosts", "rpc", "ray"])
def test_a_sequence(scheme: str, seed: int) -> None:
    if scheme == "ray":
        pytest.importorskip("ray", reason='Ray is not installed: pip install "weight-update[ray]"')
    if scheme == "hosts" and (reason := why_not()) is not None:
        pytest.skip(reason)
    done = run_python(PROGRAM, scheme, seed, env=ENVIRONMENT, timeout=280.0, merged=True)
    assert done.returncode == 0, done.stdout
