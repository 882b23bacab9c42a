"""The processes that tests work with."""

from __future__ import annotations

import time

import pytest

from weight_update.testing.workers import RemoteObject


class Sleeper:
    """An object that does not listen."""

    def sleep(self) -> None:
        time.sleep(60.0)

    def end(self) -> None:
        """Do nothing."""


@pytest.mark.slow  # it waits ten seconds for the process to end
def test_a_process_that_does_not_end_shows_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    process = RemoteObject(Sleeper)
    process.post("sleep")
    process.stop()
    assert "in sleep" in capfd.readouterr().err
