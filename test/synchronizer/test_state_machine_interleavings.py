"""The state machine under random interleavings, deaths, restarts and timeouts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weight_update.synchronizer.plan import RunningStatus, SyncMethod, SyncPlan, SyncStyle
from weight_update.synchronizer.state import ExplorerState
from weight_update.synchronizer.state_machine import StateMachine

IDS = st.integers(0, 3)
LUCK = st.integers(0, 7)
REQUIRE_SYNC = RunningStatus.REQUIRE_SYNC


def plans() -> st.SearchStrategy[SyncPlan]:
    def numbers(style: SyncStyle) -> st.SearchStrategy[SyncPlan]:
        return st.builds(
            SyncPlan,
            st.sampled_from(SyncMethod),
            st.just(style),
            sync_interval=st.integers(1, 4),
            sync_offset=st.integers(0, 5) if style is SyncStyle.FIXED else st.just(0),
            max_staleness=st.integers(0, 3) if style is SyncStyle.FULLY_ASYNC else st.just(1),
        )

    return st.sampled_from(SyncStyle).flatmap(numbers)


class Interleavings(RuleBasedStateMachine):
    """A trainer and explorers that act in any order; the rules hold all the same."""

    @initialize(plan=plans())
    def begin(self, plan: SyncPlan) -> None:
        self.machine = StateMachine(plan)
        self.published: set[int] = set()
        self.seen: dict[ExplorerState, int] = {}
        self.going: dict[int, int] = {}  # MEMORY, CHECKPOINT: what is on its way, by explorer
        self.waiters: list[ExplorerState] = []
        self.machine.trainer_joined()
        for id in range(4):
            self.machine.joined(id)

    def is_(self, id: int, *, waiting: bool) -> bool:
        """Return whether an explorer is here, and waits or does not."""
        explorer = self.machine.explorers.get(id)
        return explorer is not None and explorer.waits is waiting

    # -- coming and going

    @rule(step=st.integers(0, 20), luck=LUCK)
    def trainer_comes(self, step: int, luck: int) -> None:
        if luck == 0 or self.trainer_is_gone():
            self.machine.trainer_joined(step)

    def trainer_is_gone(self) -> bool:
        trainer = self.machine.trainer
        return trainer is None or trainer.status is RunningStatus.STOPPED

    @rule(luck=LUCK)
    def trainer_dies(self, luck: int) -> None:
        if luck == 0:
            self.machine.trainer_left("it died")

    @rule(id=IDS, step=st.integers(0, 20), luck=LUCK)
    def explorer_comes(self, id: int, step: int, luck: int) -> None:
        old = self.machine.explorers.get(id)
        if luck and old is not None:
            return
        version = None if old is None else old.version
        self.machine.joined(id, version, step)
        self.going.pop(id, None)

    @rule(id=IDS, luck=LUCK)
    def explorer_dies(self, id: int, luck: int) -> None:
        if luck == 0:
            self.machine.left(id, "it left")
            self.going.pop(id, None)

    # -- the trainer

    @precondition(lambda self: self.machine.trainer is not None)
    @rule(steps=st.integers(1, 3))
    def trainer_steps(self, steps: int) -> None:
        trainer = self.machine.trainer
        if trainer.status is RunningStatus.RUNNING:
            self.machine.trainer_at(trainer.step + steps)

    @precondition(lambda self: self.machine.trainer_needs_sync())
    @rule(fails=st.booleans())
    def trainer_syncs(self, fails: bool) -> None:
        machine = self.machine
        assert machine.trainer is not None
        if machine.plan.direct and machine.plan.style is SyncStyle.FULLY_ASYNC:
            newest = -1 if machine.newest is None else machine.newest
            machine.offered(machine.trainer.step, None if fails else newest + 1)
            if machine.ready():
                machine.begin(machine.ready())
        elif machine.plan.direct:
            machine.trainer_requires()
        elif fails:
            machine.trainer_gave_up("the disk is full")
            assert not machine.trainer_needs_sync(), "it would spin"
        else:
            self.publish()

    def publish(self) -> int:
        trainer, newest = self.machine.trainer, self.machine.newest
        version = 0 if newest is None else newest + 1
        self.published.add(version)
        self.machine.published(version, 0 if trainer is None else trainer.step)
        return version

    @rule(late=st.booleans())
    def transfer_begins(self, late: bool) -> None:
        ids = self.machine.may_transfer(late)
        if ids:
            self.machine.begin(ids)
        elif late:
            self.machine.trainer_gave_up("late")

    @precondition(lambda self: self.machine.transfer)
    @rule(arrives=st.sets(IDS))
    def transfer_ends(self, arrives: set[int]) -> None:
        machine = self.machine
        ids = [e.id for e in machine.transfer if machine.explorers.get(e.id) is e]
        reached = [id for id in ids if id in arrives]
        if reached:
            version = self.publish()
            for id in reached:
                machine.delivered(id, version)
        for id in set(ids) - set(reached):
            machine.failed(id, "it is stuck")
        machine.transferred()
        assert not machine.transfer

    @rule(luck=LUCK)
    def weights_are_lost(self, luck: int) -> None:
        if luck == 0 and self.machine.plan.method is SyncMethod.MEMORY:
            self.machine.lost_weights()

    # -- explorers

    @rule(id=IDS, steps=st.integers(1, 3))
    def explorer_steps(self, id: int, steps: int) -> None:
        explorer = self.machine.explorers.get(id)
        if explorer is not None and explorer.status is RunningStatus.RUNNING:
            self.machine.explorer_at(id, explorer.step + steps)

    @rule(ids=st.sets(IDS, min_size=1), asked=st.booleans())
    def explorers_sync(self, ids: set[int], asked: bool) -> None:
        for id in ids:
            if self.is_(id, waiting=False) and (asked or self.machine.explorer_needs_sync(id)):
                self.machine.explorer_requires(id)
                self.waiters.append(self.machine.explorers[id])

    @rule(ids=st.sets(IDS, min_size=1))
    def explorers_fetch(self, ids: set[int]) -> None:
        for id in ids & set(self.machine.explorers):
            version = self.machine.may_fetch(id)
            if version is not None:
                self.machine.begin([id])
                self.going[id] = version

    @rule(id=IDS, luck=LUCK)
    def explorer_notifies(self, id: int, luck: int) -> None:
        explorer = self.machine.explorers.get(id)
        if explorer is None or explorer.waits:
            return
        ran, needs = explorer.status is RunningStatus.RUNNING, self.machine.explorer_needs_sync(id)
        self.machine.explorer_announces(id)
        self.waiters = [one for one in self.waiters if one is not explorer]  # they read it
        if luck % 2 and explorer.status is REQUIRE_SYNC:
            self.machine.explorer_withdraws(id)
            assert explorer.status is RunningStatus.RUNNING
            assert not ran or self.machine.explorer_needs_sync(id) is needs

    @rule(luck=LUCK)
    def trainer_notifies(self, luck: int) -> None:
        trainer = self.machine.trainer
        if trainer is None or trainer.waits or self.trainer_is_gone() or not self.machine.plan.direct:
            return
        self.machine.trainer_announces()
        if luck % 2:
            self.machine.trainer_withdraws()
            assert trainer.status is RunningStatus.RUNNING

    @rule(id=IDS, arrives=st.booleans())
    def fetch_ends(self, id: int, arrives: bool) -> None:
        version = self.going.pop(id, None)
        if version is not None and arrives:
            self.machine.delivered(id, version)
        elif version is not None:
            self.machine.failed(id, "it did not arrive")

    @rule(id=IDS)
    def explorer_times_out(self, id: int) -> None:
        explorer = self.machine.explorers.get(id)
        if explorer is None or explorer.status is not REQUIRE_SYNC:
            return
        version = explorer.version
        if self.machine.gave_up(id, "late"):
            assert explorer.version == version
            assert explorer.status is RunningStatus.RUNNING
            assert not self.machine.explorer_needs_sync(id), "it would spin"

    @rule(moves=st.lists(st.tuples(st.integers(0, 9), IDS, st.booleans()), min_size=4, max_size=40))
    def busy_period(self, moves: list[tuple[int, int, bool]]) -> None:
        """Do the usual steps of a run; Hypothesis leaves out most rules in each example."""
        for move, id, flag in moves:
            if move < 6:
                self.explorer_moves(move, id, flag)
            else:
                self.trainer_moves(move, id, flag)
            self.check()

    def explorer_moves(self, move: int, id: int, flag: bool) -> None:
        if move == 0:
            self.explorer_steps(id, 1 + flag)
        elif move in (1, 2):
            self.explorers_sync({id}, flag)
        elif move == 3:
            self.explorers_fetch({id, 0})
        elif move == 4:
            self.fetch_ends(id, flag or id > 0)
        else:
            self.explorer_times_out(id)

    def trainer_moves(self, move: int, id: int, flag: bool) -> None:
        if move == 6 and not self.trainer_is_gone():
            self.trainer_steps(1)
        elif move == 7 and self.machine.trainer_needs_sync():
            self.trainer_syncs(flag and id == 0)
        elif move == 8:
            self.transfer_begins(flag)
        elif move == 9 and self.machine.transfer:
            self.transfer_ends({id, 0} if flag else set())

    def check(self) -> None:
        self.versions_only_grow_and_were_published()
        self.who_is_gone_does_not_wait_and_nobody_waits_for_it()
        self.who_waits_has_no_outcome_and_who_has_one_does_not_wait()
        self.weights_are_on_their_way_only_in_a_transfer()

    # -- what always holds

    @invariant()
    def versions_only_grow_and_were_published(self) -> None:
        for explorer in self.machine.explorers.values():
            if explorer.version is None:
                continue
            assert explorer.version in self.published
            assert explorer.version >= self.seen.get(explorer, 0)
            self.seen[explorer] = explorer.version
        newest = self.machine.newest
        assert newest == (max(self.published) if self.published else None)

    @invariant()
    def who_is_gone_does_not_wait_and_nobody_waits_for_it(self) -> None:
        here = self.machine.explorers
        for waiter in self.waiters:
            if here.get(waiter.id) is not waiter:
                assert waiter.status is RunningStatus.STOPPED
                assert waiter.outcome is not None
        assert set(self.machine.expected()) <= set(here)
        assert set(self.machine.ready()) <= set(here)
        trainer = self.machine.trainer
        if trainer is None or not trainer.waits or self.machine.transfer:
            return
        assert self.machine.expected() or self.machine.ready(), "the trainer waits for no one"

    @invariant()
    def who_waits_has_no_outcome_and_who_has_one_does_not_wait(self) -> None:
        for waiter in self.waiters:
            assert (waiter.outcome is None) or not waiter.waits
            assert not waiter.busy or waiter.waits

    @rule(id=IDS)
    def explorer_tells_what_it_has(self, id: int) -> None:
        explorer = self.machine.explorers.get(id)
        if explorer is not None and explorer.version is not None:
            before = explorer.version
            self.machine.has(id, max(before - 1, min(self.published)))  # an old message may come late
            assert explorer.version == before

    @invariant()
    def weights_are_on_their_way_only_in_a_transfer(self) -> None:
        busy = {explorer.id for explorer in self.machine.explorers.values() if explorer.busy}
        if self.machine.plan.direct:
            assert busy <= {explorer.id for explorer in self.machine.transfer}
            assert not (self.machine.transfer and self.trainer_is_gone())
        else:
            assert busy <= set(self.going)

    @invariant()
    def nobody_waits_for_a_trainer_that_stopped(self) -> None:
        trainer = self.machine.trainer
        if trainer is None or trainer.status is not RunningStatus.STOPPED:
            return
        for explorer in self.machine.explorers.values():
            waits = explorer.waits and not explorer.busy
            assert not waits or self.machine.may_fetch(explorer.id) is not None

    def teardown(self) -> None:
        """Check that every waiter can be woken: transfers end, and time passes."""
        if not hasattr(self, "machine"):
            return
        for id in list(self.going):
            self.machine.failed(id, "it did not arrive")
        if self.machine.transfer:
            self.machine.transferred()
        self.machine.trainer_gave_up("late")
        for explorer in self.machine.explorers.values():
            assert self.machine.gave_up(explorer.id, "late")
        members = [self.machine.trainer, *self.machine.explorers.values()]
        assert all(member is None or member.status is not REQUIRE_SYNC for member in members)


Interleavings.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestInterleavings = Interleavings.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_interleavings() -> None:
    class Many(Interleavings):
        pass

    Many.TestCase.settings = settings(
        max_examples=600, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Many.TestCase().runTest()
