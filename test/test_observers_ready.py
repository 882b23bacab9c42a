"""Observers that need no package of their own: a log, a CSV file, a trace, TorchRL's loggers."""

from __future__ import annotations

import csv
import logging
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from trace_parts import Trace

from weight_update.observers import ChromeTraceObserver, CsvObserver, LogObserver, TorchRLLoggerObserver
from weight_update.report import Event, Observer, PolicyLag, SyncReport, WorkerEvent

BEGAN = 1_800_000_000.25
LOST = WorkerEvent("lost", 1, 3, "its process ended", time=BEGAN)
LAG = PolicyLag(version=5, frames=40, mean=1.5, max=3, time=BEGAN)


def report_of(version: int, began: float = BEGAN, **changes: Any) -> SyncReport:
    fields = {
        "wire_bytes": 400,
        "dense_bytes": 800,
        "changed_fraction": 0.5,
        "seconds": {"extract": 0.001, "encode": 0.002, "send": 0.003, "ack": 0.010},
        "apply_seconds": {0: 0.004, 1: 0.008},
        "stall_seconds": {0: 0.0, 1: 0.002},
    }
    return SyncReport(version, "patch", began=began, **{**fields, **changes})


# -- log -------------------------------------------------------------------------------------------


def test_log_has_updates_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observer: Observer = LogObserver()
    failed = report_of(2, failures={1: "ValueError: bad"})
    joined = WorkerEvent("joined", 4)
    for news in (report_of(1), failed, joined, LOST):
        observer(news)
    assert caplog.record_tuples == [
        ("weight_update", logging.INFO, str(report_of(1))),
        ("weight_update", logging.INFO, str(failed)),
        ("weight_update", logging.WARNING, "version 2 failed on worker 1: ValueError: bad"),
        ("weight_update", logging.INFO, str(joined)),
        ("weight_update", logging.WARNING, str(LOST)),
    ]


def test_log_has_what_is_frequent_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for news in (LAG, WorkerEvent("applied", 3, 7)):
        LogObserver()(news)
    assert caplog.record_tuples == [
        ("weight_update", logging.DEBUG, "version 5: 40 frames with a lag of 1.5 (at most 3)"),
        ("weight_update", logging.DEBUG, "worker 3 applied an update, version 7"),
    ]


def test_log_takes_logger_and_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    LogObserver(logging.getLogger("mine"), logging.DEBUG)(report_of(1))
    LogObserver(logging.getLogger("mine"), logging.ERROR)(LOST)
    assert [record[:2] for record in caplog.record_tuples] == [
        ("mine", logging.DEBUG),
        ("mine", logging.ERROR),
    ]


def test_log_takes_no_name_of_a_level() -> None:
    with pytest.raises(TypeError, match=r"level= is a number such as logging.INFO, not 'INFO'"):
        LogObserver(level="INFO")  # type: ignore[arg-type]


@pytest.mark.parametrize("observer", [LogObserver, TorchRLLoggerObserver])
@pytest.mark.parametrize("given", ["run", logging.Logger])
def test_something_else_than_a_logger_is_refused_at_once(observer: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"give a logger, .*, not (an object of type str|the class Logger)$"):
        observer(given)


# -- CSV -------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_for_each_update(tmp_path: Path) -> None:
    path = tmp_path / "updates.csv"
    with CsvObserver(path) as observer:
        observer(report_of(1, failures={2: "two\nlines", 3: "it is late"}))
        observer(LOST)
        observer(LAG)
        (row,) = rows_of(path)  # flushed
    assert (row["version"], row["encoding"], row["workers"], row["failures"]) == ("1", "patch", "2", "2")
    times = [
        float(row[name]) for name in ("extract", "encode", "send", "ack", "slowest_apply", "longest_stall")
    ]
    assert times == [0.001, 0.002, 0.003, 0.010, 0.008, 0.002]
    assert row["convert"] == ""
    assert (float(row["began"]), row["wire_bytes"], row["dense_bytes"]) == (BEGAN, "400", "800")


def test_csv_appends_to_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "updates.csv"
    for version in (1, 2):
        with CsvObserver(str(path)) as observer:
            observer(report_of(version, seconds={}, apply_seconds={}, stall_seconds={}))
    assert [(row["version"], row["slowest_apply"], row["workers"]) for row in rows_of(path)] == [
        ("1", "", "0"),
        ("2", "", "0"),
    ]


def test_csv_refuses_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"mine\.csv has other columns.*step.*choose another path"):
        CsvObserver(path)
    assert path.read_text() == "step,loss\n1,2\n"


def test_csv_ends_a_row_that_a_full_disk_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "updates.csv"
    with CsvObserver(path) as observer:
        observer(report_of(1))
    path.write_bytes(path.read_bytes()[:-7])
    for version in (2, 3):
        with CsvObserver(path) as observer:
            observer(report_of(version))
    assert [row["version"] for row in rows_of(path)] == ["1", "2", "3"]
    assert [row["failures"] for row in rows_of(path)][1:] == ["0", "0"]


@pytest.mark.parametrize("content", [b"\xff\xfe\0abc", b"x" * 200_000], ids=["binary", "one long line"])
def test_csv_refuses_files_that_are_no_csv(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine has other columns.*choose another path"):
        CsvObserver(path)
    assert path.read_bytes() == content


# -- trace -----------------------------------------------------------------------------------------


def trace_of(folder: Path, *news: Event) -> Trace:
    """Return the trace of updates and events, which is valid."""
    path = folder / "trace.json"
    with ChromeTraceObserver(path) as observer:
        for one in news:
            observer(one)
    trace = Trace(path)
    trace.check()
    return trace


def test_trace_draws_stages_workers_and_arrows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceObserver(path) as observer:
        assert Trace(path).tracks == {1: "trainer"}
        for version in range(1, 4):
            observer(report_of(version, BEGAN + version))
            Trace(path).check()  # complete after each update
        observer(report_of(4))
    trace = Trace(path)
    trace.check()
    assert sorted(trace.tracks.values()) == [
        "trainer",
        "trainer",
        "worker 0",
        "worker 0",
        "worker 1",
        "worker 1",
    ]
    assert trace.slices(4, "trainer", BEGAN) == {
        "extract": (0, 1000),
        "encode": (1000, 3000),
        "send": (3000, 6000),
        "ack": (6000, 16000),
    }
    assert trace.slices(4, "worker 1", BEGAN) == {"transfer": (3000, 14000), "swap": (14000, 16000)}
    assert trace.slices(4, "worker 0", BEGAN) == {"transfer": (3000, 11999), "swap": (11999, 12000)}
    assert Counter(arrow["id"] for arrow in trace.of("s")) == {1: 2, 2: 2, 3: 2, 4: 2}


def test_trace_has_one_track_each_if_updates_do_not_overlap(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *(report_of(version, BEGAN + 0.0161 * version) for version in range(1, 4)))
    assert list(trace.tracks.values()) == ["trainer", "worker 0", "worker 1"]


def test_trace_of_version_0_begins_when_workers_join(tmp_path: Path) -> None:
    joined = [WorkerEvent("joined", worker, time=BEGAN + after) for worker, after in ((1, 0.5), (0, 0.7))]
    trace = trace_of(tmp_path, *joined, report_of(0, seconds={"encode": 0.002}))
    assert trace.slices(0, "worker 0", BEGAN) == {"transfer": (700_000, 703_999), "swap": (703_999, 704_000)}
    assert trace.slices(0, "worker 1", BEGAN)["transfer"] == (500_000, 506_000)


THREE_EACH = ["trainer"] * 3 + ["worker 0"] * 3 + ["worker 1"] * 3


def test_trace_keeps_the_tracks_of_a_worker_together(tmp_path: Path) -> None:
    tracks = trace_of(tmp_path, LOST, *map(report_of, range(1, 4))).tracks
    assert [tracks[tid] for tid in sorted(tracks)] == THREE_EACH


def test_trace_of_very_many_updates_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_update.observers.chrome_trace.TRACKS", 3)
    path = tmp_path / "trace.json"
    with ChromeTraceObserver(path) as observer:
        for version in range(1, 6):
            observer(report_of(version))
    tracks = Trace(path).tracks  # the slices of one track overlap, so the trace is not checked
    assert [tracks[tid] for tid in sorted(tracks)] == THREE_EACH


def test_trace_of_updates_that_overlap(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *(report_of(version, BEGAN + 0.007 * version) for version in range(1, 6)))
    assert Counter(trace.tracks.values())["trainer"] == 3


def test_trace_has_events_and_failures(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    observer = ChromeTraceObserver(path)
    observer(LOST)
    failed = {"seconds": {"extract": 0.001, "send": 0.002, "ack": 30.0}, "failures": {1: "it is late"}}
    observer(report_of(3, apply_seconds={0: 0.004}, stall_seconds={0: 0.001}, **failed))
    observer(LAG)
    observer.close()
    observer.close()
    trace = Trace(path)
    trace.check()
    lost, late = trace.of("i")
    assert (lost["name"], trace.tracks[lost["tid"]]) == ("lost", "worker 1")
    assert lost["args"] == {"version": 3, "reason": "its process ended"}
    assert (late["name"], late["tid"], late["args"]["reason"]) == ("failed", lost["tid"], "it is late")
    (lag,) = trace.of("C")
    assert (lag["name"], lag["args"], lag["ts"]) == ("policy lag", {"mean": 1.5, "max": 3}, lost["ts"])
    assert trace.slices(3, "worker 0", BEGAN)["swap"] == (
        6000,
        7000,
    )  # not when the trainer gave up on worker 1


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": {}},
        {
            "seconds": {"extract": 0.0, "send": 0.0, "ack": 0.0},
            "apply_seconds": {0: 0.0},
            "stall_seconds": {},
        },
        {"seconds": {"send": 0.001}, "apply_seconds": {0: 0.5}, "stall_seconds": {0: 0.5}},
        {"apply_seconds": {}, "stall_seconds": {}},
        {
            "seconds": {"send": 0.001, "ack": 0.001},
            "apply_seconds": {0: 0.5, 1: 0.1},
            "stall_seconds": {0: 0.4, 1: 0.1},
        },
    ],
)
def test_trace_of_unusual_reports(tmp_path: Path, changes: dict[str, Any]) -> None:
    trace_of(tmp_path, report_of(1, **changes))


def test_trace_of_random_reports(tmp_path: Path) -> None:
    random, now, path = Random(0), BEGAN, tmp_path / "trace.json"

    def duration() -> float:
        return random.choice([0.0, 1e-7, 1e-6, 2e-6, 1e-3, 4e-3])

    with ChromeTraceObserver(path) as observer:
        for version in range(60):
            now += duration()
            workers = range(random.randint(1, 3))
            observer(
                report_of(
                    version,
                    now,
                    seconds={stage: duration() for stage in ("extract", "encode", "send", "ack")},
                    apply_seconds={worker: duration() for worker in workers},
                    stall_seconds={worker: duration() for worker in workers},
                    failures={5: "it is late"} if random.random() < 0.1 else {},
                )
            )
            observer(WorkerEvent(random.choice(["joined", "late", "full_update"]), 1, version, time=now))
    trace = Trace(path)
    trace.check()
    assert len(trace.arrows()) == len(trace.of("X")) - len(trace.of("f")) - 4 * 60 > 60


def test_trace_is_complete_again_after_the_disk_was_full(tmp_path: Path) -> None:
    with ChromeTraceObserver(tmp_path / "trace.json") as observer:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                observer(report_of(1, apply_seconds=dict.fromkeys(range(200), 0.1)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        observer(report_of(2))
        assert len(Trace(tmp_path / "trace.json").of("s")) == 2


def test_trace_into_a_device() -> None:
    with ChromeTraceObserver("/dev/null") as observer:
        observer(report_of(1))  # it cannot be truncated


@pytest.mark.parametrize("make", [ChromeTraceObserver, CsvObserver])
def test_closed_files_stay_as_they_are(
    tmp_path: Path, make: Callable[[Path], ChromeTraceObserver | CsvObserver]
) -> None:
    """If an error ends the ``with`` block, ``shutdown()`` tells a closed observer of the last events."""
    observer, path = make(tmp_path / "file"), tmp_path / "file"
    observer.close()
    before = path.read_bytes()
    for news in (report_of(1), LOST, LAG):
        observer(news)
    observer.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("make", [ChromeTraceObserver, CsvObserver])
def test_a_pipe_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], ChromeTraceObserver | CsvObserver]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused: list[str] = []

    def start() -> None:
        with pytest.raises(OSError, match="pipe") as error:
            make(tmp_path / "pipe")
        refused.append(str(error.value))

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(10.0)
    (text,) = refused
    assert "give path= a file" in text


def test_csv_does_not_read_a_device_that_never_ends() -> None:
    starting = threading.Thread(target=lambda: CsvObserver("/dev/zero").close(), daemon=True)
    starting.start()
    starting.join(10.0)
    assert not starting.is_alive()


# -- TorchRL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "folder"), [({}, "weight_sync"), ({"prefix": "trainer/sync/"}, "trainer/sync")]
)
def test_torchrl_logger_gets_scalars(tmp_path: Path, how: dict[str, str], folder: str) -> None:
    loggers = pytest.importorskip("torchrl.record.loggers.csv")
    observer = TorchRLLoggerObserver(loggers.CSVLogger("run", log_dir=str(tmp_path)), **how)
    for news in (
        report_of(1),
        LOST,
        WorkerEvent("late", 0),
        LAG,
        LAG,
        report_of(2, apply_seconds={}, stall_seconds={}, failures={0: "late", 1: "lost"}),
    ):
        observer(news)
    found = {
        path.stem: {int(step): float(value) for step, value in csv.reader(path.read_text().splitlines())}
        for path in (tmp_path / "run" / "scalars" / folder).iterdir()
    }
    both = {"extract_ms": 1, "encode_ms": 2, "send_ms": 3, "ack_ms": 10, "total_ms": 16, "wire_bytes": 400}
    expected = {name: {1: value, 2: value} for name, value in {**both, "changed_fraction": 0.5}.items()}
    expected |= {"slowest_apply_ms": {1: 8}, "longest_stall_ms": {1: 2}, "workers_lost": {1: 0, 2: 1}}
    expected |= {"workers_failed": {1: 0, 2: 2}}
    expected |= {"policy_lag_mean": {40: 1.5, 80: 1.5}, "policy_lag_max": {40: 3, 80: 3}}
    assert found == {name: pytest.approx(values) for name, values in expected.items()}
