"""A test that hangs outside of Python ends the run, and is named."""

import os
import subprocess
import sys
import textwrap

import pytest

HANGS = """
    import os
    import signal
    import time

    def test_that_hangs():
        if os.fork() == 0:
            time.sleep(300.0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(300.0)
"""


@pytest.mark.slow
def test_the_run_does_not_wait_for_the_children_of_a_test_that_hangs(tmp_path):
    (tmp_path / "test_hangs.py").write_text(textwrap.dedent(HANGS))
    options = ["-n", "1", "--max-worker-restart", "0", "-p", "conftest", "-p", "no:cacheprovider"]
    limits = ["-o", "faulthandler_timeout=5", "-o", "faulthandler_exit_on_timeout=true"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *limits, "test_hangs.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "crashed while running 'test_hangs.py::test_that_hangs'" in done.stdout
