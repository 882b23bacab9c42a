"""Promise 7: a slow worker costs the sender no growing memory; the newest version wins."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from faults_kinds import quick_over
from faults_tools import (
    Processes,
    Stripes,
    Worker,
    eventually,
    fill,
    hold,
    let_go,
    slot_bytes,
    version_of,
    wait_version,
    weights_of,
)
from marks import quick_for

from weight_update import SyncFailedError, WeightSyncScheme

LAYERS, NUMEL = 10, 1 << 19  # 20 MB
MODEL_BYTES = LAYERS * NUMEL * 4
SENDS = 200


def big() -> Stripes:
    return Stripes(LAYERS, NUMEL)


def own_pss() -> int:
    return psutil.Process().memory_full_info().pss


def count_versions(me: Worker) -> None:
    """From now on keep every version that becomes visible."""
    me.seen = []

    def watch() -> None:
        while True:
            version = me.scheme.version
            if not me.seen or me.seen[-1] != version:
                me.seen.append(version)
            time.sleep(0.0005)

    threading.Thread(target=watch, daemon=True).start()


def seen(me: Worker) -> list[int]:
    return me.seen


@quick_over("shared_mem")
@pytest.mark.parametrize("how", quick_for(["sync=False", "send_async"], "send_async"))
def test_held_worker_costs_bounded_memory(kind, procs: Processes, how: str) -> None:
    scheme: WeightSyncScheme = procs.scheme(kind, sync=how != "sync=False", timeout=60.0)
    model = big()
    (worker,) = procs.launch(scheme, model, big, 1)
    send = scheme.send if how == "sync=False" else scheme.send_async
    worker.call(count_versions)
    worker.call(hold)
    send(fill(model, 1))
    pss, start = own_pss(), time.monotonic()
    peak = most_slots = 0
    for version in range(2, SENDS + 1):
        send(fill(model, version))
        if version % 20 == 0:
            peak = max(peak, own_pss() - pss)
            most_slots = max(most_slots, slot_bytes())
    assert MODEL_BYTES < most_slots < 5 * MODEL_BYTES, "more than four slots"
    assert peak < 4 * MODEL_BYTES
    assert time.monotonic() - start < 20.0  # nobody waited for the worker
    assert worker.call(version_of) == 0
    worker.call(let_go)
    assert worker.call(wait_version, SENDS, 10.0) == SENDS
    assert {float(v.max()) for v in worker.call(weights_of).values()} == {float(SENDS)}
    assert len(worker.call(seen)) <= 4  # 0, the one that waited, the newest: those between were dropped


@quick_over("shared_mem")
def test_held_workers_do_not_delay_updates(kind, procs: Processes) -> None:
    """Workers that hold different versions use different slots; the sender does not wait for any of them."""
    gc.collect()
    others = slot_bytes()  # of earlier tests
    scheme, model = procs.scheme(kind, timeout=60.0), Stripes(8, 1024)
    *held, fast = procs.launch(scheme, model, lambda: Stripes(8, 1024), 5)
    numbers = itertools.count(1)

    def update(count: int) -> int:
        for version in itertools.islice(numbers, count):
            scheme.send_async(fill(model, version))
            assert fast.call(wait_version, version, 5.0) == version
        return version

    with ThreadPoolExecutor(1) as pool:
        newest = 0
        for worker in held:
            assert worker.call(wait_version, newest, 5.0) == newest  # update() waits for the fast one alone
            worker.call(hold)
            newest = pool.submit(update, 3).result(20.0)
        newest = pool.submit(update, 20).result(20.0)
        assert [worker.call(version_of) for worker in held] == [0, 3, 6, 9]
        for worker in held:
            worker.call(let_go)
        assert [worker.call(wait_version, newest, 5.0) for worker in held] == [newest] * 4
        pool.submit(update, 20).result(20.0)

        def trimmed() -> bool:  # slots that slow workers release after an update are closed by later ones
            newest = update(1)
            assert [worker.call(wait_version, newest, 5.0) for worker in held] == [newest] * 4
            return slot_bytes() - others <= 4 * 8 * 1024 * 4

        assert pool.submit(eventually, trimmed).result(20.0)


def leave_inside_hold(me: Worker) -> tuple[float, list[str]]:
    start = time.monotonic()
    me.scheme.shutdown()
    names = [thread.name for thread in threading.enumerate()]
    return time.monotonic() - start, [name for name in names if "receiver" in name]


def test_shutdown_inside_hold_does_not_wait_for_its_end(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind, timeout=30.0), Stripes(4, 16)
    (worker,) = procs.launch(scheme, model, lambda: Stripes(4, 16), 1)
    worker.call(hold)
    handle = scheme.send_async(fill(model, 1))
    time.sleep(0.3)  # the update waits at the gate now
    seconds, threads = worker.call(leave_inside_hold)
    assert seconds < 15.0
    assert threads == []
    with pytest.raises(SyncFailedError, match="worker 0"):
        handle.wait(5.0)


def leave_and_say_when(me: Worker) -> float:
    start = time.monotonic()
    me.scheme.shutdown()
    return time.monotonic() - start


@pytest.mark.slow  # test_exit.py has a program that exits after as many
def test_prompt_exit_after_8000_async_sends(kind, procs: Processes) -> None:
    scheme, model = procs.scheme(kind), Stripes(2, 4)
    (worker,) = procs.launch(scheme, model, lambda: Stripes(2, 4), 1)
    for _ in range(8000):
        handle = scheme.send_async(model)
    assert worker.call(wait_version, 8000) == 8000
    assert handle.wait(10.0).version == 8000
    assert worker.call(leave_and_say_when) < 10.0
    worker.dismiss()
    worker.process.join(10.0)
    assert worker.process.exitcode == 0
