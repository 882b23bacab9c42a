"""Records that strangers cause are bounded in number, and the ones left out are counted."""

import logging
import time

import pytest

from weight_update.errors import LinkClosedError
from weight_update.transports.rate_limit import RateLimitedLog, Refusals


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


def test_refusals(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(log)
    for number in range(20):
        refusals.note(LinkClosedError(f"number {number}"))
    assert list(refusals)[-1] == "number 19"
    assert len(list(refusals)) < 20
    refusals.clear()
    refusals.note(KeyError("a defect"))
    refusals.note(EOFError("a stranger's"))
    assert len(list(refusals)) == 2
    assert len(caplog.records) == 10


def test_only_unexpected_refusals_have_a_traceback(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(log)
    refusals.note(LinkClosedError("gone"))
    refusals.note(EOFError("a stranger's"))
    refusals.note(KeyError("a defect"))
    assert [record.exc_info is not None for record in caplog.records] == [False, False, True]
