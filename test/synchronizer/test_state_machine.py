"""The rules of the state machine, one by one."""

from __future__ import annotations

import pytest
from sync_parts import machine

from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncPlan, SyncStyle
from weight_update.synchronizer.state import SyncOutcome
from weight_update.synchronizer.state_machine import StateMachine

HELD = [SyncMethod.MEMORY, SyncMethod.CHECKPOINT]


EVERY = list(SyncMethod)


def explorer_steps(made: StateMachine, until: int) -> list[int]:
    """Return the steps at which explorer 0 synchronizes, if every synchronization succeeds."""
    found = []
    for step in range(until + 1):
        made.explorer_at(0, step)
        if made.explorer_needs_sync(0):
            made.explorer_requires(0)
            found.append(step)
            made.published(len(found), 10**6 + step)
            made.has(0, len(found))
    return found


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize(
    ("interval", "offset", "steps", "wanted"),
    [
        (10, 0, [10, 20, 30], [10, 20, 30]),
        (10, 5, [5, 15, 25], [0, 10, 20]),
        (1, 0, [1, 2, 3], [1, 2, 3]),
        (1, 1, [1, 2, 3], [0, 1, 2]),
        (4, 6, [6, 10, 14], [0, 4, 8]),
    ],
)
def test_fixed_explorers_synchronize_at_their_steps(
    method: SyncMethod, interval: int, offset: int, steps: list[int], wanted: list[int]
) -> None:
    made = machine(method, SyncStyle.FIXED, sync_interval=interval, sync_offset=offset)
    assert explorer_steps(made, steps[-1]) == steps
    assert [made.plan.wanted(step) for step in steps] == wanted


@pytest.mark.parametrize("method", HELD)
@pytest.mark.parametrize("style", [SyncStyle.FIXED, SyncStyle.TRAINER_DRIVEN, SyncStyle.FULLY_ASYNC])
def test_the_trainer_publishes_in_its_rhythm_and_never_waits(method: SyncMethod, style: SyncStyle) -> None:
    made = machine(method, style, explorers=3, sync_interval=10)
    found = []
    for step in range(31):
        made.trainer_at(step)
        while made.trainer_needs_sync():
            found.append(step)
            made.published(len(found) - 1, step)
        assert made.trainer.status is RunningStatus.RUNNING
    assert found == [0, 10, 20, 30]


@pytest.mark.parametrize("method", HELD)
def test_fixed_waits_for_weights_of_its_step(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.FIXED, sync_interval=10, sync_offset=5)
    made.published(0, 0)
    made.explorer_at(0, 15)
    made.explorer_requires(0)
    assert made.may_fetch(0) is None
    made.published(1, 10)
    assert made.may_fetch(0) == 1
    made.begin([0])
    made.delivered(0, 1)
    assert made.explorers[0].outcome == SyncOutcome(1)
    assert made.explorers[0].status is RunningStatus.RUNNING


@pytest.mark.parametrize("method", EVERY)
def test_explorer_driven_asks_after_its_interval_and_the_trainer_answers(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.EXPLORER_DRIVEN, explorers=2, sync_interval=3)
    assert not made.trainer_needs_sync()
    needs = []
    for step in range(4):
        made.explorer_at(0, step)
        needs.append(made.explorer_needs_sync(0))
    assert needs == [False, False, False, True]
    made.explorer_requires(0)
    assert made.trainer_needs_sync()
    if made.plan.direct:
        made.trainer_requires()
        assert made.may_transfer() == (0,), "the other explorer did not ask"
        made.begin([0])
    made.published(0, 0)
    if not made.plan.direct:
        assert made.may_fetch(0) == 0
        made.begin([0])
    made.delivered(0, 0)
    made.transferred()
    assert made.explorers[0].outcome == SyncOutcome(0)
    assert not made.trainer_needs_sync()
    assert not made.explorer_needs_sync(0)


@pytest.mark.parametrize("method", EVERY)
def test_explorer_driven_after_a_timeout_asks_again_at_the_next_step(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.EXPLORER_DRIVEN, sync_interval=3)
    made.explorer_at(0, 3)
    made.explorer_requires(0)
    assert made.gave_up(0, "too late")
    assert made.explorers[0].outcome == SyncOutcome(None, "too late")
    assert made.explorers[0].status is RunningStatus.RUNNING
    assert not made.trainer_needs_sync()
    assert not made.explorer_needs_sync(0)
    made.explorer_at(0, 4)
    assert made.explorer_needs_sync(0)


@pytest.mark.parametrize("method", HELD)
def test_explorer_driven_takes_what_was_published_at_this_very_step_for_another(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.EXPLORER_DRIVEN, explorers=2)
    made.trainer_at(3)
    made.published(0, 3)
    made.explorer_requires(1)
    assert made.may_fetch(1) == 0
    assert not made.trainer_needs_sync()
    made.trainer_at(4)
    assert made.may_fetch(1) is None
    assert made.trainer_needs_sync()


@pytest.mark.parametrize("method", HELD)
def test_trainer_driven_explorers_see_that_there_is_something_newer(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.TRAINER_DRIVEN)
    assert not made.explorer_needs_sync(0)
    made.published(0, 0)
    assert made.explorer_needs_sync(0)
    made.explorer_requires(0)
    assert made.may_fetch(0) == 0
    made.begin([0])
    made.delivered(0, 0)
    assert not made.explorer_needs_sync(0)


def test_trainer_driven_directly_waits_for_all_running_explorers() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.TRAINER_DRIVEN, explorers=3, sync_interval=2)
    made.trainer_at(2)
    made.trainer_requires()
    assert all(made.explorer_needs_sync(id) for id in range(3))
    made.explorer_requires(0)
    made.explorer_requires(1)
    assert made.may_transfer() == ()
    assert made.may_transfer(late=True) == (0, 1)
    made.left(2, "it left")
    assert made.may_transfer() == (0, 1)


def test_fully_async_needs_to_wait_only_when_too_far_behind() -> None:
    made = machine(SyncMethod.MEMORY, SyncStyle.FULLY_ASYNC, max_staleness=2)
    made.published(0, 0)
    assert made.explorer_needs_sync(0), "it has no weights of the trainer yet"
    made.has(0, 0)
    for version, needed in ((1, False), (2, False), (3, True)):
        made.published(version, version)
        assert made.explorer_needs_sync(0) is needed
    made.explorer_requires(0)
    made.has(0, 2)  # it came in the background
    assert made.explorers[0].outcome == SyncOutcome(2)


def test_fully_async_directly_counts_from_what_was_given_away() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.FULLY_ASYNC, max_staleness=1)
    made.published(0, 0)
    made.has(0, 0)
    for version, needed in ((1, False), (2, True)):
        made.trainer_at(version)
        made.offered(version, version)
        assert made.explorer_needs_sync(0) is needed
    assert made.newest == 0, "no explorer is known to have more"
    made.explorer_requires(0)
    assert made.ready() == (0,)
    made.published(1, 1)
    made.has(0, 1)  # it came in the background
    assert made.explorers[0].outcome == SyncOutcome(1)


def test_fully_async_directly_what_a_trainer_gave_is_forgotten_with_it() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.FULLY_ASYNC, max_staleness=0)
    made.published(0, 0)
    made.has(0, 0)
    made.offered(0, 1)
    assert made.explorer_needs_sync(0)
    made.trainer_left("it died")
    assert not made.explorer_needs_sync(0)
    made.trainer_joined(0)
    assert not made.explorer_needs_sync(0)


def test_fixed_directly_in_lockstep_and_no_transfer_before_anybody_wants_one() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.FIXED, explorers=2, sync_interval=10)
    assert not made.trainer_needs_sync(), "explorers first synchronize at step 10"
    for id in range(2):
        made.explorer_at(id, 10)
        made.explorer_requires(id)
    assert not made.trainer_needs_sync()
    made.trainer_at(10)
    assert made.trainer_needs_sync()
    made.trainer_requires()
    assert made.may_transfer() == (0, 1)


def test_fixed_directly_does_not_wait_for_who_has_passed_but_serves_who_comes_late() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.FIXED, explorers=2, sync_interval=10)
    made.explorer_at(0, 13)
    made.trainer_at(10)
    made.explorer_at(1, 9)
    made.trainer_requires()
    assert made.expected() == (1,)
    assert made.trainer_gave_up("late")
    assert not made.trainer_needs_sync()
    made.explorer_at(1, 10)
    made.explorer_requires(1)
    assert made.trainer_needs_sync()
    made.trainer_requires()
    assert made.may_transfer() == (1,)


def test_a_trainer_that_waits_before_an_explorer_asks_is_told_so() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.EXPLORER_DRIVEN)
    made.trainer_requires()
    assert made.trainer is not None
    reason = "no explorer waits for weights; call sync_weight() when need_sync() returns True"
    assert made.trainer.outcome == SyncOutcome(None, reason)


@pytest.mark.parametrize("style", [SyncStyle.FIXED, SyncStyle.EXPLORER_DRIVEN, SyncStyle.TRAINER_DRIVEN])
def test_directly_without_explorers_the_trainer_goes_on_at_once(style: SyncStyle) -> None:
    made = machine(SyncMethod.NCCL, style, explorers=0)
    made.trainer_at(1)
    made.trainer_requires()
    assert made.trainer.outcome.reason
    assert not made.trainer_needs_sync()


@pytest.mark.parametrize("method", EVERY)
def test_fixed_synchronizes_once_at_a_step(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.FIXED, sync_interval=2)
    made.explorer_at(0, 2)
    made.explorer_requires(0)
    made.published(0, 2)
    made.begin([0])
    made.delivered(0, 0)
    assert made.explorers[0].outcome == SyncOutcome(0)
    assert not made.explorer_needs_sync(0)
    made.explorer_at(0, 4)
    assert made.explorer_needs_sync(0)


def test_fixed_directly_no_explorer_is_expected_before_the_first_synchronization() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.FIXED, sync_interval=10)
    assert made.expected() == ()
    ahead = SyncPlan(SyncMethod.NCCL, SyncStyle.FIXED, 10, 5)
    assert [ahead.next_wanted(step) for step in (0, 4, 5, 14, 15)] == [0, 0, 10, 10, 20]


def test_fixed_directly_waits_for_who_is_about_to_ask() -> None:
    made = machine(SyncMethod.NCCL, SyncStyle.FIXED, sync_interval=10)
    made.explorer_at(0, 10)
    made.trainer_at(10)
    assert made.expected() == (0,)


def test_an_explorer_that_waits_for_the_newest_does_not_settle_for_a_newer_one() -> None:
    made = machine(SyncMethod.MEMORY, SyncStyle.TRAINER_DRIVEN)
    made.published(0, 0)
    made.has(0, 0)
    made.published(2, 2)
    made.explorer_requires(0)
    made.has(0, 1)
    assert made.may_fetch(0) == 2
    made.has(0, 2)
    assert made.explorers[0].outcome == SyncOutcome(2)


@pytest.mark.parametrize("method", HELD)
def test_the_trainer_is_not_asked_for_who_is_being_served(method: SyncMethod) -> None:
    made = machine(method, SyncStyle.EXPLORER_DRIVEN)
    made.explorer_requires(0)
    made.published(0, 0)
    made.begin([0])
    made.trainer_at(1)
    assert not made.trainer_needs_sync()


def test_a_version_that_came_by_connecting_is_not_taken_for_a_newer_one() -> None:
    """The explorer announced its wish before both versions."""
    made = machine(SyncMethod.MEMORY, SyncStyle.EXPLORER_DRIVEN)
    made.published(0, 0)
    made.explorer_announces(0)
    made.published(1, 1)
    made.published(2, 2)
    made.explorer_requires(0)
    made.has(0, 1)
    assert made.explorers[0].waits
    assert made.may_fetch(0) == 2


@pytest.mark.parametrize("method", HELD)
def test_an_explorer_goes_on_with_the_version_that_reached_it_while_a_newer_one_came(
    method: SyncMethod,
) -> None:
    """It would not end to wait if the trainer were faster than each transfer."""
    made = machine(method, SyncStyle.TRAINER_DRIVEN)
    made.published(0, 0)
    made.explorer_requires(0)
    made.begin([0])
    made.published(1, 1)
    made.delivered(0, 0)
    assert made.explorers[0].outcome == SyncOutcome(0)
    assert made.explorer_needs_sync(0)


def test_directly_an_explorer_asks_for_its_first_weights_once_the_trainer_is_there() -> None:
    """It joins the trainer by asking, and otherwise would get no update in the background."""
    made = StateMachine(SyncPlan(SyncMethod.NCCL, SyncStyle.FULLY_ASYNC, max_staleness=5))
    made.joined(0)
    assert not made.explorer_needs_sync(0)
    made.trainer_joined()
    assert made.explorer_needs_sync(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "carrier pigeon"}, "known: 'nccl', 'memory', 'checkpoint'"),
        ({"style": "sometimes"}, "unknown SyncStyle"),
        ({"sync_interval": 0}, "sync_interval"),
        ({"sync_interval": True}, "sync_interval"),
        ({"sync_offset": -1}, "sync_offset"),
        ({"sync_offset": 1, "style": "explorer_driven"}, r"for SyncStyle\.FIXED"),
        ({"max_staleness": 2}, r"for SyncStyle\.FULLY_ASYNC"),
    ],
)
def test_a_plan_checks_itself(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyncPlan(**{"method": "memory", **fields})  # type: ignore[arg-type]


def test_a_plan_travels_as_plain_values() -> None:
    plan = SyncPlan(SyncMethod.NCCL, SyncStyle.FIXED, 10, 5)
    assert SyncPlan(**plan.to_json()) == plan
