"""The processes that tests work with."""

from __future__ import annotations

import time

import pytest

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


@pytest.mark.slow  # it waits ten seconds for the process to end
def test_a_process_that_does_not_end_shows_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    process = RemoteObject(Sleeper)
    process.post("sleep")
    process.stop()
    assert "in sleep" in capfd.readouterr().err
