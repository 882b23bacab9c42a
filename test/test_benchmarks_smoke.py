"""The benchmarks run to their end and measure something for everybody."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from benchmarks import against, gpu, links, report
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.against import Comparison, order_of
from benchmarks.network import why_not
from benchmarks.options import Options
from benchmarks.processes import Failed, Process, in_turns
from benchmarks.report import Figure, Table, Unable, publish, ratio, show_ratio
from benchmarks.rlinf import documented_bytes
from benchmarks.targets import target, targets_table
from weight_update.compression import NoCompression, ans
from weight_update.encodings import dense

ROOT = Path(__file__).parent.parent
PACKAGES = {"benchmarks", "weight_update", "collectors"}
PACKAGES_OF = {
    "cluster": ["torchrl"],
    "collectors": ["torchrl", "gymnasium"],
    "compare": ["torchrl"],
    "engines": ["transformers"],
    "hosts": ["torchrl"],
    "observers": ["torchrl"],
    "patch": ["torchrl", "gymnasium", "lz4", "zstandard"],
    "stores": ["safetensors"],
}
ROWS = {
    "compare": {
        "Synchronous update": 1,
        "Small updates": 1,
        "Many tensors": 1,
        "A worker that computes": 2,
        "Memory of all": 2,
    },
    "cluster": {"Across processes: synchronous": 1, "Across processes: many": 1},
    "patch": {
        "Bytes: policies in training": 35,
        "Bytes: changes of 1..4 ulp": 28,
        "Bytes: changes of random bits": 28,
        "Building and applying": 40,
        "Over a link": 20,
        "send() until applied": 8,
    },
    "links": {
        "4 MB to one host over 1gbit": 4,
        "4 MB to one host over links of several rates": 8,
        "4 MB to several hosts": 2,
        "4 MB to one host over connections": 3,
    },
    "hosts": {"To another host": 1 + (why_not() is None), "Where our time goes": 1 + (why_not() is None)},
    "synchronizer": {"Methods": 4, "Styles": 10},
    "collectors": {
        "Frames per second": 1,
        "update_policy_weights_()": 1,
        "From the constructor to the first batch": 1,
    },
    "engines": {"A Qwen3 model of 40 MB": 3},
    "stores": {"4 MB through a directory": 8},
    "observers": {"SharedMem, 1 MB in 16 tensors": 10},
}
"""The tables of each benchmark with ``--quick``: how their titles begin, and their numbers of rows."""
MORE_OPTIONS = {"compare": ["--scheme", "shared"], "links": ["--rates", "50mbit,1gbit"]}
OF_LARGE_MODELS = ("cluster", "compare", "hosts")  # some of their targets are not for quick runs
NOT_MEASURED = re.compile(r"not measured|a process died|never \(|\bnan\b|\binf\b")


def _run(name, *arguments):
    """Run a benchmark to its end; its exit status must say whether a target was missed."""
    done = _started(name, *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    missed = re.search(r"^Missed targets:\n((?:  .+\n)+)", done.stdout, re.MULTILINE)
    assert done.returncode == (1 if missed else 0), done.stderr
    shown = re.findall(r"^(.+?) +<= \S+ .* no$", done.stdout, re.MULTILINE)
    assert [line.strip() for line in missed[1].splitlines()] == shown if missed else not shown


def _started(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _tables(text, titles):
    found = {}
    for title in titles:
        start = text.index(f"\n{title}")
        rules = [match.span() for match in re.finditer(r"^=[= ]+$", text[start:], re.MULTILINE)][:3]
        head, body = text[start:][rules[0][1] : rules[1][0]], text[start:][rules[1][1] : rules[2][0]]
        rows = [re.split(r" {2,}", line.strip()) for line in [*head.splitlines(), *body.splitlines()] if line]
        found[title] = rows
    return found


def _require_verdicts(table):
    """Check every verdict against the figures beside it; return the rows, by target."""
    head, *lines = table
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    for row in rows:
        limit = float(row["limit"].removeprefix("<= "))
        reached = [float(row[name]) for name in ("reached", "fastest") if row.get(name, "-") != "-"]
        if row["reached"] == "-":
            assert row["met"] == "not measured", row
        elif abs(max(reached) - limit) > 0.005 * limit:  # both are shown rounded
            assert row["met"] == ("yes" if max(reached) < limit else "no"), row
        else:
            assert row["met"] in ("yes", "no"), row
    return {row["target"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROWS)
def test_a_quick_run_measures_everything(name, tmp_path):
    for package in PACKAGES_OF.get(name, []):
        pytest.importorskip(package, reason="the benchmark uses it")
    if name == "links" and (reason := why_not()) is not None:
        pytest.skip(reason)
    file = tmp_path / "results.rst"
    _run(name, "--quick", *MORE_OPTIONS.get(name, []), "--rst", str(file))
    tables = _tables(file.read_text(), ROWS[name])
    assert {title: len(rows) - 1 for title, rows in tables.items()} == ROWS[name]
    wrong = [row for rows in tables.values() for row in rows if any(map(NOT_MEASURED.search, row))]
    assert wrong == []
    if name != "synchronizer":  # it has no targets
        title = "Across processes: targets" if name == "cluster" else "Targets"
        judged = _require_verdicts(_tables(file.read_text(), [title])[title])
        measured = [row["met"] != "not measured" for row in judged.values()]
        if name != "links":  # its one target is for a large model
            assert any(measured) if name in OF_LARGE_MODELS else all(measured), judged


needs_hosts = pytest.mark.skipif(why_not() is not None, reason=f"no network namespaces: {why_not()}")


@needs_hosts
@pytest.mark.slow  # it measures time
def test_an_update_is_timed_over_a_slow_link():
    sent = [links.measure("dense", 1.0, 1, rate=rate, turns=1) for rate in ("20mbit", "1gbit")]
    assert sent[0].seconds.median > 0.4  # 1.6 MB at 2.5 MB/s
    assert sent[1].seconds.median < sent[0].seconds.median / 2


NO_IMPORTS = """
import sys
from collections import defaultdict
from benchmarks import collectors

def stop():
    print("collectors" in sys.modules)
    raise SystemExit

collectors.time.perf_counter = stop
collectors.run(("Collector", 8), collectors.OURS, 1, defaultdict(list))
"""


@pytest.mark.slow
def test_the_time_to_the_first_batch_has_no_imports():
    pytest.importorskip("torchrl", reason="the benchmark compares with torchrl")
    pytest.importorskip("gymnasium", reason="the benchmark collects from CartPole")
    command = [sys.executable, "-c", NO_IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "True\n", done.stderr


def _documented(shape, *places):
    old = torch.zeros(shape, dtype=torch.bfloat16)
    new = old.clone()
    for place in places:
        new[place] = 1.0
    changed = {"w": new.float()}
    return [documented_bytes({"w": old}, changed, delta, NoCompression()) for delta in (True, False)]


def test_rlinf_bytes_by_hand():
    counts = 2 * 4  # ordinals and nnz_per_tensor
    assert _documented((3, 4), (0, 1), (0, 3), (2, 0)) == [counts + 3 * (1 + 1 + 2)] * 2
    wide = [(0, 100), (0, 300), (1, 200)]
    assert _documented((2, 400), *wide) == [counts + 3 * (1 + 1 + 2), counts + 3 * (1 + 4 + 2)]
    assert _documented((400,), (300,)) == [counts + 1 + 4 + 2] * 2
    assert _documented((5,)) == [0, 0]


@pytest.mark.slow
def test_the_list_of_benchmarks():
    done = _started()
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in BENCHMARKS)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["no-such"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_of_every_benchmark(name):
    pytest.importorskip("lz4")
    pytest.importorskip("zstandard")
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])


def test_options_have_a_value_by_default_and_one_with_quick():
    known = Options("x", None, "a little")
    known.add("--sizes", (1.0, 100.0), quick=(1.0,))
    known.add("--turns", 9)
    known.add_choice("--only", "only", ("a", "b", "c"), quick=("c",))
    for arguments, expected in (
        ([], ((1.0, 100.0), 9, ("a", "b", "c"))),
        (["--quick"], ((1.0,), 9, ("c",))),
        (["--quick", "--sizes", "0.5,2", "--turns", "3"], ((0.5, 2.0), 3, ("c",))),
        (["--only", "b", "--only", "a"], ((1.0, 100.0), 9, ["b", "a"])),
    ):
        found = known.parse(arguments)
        assert (found.sizes, found.turns, found.only) == expected
        assert found.beside
    assert not known.parse(["--figures", "x.json"]).beside
    with pytest.raises(SystemExit, match=r"^2$"):
        known.parse(["--sizes", "many"])


def test_a_wrong_verdict_is_found():
    head = ["target", "limit", "reached", "fastest", "met"]
    figures = [["a", "<= 2", "1.9", "-"], ["b", "<= 2", "1.9", "2.2"], ["c", "<= 2", "-", "-"]]
    rows = [[*row, met] for row, met in zip(figures, ["yes", "no", "not measured"], strict=True)]
    assert list(_require_verdicts([head, *rows])) == ["a", "b", "c"]
    for row, met in zip(figures, ["no", "yes", "yes"], strict=True):
        with pytest.raises(AssertionError):
            _require_verdicts([head, [*row, met]])


def test_a_missed_target_is_the_exit_status(capsys):
    slow = target("SharedMem, 1 GB, 4 workers, of one plain copy", 1.6)
    lucky = target("building, of one copy: {variant}", 1.4, fastest=1.6, variant="flat")
    good = target("building, of one copy: {variant}", 1.4, fastest=1.5, variant="coo")
    unknown = target("SharedMem, 1 GB, slowest / fastest of 1 to 8 workers", None)
    assert [each.met for each in (slow, lucky, good, unknown)] == ["no", "no", "yes", "not measured"]
    assert publish("x", [], [targets_table([good, unknown])], None) == 0
    assert publish("x", [], [targets_table([slow, lucky, good])], None) == 1
    shown = "Targets: 1 met, 2 missed, 0 not measured.\nMissed targets:"
    assert capsys.readouterr().out.endswith(f"{shown}\n  {slow.name}\n  {lucky.name}\n")


def test_a_missing_package_is_no_missed_target(monkeypatch, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(report, "version", missing)
    assert main(["compression", "--quick"]) == 2
    assert re.search(r'for torch; .*: pip install "weight-update\[bench,', capsys.readouterr().err)


FAILED, GOOD = Figure((), "a process died"), Figure((1.0, 2.0))


def test_a_failure_of_this_library_misses_its_targets():
    pytest.importorskip("torchrl", reason="the benchmark compares with torchrl")
    from benchmarks import compare

    assert (ratio(FAILED, GOOD), ratio(GOOD, FAILED), ratio(Figure(), GOOD)) == (math.inf, None, None)
    assert show_ratio(FAILED, GOOD) == "-"
    others = dict.fromkeys((compare.rival("shared"), compare.COPY, compare.FLOOR), GOOD)
    cases = [compare.Case(megabytes, 16, workers) for megabytes in (1.0, 1000.0) for workers in (1, 2, 4, 8)]
    found = {("shared", case): {"shared": FAILED, **others} for case in cases}
    memory = compare.Memory("shared", 1e9, 9, FAILED, 0)
    stalls = compare._stall_figures([], "a process died")
    judged = [
        *compare._large(found),
        *compare._small(found),
        *compare._memory_targets([memory], "1000"),
        *compare._stall_targets(stalls, "1000"),
    ]
    assert {one.met for one in judged} == {"no"}
    assert {one.met for one in compare._stall_targets({}, "1000")} == {"not measured"}


def test_a_failure_of_one_start_is_shown():
    for figure in (GOOD.with_more(FAILED), FAILED.with_more(GOOD)):
        assert figure.show() == "a process died"
    assert GOOD.with_more(GOOD).values == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_its_benchmark_says_so():
    done = _started("gpu", "--quick")
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
    assert done.stdout == ""


def _gpu_options(*arguments):
    known = Options("gpu", gpu.__doc__, gpu.QUICK)
    gpu.add_options(known)
    return known.parse(arguments)


def test_what_the_benchmark_of_a_gpu_measures():
    whole = gpu.plan(_gpu_options().megabytes, False, ("none", "nvcomp_lz4"))
    assert (whole.megabytes, whole.fractions) == (500.0, (0.0001, 0.01, 0.05, 0.2))
    assert len(set(whole.variants)) == 2 * (2 + 2)
    assert {one.transport_device for one in whole.variants if one.compression != "none"} == {"cuda"}
    quick = gpu.plan(_gpu_options("--quick").megabytes, True, ("none",))
    assert (quick.megabytes, quick.fractions, len(quick.variants)) == (20.0, (0.01,), 4)
    assert _gpu_options("--quick", "--megabytes", "7").megabytes == 7.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_of_a_gpu_runs_to_its_end_on_the_cpu():
    variants = tuple(gpu.Variant("cpu", "cpu", "none", values) for values in ("raw", "relative"))
    tables = list(gpu.measure(gpu.Plan(2.0, 1, (0.01,), variants), torch.device("cpu")))
    assert [table.title.partition(",")[0].partition(":")[0] for table in tables] == [
        "Dense",
        "Patches",
        "send() until applied",
        "Colocated",
    ]
    assert all(len(row) == len(table.head) for table in tables for row in table.rows)
    assert [row[:2] for row in tables[1].rows[2:]] == [
        ["RLinf's way", "cpu"],
        ["RLinf's way", "cuda"],
        ["ours", "cpu"],
        ["ours", "cpu"],
    ]
    assert {row[0] for row in tables[2].rows} == {"SharedMem", "Distributed"}
    assert [row[:2] for row in tables[3].rows] == [
        ["host memory", "dense"],
        ["host memory", "bucket"],
        ["host memory", "bucket, 2 in flight"],
    ]


class Counter:
    """An object for a process, which counts its calls."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("start: it must not be negative")
        self._count = start

    def count(self) -> int:
        self._count += 1
        if self._count == 100:
            os._exit(1)
        return self._count

    def close(self) -> None: ...


def test_an_object_in_a_process_answers_until_it_fails():
    processes = [Process(Counter, start, start="fork") for start in (0, 10, 97, -1)]
    with pytest.raises(Failed, match="never \\(it must not be negative\\)"):
        processes[3].answer()
    for process in processes[:3]:
        assert process.answer() is None
    found = in_turns(processes, "count", 3, warmup=1, timeout=20.0, budget=60.0)
    assert found == [[2, 3, 4], [12, 13, 14], [], []]
    slow = in_turns(processes[:1], "count", 3, warmup=2, timeout=20.0, budget=0.0)
    assert slow == [[7]], "a result of the warmup counts, however long that took"
    assert processes[2].failure == "a process died"
    with pytest.raises(Failed, match="a process died"):
        processes[2].ask("count")
    for process in processes:
        process.close()
        assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize(
    ("theirs", "ours", "more_is_better", "verdict"),
    [
        ([1.0, 1.2], [1.1, 1.3], False, "within noise"),
        ([1.0, 1.2], [1.4, 1.5], False, "worse"),
        ([1.0, 1.2], [1.4, 1.5], True, "better"),
        ([1.4, 1.5], [1.0, 1.2], False, "better"),
        ([1.4, 1.5], [1.0, 1.2], True, "worse"),
        ([1.0, 1.2], [1.1, 2.9], False, "within noise"),  # ours are far apart
        ([7.0, 7.0], [8.0, 8.0], False, "worse"),  # bytes have no noise
        ([7.0, 7.0], [7.0, 7.0], False, "within noise"),
        ([1.0, 1.2], [], False, "fails here"),
        ([], [1.0, 1.2], False, "only here"),
    ],
)
def test_a_difference_counts_if_it_is_wider_than_the_noise(theirs, ours, more_is_better, verdict):
    comparison = Comparison(1e3, 1, more_is_better, (theirs, ours))
    assert comparison.verdict == verdict
    assert comparison.cells()[-1] == verdict
    assert comparison.is_worse == (verdict in ("worse", "fails here"))


@pytest.mark.parametrize(("ours", "shown"), [([3.0], "2.000"), ([], "-")])
def test_a_comparison_shows_the_ratio_of_the_medians(ours, shown):
    assert Comparison(1.0, 1, False, ([1.0, 2.0], ours)).cells()[2] == shown


def test_runs_on_two_commits_take_turns():
    assert "".join("AB"[which] for which in order_of(4)) == "ABBAABBA"


def test_figures_of_this_library_are_written_for_the_comparison(tmp_path):
    file = tmp_path / "figures.json"
    ours, theirs = Figure((1.0, 3.0, 2.0)), Figure((9.0,))
    table = Table(
        "Time", "", ["scheme", "MB", "ours", "theirs"], [["a", "1", ours.cell(1e3), theirs.show()]], (0, 1)
    )
    missed = targets_table([target("SharedMem, 1 GB, 4 workers, of one plain copy", 9.0)])
    assert publish("x", [], [table, missed], None, file) == 0
    place = {"table": "Time", "row": "a, 1", "column": "ours"}
    shape = {"scale": 1e3, "digits": 2, "more_is_better": False}
    assert json.loads(file.read_text()) == [{**place, **shape, "figure": [1.0, 3.0, 2.0]}]


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def _git(repository, *arguments):
    settings = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    command = ["git", "-C", str(repository), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with this tree's packages; the tag ``empty`` is a commit without them."""
    root = tmp_path_factory.mktemp("repository")
    _git(root, "init", "--quiet")
    _git(root, "commit", "--quiet", "--allow-empty", "-m", "nothing")
    _git(root, "tag", "empty")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "-m", "now")
    return root


@pytest.fixture
def at(repository, monkeypatch):
    """The repository as the checkout that is measured; no work tree may be left behind."""
    monkeypatch.setattr(against, "ROOT", repository)
    yield repository
    assert _git(repository, "worktree", "list").count("\n") == 0
    assert _git(repository, "status", "--porcelain") == ""


@needs_git
@pytest.mark.parametrize(
    ("ref", "cure"),
    [
        ("no-such", "git knows no commit 'no-such'.*git fetch"),
        ("--all", "no commit"),
        ("empty", "no weight_update/"),
    ],
)
def test_the_other_commit_is_checked_first(at, ref, cure, capsys):
    assert main(["compression", "--quick", f"--against={ref}"]) == 2
    assert re.search(cure, capsys.readouterr().err)


@needs_git
def test_changes_must_be_committed_before_they_are_compared(at, capsys):
    changed = at / "weight_update" / "new.py"
    changed.touch()
    assert main(["compression", "--quick", "--against", "HEAD"]) == 2
    changed.unlink()
    assert re.search(r"commit them first.*\n.*weight_update/new.py", capsys.readouterr().err)


@needs_git
def test_the_comparison_needs_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(against, "ROOT", tmp_path)
    with pytest.raises(Unable, match=r"is no checkout of git.*clone the repository"):
        against.find_commits("HEAD")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unable, match="install git"):
        against.find_commits("HEAD")


@needs_git
def test_a_run_that_fails_names_its_commit_and_leaves_nothing(at, monkeypatch, capsys):
    monkeypatch.setattr(against.sys, "executable", shutil.which("false"))
    assert main(["compression", "--quick", "--against", "HEAD"]) == 2
    assert "it does not run with weight_update of HEAD" in capsys.readouterr().err


@needs_git
@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (1.5, 1)])
def test_the_exit_status_says_whether_this_checkout_is_slower(at, slower, status, monkeypatch, capsys):
    seconds = iter([1.0, slower, slower * 1.01, 1.01])  # A B B A

    def run(home, name, arguments, commit):
        assert arguments == ["--quick"]
        assert {path.name for path in home.iterdir()} == PACKAGES
        place = {"table": "Time", "row": "a, 1", "scale": 1e3, "digits": 1, "more_is_better": False}
        one = {**place, "column": "ours", "figure": [next(seconds)]}
        return [one, {**place, "column": "does not apply", "figure": []}]

    monkeypatch.setattr(against, "_run", run)
    assert main(["compression", "--quick", "--against", "HEAD", "--rounds", "2"]) == status
    shown = capsys.readouterr().out
    figures = rf"1005\.0 \(1000\.0 \.\. 1010\.0\) .* {slower:.3f} +{'worse' if status else 'within noise'}"
    assert re.search(rf"^a, 1 +ours +{figures}$", shown, re.MULTILINE)
    assert shown.endswith(
        "Worse than before:\n  Time, a, 1, ours\n" if status else "Figures: 1 within noise.\n"
    )


@pytest.mark.slow
@needs_git
@pytest.mark.timeout(300)
def test_a_tiny_benchmark_against_its_own_commit(at, capsys):
    pytest.importorskip("lz4")
    pytest.importorskip("zstandard")
    status = main(["compression", "--quick", "--mb", "1", "--against", "HEAD", "--rounds", "2"])
    shown = capsys.readouterr()
    assert status == (1 if "Worse than before" in shown.out else 0)
    assert shown.err.count("... run ") == 4
    rows = re.findall(r"^(\S.+?) {2,}(ratio|compress|decompress) {2,}.* (\S+)$", shown.out, re.MULTILINE)
    assert len(rows) == 3 * (8 if ans.library is None else 10) * 3
    ratios = [line for line in shown.out.splitlines() if re.search(r" {2,}ratio {2,}", line)]
    assert all(" 1.000 " in line and line.endswith("within noise") for line in ratios), ratios


@needs_git
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_run_imports_the_library_of_its_commit(repository, at, capsys):
    pytest.importorskip("lz4")
    pytest.importorskip("zstandard")
    here = _git(repository, "rev-parse", "HEAD")
    try:
        (repository / "weight_update" / "compression" / "__init__.py").write_text("")
        _git(repository, "commit", "--quiet", "--all", "-m", "without its compressions")
        _git(repository, "tag", "other")
    finally:
        _git(repository, "reset", "--quiet", "--hard", here)
    assert main(["compression", "--quick", "--mb", "1", "--against", "other"]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"does not run with weight_update of other \(\w{10}\)", shown)
    assert "ImportError" in shown


@needs_git
@pytest.mark.slow
@pytest.mark.skipif(dense.library is None, reason="there is no C compiler")
def test_work_trees_have_compiled_loops(tmp_path):
    """Without them, both commits would be measured as no installation is."""
    head = _git(ROOT, "rev-parse", "HEAD").strip()
    with against._work_tree(tmp_path / "tree", against.Commit("HEAD", head)):
        built = {path.name.partition(".")[0] for path in (tmp_path / "tree").rglob("*.so")}
    assert built == {"_ans", "_copying", "_kernels", "_transfer", "_unchanged"}
