"""The snippets of pages of the manual run, one after the other, as a reader would type them."""

import re
import textwrap
from pathlib import Path

import pytest
from interpreters import run_python
from marks import slow

ROOT = Path(__file__).resolve().parent.parent


def snippets(page: str) -> list[str]:
    """The code blocks of the page, in order."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", text)
    return [textwrap.dedent(block) for block in blocks]


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        ("strategies.rst", 10),
        ("observers.rst", 1),
        ("testing.rst", 1),
        ("compression.rst", 1),
        ("cluster_fleets.rst", 1),
        ("object_stores.rst", 1),
        ("checkpoints.rst", 1),
        slow("converters.rst", 8),
        slow("pipeline.rst", 1),
        slow("engines.rst", 1),
        slow("engine_transformers.rst", 1),
        slow("synchronizer.rst", 1),
        ("transports.rst", 4),
    ],
)
def test_the_snippets_of_the_page_run_one_after_the_other(page: str, at_least: int, tmp_path: Path) -> None:
    if page == "engine_transformers.rst":
        pytest.importorskip("transformers", reason="the extra transformers is not installed")
    if page == "checkpoints.rst":
        pytest.importorskip("safetensors")
    found = snippets(page)
    assert len(found) >= at_least
    program = tmp_path / "page.py"
    program.write_text("\n".join([*found, "if __name__ == '__main__':\n    print('all of it ran')"]))
    done = run_python("-W", "error", program)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("all of it ran\n", "")


def test_the_example_of_a_contract_passes(tmp_path: Path) -> None:
    program = tmp_path / "test_page.py"
    program.write_text("\n".join(snippets("testing.rst")))
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", program)
    assert done.returncode == 0, done.stdout
