"""Tests that want an interpreter of their own.

Their workers are forked from it, and count what they hold. Forked from this one, late in a whole run, they
kept the first slot's memory after they had let go of it; why is not known yet.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "at_least"), [("alone_cuda_slots.py", 30), ("alone_loans.py", 6)])
def test_in_an_interpreter_of_its_own(name: str, at_least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found, done.stdout
    assert int(found[1]) >= at_least
    assert "skipped" not in done.stdout
