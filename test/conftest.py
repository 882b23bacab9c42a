"""Which tests ``make test`` runs; ``make test-all`` runs all of them."""

# ruff: noqa: E402 - the garbage collector stops before the imports

from __future__ import annotations

import gc
import os

gc.disable()  # a quarter of the time that importing and collecting takes; see pytest_collection_finish
# There are more threads than cores. Those of OpenMP that wait must not spin; it looks when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ctypes
import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import fuzz
import interpreters
import pytest

# The process of pytest-xdist that only distributes tests imports neither torch nor the library, which takes
# seconds in which no test runs. The fixtures import them.
if TYPE_CHECKING:
    from weight_update.testing.worker_processes import WorkerProcesses

# By default 15: on a busy machine, Ray's workers then start only when all other tests have ended.
os.environ.setdefault("RAY_worker_niceness", "0")
# By default, the first ray.init() of a process makes a token, unless another process just did, and sets this
# variable. Tests that run at the same time would overwrite each other's token, and those that run in a fork
# (interpreters.py) would see the variable and not the token. test_hosts_ray.py uses a token.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

SMOKE = {
    # Of SchemeContract:
    "test_first_weights",
    "test_mismatch",
    "test_updates_count_up_and_are_exact",
    "test_worker_ids[0-chosen0]",
    "test_send_async",
    "test_hold",
    "test_exception_while_applying",
    "test_forward_pass_sees_one_version",
    "test_shutdown_of_a_worker",
    "test_no_thread_is_left",
    # Of TransportContract:
    "test_order_is_kept",
    "test_a_last_word_can_be_read",
    "test_a_last_word_to_the_receiver_can_be_read",
    "test_payload_arrives_whole[65]",
    "test_rubbish_is_refused[damaged header-receiver]",
    "test_disconnect_and_join_again[sender]",
    "test_both_ends_learn_of_close[sender]",
    "test_nothing_arrives_in_time[1]",
}
"""The tests of a contract that ``make test`` runs where the class is marked ``smoke``."""

_PR_SET_PDEATHSIG = 1

LONG = {
    "test_cli_watch.py",
    "test_collectors_async.py",
    "test_collectors_distributed_end.py",
    "test_collectors_ray.py",
    "test_engine_transformers.py",
    "test_examples.py",
    "test_hosts.py",
    "test_object_store_late.py",
    "test_ray.py",
    "test_schemes.py",
    "test_transports.py",
}
"""The files that take longest; they begin first, so that no worker of pytest-xdist is left alone with one."""


def pytest_configure(config: pytest.Config) -> None:
    fuzz.thorough = "not slow" not in config.option.markexpr
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        interpreters.start_template()  # one for all workers of pytest-xdist
    end_forked_children_with_this_process()


def end_forked_children_with_this_process() -> None:
    """Have the kernel kill them when this process ends, as it does if a test hangs outside of Python.

    They hold its pipe to pytest-xdist, which would wait for them. Children that a thread forks would end with
    the thread, so they are left out, as are children of children.
    """
    prctl, this, by_main = ctypes.CDLL(None).prctl, os.getpid(), [False]

    def before() -> None:
        by_main[0] = os.getpid() == this and threading.current_thread() is threading.main_thread()

    def after() -> None:
        if by_main[0]:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(before=before, after_in_child=after)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("smoke") and not in_smoke(item):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector run, and spare it the modules and tests that stay until the end."""
    interpreters.prepare_to_fork()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Let interrupts reach the tests and their workers, even if the shell ignores interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def nothing_goes_on_after_a_file() -> Iterator[None]:
    """Fail if a file of tests leaves a thread or a process group to the next file."""
    import torch

    from weight_update.testing.processes import eventually

    yield
    if threads():
        gc.collect()  # the lease of a checkpoint ends with its weights, which an error may still hold
    eventually(lambda: not threads(), 10.0)
    assert threads() == []
    assert not torch.distributed.is_initialized()


@pytest.fixture
def hired() -> Iterator[Callable[..., WorkerProcesses]]:
    """Return :func:`start_workers`, whose senders and workers end with the test."""
    from weight_update.testing.worker_processes import start_workers

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(start_workers(*args, **options))


@pytest.fixture
def all_observer_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log errors of observers, also if tests before this one have used up the limit of the log."""
    from weight_update.sender import observers
    from weight_update.transports.rate_limit import RateLimitedLog

    log = RateLimitedLog(logging.getLogger(observers.__name__))
    monkeypatch.setattr(observers, "_log", log)


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """Yield a tmpfs of 1 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let us mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def numpy_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test without the compiled inner loops."""
    from weight_update.compression import ans
    from weight_update.encodings.patch import kernels

    monkeypatch.setattr(kernels, "library", None)
    monkeypatch.setattr(ans, "library", None)


@pytest.fixture(params=["as installed", pytest.param("numpy", marks=pytest.mark.slow)])
def inner_loops(request: pytest.FixtureRequest) -> None:
    """Run a test with the compiled inner loops, and without."""
    if request.param == "numpy":
        request.getfixturevalue("numpy_loops")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weight_update")]


def in_smoke(item: pytest.Item) -> bool:
    return item.name in SMOKE or getattr(item, "originalname", None) in SMOKE
