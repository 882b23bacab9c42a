"""One benchmark on two commits in turns: ``python -m benchmarks <name> --against REF``.

The benchmark's code is that of this checkout in all runs; the packages ``weight_update`` and ``collectors``
are those of the commit. Each run is a process of its own. The runs follow each other as A B B A A B B A, so
that a machine that gets slower or faster meanwhile affects both commits alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Figure, Table, Unable, machine, publish, report_missed, say, show_ratio

ROOT = Path(__file__).parent.parent
_MEASURED = ("weight_update", "collectors")
_ENDING = 30.0  # seconds that an interrupted run has to end its processes


@dataclass(frozen=True)
class Commit:
    """A commit as it was named, and as git knows it."""

    ref: str
    hash: str

    def __str__(self) -> str:
        return self.hash[:10] if self.hash.startswith(self.ref) else f"{self.ref} ({self.hash[:10]})"


@dataclass
class Comparison:
    """One figure of the benchmark on both commits.

    Attributes:
        scale: factor between a measurement and the number shown.
        digits: number of digits shown after the decimal point.
        more_is_better: whether a larger figure is the better one.
        medians: median of each run, by commit: ``[0]`` the other one, ``[1]`` this checkout.
    """

    scale: float
    digits: int
    more_is_better: bool
    medians: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def verdict(self) -> str:
        """The verdict, as a cell: a difference of the medians up to the wider spread of the runs is noise."""
        theirs, ours = self.medians
        if not theirs or not ours:
            return "only here" if ours else "fails here"
        change = median(ours) - median(theirs)
        if abs(change) <= max(max(runs) - min(runs) for runs in self.medians):
            return "within noise"
        return "better" if (change > 0) == self.more_is_better else "worse"

    @property
    def is_worse(self) -> bool:
        """Whether this checkout is worse beyond noise, or has no figure where the other commit has one."""
        return self.verdict in ("worse", "fails here")

    def cells(self) -> list[str]:
        """Return the medians of both commits with their spread, the ratio, and the verdict."""
        theirs, ours = (Figure(runs, None if runs else "-") for runs in self.medians)
        shown = [figure.show(self.scale, self.digits) for figure in (theirs, ours)]
        return [*shown, show_ratio(ours, theirs), self.verdict]


Comparisons = dict[tuple[str, str, str], Comparison]
"""By table, row and column."""


def against(name: str, arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run a benchmark on the commit ``options.against`` and on this checkout, and print the comparison.

    Args:
        name: of the benchmark.
        arguments: its command line.
        options: ``arguments``, parsed.

    Returns:
        Exit status: 1 if a figure is worse beyond noise.

    Raises:
        Unable: git or the commit is missing, there are changes that are not committed, or a run failed.
    """
    if options.rounds < 2:
        raise Unable("--rounds must be at least 2: noise is the spread between runs on the same commit")
    commits = find_commits(options.against)
    found: Comparisons = {}
    with checkouts(commits) as homes:
        order = order_of(options.rounds)
        for turn, which in enumerate(order, 1):
            say(f"run {turn} of {len(order)}: {commits[which]}")
            for one in _run(homes[which], name, _without_comparison(arguments), commits[which]):
                _add(found, which, one)
    facts = [
        *machine(),
        f"python -m benchmarks {' '.join([name, *arguments])}",
        f"Before: {commits[0]}. Now: {commits[1]}. {options.rounds} runs of each",
    ]
    publish(f"{name} --against", facts, _tables(found), options.rst)
    return _summary(found)


def order_of(rounds: int) -> list[int]:
    """Return the order of runs, A B B A A B B A..., where 0 is the other commit and 1 this checkout."""
    return ([0, 1, 1, 0] * rounds)[: 2 * rounds]


def find_commits(ref: str) -> tuple[Commit, Commit]:
    """Return the commit that ``ref`` names and the one of this checkout.

    Raises:
        Unable: git or the commit is missing, or there are changes that are not committed.
    """
    if shutil.which("git") is None:
        raise Unable("--against needs git to get the other commit: install git")
    try:
        top = _git("rev-parse", "--show-toplevel")
    except subprocess.CalledProcessError as error:
        raise Unable(_no_checkout(error.stderr.strip())) from None
    if Path(top) != ROOT.resolve():
        raise Unable(_no_checkout(f"the repository there is that of {top}"))
    found = Commit(ref, _hash_of(ref))
    for package in _MEASURED:
        if not _git("ls-tree", found.hash, f"{package}/__init__.py"):
            raise Unable(f"{found} has no {package}/ at its top; name a commit of this repository that has")
    if changed := _git("status", "--porcelain", "--", "benchmarks", *_MEASURED):
        raise Unable(
            "there are changes that are not committed; commit them first (on a branch of your own, say), so "
            f"that the figures belong to a commit:\n{changed}"
        )
    return found, Commit("HEAD", _hash_of("HEAD"))


def _no_checkout(reason: str) -> str:
    return (
        f"{ROOT} is no checkout of git ({reason}); clone the repository with git, and run the benchmark there"
    )


def _hash_of(ref: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except subprocess.CalledProcessError:
        raise Unable(
            f"git knows no commit {ref!r}; `git log --oneline` lists commits, and `git fetch` brings "
            "branches and tags of the remote repository"
        ) from None


def _git(*arguments: str) -> str:
    # GIT_DIR and the like would point git to another repository, and a hook of the user's might run long.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(ROOT), "-c", f"core.hooksPath={os.devnull}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rstrip()


@contextlib.contextmanager
def checkouts(commits: tuple[Commit, Commit]) -> Iterator[list[Path]]:
    """Yield for each commit a directory with its packages and this checkout's ``benchmarks``.

    Work trees of git in a temporary directory hold the files, so that edits made meanwhile affect no run.
    They are removed in any case.
    """
    with (
        tempfile.TemporaryDirectory(prefix="weight_update-against-") as name,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(_git, "worktree", "prune")
        trees = [Path(name).resolve() / f"{label}-tree" for label in ("before", "now")]
        homes = [Path(name).resolve() / label for label in ("before", "now")]
        for tree, home, commit in zip(trees, homes, commits, strict=True):
            ending.enter_context(_work_tree(tree, commit))
            home.mkdir()
            (home / "benchmarks").symlink_to(trees[-1] / "benchmarks")
            for package in _MEASURED:
                (home / package).symlink_to(tree / package)
        yield homes


@contextlib.contextmanager
def _work_tree(path: Path, commit: Commit) -> Iterator[None]:
    try:
        try:
            _git("worktree", "add", "--detach", str(path), commit.hash)
        except subprocess.CalledProcessError as error:
            raise Unable(f"git cannot check out {commit}: {error.stderr.strip()}") from None
        # the compiled loops, as an installation has them; without a compiler there are none
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=path, capture_output=True, check=False)
        yield
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
            _git("worktree", "remove", "--force", str(path))


def _without_comparison(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that a run on one commit takes."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--against", "--rounds", "--rst"):
        known.add_argument(option)
    return known.parse_known_args(arguments)[1]


def _run(home: Path, name: str, arguments: Sequence[str], commit: Commit) -> list[dict[str, Any]]:
    """Run the benchmark in ``home`` and return its figures."""
    figures = home / "figures.json"
    paths = [str(home), *filter(None, [os.environ.get("PYTHONPATH")])]
    code, errors = _finish(
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks", name, *arguments, "--figures", str(figures)],
            cwd=home,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through _finish alone
        )
    )
    if code == 2:  # Unable, with the reason in its last line
        raise Unable(errors.strip().rpartition(f"benchmarks {name}: ")[2])
    if code != 0:
        raise Unable(
            f"it does not run with weight_update of {commit} (exit status {code}). Its code is that of this "
            "checkout for both commits, so both need all names that it uses; take a commit nearer to this "
            "one, or a benchmark that uses public names only, such as compare. The last lines of the run:\n"
            + "\n".join(f"  {line}" for line in errors.strip().splitlines()[-8:])
        )
    found: list[dict[str, Any]] = json.loads(figures.read_text())
    figures.unlink()
    return found


def _finish(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a run; if something else ends first, end the run with all its processes."""
    try:
        _, errors = run.communicate()
    except BaseException:
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.communicate(timeout=_ENDING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        raise
    return run.returncode, errors


def _add(found: Comparisons, which: int, one: Mapping[str, Any]) -> None:
    """Add a figure of a run on commit ``which``, if it was measured."""
    if one["figure"]:
        place = (one["table"], one["row"], one["column"])
        comparison = found.setdefault(place, Comparison(one["scale"], one["digits"], one["more_is_better"]))
        comparison.medians[which].append(median(one["figure"]))


def _tables(found: Comparisons) -> Iterator[Table]:
    note = (
        "Median of the runs (min .. max); a run counts with its median. Within noise: the medians differ\n"
        "by no more than the runs on one commit do."
    )
    head = ["row", "figure", "before", "now", "now/before", "verdict"]
    for title in dict.fromkeys(table for table, _, _ in found):
        rows = [
            [row, column, *comparison.cells()]
            for (table, row, column), comparison in found.items()
            if table == title
        ]
        yield Table(title, note, head, rows, names=(0, 1))


def _summary(found: Comparisons) -> int:
    counts = Counter(comparison.verdict for comparison in found.values())
    if not counts:
        raise Unable(
            "the runs measured nothing that can be compared; leave out options that select other parts"
        )
    print("Figures: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".")
    worse = [", ".join(place) for place, comparison in found.items() if comparison.is_worse]
    return report_missed("Worse than before:", worse)
