"""Whole programs, each in an interpreter of its own: those of TorchRL's documentation, and our docs page."""

import re
import textwrap
from pathlib import Path

import pytest
from interpreters import run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # test_examples.py has quick programs

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
DOCS = ROOT / "docs"


def run(program, **how):
    done = run_python(program, timeout=280.0, **how)  # imports alone take a minute on a loaded machine
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


QUICK = pytest.mark.parametrize("quick_spawn", [True, False], ids=["from a forkserver", "by spawn"])


@QUICK
def test_the_collector_program(quick_spawn):
    lines = run(PROGRAMS / "with_collectors.py", quick_spawn=quick_spawn)
    versions = [int(re.fullmatch(r"frames 192 version (\d+)", line).group(1)) for line in lines]
    batches = -(-10000 // 192)
    assert len(versions) == batches
    assert versions == [2 * (1 + (batch - 1) // 10) for batch in range(batches)]


def test_the_standalone_program():
    lines = run(PROGRAMS / "standalone.py")
    assert sorted(lines) == [
        "exit codes [0, 0]",
        "worker 0 ends at version 10",
        "worker 1 ends at version 10",
    ]


def snippets(page):
    """The code blocks of the page, in order."""
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", (DOCS / page).read_text())
    return [textwrap.dedent(block) for block in blocks]


@QUICK
@pytest.mark.parametrize(("page", "at_least"), [("collectors.rst", 6), ("collectors_remote.rst", 1)])
def test_the_snippets_of_the_page_run_one_after_the_other(page, at_least, quick_spawn, tmp_path):
    first, *rest = snippets(page)
    assert len(rest) >= at_least
    program = tmp_path / "page.py"
    body = textwrap.indent("\n".join(rest), "    ")
    program.write_text(f"{first}\nif __name__ == '__main__':\n{body}\n    print('all of it ran')\n")
    assert run(program, quick_spawn=quick_spawn)[-1] == "all of it ran"


@QUICK
def test_the_first_program_of_the_guide(quick_spawn, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(snippets("getting_started.rst")[0])
    lines = run(program, quick_spawn=quick_spawn)
    versions = [re.match(r"version (\d+): dense, .* 3 workers", line)[1] for line in lines]
    assert versions == [str(number) for number in range(1, 11)]
