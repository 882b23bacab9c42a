"""A worker of vLLM as a receiver, without vLLM."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from weight_update.serving.vllm.loader import PatchCounts
from weight_update.serving.vllm.receiving import LeadingCalls, VLLMReceiver
from weight_update.serving.vllm.turns import Turns
from weight_update.threads import call_in_thread

WAIT = 20.0


def test_the_log_has_the_version_that_a_patch_leads_to(caplog: pytest.LogCaptureFixture) -> None:
    loader: Any = SimpleNamespace(abort=lambda: None, patch=lambda changes: PatchCounts(2, 3, 1))
    turns: Any = SimpleNamespace(
        version=None, is_inline=False, admit=lambda version: None, run=lambda work: work()
    )
    receiver = VLLMReceiver(loader, turns, in_chunks=False, calls=None)
    with caplog.at_level(logging.INFO, "weight_update.serving.vllm.receiving"):
        receiver.begin_update(7)
        receiver.load_changes(iter([]), 5)
    assert caplog.messages == ["patch to version 7: 2 weights in place (3 elements), 1 reloaded"]


@pytest.mark.parametrize(("of_the_scheme", "of_a_call"), [(60.0, 300.0), (1800.0, 1800.0)])
def test_calls_of_the_server_may_take_as_long_as_an_update(of_the_scheme: float, of_a_call: float) -> None:
    assert LeadingCalls("http://127.0.0.1:8000", "wait", of_the_scheme)._server.timeout == of_a_call


def test_a_version_that_is_sent_again_is_loaded_again() -> None:
    """As after an interrupted connection; the call of vLLM must not return because the worker has it."""
    turns, loaded, begun = Turns(), list[str](), threading.Event()
    loader: Any = SimpleNamespace(abort=lambda: None, load=loaded.extend, finish=lambda: None)

    class Leading(LeadingCalls):
        def begin(self, version: int) -> None:
            self._update = call_in_thread("vllm", turns.serve, version, WAIT, begun.set)
            begun.wait(1.0)

        def finish(self, version: int) -> None:
            assert self._update is not None
            self._update.result(WAIT)

    turns.settle(7)
    calls = Leading("http://127.0.0.1:8000", "wait", WAIT)
    receiver = VLLMReceiver(loader, turns, in_chunks=False, calls=calls)

    def update() -> None:
        receiver.begin_update(7)
        receiver.load_weights(iter(["weight"]))  # type: ignore[list-item]
        receiver.finish_update(7)

    call_in_thread("receiver", update).result(WAIT)
    assert loaded == ["weight"]
    assert turns.version == 7


def test_a_server_that_answers_and_did_not_ask_this_worker() -> None:
    calls = LeadingCalls("http://10.0.0.6:8000", "wait", 60.0)
    calls._update = call_in_thread("vllm", lambda: None)
    calls._update.result(WAIT)
    with pytest.raises(
        RuntimeError, match=r"http://10.0.0.6:8000 updated other workers than this one; .* URL"
    ):
        calls.check()
