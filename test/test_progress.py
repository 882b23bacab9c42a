"""Progress of long transfers: a bar on a terminal, log lines elsewhere, nothing for short ones."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weight_update import (
    BucketEncoding,
    Encoding,
    SharedMemWeightSyncScheme,
    SyncTimeoutError,
    WeightStrategy,
    show_progress,
)
from weight_update.checkpoints.store import CheckpointStore
from weight_update.progress import LEAST_BYTES, Progress, advancer, notice
from weight_update.testing import Apart, Body, WorkerProcesses, mlp
from weight_update.testing.processes import wait_until
from weight_update.testing.worker_processes import context_of, start_workers

LARGE = 3 * LEAST_BYTES
LOGGER = "weight_update.progress"
SWITCH = "WEIGHT_UPDATE_PROGRESS"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Show progress from the first byte on, in this process and in those forked from it."""
    monkeypatch.setenv(SWITCH, "1")
    for name in ("weight_update.progress.SHOW_AFTER", "weight_update.sender.joining.SHOW_AFTER"):
        monkeypatch.setattr(name, 0.0)
    for name in ("_BAR_SECONDS", "_LINE_SECONDS"):
        monkeypatch.setattr(f"weight_update.progress.{name}", 0.0)
    caplog.set_level(logging.INFO, LOGGER)


class Terminal:
    """A pseudo-terminal to write to, and a thread that reads what was written."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stderr = io.TextIOWrapper(os.fdopen(slave, "wb", 0), write_through=True)
        self._text = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self) -> str:
        return self._text.decode()

    @property
    def frames(self) -> list[str]:
        """The lines that were seen one after the other."""
        return [frame.strip() for frame in self.text.replace("\n", "\r").split("\r") if frame.strip()]

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side was closed
            while data := os.read(self._master, 4096):
                self._text += data

    def close(self) -> None:
        self.stderr.close()
        self._reader.join(10.0)
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("weight_update.progress.sys", SimpleNamespace(stderr=made.stderr))
    yield made
    monkeypatch.undo()
    made.close()


def transfer(what: str = "sending", pieces: int = 10) -> None:
    with Progress(what, LARGE) as progress:
        for _ in range(pieces):
            progress.advance(LARGE // pieces)


# -- parts ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_bar_on_a_terminal(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    with Progress("sending", LARGE) as progress:
        progress.advance(LARGE // 2)
        wait_until(lambda: "sending [#####     ] 50% of 25 MB in " in terminal.text)
    wait_until(lambda: terminal.text.endswith("\r" + " " * 99 + "\r"))  # the bar is removed
    assert "\n" not in terminal.text
    assert not caplog.messages


@pytest.mark.usefixtures("at_once")
def test_a_bar_fits_into_one_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    transfer("sending weights to worker 0")
    wait_until(lambda: terminal.text.endswith("\r" + " " * 29 + "\r"))
    assert all(len(frame) < 30 for frame in terminal.frames)


@pytest.mark.usefixtures("at_once")
def test_a_bar_fits_where_stdout_is_a_file(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", None)
    fcntl.ioctl(terminal.stderr, termios.TIOCSWINSZ, struct.pack("4H", 24, 30, 0, 0))
    transfer("sending weights to worker 0")
    wait_until(lambda: terminal.text.endswith("\r" + " " * 29 + "\r"))
    assert all(len(frame) < 30 for frame in terminal.frames)


@pytest.mark.usefixtures("at_once")
def test_log_lines_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    transfer("sending", 2)
    assert caplog.messages[0].startswith("sending: 50% of 25 MB in ")
    assert caplog.messages[-1].startswith("sending: 100% of 25 MB in ")


@pytest.mark.usefixtures("at_once")
def test_nothing_before_the_threshold(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_update.progress.SHOW_AFTER", 0.2)
    transfer()
    assert not caplog.messages
    with Progress("slow", LARGE) as progress:
        time.sleep(0.25)
        progress.advance(1)
    assert caplog.messages


@pytest.mark.usefixtures("at_once")
def test_nothing_below_a_size(caplog: pytest.LogCaptureFixture) -> None:
    for nbytes in (0, LEAST_BYTES - 1):
        with Progress("small", nbytes) as progress:
            progress.advance(nbytes)
    assert not caplog.messages


@pytest.mark.usefixtures("at_once")
def test_switched_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    transfer()
    assert not caplog.messages
    show_progress(True)
    transfer()
    assert caplog.messages
    caplog.clear()
    show_progress(False)
    transfer()
    assert not caplog.messages


@pytest.mark.usefixtures("at_once")
def test_advancer_refers_to_the_inner_transfer_of_this_thread(caplog: pytest.LogCaptureFixture) -> None:
    advancer()(LARGE)
    with Progress("outer", LARGE):
        with Progress("inner", LARGE):
            elsewhere = threading.Thread(target=lambda: advancer()(LARGE))
            elsewhere.start()
            elsewhere.join()
            assert not caplog.messages
            of_this_thread = threading.Thread(target=advancer(), args=(LARGE,))
            of_this_thread.start()
            of_this_thread.join()
        advancer()(LARGE // 2)
    starts = [message.partition("%")[0] for message in caplog.messages]
    assert starts == ["inner: 100", "inner: 100", "outer: 50", "outer: 50"]


def test_a_notice_is_shown_whole(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    awaited = f"waiting for workers {list(range(30))} to connect"
    notice(awaited)
    wait_until(lambda: awaited in terminal.text)


@pytest.mark.usefixtures("at_once")
def test_one_rank_of_torchrun_writes_to_the_terminal(
    terminal: Terminal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with Progress(f"rank {rank}", LARGE) as progress:
            progress.advance(LARGE // 2)
    wait_until(lambda: "rank 0" in terminal.text)
    assert "rank 1" not in terminal.text
    assert "rank 1" in caplog.text


@pytest.mark.usefixtures("at_once")
def test_several_at_once_take_turns(terminal: Terminal) -> None:
    first, second = Progress("first", LARGE), Progress("second", LARGE)
    first.advance(LARGE // 2)
    second.advance(LARGE // 2)
    first.advance(LARGE // 2)
    first.__exit__()
    second.advance(LARGE // 2)
    wait_until(lambda: "second [##########] 100%" in terminal.text)
    assert [frame.split()[0] for frame in terminal.frames] == ["first", "first", "second"]
    second.__exit__()


@pytest.mark.usefixtures("at_once")
def test_threads_write_no_broken_line(terminal: Terminal) -> None:
    def work(number: int) -> None:
        for _ in range(20):
            transfer(f"transfer {number}", 20)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: terminal.text.endswith("\r"))  # no half of a line was read
    assert terminal.frames
    assert all(frame.startswith("transfer ") and frame.count("transfer") == 1 for frame in terminal.frames)


@pytest.mark.usefixtures("at_once")
def test_a_terminal_that_is_gone_does_not_end_the_transfer(terminal: Terminal) -> None:
    with Progress("sending", LARGE) as progress:
        progress.advance(1)
        terminal.stderr.close()
        progress.advance(1)
    transfer()


# -- real transfers ------------------------------------------------------------------------------------


def large() -> nn.Module:
    return nn.ModuleList([nn.Linear(LEAST_BYTES // 4, 1, bias=False) for _ in range(3)])


@contextlib.contextmanager
def connected(count: int, encoding: str | Encoding) -> Iterator[WorkerProcesses]:
    strategy = WeightStrategy("state_dict", encoding=encoding)
    scheme = Apart(timeout=30.0, strategy=strategy)
    models = [large() for _ in range(count)]
    with start_workers(scheme, models, model=large(), connect=False) as procs:
        procs.ask("run", log_to_memory)
        procs.connect()
        yield procs


def log_to_memory(body: Body) -> None:
    body.log = io.StringIO()
    logging.getLogger(LOGGER).addHandler(logging.StreamHandler(body.log))


def logged(body: Body) -> list[str]:
    return body.log.getvalue().splitlines()


ENCODINGS = ["dense", BucketEncoding(bucket_size=LEAST_BYTES), "patch"]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=["dense", "bucket", "patch"])
@pytest.mark.usefixtures("at_once")
def test_transfer_to_a_host(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, encoding: str | Encoding
) -> None:
    with connected(1, encoding) as procs:
        received = procs.workers[0].call("run", logged)
    parts = ("encoding weights: ", "sending weights to worker 0: ", "receiving weights: ")
    for part, lines in zip(parts, (caplog.messages, caplog.messages, received), strict=True):
        shares = [
            line.removeprefix(part).partition("%")[0].strip() for line in lines if line.startswith(part)
        ]
        assert "33" in shares or len(shares) > 3, f"{part} within the payload, if there is only one: {lines}"
        assert shares[-1] == "100", lines


@pytest.mark.usefixtures("at_once")
def test_workers_leave_the_terminal_to_the_trainer(terminal: Terminal) -> None:
    with connected(2, "dense") as procs:
        for worker in procs.workers:
            assert any(line.startswith("receiving weights: ") for line in worker.call("run", logged))
    wait_until(lambda: "sending weights to worker" in terminal.text)
    assert {frame.split()[0] for frame in terminal.frames} <= {"sending", "encoding", "waiting"}
    assert "receiving" not in terminal.text


@pytest.mark.usefixtures("at_once")
def test_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    strategy = WeightStrategy("state_dict", encoding=BucketEncoding(LEAST_BYTES), max_in_flight=2)
    scheme = Apart(strategy=strategy)
    with start_workers(scheme, [large()], "thread", model=large()):
        pass
    sent = [line.partition(" of ")[0] for line in caplog.messages if line.startswith("sending weights")]
    assert sent == [f"sending weights: {share}%" for share in (33, 67, 100, 100)]


@pytest.mark.usefixtures("at_once")
def test_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.publish(1, {"weight": torch.ones(LARGE // 4)}, step=1)
    assert len(caplog.messages) > 3
    assert all(line.startswith("writing a checkpoint: ") for line in caplog.messages)
    assert caplog.messages[-1].startswith("writing a checkpoint: 100% of 25 MB in ")
    caplog.clear()
    with store.reading(1):
        assert len(caplog.messages) > 3
        assert all(line.startswith("reading a checkpoint: ") for line in caplog.messages)
        assert caplog.messages[-1].startswith("reading a checkpoint: 100% of 25 MB in ")


@pytest.mark.usefixtures("at_once")
def test_connect_names_the_workers_that_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_update.sender.joining.SHOW_AFTER", 0.5)
    scheme = SharedMemWeightSyncScheme(timeout=20.0)
    with start_workers(scheme, [mlp(1), mlp(1)], model=mlp(0), connect=False) as procs:
        procs.workers[0].post("connect")
        trainer = threading.Thread(target=scheme.connect)
        trainer.start()
        wait_until(lambda: caplog.messages)
        procs.workers[1].post("connect")
        trainer.join(20.0)
        for worker in procs.workers:
            worker.answer()
    assert caplog.messages == ["waiting for workers [1] to connect"]


@pytest.mark.parametrize("show_after", [0.0, 0.3, 30.0])
@pytest.mark.usefixtures("at_once")
def test_connect_honours_its_timeout(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, show_after: float
) -> None:
    monkeypatch.setattr("weight_update.sender.joining.SHOW_AFTER", show_after)
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=mlp(0), num_workers=1, ctx=context_of("fork"))
    start = time.monotonic()
    with scheme, pytest.raises(SyncTimeoutError, match=r"workers \[0\] did not connect within 0.6 s"):
        scheme.connect(timeout=0.6)
    assert 0.6 <= time.monotonic() - start < 15.0
    assert bool(caplog.messages) == (show_after < 0.6)
