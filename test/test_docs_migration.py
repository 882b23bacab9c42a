"""The programs of the migration pages run."""

import re
import shlex
import subprocess

import pytest
from interpreters import run_python
from marks import slow
from test_docs_snippets import ROOT, snippets

DOCS = ROOT / "docs"

SHARES = ["0%", "100%", "0%", "100%"]
ACTIONS = [f"batch {number}: {share} of the actions are action 1" for number, share in enumerate(SHARES)]
SAME = [f"worker {index} has the trainer's weights: True" for index in range(2)]


def run(program, tmp_path):
    """Return the lines that a program prints."""
    file = tmp_path / "program.py"
    file.write_text(program)
    done = run_python(file, quick_spawn=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # of a worker
    return done.stdout.splitlines()


def changed_program(before, number):
    """Return a program with the lines of the page's diff changed."""
    page = (DOCS / "migration_torchrl_schemes.rst").read_text()
    diff = re.findall(r"\.\. code-block:: diff\n\n((?:    .*\n)+)", page)[number]
    lines = [line.strip() for line in diff.splitlines()]
    removed, added = (
        [line[1:] for line in lines[place::2] if line[0] == sign] for place, sign in enumerate("-+")
    )
    for old, new in zip(removed, added, strict=True):
        assert new == re.sub(r"torchrl\.(weight_update|collectors)", r"\1", old) != old
        assert before.count(f"{old}\n") == 1
        before = before.replace(f"{old}\n", f"{new}\n")
    assert len(lines) == 2 * len(removed) > 0
    return before


def programs(page, number):
    """Return a program of a page before and after the move."""
    found = snippets(f"migration_{page}.rst")
    if page == "torchrl_schemes":
        return found[number], changed_program(found[number], number)
    return found[2 * number], found[2 * number + 1]


@pytest.mark.parametrize("when", [slow("before"), "after"])
@pytest.mark.parametrize(
    ("page", "number", "printed"),
    [
        ("torchrl_schemes", 0, ACTIONS),
        slow("torchrl_schemes", 1, SAME),
        slow("torchrl_updaters", 0, ACTIONS),
    ],
)
def test_both_programs_print_the_same(page, number, printed, when, tmp_path):
    pytest.importorskip("torchrl", reason="the program is one for torchrl")
    pytest.importorskip("gymnasium", reason="the program plays CartPole")
    assert run(programs(page, number)[when == "after"], tmp_path) == printed


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_imports_of_a_program_for_schemes_change(number):
    before, after = programs("torchrl_schemes", number)
    assert "torchrl.weight_update" in before
    assert not re.search(r"torchrl\.(weight_update|collectors)", after)


@pytest.mark.parametrize("number", [0, 1])
def test_the_command_of_the_page_changes_the_imports(number, tmp_path):
    before, after = programs("torchrl_schemes", number)
    page = (DOCS / "migration_torchrl_schemes.rst").read_text()
    (tmp_path / "train.py").write_text(before)
    subprocess.run(shlex.split(re.search(r"\$ (sed .*)", page)[1]), cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == after


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("rlinf", [f"worker {index} has the trainer's weights in bf16: True" for index in range(2)]),
        slow(
            "trinity",
            [f"step {5 * n}: samples of version [{n - 1}], now {n}" for n in range(1, 5)],
        ),
    ],
)
def test_the_program_after_runs_and_the_program_before_parses(page, printed, tmp_path):
    before, after = snippets(f"migration_{page}.rst")
    compile(before, page, "exec")
    assert run(after, tmp_path) == printed
