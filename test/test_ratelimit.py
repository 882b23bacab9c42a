"""Records that strangers cause are bounded in number, and the ones left out are counted."""

import logging
import time

import pytest

from weight_update.ratelimit import RateLimitedLog


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level(logging.WARNING)
    return logging.getLogger("weight_update.test")


def test_a_burst_is_cut_and_counted(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog(log, burst=2, seconds=0.2)
    for number in range(100):
        limited.warning("refused number %d", number)
    assert caplog.messages == ["refused number 0", "refused number 1"]
    time.sleep(0.2)
    limited.warning("refused number %d", 100)
    limited.warning("refused number %d", 101)
    assert caplog.messages[2:] == [
        "refused number 100 (98 more like this were not logged)",
        "refused number 101",
    ]


def test_each_message_has_its_own_limit(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog(log, burst=1)
    for _ in range(3):
        limited.warning("one")
        limited.warning("another")
    assert caplog.messages == ["one", "another"]


def test_records_name_the_caller(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    RateLimitedLog(log).warning("here")
    assert caplog.records[0].funcName == "test_records_name_the_caller"
