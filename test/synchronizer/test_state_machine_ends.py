"""The rules of the state machine when a side stops, fails or is replaced, and when weights are lost."""

from __future__ import annotations

import pytest
from sync_parts import machine

from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncStyle
from weight_update.synchronizer.state import SyncOutcome

HELD = [SyncMethod.MEMORY, SyncMethod.CHECKPOINT]
EVERY = list(SyncMethod)


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("style", list(SyncStyle))
def test_the_trainer_stopping_wakes_every_waiter_with_the_unchanged_version(
    method: SyncMethod, style: SyncStyle
) -> None:
    made = machine(method, style, explorers=3)
    made.published(0, 0)
    for id in range(3):
        made.has(id, 0)
        made.explorer_at(id, 5)
    if style is SyncStyle.FULLY_ASYNC:
        made.newest = None  # so that they have to wait
        for explorer in made.explorers.values():
            explorer.version = None
    for id in range(3):
        made.explorer_requires(id)
    before = {id: explorer.version for id, explorer in made.explorers.items()}
    made.trainer_left("the trainer stopped")
    for id, explorer in made.explorers.items():
        assert explorer.status is RunningStatus.RUNNING
        assert explorer.outcome == SyncOutcome(before[id], "the trainer stopped")


def test_a_transfer_under_way_is_not_given_up_and_ends_when_the_trainer_dies() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN, explorers=2)
    made.trainer_requires()
    for id in range(2):
        made.explorer_requires(id)
    made.begin(made.may_transfer())
    assert not made.gave_up(0, "late")
    assert not made.trainer_gave_up("late")
    made.left(1, "it left")
    made.trainer_left("it died")
    assert made.explorers[0].outcome == SyncOutcome(None, "it died")
    assert made.newest is None, "no explorer has it: it was not published"


def test_a_transfer_that_reaches_one_of_two_is_published() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN, explorers=2)
    made.trainer_requires()
    for id in range(2):
        made.explorer_requires(id)
    made.begin(made.may_transfer())
    made.published(0, 0)
    made.delivered(0, 0)
    made.failed(1, "it is stuck")
    made.transferred()
    assert made.trainer.outcome == SyncOutcome(0)
    assert made.explorers[0].outcome == SyncOutcome(0)
    assert made.explorers[1].outcome == SyncOutcome(None, "it is stuck")


def test_weights_sent_to_a_replaced_explorer_do_not_count_for_the_new_one() -> None:
    made = machine(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN)
    made.published(3, 3)
    made.explorer_requires(0)
    old = made.explorers[0]
    made.begin([0])
    made.joined(0)
    made.delivered(0, 3)
    assert made.explorers[0].version is None
    assert "another explorer" in str(old.outcome.reason)


def test_weights_that_were_lost_are_asked_for_again() -> None:
    made = machine(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN, sync_interval=10)
    made.published(4, 40)
    made.trainer_at(43)
    made.lost_weights()
    assert made.trainer_needs_sync()
    made.explorer_requires(0)
    assert made.may_fetch(0) is None
    made.published(5, 43)
    assert made.may_fetch(0) == 5


def test_weights_that_are_lost_when_the_trainer_has_stopped_are_not_waited_for() -> None:
    made = machine(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN)
    made.published(0, 0)
    made.explorer_requires(0)
    made.trainer_left("the trainer stopped")
    assert made.may_fetch(0) == 0
    made.lost_weights()
    assert made.explorers[0].outcome == SyncOutcome(None, "the trainer stopped")


def test_a_trainer_that_could_not_publish_tries_again_at_the_next_occasion_only() -> None:
    made = machine(SyncMethod.CHECKPOINT, SyncStyle.TRAINER_DRIVEN, sync_interval=2)
    assert made.trainer_needs_sync()
    made.trainer_gave_up("the disk is full")
    assert not made.trainer_needs_sync()
    made.trainer_at(1)
    assert not made.trainer_needs_sync()
    made.trainer_at(2)
    assert made.trainer_needs_sync()


@pytest.mark.parametrize("method", EVERY)
def test_after_the_trainer_stopped_explorers_take_what_is_left_of_it(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.FIXED, explorers=2, sync_interval=10)
    made.published(0, 0)
    made.explorer_at(0, 10)
    made.explorer_requires(0)
    made.trainer_left("the trainer stopped")
    if made.plan.direct:
        assert made.explorers[0].outcome == SyncOutcome(None, "the trainer stopped")
        assert not made.explorer_needs_sync(1), "no one has them"
    else:
        assert made.may_fetch(0) == 0, "older than it wanted, but better than none"
        assert made.explorer_needs_sync(1)


@pytest.mark.parametrize("method", HELD)
@pytest.mark.parametrize("style", [SyncStyle.FIXED, SyncStyle.TRAINER_DRIVEN])
def test_after_the_trainer_stopped_an_explorer_with_its_last_version_asks_no_more(
    method: SyncMethod, style: SyncStyle
) -> None:
    made = machine(method, style, sync_interval=10)
    made.published(0, 0)
    made.trainer_left("the trainer stopped")
    assert made.explorer_needs_sync(0)
    made.has(0, 0)
    made.explorer_at(0, 10)
    assert not made.explorer_needs_sync(0)


@pytest.mark.parametrize("style", SyncStyle)
def test_what_is_left_of_a_trainer_is_enough_also_if_it_came_by_connecting(style: SyncStyle) -> None:
    """With MEMORY, an explorer that connects gets the newest weights, before it is handed any."""
    made = machine(SyncMethod.MEMORY, style)
    made.published(0, 0)
    made.trainer_at(3)
    made.trainer_left("the trainer stopped")
    made.explorer_at(0, 8)
    made.explorer_requires(0)
    made.has(0, 0)
    assert made.explorers[0].outcome == SyncOutcome(0)


def test_directly_the_trainer_goes_on_waiting_for_an_explorer_that_restarts() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN)
    made.trainer_requires()
    made.joined(0)
    assert made.trainer.waits
    assert made.expected() == (0,)


def test_weights_that_are_lost_are_not_asked_for_after_the_trainer_stopped() -> None:
    made = machine(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN)
    made.published(0, 0)
    made.lost_weights()
    made.trainer_left("the trainer stopped")
    assert not made.explorer_needs_sync(0)
