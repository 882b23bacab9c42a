"""The manual holds all public names, and what it says of the code is true."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_exports import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PUBLIC = [*PACKAGES, "weight_update.engines"]


def target(name: str) -> Any:
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def documented() -> Iterator[tuple[str, int]]:
    """Page and identity of each object that a directive of a page describes."""
    for page in sorted(DOCS.glob("*.rst")):
        for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)$", page.read_text(), re.MULTILINE):
            if kind == "module":
                for member in importlib.import_module(name).__all__:
                    yield page.name, id(target(f"{name}.{member}"))
            else:
                yield page.name, id(target(name))


def public() -> dict[int, str]:
    """The public names that are ours, by the identity of their objects: an object may have several names."""
    found: dict[int, str] = {}
    for package in PUBLIC:
        for name in importlib.import_module(package).__all__:
            value = target(f"{package}.{name}")
            if not getattr(value, "__module__", "").startswith("torchrl."):
                found.setdefault(id(value), f"{package}.{name}")
    return found


def test_each_public_name_is_on_exactly_one_page() -> None:
    pages = Counter(identity for _, identity in documented())
    wrong = {name: pages[identity] for identity, name in public().items() if pages[identity] != 1}
    assert wrong == {}


def test_packages_that_the_manual_names_are_public() -> None:
    imports = re.compile(r"^\s*from (weight_update[\w.]*|collectors) import", re.MULTILINE)
    named = {name for page in DOCS.glob("*.rst") for name in imports.findall(page.read_text())}
    assert named
    assert named <= set(PUBLIC)


def run_script(path: Path, folder: Path) -> dict[str, bytes]:
    """The files that a script of the manual writes into a folder."""
    done = subprocess.run(
        [sys.executable, path, folder], capture_output=True, text=True, timeout=60, cwd=DOCS
    )
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("script", "folder", "pattern"),
    [
        ("make_inventory.py", "inventories", "*.inv"),
        ("make_tables.py", "tables", "*.rst"),
        ("pictures/draw.py", "pictures", "*.svg"),
    ],
)
def test_checked_in_files_are_as_their_script_writes_them(
    script: str, folder: str, pattern: str, tmp_path: Path
) -> None:
    checked_in = {file.name: file.read_bytes() for file in (DOCS / folder).glob(pattern)}
    assert checked_in
    assert run_script(DOCS / script, tmp_path) == checked_in, f"run python docs/{script}"


def test_the_readme_has_the_speeds_of_the_manual() -> None:
    speeds = (DOCS / "tables" / "speeds.rst").read_text()
    assert f"\n\n{speeds}\n" in (ROOT / "README.rst").read_text(), "run python docs/make_tables.py"


def test_the_readme_lists_all_extras() -> None:
    extras = (ROOT / "setup.py").read_text().partition("extras_require={")[2].partition("\n    }")[0]
    table = (ROOT / "README.rst").read_text().partition("\nextra  ")[2].partition("\n\n")[0]
    listed = re.findall(r"``(\w+)``", " ".join(row[:45] for row in table.splitlines()))
    assert sorted(listed) == sorted(re.findall(r'^        "(\w+)":', extras, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_manual_builds_without_warnings(tmp_path: Path) -> None:
    for module in ("sphinx", "furo"):
        pytest.importorskip(module, reason="the extra docs is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def texts() -> Iterator[tuple[str, list[str]]]:
    """The fixed parts of each text that the code keeps or passes to a call, with the name of the function."""
    for package in ("weight_update", "collectors"):
        for file in (ROOT / package).rglob("*.py"):
            if file.is_relative_to(ROOT / "weight_update" / "testing"):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                yield "", parts_of(node)
                if isinstance(node, ast.Call) and node.args:
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    yield name, parts_of(node.args[0])


def parts_of(node: ast.AST) -> list[str]:
    """The parts of a text between its replaced fields; none if it is no text, or its parts say too little."""
    if isinstance(node, ast.Constant):
        found = [str(node.value)]
    elif isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            if isinstance(part, ast.Constant):
                found[-1] += str(part.value)
            else:
                found.append("")
    else:
        return []
    return found if len("".join(found)) >= 15 else []


def is_made_of(message: str, parts: list[str]) -> bool:
    """Whether a message is a text with something in its replaced fields."""
    if not all(part in message for part in parts):
        return False
    return re.fullmatch("(?s:.*)".join(map(re.escape, parts)), message) is not None


def quoted() -> Iterator[tuple[str, str]]:
    """Class and message of each error of the page; of an error of workers, each line is one more."""
    page = (DOCS / "troubleshooting.rst").read_text()
    for block in re.findall(
        r"^\.\. code-block:: text\n    :class: message\n\n((?:    .*\n)+)", page, re.MULTILINE
    ):
        kind, _, message = textwrap.dedent(block).strip().partition(": ")
        yield kind, message
        for part in WITHIN.findall(message):
            yield "reason", part


# These begin a message that ends with another message.
WITHIN = re.compile(
    r"^(?:  worker \d+|the sender refused this worker|the synchronizer at [\d.:]+): (.*)$", re.MULTILINE
)
# The function that gets the text, where it is not the class of the error.
RAISED_BY = {"reason": "", "WARNING": "warning", "ImportError": "", "JoinRefusedError": ""}


def test_quoted_messages_are_those_of_the_code() -> None:
    found = defaultdict(list)
    for function, parts in texts():
        if parts:
            found[function].append(parts)
    messages = list(quoted())
    assert len(messages) > 25
    wrong = [
        f"{kind}: {message}"
        for kind, message in messages
        if not any(is_made_of(message, parts) for parts in found[RAISED_BY.get(kind, kind)])
    ]
    assert wrong == []


def test_the_threads_and_locks_of_the_architecture_exist() -> None:
    page = (DOCS / "architecture.rst").read_text()
    section = page.partition("Threads and locks\n")[2].partition("\nSend groups\n")[0]
    sources = "".join(path.read_text() for path in sorted((ROOT / "weight_update").rglob("*.py")))
    threads = re.findall(r"^``([\w-]+?)(?:-<index>)?``  ", section, re.MULTILINE)
    assert len(threads) > 5
    assert [name for name in threads if f'"weight_update-{name}' not in sources] == []
    attributes = re.findall(r"``(\w+)\.(\w+)``", section)
    assert len(attributes) > 5
    owned = {(name, found) for name, body in classes(sources) for found in re.findall(r"\b\w+\b", body)}
    assert [pair for pair in attributes if pair not in owned] == []


def classes(sources: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each class."""
    for found in re.finditer(r"^class (\w+)(.*?)(?=^\S)", sources, re.MULTILINE | re.DOTALL):
        yield found[1], found[2]
