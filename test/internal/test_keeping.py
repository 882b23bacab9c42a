"""Receivers of one model that come and go in several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from weight_update.receiver import keeping
from weight_update.receiver.keeping import keep_alive, let_go


def keep_with(monkeypatch: pytest.MonkeyPatch, at_the_end: Callable[[], None]) -> nn.Module:
    """Return a model that refers to "first"; ``at_the_end`` is called when the last receiver has gone."""

    class Kept(keeping._Kept):
        def __len__(self) -> int:
            left = super().__len__()
            if not left and waiting:
                waiting.pop()()
            return left

    waiting = [at_the_end]
    monkeypatch.setattr(keeping, "_Kept", Kept)
    model = nn.Linear(1, 1)
    keep_alive(model, "first")
    return model


def kept_by(model: nn.Module) -> Any:
    return vars(model).get(keeping._ATTRIBUTE)


def test_a_receiver_that_comes_while_the_last_one_goes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keep_with(monkeypatch, lambda: keep_alive(model, "second"))
    let_go(model, "first")
    assert kept_by(model) == {"second"}
    let_go(model, "second")
    assert kept_by(model) is None


def test_two_receivers_that_go_at_once_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keep_with(monkeypatch, lambda: let_go(model, "second"))
    let_go(model, "first")
    assert kept_by(model) is None
