"""Memory that is left, according to /proc and the cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weight_update.transports.memory_limits import available_memory

MB = 1_000_000
TOPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, cgroups: str) -> Path:
    """Make the files of a machine with 1000 MB left and a process in ``cgroups``."""
    write(root, "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {1000 * MB // 1024} kB\nHugePages_Total: 0")
    write(root, "proc/self/cgroup", cgroups)
    return root


def cgroup_2(root: Path, name: str, limit: object, current: int, **stat: int) -> None:
    where = f"sys/fs/cgroup/{name}"
    write(root, f"{where}/memory.max", limit)
    write(root, f"{where}/memory.current", current)
    write(root, f"{where}/memory.stat", "\n".join(f"{key} {value}" for key, value in stat.items()))


def cgroup_1(root: Path, name: str, limit: int, usage: int, **stat: int) -> None:
    where = f"sys/fs/cgroup/memory/{name}"
    write(root, f"{where}/memory.limit_in_bytes", limit)
    write(root, f"{where}/memory.usage_in_bytes", usage)
    write(root, f"{where}/memory.stat", "\n".join(f"{key} {value}" for key, value in stat.items()))


def test_no_cgroup(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/")) == 1000 * MB // 1024 * 1024


def test_nothing_can_be_read(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize("name", ["", "user.slice/job"])
def test_page_cache_is_not_used_in_cgroups_2(tmp_path: Path, name: str) -> None:
    root = machine(tmp_path, f"0::/{name}")
    cgroup_2(
        root, name, 500 * MB, 490 * MB, inactive_file=200 * MB, active_file=100 * MB, slab_reclaimable=5 * MB
    )
    assert available_memory(root) == (500 - 490 + 305) * MB


@pytest.mark.parametrize("name", ["", "docker/1234"])
def test_page_cache_is_not_used_in_cgroups_1(tmp_path: Path, name: str) -> None:
    root = machine(tmp_path, f"9:cpu,cpuacct:/\n4:memory:/{name}\n0::/")
    stat = {
        "inactive_file": 1,
        "total_inactive_file": 200 * MB,
        "total_active_file": 100 * MB,
        "total_shmem": 9,
    }
    cgroup_1(root, name, 500 * MB, 490 * MB, **stat)
    assert available_memory(root) == (500 - 490 + 300) * MB


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/pod/container")
    cgroup_2(root, "", "max", 900 * MB)
    cgroup_2(root, "pod", 300 * MB, 100 * MB)
    cgroup_2(root, "pod/container", 800 * MB, 50 * MB)
    cgroup_2(root, "another", 10 * MB, 10 * MB)
    assert available_memory(root) == 200 * MB


def test_a_container_that_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    """The path of the cgroup is valid on the host, and not mounted here."""
    root = machine(tmp_path, "4:memory:/docker/1234")
    cgroup_1(root, "", 300 * MB, 100 * MB)
    assert available_memory(root) == 200 * MB


def test_more_used_than_allowed(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/")
    cgroup_2(root, "", 100 * MB, 120 * MB)
    assert available_memory(root) == 0


def test_this_machine() -> None:
    left = available_memory()
    assert left is not None
    assert 0 < left < 1 << 50


PROGRAM = """
import os, sys
from pathlib import Path
from weight_update.transports.memory_limits import available_memory
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = available_memory()
with open(sys.argv[2], "wb") as file:
    for _ in range(150):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
print(before, available_memory())
"""


@pytest.mark.slow
def test_in_a_real_cgroup_full_of_page_cache(tmp_path: Path) -> None:
    """Writing a file of 150 MB leaves as much memory as there was."""
    top = next((path for path in map(Path, TOPS) if (path / "memory.stat").exists()), None)
    if top is None:
        pytest.skip("no cgroup controls memory here")
    group = top / f"weight_update-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
        limit.write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"this machine does not let us make a cgroup: {error}")
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(group), str(tmp_path / "file")],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    finally:
        group.rmdir()
    before, after = map(int, done.stdout.split())
    assert before < 1 << 30
    assert after > before - 50 * MB


def test_an_interpreter_that_forbids_the_encoding_of_the_locale() -> None:
    program = f"from {available_memory.__module__} import available_memory; print(available_memory())"
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
