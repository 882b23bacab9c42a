"""The command weight-update: all its commands, and the examples of the manual."""

from __future__ import annotations

import io
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_parts import MODEL, ROOT, call, dump, full, in_folder, make_run, patches, welcome
from interpreters import run_python
from marks import slow
from test_observers_ready import report_of

from weight_update.cli import main
from weight_update.cli.checks.base import Finding
from weight_update.cli.commands import COMMANDS
from weight_update.cli.output import show
from weight_update.observers import PrometheusObserver


@pytest.fixture
def run_7(tmp_path: Path) -> Path:
    return make_run(tmp_path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def metrics() -> Iterator[PrometheusObserver]:
    with PrometheusObserver() as made:
        made(report_of(1, apply_seconds={0: 0.008}))
        yield made


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: str(one.name))
def test_every_command_has_json_and_help_with_an_example(command: Any) -> None:
    result = call(command.name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output
    assert f"Example: weight-update {command.name}" in result.output


def test_every_command_is_listed() -> None:
    result = call("--help")
    assert all(f"  {command.name} " in result.output for command in COMMANDS)
    assert call("no-such-command").exit_code == 2


def test_python_m_weight_update(tmp_path: Path) -> None:
    done = run_python("-m", "weight_update", "inspect", tmp_path)
    assert done.returncode == 2
    assert f"Error: Invalid value for PATH: {tmp_path} holds no checkpoints" in done.stderr
    assert "Traceback" not in done.stderr


def test_characters_that_the_output_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    show({"path": "\u6f22\udcff"}, as_json=False)
    assert written.getvalue().split() == [b"path", rb"\u6f22\udcff"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(document: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of each line that a terminal of this width shows."""
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    show(document, as_json=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    return [" ".join(line.split()) for line in lines]


def test_a_table_with_too_many_columns_for_the_terminal_becomes_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "/" + "x" * 100
    rows = [
        {"worker": one, "state": "joined", "version": 7, "apply_ms": None, "problem": path} for one in (0, 1)
    ]
    document = {"path": path, "workers": rows}
    assert "worker state version apply ms problem" in on_terminal(document, 80, monkeypatch)
    lines = on_terminal(document, 30, monkeypatch)
    assert lines.count("state joined") == lines.count("version 7") == lines.count("apply ms -") == 2
    assert "".join(lines).count("x") == 3 * 100  # nothing is cut


def test_sentences_are_not_squeezed_into_narrow_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 40 columns, each word of a finding is whole."""
    cure = "raise the limit of the container or job (docker run --memory, Slurm's --mem)"
    found = Finding("warn", "the memory limit leaves 1.2 GB; the machine has 60 GB free", cure)
    rows = [{"check": "memory limit", "status": found.status, "found": found.found, "cure": found.cure}]
    assert "check status found cure" in on_terminal({"findings": rows}, 80, monkeypatch)
    words = " ".join(on_terminal({"findings": rows}, 40, monkeypatch))
    assert f"check memory limit status warn found {found.found} cure {cure}" in words


def test_a_closed_output_is_no_error(run_7: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):  # as Python sets them in "weight-update ... >&- 2>&-"
        monkeypatch.setattr(sys, stream, None)
    monkeypatch.setattr(sys, "argv", ["weight-update", "inspect", str(run_7)])
    with pytest.raises(SystemExit) as ended:
        main()
    for stream in (sys.stdout, sys.stderr):
        stream.close()
    assert ended.value.code == 0


WITHOUT_EACH = """
import sys
for package in ("click", "rich", "prometheus_client"):
    sys.modules[package] = None
    from weight_update.cli import main
    try:
        main()
    except SystemExit as end:
        print(end)
    for name in [name for name in sys.modules if name.startswith("weight_update.cli") or name == package]:
        del sys.modules[name]
"""


def test_the_error_without_the_extra_names_it() -> None:
    """The commands exit with this message, and so with status 1."""
    done = run_python("-c", WITHOUT_EACH)
    message = 'weight-update needs the package {0}: pip install "weight-update[cli]"\n'
    expected = "".join(map(message.format, ("click", "rich", "prometheus_client")))
    assert done.stdout == expected, done.stderr


QUICK = ("weight-update doctor", "weight-update inspect update.frames")


def examples() -> list[Any]:
    """Return the commands in the manual, each with the output that is shown; a few of them are not slow."""
    text = (ROOT / "docs" / "commands.rst").read_text()
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"\.\. code-block:: console\n\n((?:    .*\n|\n)+)", text):
        for line in block.splitlines():
            if line.strip().startswith("$ "):
                found.append((line.strip().removeprefix("$ "), []))
            elif line.strip():
                found[-1][1].append(" ".join(line.split()))
    ours = [one for one in found if one[0].startswith("weight-update ")]
    return [one if one[0] in QUICK else slow(*one) for one in ours]


@pytest.mark.parametrize(("command", "shown"), examples())
def test_the_examples_of_the_manual_run(
    command: str,
    shown: list[str],
    run_7: Path,
    listener: socket.socket,
    metrics: PrometheusObserver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run_7.parent)
    dump(run_7.parent / "update.frames", welcome(), full(3), *patches(3, 4), *patches(4, 5, 6))
    command = command.replace("10.0.0.5:29650", f"127.0.0.1:{listener.getsockname()[1]}")
    command = command.replace("http://127.0.0.1:9400/metrics", metrics.url)
    (run_7.parent / "my_policy.py").write_text(MODEL.replace("Net", "Policy"))
    words = shlex.split(command)
    done = in_folder(run_7.parent, words)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    for line in shown:
        if line != "..." and not re.search(r"\d", line):
            assert line in lines
