"""Whole programs, each in an interpreter of its own: those of TorchRL's documentation, and our docs page."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "collectors.rst"


def run(program):
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,  # imports alone take a minute on a loaded machine
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def test_the_collector_program():
    lines = run(PROGRAMS / "with_collectors.py")
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


def snippets():
    """The code blocks of the page, in order."""
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", PAGE.read_text())
    return [textwrap.dedent(block) for block in blocks]


def test_the_snippets_of_the_page_run_one_after_the_other(tmp_path):
    first, *rest = snippets()
    assert len(rest) >= 6
    program = tmp_path / "page.py"
    body = textwrap.indent("\n".join(rest), "    ")
    program.write_text(f"{first}\nif __name__ == '__main__':\n{body}\n    print('all of it ran')\n")
    assert run(program)[-1] == "all of it ran"
