"""Random sequences of the operations of a scheme: ``python test/faults/sequences.py SCHEME SEED ...``.

The seed chooses the operations. The program prints each of them, and fails if a promise was broken. It takes
one seed of ``rpc``: a process cannot enter a second RPC world.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interpreters
import rpc_parts
import torch
from sequences_driver import (
    LATE_JOINER,
    WORKERS,
    Clock,
    Member,
    SequenceDriver,
    begin,
    leave,
    look,
    take,
    threads_left,
)
from soak_measure import COUNT, sample
from soak_worker import REFUSAL, fill, open_board, start_passes

from weight_update import SyncFailedError
from weight_update.testing.processes import eventually, freeze

ROWS, LIVES, OPERATIONS = 64, 2, 8
TIMEOUT, SLACK, PATIENCE = 3.0, 2.5, 25.0
"""Seconds of a send; that a call may take longer on a busy machine; until all workers are well again."""
GROWTH = {"slots": 0, "threads": COUNT, "descriptors": COUNT}


def require(condition: object, text: str) -> None:
    if not condition:
        raise AssertionError(text)


class Episode:
    """One sequence: the life of a scheme, then of another one with the workers that are left."""

    def __init__(self, driver: SequenceDriver, seed: int, path: Path) -> None:
        self.driver, self.path, self.board = driver, path, open_board(path, ROWS)
        self.dice, self.clock = random.Random(seed), Clock()
        self.kind, self.began = driver.options.scheme, time.monotonic()
        self.bound = self.kind in ("multiprocess", "ray")  # a process keeps its scheme
        self.members: dict[int, Member] = {}
        self.handles: list[tuple[Any, set[int], float]] = []
        self.of_version: dict[int, int] = {}
        self.rows = self.stamp = 0

    def run(self) -> None:
        held = []
        for _ in range(LIVES):
            self.live()
            gc.collect()  # a sender that was shut down, and its workers
            held.append(sample([os.getpid()]))
        kinds = ["slots"] if self.kind in ("rpc", "ray") else [*GROWTH]  # theirs grow with use
        grown = [name for name in kinds if held[1][name] > held[0][name] + GROWTH[name]]
        require(not grown, f"what the trainer holds grew: {held}")

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.2f} {text}", flush=True)
        faulthandler.dump_traceback_later(4 * PATIENCE + self.clock.lost(), exit=True)

    def live(self) -> None:
        options = self.driver.options
        options.encoding = self.dice.choice(["dense", "bucket", "patch", "pipeline"])
        options.megabytes, options.calls = self.dice.choice([0.02, 0.5, 3.0]), self.dice.random() < 0.7
        options.data = self.dice.choice(["torch", "object_store"])
        self.log(f"new scheme: {options.encoding}, {options.megabytes} MB, {options.data}")
        self.connect()
        for _ in range(OPERATIONS):
            name = self.dice.choice(self.possible())
            self.log(name)
            getattr(self, f"do_{name}")()
            if any(self.board[kind].any() for kind in ("torn", "backward", "errors")):
                raise AssertionError(self.path.with_suffix(".problems").read_text())
        if self.dice.random() < 0.8:
            self.heal()
        self.close()

    def possible(self) -> list[str]:
        up = len(self.those("up"))
        names = ["send", "send", "later", "later", "interrupt", "interrupt"]
        names += ["busy", "receive"] if up else []
        names += ["wait"] if self.handles else []
        names += ["kill", "stop", "depart", "refuse"] if up > 1 else []
        names += ["go_on", "go_on"] if self.those("stopped") else []
        names += ["return", "return"] if self.those("gone") else []
        names += ["raise", "raise"] if self.members_called() else []
        names += ["cut"] if self.driver.network is not None else []
        if self.kind != "multiprocess":  # it has no late joiners, and no second process while the first lives
            names += ["late", *["replace"] * (up > 1)]
        return names

    def those(self, state: str) -> list[Member]:
        return [one for one in self.members.values() if one.idx < LATE_JOINER and one.state == state]

    def members_called(self) -> list[Member]:
        return [one for one in self.those("up") if one.idx in self.driver.called]

    def pick(self, members: list[Member]) -> Member:
        member = self.dice.choice(members)
        self.log(f"  worker {member.idx}")
        return member

    def excuse(self, *members: Member, state: str = "") -> None:
        """Excuse workers from updates until they have taken one."""
        for member in members:
            member.excused, member.state = True, state or member.state
            for _, suspects, _ in self.handles:
                suspects.add(member.idx)

    @contextlib.contextmanager
    def within(self, what: str, limit: float) -> Iterator[None]:
        """Check that the block does not take longer."""
        start = time.monotonic() - self.clock.lost()
        yield
        took = time.monotonic() - self.clock.lost() - start
        require(took < limit + SLACK, f"{what} took {took:.1f} s, limit {limit:g} s")

    # -- workers ---------------------------------------------------------------------------------------

    def started(self, idx: int) -> Member:
        if idx not in self.members:
            self.members[idx] = Member(idx, self.driver.started(idx, alone=bool(self.those("stopped"))))
        return self.members[idx]

    def prepare(self, member: Member) -> None:
        member.row, self.rows = self.rows, self.rows + 1
        member.state, member.excused = "joining", True
        asks = member.idx in self.driver.inside  # for the sender, through RPC
        scheme = None if self.bound else self.driver.make_scheme() if asks else self.driver.scheme
        member.worker.call("run", begin, scheme, self.driver.make_model)
        member.worker.post("connect")

    def joined(self, member: Member) -> None:
        member.worker.answer(PATIENCE)
        member.pid = member.worker.call("run", start_passes, self.path, ROWS, member.row, False)
        member.state, member.excused = "up", False
        self.look_at(member)

    def connect(self) -> None:
        self.stamp += 1
        steps = [lambda: self.driver.renew(self.stamp), lambda: [self.started(idx) for idx in range(WORKERS)]]
        for step in steps[::-1] if self.kind == "rpc" else steps:  # RPC needs to know whom it calls
            step()
        if self.dice.random() < 0.5:
            self.driver.scheme.continue_from(self.dice.randrange(1000))
        for idx in range(WORKERS):
            self.prepare(self.members[idx])
        with self.within("connect()", PATIENCE):
            self.driver.scheme.connect()
        self.of_version = {self.driver.scheme.version: self.stamp}
        for idx in range(WORKERS):
            self.joined(self.members[idx])

    def join(self, idx: int) -> Member:
        """Let a worker join while updates are sent."""
        member = self.started(idx)
        self.prepare(member)
        with self.within(f"connect() of worker {idx}", PATIENCE):
            while member.worker.busy(0.1 * self.dice.random()):
                if self.driver.options.encoding == "pipeline" or self.dice.random() < 0.2:
                    self.send()
            self.joined(member)
        return member

    def leave(self, member: Member) -> None:
        with self.within(f"shutdown() of worker {member.idx}", 5.0):
            left = member.worker.call("run", leave)
        require(not left, f"threads of worker {member.idx} go on after shutdown(): {left}")
        self.excuse(member, state="gone")

    def kill(self, member: Member) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        self.driver.ended(member)
        self.excuse(member, state="gone")
        member.dead = True

    def end(self, member: Member) -> None:
        self.members.pop(member.idx, None)
        self.driver.ended(member)
        member.worker.stop()

    # -- updates ---------------------------------------------------------------------------------------

    def fill(self) -> tuple[set[int], float]:
        """Give the trainer new weights; return the workers that may miss them, and the lost time."""
        self.stamp += 1
        fill(self.driver.source, self.stamp)
        suspects = {one.idx for one in self.members.values() if one.excused or one.state != "up"}
        return suspects, self.clock.lost()

    def send(self, ids: list[int] | None = None, killed: int | None = None) -> dict[int, Exception]:
        """Send, and check who has the update; return the failures."""
        suspects, lost = self.fill()
        suspects |= set() if killed is None else {killed}
        chosen = [one for one in self.members.values() if ids is None or one.idx in ids]
        missed = {one.idx for one in chosen if one.state in ("gone", "stopped") and one.idx < LATE_JOINER}
        failures: dict[int, Exception] = {}
        with self.within("send()", self.limit()):
            try:
                report = self.driver.scheme.send(self.dice.choice([None, self.driver.source]), ids)
            except SyncFailedError as error:
                report, failures = error.report, dict(error.failures)
                self.check(error, suspects, lost)
        self.of_version[report.version] = self.stamp
        require(missed <= failures.keys(), f"send() did not name {missed}; it named {list(failures)}")
        for one in chosen:
            if one.forgotten and one.idx not in report.apply_seconds:
                continue
            if one.state == "up" and one.idx not in {killed, *failures}:
                require(self.look_at(one) == self.stamp, f"worker {one.idx} does not have {self.stamp}")
                one.excused = False
        return failures

    def limit(self) -> float:
        """Return the seconds of a send; a pipeline waits for the version before, and then for its chunks."""
        return 2 * TIMEOUT if self.driver.options.encoding == "pipeline" else TIMEOUT

    def check(self, error: SyncFailedError, suspects: set[int], lost: float) -> None:
        """Check that an error names those that failed, and nobody who is well."""
        nameless = [idx for idx in error.failures if f"worker {idx}" not in str(error)]
        require(not nameless, f"the error does not name workers {nameless}: {error}")
        if self.clock.lost() > lost:
            self.log(f"  the machine stood still for {self.clock.lost() - lost:.1f} s")
            self.excuse(*self.members.values())
        elif blamed := {idx for idx in error.failures if idx in self.members} - suspects:
            raise AssertionError(f"workers {blamed} are well, but: {error}")

    def look_at(self, member: Member) -> int:
        version, stamp, wrong = member.worker.call("run", look)
        require(not wrong and 0 < stamp <= self.stamp, f"worker {member.idx} has weights {stamp}: {wrong}")
        sent = self.of_version.get(version, stamp)
        require(sent == stamp, f"worker {member.idx} calls {stamp} version {version}, which was {sent}")
        return stamp

    # -- operations ------------------------------------------------------------------------------------

    def do_send(self) -> None:
        awake = [idx for idx, one in self.members.items() if one.state != "stopped" and not one.forgotten]
        if self.dice.random() < 0.5 and awake:
            self.send(self.dice.sample(awake, self.dice.randrange(1, len(awake) + 1)))
        elif not self.those("stopped") or self.dice.random() < 0.3:  # it takes long
            self.send()

    def do_later(self) -> None:
        for _ in range(self.dice.choice([1, 1, 4])):
            suspects, lost = self.fill()
            with self.within("send_async()", self.limit()):
                handle = self.driver.scheme.send_async()
            self.of_version[handle.version] = self.stamp
            self.handles.append((handle, suspects, lost))

    def do_wait(self) -> None:
        (handle, suspects, lost), limit = self.handles.pop(), self.dice.choice([0.0, 0.3, None])
        with self.within("wait()", TIMEOUT if limit is None else limit):
            try:
                handle.wait(limit)
            except SyncFailedError as error:
                self.check(error, suspects if limit is None else {*self.members}, lost)

    def do_interrupt(self) -> None:
        """Let Ctrl-C come during a send."""
        self.fill()
        self.excuse(*self.members.values())
        send = self.dice.choice([self.driver.scheme.send, self.driver.scheme.send_async])
        seconds = max(1e-5, self.dice.choice([0.001, 0.01, 0.1]) * self.dice.random())
        self.log(f"  after {1e3 * seconds:.1f} ms in {send.__name__}()")
        with self.within("an interrupt", 1.0), contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with contextlib.suppress(SyncFailedError):
                send()
            time.sleep(0.5)

    def do_busy(self) -> None:
        member = self.pick(self.those("up"))
        self.board[member.row].delay_ms = self.dice.randrange(100, 800)
        self.do_later()
        self.do_wait()
        self.do_send()
        self.board[member.row].delay_ms = 0

    def do_receive(self) -> None:
        member, limit = self.pick(self.those("up")), self.dice.choice([0.0, 0.3])
        with self.within("receive()", 4 * self.limit()):  # up to four updates are sent meanwhile
            member.worker.post("run", take, limit)
            self.do_later()
            error = member.worker.answer(PATIENCE)
        require(member.excused or not error, f"receive() of worker {member.idx}: {error}")

    def do_refuse(self) -> None:
        self.fails(self.pick(self.those("up")), REFUSAL, self.order_to_refuse)

    def order_to_refuse(self, member: Member) -> None:
        self.board[member.row].refuse = 1

    def do_raise(self) -> None:
        """Let the object that is called through RPC raise."""
        member, trouble = self.pick(self.members_called()), rpc_parts.make_trouble
        self.fails(member, "told to raise", lambda one: one.worker.call("run", trouble, "raise"))
        member.worker.call("run", trouble, None)

    def fails(self, member: Member, text: str, order: Callable[[Member], None]) -> None:
        """Check that ``send()`` tells why a worker failed that was well before."""
        if not self.send([member.idx]):
            order(member)
            self.excuse(member)
            told = str(self.send([member.idx]).get(member.idx))
            require(text in told, f"worker {member.idx} raised, and send() told {told}")

    def do_kill(self) -> None:
        """Kill a worker, maybe while something is sent to it."""
        member = self.pick(self.those("up"))
        if self.dice.random() < 0.5:
            timer = threading.Timer(0.05 * self.dice.random(), os.kill, (member.pid, signal.SIGKILL))
            timer.start()
            self.send(killed=member.idx)
            timer.join()
        self.kill(member)

    def do_stop(self) -> None:
        member = self.pick(self.those("up"))
        freeze(member.pid)
        self.excuse(member, state="stopped")

    def do_go_on(self) -> None:
        for member in self.those("stopped"):
            os.kill(member.pid, signal.SIGCONT)
            member.state = "up"

    def do_depart(self) -> None:
        member = self.pick(self.those("up"))
        self.leave(member)
        if self.dice.random() < 0.5:
            member.dead = True
            self.driver.ended(member, leaves=not self.those("stopped"))

    def do_return(self) -> None:
        member = self.pick(self.those("gone"))
        if member.dead or self.bound:
            self.end(member)
        self.join(member.idx)

    def do_replace(self) -> None:
        """Let another process take the place of one that lives, or is stopped."""
        old = self.pick(self.those("up"))
        if self.dice.random() < 0.3:
            freeze(old.pid)
        self.driver.ended(self.members.pop(old.idx))
        new = self.join(old.idx)
        os.kill(old.pid, signal.SIGCONT)
        error = old.worker.call("run", take, 5.0)
        require(str(new.pid) in error, f"receive() of the replaced worker {old.idx} said {error!r}")
        self.leave(old)
        old.worker.stop()

    def do_late(self) -> None:
        """Let a late joiner join, or leave, or die."""
        late_joiner = self.members.get(LATE_JOINER)
        if late_joiner is None:
            self.join(LATE_JOINER)
        else:
            self.dice.choice([self.leave, self.kill])(late_joiner)
            self.end(late_joiner)

    def do_cut(self) -> None:
        """Cut the network of a host for a moment."""
        idx, network = self.dice.randrange(WORKERS), self.driver.network
        assert network is not None
        cut, mend = self.dice.choice([(network.lose, network.find), (network.pull, network.plug)])
        self.excuse(self.members[idx])
        cut(self.driver.host_of(idx))
        self.do_later()
        time.sleep(0.5 * self.dice.random())
        mend(self.driver.host_of(idx))

    # -- the end ---------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Check that all workers take updates soon after the last fault."""
        self.log("heal")
        self.do_go_on()
        while self.those("gone"):
            self.do_return()
        start = time.monotonic() - self.clock.lost()
        while failures := self.send() or self.just_joined():
            late = time.monotonic() - self.clock.lost() - start > PATIENCE
            require(not late, f"{PATIENCE:g} s after the last fault: {failures}")
            time.sleep(0.1)
        versions, newest = self.driver.scheme.worker_versions, self.driver.scheme.version
        require({*versions.values()} == {newest}, f"{versions} after version {newest} to all")

    def just_joined(self) -> list[int]:
        """Return the late joiners without weights: of a pipeline, they get those of the next update."""
        return [idx for idx, version in self.driver.scheme.worker_versions.items() if version is None]

    def close(self) -> None:
        """Shut both ends down, in any order."""
        for end in self.dice.sample([self.close_sender, self.close_workers], 2):
            self.log(end.__name__)
            end()
        for handle, *_ in self.handles:
            with self.within("wait() after shutdown()", TIMEOUT), contextlib.suppress(SyncFailedError):
                handle.wait()
        self.handles.clear()
        for member in list(self.members.values()):
            if member.dead or self.bound or member.idx >= LATE_JOINER:
                self.end(member)

    def close_sender(self) -> None:
        waiting = [one for one in self.members.values() if one.state == "up"]
        for one in waiting:
            one.worker.post("run", take, 30.0)
        with self.within("shutdown()", 5.0):
            self.driver.scheme.shutdown()
        for one in waiting:
            with self.within(f"receive() of worker {one.idx} after shutdown()", 1.0):
                require(one.worker.answer(PATIENCE), f"worker {one.idx} does not know of the shutdown()")
        gone = eventually(lambda: not threads_left(), 5.0)
        require(gone, f"threads go on after shutdown(): {threads_left()}")

    def close_workers(self) -> None:
        self.do_go_on()
        for one in self.members.values():
            if one.state == "up":
                self.leave(one)


def main(name: str, *seeds: str) -> None:
    """Run sequences over one scheme."""
    torch.set_num_threads(1)
    interpreters.use_template_for_forkserver()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    options = Namespace(scheme="distributed" if name == "hosts" else name, hosts=name == "hosts")
    options.workers, options.timeout, options.compression = WORKERS, TIMEOUT, "none"
    driver = SequenceDriver(options)
    with driver.stack, tempfile.TemporaryDirectory() as directory:
        driver.open()
        for seed in seeds:
            print(f"{name} seed {seed}", flush=True)
            episode = Episode(driver, int(seed), Path(directory, seed))
            try:
                episode.run()
            finally:
                faulthandler.cancel_dump_traceback_later()
                for member in episode.members.values():
                    member.worker.runner.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
