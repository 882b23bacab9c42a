"""``weight-update watch``: a real trainer's metrics over HTTP, in a terminal and as JSON."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from cli_parts import ROOT, call, document
from interpreters import JOB_PYTHON, start_template

from weight_update import SharedMemWeightSyncScheme, SyncFailedError
from weight_update.cli import metrics
from weight_update.observers import PrometheusObserver
from weight_update.report import PolicyLag
from weight_update.testing.models import mlp
from weight_update.testing.processes import freeze, wait_until
from weight_update.testing.worker_processes import start_workers


class Trainer:
    """A scheme with two worker processes, and the address of its metrics."""

    def __init__(self, stack: ExitStack) -> None:
        self.observer = stack.enter_context(PrometheusObserver())
        self.url = self.observer.url
        self.scheme = SharedMemWeightSyncScheme(timeout=2.0)
        self.told: list[Any] = []
        self.scheme.add_observer(self.told.append)
        self.scheme.add_observer(self.observer)
        self.procs = stack.enter_context(start_workers(self.scheme, [mlp(2), mlp(2)], model=mlp(1)))
        wait_until(lambda: self.look()["version"] == 0)

    def look(self) -> dict[str, Any]:
        return document(call("watch", self.url, "--once", "--json"))

    def states(self) -> dict[int, str]:
        return {row["worker"]: row["state"] for row in self.look()["workers"]}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(stack)


def test_watch_shows_updates_and_the_state_of_workers(trainer: Trainer) -> None:
    trainer.scheme.send()
    trainer.observer(PolicyLag(version=1, frames=4, mean=0.5, max=2))
    wait_until(lambda: trainer.look()["version"] == 1)
    found, report = trainer.look(), trainer.told[-1]
    workers = found.pop("workers")
    assert found == {
        "version": 1,
        "updates_per_second": None,
        "last_update_bytes": report.wire_bytes,
        "stage_ms": pytest.approx({name: 1e3 * seconds for name, seconds in report.seconds.items()}),
        "policy_lag_mean": 0.5,
        "policy_lag_max": 2,
    }
    for idx, row in enumerate(workers):
        assert row == {
            "worker": idx,
            "state": "joined",
            "version": 1,
            "lag": 0,
            "apply_ms": pytest.approx(1e3 * report.apply_seconds[idx]),
            "stall_ms": pytest.approx(1e3 * report.stall_seconds[idx]),
            "failures": 0,
        }

    freeze(trainer.procs.workers[1].runner.pid)
    with pytest.raises(SyncFailedError):
        trainer.scheme.send()
    wait_until(lambda: trainer.states() == {0: "joined", 1: "late"})
    first, second = trainer.look()["workers"]  # the late worker comes first
    assert [first[key] for key in ("worker", "version", "lag", "failures")] == [1, 1, 1, 1]
    assert [second[key] for key in ("worker", "version", "lag", "failures")] == [0, 2, 0, 0]
    table = call("watch", trainer.url, "--once").output
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert "version 2" in rows
    assert any(row.startswith("stage ms extract ") for row in rows)
    assert any(row.startswith("1 late 1 1 ") and row.endswith(" 1") for row in rows)

    trainer.procs.workers[1].runner.kill()
    wait_until(lambda: trainer.states() == {0: "joined", 1: "lost"})


def start(*arguments: str, stdout: int) -> subprocess.Popen[str]:
    start_template()
    return subprocess.Popen(
        [*shlex.split(JOB_PYTHON), "-m", "weight_update", "watch", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "LINES": "40"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_watch_follows_a_trainer_until_it_is_gone(trainer: Trainer) -> None:
    with start(trainer.url, "--json", "--every", "0.05", stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert json.loads(watching.stdout.readline())["updates_per_second"] is None
        trainer.scheme.send()
        assert any((look := json.loads(line))["version"] == 1 for line in watching.stdout)
        assert look["updates_per_second"] > 0
        assert json.loads(watching.stdout.readline())["updates_per_second"] == 0
        trainer.observer.close()
        assert watching.wait(timeout=30) == 1
        assert f"{trainer.url} can no longer be watched: " in watching.stderr.read()


def test_watch_in_a_terminal_ends_with_ctrl_c(trainer: Trainer) -> None:
    ours, theirs = pty.openpty()
    with (
        open(ours, "rb", buffering=0) as terminal,
        start(trainer.url, "--every", "0.05", stdout=theirs) as watching,
    ):
        os.close(theirs)
        screen = b""
        while b"joined" not in screen:
            screen += terminal.read(1 << 16)
        trainer.scheme.send()
        screen = b""
        while b"version             1" not in screen:
            screen += terminal.read(1 << 16)
        assert b"\x1b[1A" in screen  # in the place of the tables before
        watching.send_signal(signal.SIGINT)
        reader = threading.Thread(target=drain, args=(ours,))
        reader.start()
        assert watching.wait(timeout=30) == 0
        assert watching.stderr is not None
        assert watching.stderr.read() == ""
        reader.join(30)


def drain(terminal: int) -> None:
    """Read until the other end is closed."""
    while True:
        try:
            if not os.read(terminal, 1 << 16):
                return
        except OSError:
            return


def test_a_wrong_address_names_the_cure() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = call("watch", f"http://127.0.0.1:{free.getsockname()[1]}/metrics")  # nothing listens
    assert result.exit_code == 1
    assert "Connection refused" in result.output
    assert "Add a PrometheusObserver to the trainer's scheme" in result.output


@pytest.mark.parametrize("url", ["127.0.0.1:9400", "file:///etc/passwd", "http://", "http://host:port/", ""])
def test_an_address_that_is_none(url: str) -> None:
    result = call("watch", url)
    assert result.exit_code == 2
    assert "is not an address such as" in result.output


def error_at(answer: Callable[[socket.socket, threading.Event], None]) -> str:
    """Watch a server that treats its one client as ``answer`` does; return the error.

    The event of ``answer`` is set when the command has ended.
    """
    done = threading.Event()

    def serve() -> None:
        client, _ = server.accept()
        with client:
            answer(client, done)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        result = call("watch", f"http://127.0.0.1:{server.getsockname()[1]}/", "--once")
        done.set()
        thread.join(30)
    assert result.exit_code == 1
    return result.output


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "the answer is HTTP status 404"),
        (b"HTTP/1.0 200 OK\r\n\r\nup 1\n", "the answer has no metrics of weight_update"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>{</html>", "the answer has no metrics"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff", "invalid start byte"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the answer is not HTTP (BadStatusLine)"),
        (b"", "timed out"),
        (b"HTTP/1.0 200 OK\r\n\r\n#", "timed out"),
    ],
    ids=["404", "other metrics", "HTML", "bytes", "SSH", "silence", "unfinished"],
)
def test_an_address_of_something_else(reply: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT", 0.3)

    def answer(client: socket.socket, done: threading.Event) -> None:
        client.recv(1 << 16)
        client.sendall(reply)
        if reason == "timed out":
            done.wait(30)

    assert reason in error_at(answer)


@pytest.mark.parametrize("sample", ['worker_up{worker="a"} 1', "version +Inf"])
def test_metrics_that_are_not_ours_are_an_error_without_a_traceback(sample: str) -> None:
    text = (
        f"# TYPE weight_update_sent_bytes counter\nweight_update_sent_bytes_total 1\nweight_update_{sample}\n"
    )

    def answer(client: socket.socket, done: threading.Event) -> None:
        client.recv(1 << 16)
        client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + text.encode())

    assert "cannot watch" in error_at(answer)


def test_a_header_that_comes_byte_by_byte_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT", 0.5)

    def answer(client: socket.socket, done: threading.Event) -> None:
        with suppress(OSError):
            client.sendall(b"HTTP/1.0 200 OK\r\nX: ")
            for _ in range(100):
                if done.wait(0.1):  # each byte comes in time
                    return
                client.sendall(b"x")

    assert "timed out" in error_at(answer)


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "1e300"])
def test_a_number_of_seconds_that_is_none(seconds: str) -> None:
    result = call("watch", "http://127.0.0.1:1/metrics", "--every", seconds)
    assert result.exit_code == 2
    assert "--every" in result.output
