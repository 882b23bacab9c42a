"""The processes that tests work with."""

from __future__ import annotations

import signal
import time

import pytest
from interpreters import run_python

from weight_update.testing.workers import RemoteObject, WorkerDiedError


class Sleeper:
    """An object that does not listen."""

    def sleep(self) -> None:
        time.sleep(60.0)

    def end(self) -> None:
        """Do nothing."""


def test_a_call_of_a_killed_process_says_that_it_is_gone() -> None:
    process = RemoteObject(Sleeper)
    process.runner.kill()
    process.runner.join()
    with pytest.raises(WorkerDiedError, match="process is gone"):
        process.call("sleep")
    process.stop()


def test_processes_end_with_a_test_that_is_killed() -> None:
    done = run_python("-c", KILLED, timeout=30.0)  # raises while any process has its output
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "both run\n"


KILLED = """
import os, signal
from weight_update.testing.workers import RemoteObject

class Idle:
    def run(self):
        pass

    def end(self):
        pass

for process in [RemoteObject(Idle), RemoteObject(Idle)]:
    process.call("run")
print("both run", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # it waits ten seconds for the process to end
def test_a_process_that_does_not_end_shows_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    process = RemoteObject(Sleeper)
    process.post("sleep")
    process.stop()
    assert "in sleep" in capfd.readouterr().err
