"""A worker of vLLM as a receiver, without vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weight_update.serving.vllm.loader import PatchCounts
from weight_update.serving.vllm.receiving import LeadingCalls, VLLMReceiver


def test_the_log_has_the_version_that_a_patch_leads_to(caplog: pytest.LogCaptureFixture) -> None:
    loader: Any = SimpleNamespace(abort=lambda: None, patch=lambda changes: PatchCounts(2, 3, 1))
    turns: Any = SimpleNamespace(is_inline=False, admit=lambda version: None, run=lambda work: work())
    receiver = VLLMReceiver(loader, turns, in_chunks=False, calls=None)
    with caplog.at_level(logging.INFO, "weight_update.serving.vllm.receiving"):
        receiver.begin_update(7)
        receiver.load_changes(iter([]), 5)
    assert caplog.messages == ["patch to version 7: 2 weights in place (3 elements), 1 reloaded"]


@pytest.mark.parametrize(("of_the_scheme", "of_a_call"), [(60.0, 300.0), (1800.0, 1800.0)])
def test_calls_of_the_server_may_take_as_long_as_an_update(of_the_scheme: float, of_a_call: float) -> None:
    assert LeadingCalls("http://127.0.0.1:8000", "wait", of_the_scheme)._server.timeout == of_a_call
