"""``weight-update bench``: measurements with real workers, and the recommendation."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_parts import MODEL, call, in_folder
from interpreters import run_python, use_template_for_forkserver
from marks import slow

from weight_update.cli.measuring import rounds, workers
from weight_update.cli.measuring.advice import network_advice, quartiles, recommendation
from weight_update.cli.measuring.models import ModelSource, change
from weight_update.cli.measuring.rounds import ENCODINGS, Case, Plan, Results, _answers, _connect, measure
from weight_update.cli.measuring.workers import ProcessWorker, Worker, WorkerLateError
from weight_update.errors import WorkerError
from weight_update.report import SyncReport
from weight_update.testing.processes import wait_until

BROKEN = """
from weight_update.cli import main
from weight_update.cli.measuring import rounds
{}
main()
"""


def bench(
    *arguments: str | Path, breaking: str = "", quick_spawn: bool = True
) -> tuple[int, dict[str, Any], str]:
    """Run ``bench`` in a process of its own; return status, document and stderr."""
    start = ["-c", BROKEN.format(breaking)] if breaking else ["-m", "weight_update"]
    done = run_python(*start, "bench", "--json", *arguments, quick_spawn=quick_spawn)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def refused(*arguments: str | Path) -> str:
    """Return the error of ``bench`` for wrong arguments."""
    result = call("bench", *arguments)
    assert result.exit_code == 2
    return result.stderr


def test_quartiles_are_in_milliseconds() -> None:
    assert quartiles([]) == (None, None, None)
    assert quartiles([0.002]) == (2.0, 2.0, 2.0)
    assert quartiles([0.001, 0.002, 0.004, 0.008, 0.016]) == (2.0, 4.0, 8.0)


@pytest.mark.parametrize("schemes", [["shared", "distributed"], slow([])], ids=["two", "all"])
def test_bench_measures_schemes_in_turns_and_draws_them(schemes: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    more = ["--png", picture] if importlib.util.find_spec("matplotlib") else []
    more += [word for scheme in schemes for word in ("--scheme", scheme)]
    status, found, errors = bench("--size", "0.2", "--workers", "1", "--seconds", "50", *more)
    assert status == 0, (found, errors)
    rows = {(row["scheme"], row["encoding"]): row for row in found["updates"]}
    measured = schemes or ["shared", "process", "distributed"]
    assert list(rows) == [(scheme, encoding) for scheme in measured for encoding in ("dense", "patch")]
    assert len({row["updates"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["problem"] is None
        assert 0 < row["lower_quartile_ms"] <= row["median_ms"] <= row["upper_quartile_ms"]
    assert 0 < rows["shared", "patch"]["sent_bytes"] < found["model_bytes"] / 10
    assert rows["shared", "dense"]["sent_bytes"] >= found["model_bytes"]
    assert (found["recommended_scheme"], found["recommended_encoding"]) in rows
    assert "\n" not in found["reason"]
    assert (
        f"{rows[found['recommended_scheme'], found['recommended_encoding']]['median_ms']:.3g} ms"
        in found["reason"]
    )
    assert found["plain_copy_ms"] > 0
    assert found["network"].startswith("between machines: ")
    assert not more or picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Net", "net"])
def test_bench_measures_a_module_given_by_import_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    words = ["weight-update", "bench", "--json", "--model", f"my_model:{name}", "--scheme", "process"]
    done = in_folder(tmp_path, [*words, "--changed", "0.5"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(done.stdout)
    assert found["model_bytes"] == 4 * (300 * 200 + 200) + 10 + 8
    assert [row["scheme"] for row in found["updates"]] == ["process", "process"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:net", "No module named 'no_such_module'; give module:attribute"),
        ("json", "'json' is not of the form module:attribute, such as my_policy:Policy"),
        ("json:", "'json:' is not of the form module:attribute"),
        (":loads", "':loads' is not of the form module:attribute"),
        ("json:loads.nothing", "has no attribute 'nothing'"),
        ("torch.nn:Identity", "has no weights to send"),
        ("torch.nn:Linear", "needs arguments (missing a required argument: 'in_features'); give a function"),
        ("os:sep", "is of type str, neither a torch.nn.Module nor"),
    ],
)
def test_bench_refuses_a_path_that_leads_to_no_module(path: str, words: str) -> None:
    error = refused("--model", path)
    assert words in error
    assert "Invalid value for --model: " in error


def test_bench_refuses_a_size_for_a_model_of_the_user() -> None:
    assert "leave it out, or leave out --model" in refused("--model", "no_such_module:net", "--size", "5")


def test_bench_refuses_a_picture_that_it_could_not_write(tmp_path: Path) -> None:
    assert "does not exist" in refused("--png", tmp_path / "nowhere" / "bench.png")


@pytest.mark.parametrize("name", ["bench.pdf", "bench", "bench.png.svg"])
def test_bench_refuses_another_format_of_the_picture_before_it_measures(tmp_path: Path, name: str) -> None:
    error = refused("--model", "no_such_module:net", "--png", tmp_path / name)
    assert "Invalid value for '--png': the picture is a PNG" in error
    assert "must end with .png" in error
    assert ".png" in call("bench", "--help").output


TOO_LARGE = "give a smaller {}, fewer --workers, or one --scheme"


def test_bench_refuses_a_model_of_the_user_that_does_not_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "available_memory", lambda: 1_000)
    result = call("bench", "--model", "cli_parts:Model")
    assert result.exit_code == 1
    assert TOO_LARGE.format("--model") in result.stderr, "--size is refused with --model"


def test_bench_advises_no_size_for_a_model_of_the_user_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds._Clock, "left", lambda self: 0.0)
    result = call("bench", "--model", "cli_parts:Model")
    assert result.exit_code == 1
    assert "a larger --seconds, a smaller --model, or fewer schemes" in result.stderr


class Slow(Worker):
    """A worker that answers after some seconds."""

    seconds = 0.0

    def answer(self, timeout: float) -> Any:
        time.sleep(min(self.seconds, timeout))
        if self.seconds > timeout:
            raise WorkerLateError(f"worker {self.index} did not answer within {timeout:.1f} s")


def test_a_worker_that_does_not_answer_is_told_with_the_whole_time_that_it_had() -> None:
    workers = [Slow(0), Slow(1)]
    workers[0].seconds, workers[1].seconds = 0.18, 9.0
    with pytest.raises(WorkerLateError, match=r"worker 1 did not answer within 0\.2 s"):
        rounds._answers(workers, 0.2)


def test_bench_makes_no_model_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSource, "make", lambda self: pytest.fail("it was made"))
    result = call("bench", "--size", "1e12")
    assert result.exit_code == 1
    assert TOO_LARGE.format("--size") in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--size", "nan"), ("--size", "inf"), ("--changed", "nan"), ("--seconds", "1e300")],
)
def test_bench_refuses_a_number_that_is_none(option: str, value: str) -> None:
    assert option in refused(option, value)


@pytest.mark.slow
def test_bench_ends_at_its_time_limit() -> None:
    began = time.monotonic()
    status, _, errors = bench("--seconds", "1", "--workers", "1", "--scheme", "shared", "--size", "300")
    assert status == 1
    assert re.search("the time limit passed while .*; give a larger --seconds", errors), errors
    assert "did not answer" not in errors
    assert time.monotonic() - began < 30.0


def test_bench_shows_what_it_measured_when_its_short_time_limit_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[str] = []
    waits: list[float] = []

    def connect(case: Case, workers: Any, timeout: float) -> None:
        waits.extend([timeout, case.sender.timeout])
        _connect(case, workers, timeout)

    context = multiprocessing.get_context("forkserver")
    use_template_for_forkserver()
    monkeypatch.setattr(workers.mp, "get_context", lambda method: context)
    monkeypatch.setattr(rounds, "_connect", connect)
    monkeypatch.setattr(rounds._Clock, "left", lambda self: 0.0 if passed else 60.0)
    plan = Plan(ModelSource(0.1, None), 1, ("shared",), ENCODINGS, 0.01, 1.0)
    found = measure(plan, lambda what, share: passed.append(what) if what.startswith("round 2") else None)
    assert passed == ["round 2 of 30"]
    assert [(len(case.seconds), case.failure) for case in found.cases] == [(2, "")] * 2
    assert min(waits) >= 10.0  # less would blame the worker for the time limit


@pytest.mark.slow
def test_bench_names_a_worker_that_dies_and_goes_on() -> None:
    kill_at_fifth = """
import multiprocessing, os, signal
send, count = rounds._send, [0]
def kill_then_send(case, counted):
    count[0] += 1
    if count[0] == 5:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    send(case, counted)
rounds._send = kill_then_send
"""
    words = ["--size", "1", "--scheme", "shared"]
    status, found, errors = bench(*words, breaking=kill_at_fifth, quick_spawn=False)
    assert status == 1, errors
    assert not found["good"]
    assert all(re.search(r"worker [01]: the other end is gone", row["problem"]) for row in found["updates"])


@pytest.mark.slow
def test_ctrl_c_while_workers_start_shows_no_traceback() -> None:
    words = [sys.executable, "-m", "weight_update", "bench", "--size", "1", "--scheme", "shared"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as benching:
        children = Path(f"/proc/{benching.pid}/task/{benching.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 3, 120.0)  # two workers and a tracker
        os.killpg(benching.pid, signal.SIGINT)
        assert benching.stderr is not None
        assert benching.stderr.read() == "\nAborted!\n"
        assert benching.wait(60) == 1


@pytest.mark.slow
def test_bench_fails_if_a_worker_has_other_weights() -> None:
    breaking = 'rounds.checksums = lambda tensors: {"layer": 0}  # in this process alone'
    words = ["--size", "0.2", "--workers", "1", "--scheme", "shared"]
    status, found, errors = bench(*words, breaking=breaking)
    assert status == 1, errors
    problems = [row["problem"] for row in found["updates"]]
    assert problems == ["the weights of worker 0 differ from those of the trainer"] * 2


@pytest.mark.slow
def test_bench_shows_no_bar_but_its_own() -> None:
    breaking = """
import sys
from weight_update import progress
progress.SHOW_AFTER = progress.LEAST_BYTES = 0
progress._find_terminal = lambda: sys.stderr
"""
    words = ["--size", "10", "--workers", "1", "--scheme", "shared", "--encoding", "dense"]
    status, found, errors = bench(*words, breaking=breaking)
    assert (status, errors) == (0, ""), found


@pytest.mark.slow
def test_bench_measures_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    status, found, errors = bench("--scheme", "ray", "--encoding", "dense", "--size", "1", "--workers", "1")
    assert status == 0, (found, errors)
    assert found["updates"][0]["updates"] > 0


@pytest.mark.slow
def test_bench_names_a_missing_package() -> None:
    program = (
        "import sys; sys.modules[{!r}] = None; sys.argv[1:] = {!r}; import weight_update.cli as c; c.main()"
    )
    for package, options, words in [
        ("ray", ["bench", "--scheme", "ray"], 'pip install "weight-update[ray]"'),
        ("matplotlib", ["bench", "--png", "x.png"], 'pip install "matplotlib'),
    ]:
        done = run_python("-c", program.format(package, options))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: ")
        assert words in done.stderr


def results(**milliseconds: list[float]) -> Results:
    """Make up figures, by ``scheme_encoding``; a patch has a hundredth of the bytes."""
    cases = []
    for name, times in milliseconds.items():
        scheme, encoding = name.split("_")
        case = Case(scheme, encoding, None, [time / 1e3 for time in times])  # type: ignore[arg-type]
        sent = 10_000_000 if encoding == "dense" else 100_000
        case.report = SyncReport(1, encoding, dense_bytes=10_000_000, wire_bytes=2 * sent)
        cases.append(case)
    return Results(cases, [0.001], 10_000_000, 3)


def test_the_fastest_is_recommended_unless_a_simpler_one_is_within_the_spread() -> None:
    clear = recommendation(results(shared_dense=[4, 4, 4], shared_patch=[2, 2, 2], process_dense=[3, 3, 3]))
    assert clear["recommended_encoding"] == "patch"
    assert (
        clear["reason"] == "2 ms per update, 2 times a plain copy; the next is process with dense with 3 ms"
    )
    slow = recommendation(results(shared_dense=[1234, 1234], shared_patch=[2345, 2345]))
    assert (
        slow["reason"]
        == "1234 ms per update, 1234 times a plain copy; the next is shared with patch with 2345 ms"
    )
    close = recommendation(results(shared_dense=[1, 3, 5], shared_patch=[2.5, 2.5, 2.5]))
    assert close["recommended_encoding"] == "dense"
    assert "simpler than shared with patch (2.5 ms), within the spread" in str(close["reason"])
    assert recommendation(results())["recommended_scheme"] is None


def test_the_link_on_which_patches_pay_off() -> None:
    # 9.9 MB less in 9.9 ms more: equal at 8 Gbit/s
    found = network_advice(results(distributed_dense=[1, 1, 1], distributed_patch=[10.9, 10.9, 10.9]))
    assert found == "between machines: distributed with patch below 8 Gbit/s, with dense on faster links"
    faster = network_advice(results(distributed_dense=[3, 3, 3], distributed_patch=[2, 2, 2]))
    assert "even over loopback" in str(faster)
    assert network_advice(results(shared_dense=[3, 3, 3])) is None
    failed = results(distributed_dense=[3, 3, 3], distributed_patch=[2, 2, 2])
    failed.cases[1].failure = "the weights of worker 0 differ from those of the trainer"
    assert network_advice(failed) is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_share_that_changes_is_the_one_that_was_asked_for(share: float) -> None:
    weights = torch.zeros(1_000_000, dtype=torch.bfloat16)
    change({"weight": weights, "tied": weights}, share)
    assert weights.count_nonzero().item() / len(weights) == pytest.approx(share, abs=0.005)


def test_a_late_answer_is_not_that_of_a_later_call() -> None:
    here, there = multiprocessing.Pipe()
    worker = ProcessWorker.__new__(ProcessWorker)
    worker.index, worker._pipe, worker._posted, worker._answered = 0, here, 0, 1  # it has started
    worker.post("slow")
    with pytest.raises(WorkerError, match="did not answer"):
        worker.answer(0.0)
    worker.post("quick")
    there.send((1, True, "of the slow call"))
    there.send((2, True, "of the quick call"))
    assert worker.answer(1.0) == "of the quick call"


def test_a_worker_that_could_not_make_its_model_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.torch, "set_num_threads", lambda number: None)
    here, there = multiprocessing.Pipe()
    here.send((1, "stop", ()))
    workers._serve(there, 0, {"shared": rounds.SCHEMES["shared"]()}, ModelSource(1.0, "no_such:net"))
    number, good, problem = here.recv()
    assert (number, good) == (0, False)
    assert "no_such" in problem


def test_the_answers_of_all_workers_are_read_before_an_error_is_raised() -> None:
    class Fails(ProcessWorker):
        def __init__(self) -> None:
            self.read = 0

        def answer(self, timeout: float) -> Any:
            self.read += 1
            raise WorkerError("it failed")

    workers = [Fails(), Fails()]
    with pytest.raises(WorkerError, match="it failed"):
        _answers(workers, 1.0)
    assert [worker.read for worker in workers] == [1, 1]
