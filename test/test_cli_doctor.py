"""``weight-update doctor``: each check finds what it looks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_parts import call, document
from interpreters import run_python
from marks import slow

from weight_update.cli import doctor
from weight_update.cli.checks import memory, network, packages, ray
from weight_update.cli.checks.base import Check, Finding, ok, run
from weight_update.wire import unchanged

DOCTOR = """
import ctypes, os, resource, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
{breaking}
from weight_update.cli import main
sys.argv = ["weight-update", "doctor", "--json"]
main()
"""
FORBID_MEMFD = """
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte)]
    _fields_ += [("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
steps = (Filter * 4)(
    Filter(0x20, 0, 0, 0),  # load the number of the system call
    Filter(0x15, 0, 1, number),  # is it memfd_create?
    Filter(0x06, 0, 0, 0x00050001),  # return EPERM
    Filter(0x06, 0, 0, 0x7FFF0000),  # allow
)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, ctypes.byref(Program(4, steps)), 0, 0) == 0
"""
HIDE_MEMORY = """
if os.getuid() == 0:
    for capability in (1, 2, 19):  # processes that it starts may not override permissions, nor trace
        assert libc.prctl(24, capability, 0, 0, 0) == 0
else:
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # not dumpable: /proc/<pid> belongs to root
"""
SMALL_SHM = """
assert libc.unshare(0x00020000) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
"""
NO_NETWORK = "assert libc.unshare(0x40000000) == 0"
NO_LIBUV = """
from weight_update.transports.distributed import rendezvous
def store(*_, **__):
    raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support, run with ...")
rendezvous.TCPStore = store
"""
FEW_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))"

needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-mn", "true"], check=False).returncode != 0,
    reason="this process may not make namespaces",
)
needs_seccomp = pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"), reason="the number of memfd_create is not known"
)


@pytest.mark.parametrize(
    ("breaking", "check", "status", "words", "cure"),
    [
        slow(FEW_FILES, "open files", "fail", "100 files may be open", "ulimit -n 4096"),
        pytest.param(
            FORBID_MEMFD, "shared memory", "fail", "Operation not permitted", "seccomp", marks=needs_seccomp
        ),
        slow(HIDE_MEMORY, "other processes", "fail", "Permission denied", "the same user"),
        pytest.param(
            *(SMALL_SHM, "/dev/shm", "warn", "1.05 MB are free", "--shm-size"),
            marks=[needs_namespaces, pytest.mark.slow],
        ),
        pytest.param(
            *(NO_NETWORK, "sockets", "fail", "loopback", "ip link set lo up"),
            marks=[needs_namespaces, pytest.mark.slow],
        ),
        (NO_LIBUV, "sockets", "fail", "built without libuv", "install PyTorch's own build"),
        slow(
            "os.environ['GLOO_SOCKET_IFNAME'] = 'no-such-interface'",
            "gloo",
            "warn",
            "Unable to find address for: no-such-interface",
            "set GLOO_SOCKET_IFNAME",
        ),
    ],
    ids=["open files", "memfd", "other processes", "shm", "loopback", "libuv", "gloo"],
)
def test_doctor_finds_what_is_broken(breaking: str, check: str, status: str, words: str, cure: str) -> None:
    done = run_python("-c", DOCTOR.format(breaking=breaking))
    found = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert found[check]["status"] == status, (found[check], done.stderr)
    assert words in found[check]["found"]
    assert cure in found[check]["cure"]
    assert done.returncode == (1 if status == "fail" else 0), done.stderr


def test_doctor_finds_nothing_here_and_shows_the_same_as_a_table() -> None:
    result, table = call("doctor", "--json"), call("doctor")
    found = document(result)
    assert found["good"], found
    assert (result.exit_code, table.exit_code) == (0, 0)
    lines = table.stdout.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert len(lines) == len(found["findings"]) + 4  # one line each, below the result and the headings
    for row in found["findings"]:
        assert set(row) == {"check", "status", "found", "cure"}
        assert re.search(rf"^\s*{re.escape(row['check'])}\s+{row['status']}\s", table.stdout, re.MULTILINE), (
            row
        )


def install(place: Path, name: str, version: str, *more: str) -> None:
    """Make a package look installed."""
    folder = place / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *more]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_doctor_compares_versions_with_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path,
        "weight-update",
        "9.0",
        "Requires-Python: >=3.99",
        "Requires-Dist: torch>=99",
        "Requires-Dist: not-there>=1.5",
        'Requires-Dist: tensordict>=0.1; extra == "some"',
        'Requires-Dist: not-there-either<2; extra == "some"',
        'Requires-Dist: old-one>=2; extra == "some"',
        "Provides-Extra: some",
    )
    install(tmp_path, "old-one", "1.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.look_at_python().status == "fail"
    assert packages.look_at_python().cure == "use Python >=3.99"
    old = packages.look_at_package("torch")
    assert (old.status, old.cure) == ("fail", 'pip install "torch>=99"')
    missing = packages.look_at_package("not-there")
    assert (missing.status, missing.cure) == ("fail", 'pip install "not-there>=1.5"')
    assert packages.look_at_package("tensordict").status == "ok"
    optional = packages.look_at_package("not-there-either")
    assert (optional.status, optional.cure) == (
        "skipped",
        'if you need it: pip install "weight-update[some]"',
    )
    other = packages.look_at_package("old-one")  # which only some programs need
    assert (other.status, other.cure) == ("warn", 'pip install "old-one>=2"')
    assert packages.look_at_package("unheard-of").status == "warn"


def machine(root: Path, free: int, total: int, limit: int | None = None) -> Path:
    """Write the files in which Linux shows its memory, in MB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total * 1000} kB\nMemAvailable: {free * 1000} kB\n")
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    if limit is not None:
        (root / "sys/fs/cgroup/job/memory.max").write_text(f"{limit * 1024_000}\n")
        (root / "sys/fs/cgroup/job/memory.current").write_text("0\n")
    return root


def test_doctor_finds_too_little_memory(tmp_path: Path) -> None:
    assert memory.look_at_memory(machine(tmp_path / "a", free=8000, total=16000)).status == "ok"
    little = memory.look_at_memory(machine(tmp_path / "b", free=800, total=16000))
    assert (little.status, little.cure.partition(",")[0]) == ("warn", "end other programs")


def test_doctor_finds_a_limit_of_memory(tmp_path: Path) -> None:
    assert memory.look_at_cgroup(machine(tmp_path / "a", 8000, 16000)).found.startswith("no limit")
    assert memory.look_at_cgroup(machine(tmp_path / "b", 8000, 16000, limit=32000)).found.startswith(
        "no limit"
    )
    found = memory.look_at_cgroup(machine(tmp_path / "c", 8000, 16000, limit=4000))
    assert (found.status, found.found) == (
        "ok",
        "the memory limit leaves 4.1 GB; the machine has 8.19 GB free",
    )
    found = memory.look_at_cgroup(machine(tmp_path / "d", 8000, 16000, limit=400))
    assert found.status == "warn"
    assert "docker run --memory" in found.cure


def test_doctor_finds_no_shm(tmp_path: Path) -> None:
    found = memory.look_at_shm(str(tmp_path / "nothing"))
    assert found.status == "warn"
    assert "No such file or directory" in found.found


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
    return port


def test_doctor_tries_peers(listener: socket.socket, closed: int) -> None:
    port = listener.getsockname()[1]
    result = call("doctor", "--json", "--peer", f"127.0.0.1:{port}", "--peer", f"[127.0.0.1]:{closed}")
    found = {row["check"]: row for row in document(result)["findings"]}
    assert result.exit_code == 1
    assert found[f"peer 127.0.0.1:{port}"]["status"] == "ok"
    assert found[f"peer 127.0.0.1:{closed}"]["status"] == "fail"
    assert "start the trainer" in found[f"peer 127.0.0.1:{closed}"]["cure"]


def test_doctor_finds_a_peer_that_does_not_answer_or_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PEER_SECONDS", 0.2)
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())  # nobody accepts it, and no other fits into the queue
        silent = network.look_at_peer(*full.getsockname())
    assert silent.status == "fail"
    assert "does not answer within 0.2 s" in silent.found
    assert "firewall" in silent.cure
    unknown = network.look_at_peer("no-such-host.invalid", 80)
    assert unknown.status == "fail"
    assert "no-such-host.invalid" in unknown.found


@pytest.mark.slow
def test_doctor_gives_each_address_of_a_peer_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, port = ("127.0.0.1", "127.0.0.2"), 0
    with ExitStack() as stack:
        for host in hosts:
            full, first = (stack.enter_context(socket.socket()) for _ in range(2))
            full.bind((host, port))
            port = full.getsockname()[1]
            full.listen(0)
            first.connect(full.getsockname())  # nobody accepts it, and no other fits into the queue
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
        (peer,) = (check for check in doctor.checks([("trainer", port)]) if check.name.startswith("peer"))
        ((_, silent),) = run([peer])
    assert (silent.status, "firewall" in silent.cure) == ("fail", True), silent


@pytest.mark.parametrize("peer", ["10.0.0.5", "10.0.0.5:", ":80", "host:0", "host:99999", "host:http"])
def test_a_peer_without_a_port_is_refused(peer: str) -> None:
    result = call("doctor", "--peer", peer)
    assert result.exit_code == 2
    words = "is not HOST:PORT, such as 10.0.0.5:29650; a port is a number from 1 to 65535"
    assert words in result.output


def test_doctor_warns_if_gloo_uses_loopback_in_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.look_at_gloo().status == "ok"
    assert network.look_at_gloo(cluster=True).status == "warn"


def test_doctor_looks_for_the_cluster_of_ray(
    listener: socket.socket, closed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # as for Ray, if RAY_TMPDIR is not set
    current = tmp_path / "ray" / "ray_current_cluster"
    assert ray.look_at_ray().found.startswith("no cluster runs here")
    current.parent.mkdir()
    current.write_text(address)
    assert ray.look_at_ray().found == f"the cluster at {address} answers"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray.look_at_ray().found.startswith("no cluster runs here")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "other"))
    assert ray.look_at_ray().found.startswith("no cluster runs here")
    monkeypatch.delenv("RAY_TMPDIR")
    current.write_text(f"127.0.0.1:{closed}")
    assert ray.look_at_ray().status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed}")
    lost = ray.look_at_ray()
    assert lost.status == "fail"
    assert "unset RAY_ADDRESS" in lost.cure
    monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
    assert ray.look_at_ray().found.endswith("answers")


def test_a_check_that_hangs_or_fails_does_not_stop_the_others() -> None:
    gate = threading.Event()

    def hang() -> Finding:
        gate.wait(60.0)
        return ok("too late")

    def break_down() -> Finding:
        raise RuntimeError("no such thing")

    checks = [
        Check("hangs", hang, "cure 1", 0.2),
        Check("breaks", break_down, "cure 2"),
        Check("works", lambda: ok("all is well"), "cure 3"),
    ]
    began = time.monotonic()
    found = dict(run(checks))
    gate.set()
    assert time.monotonic() - began < 20.0
    assert found["hangs"] == Finding("fail", "the check did not end within 0.2 s", "cure 1")
    assert found["breaks"] == Finding("fail", "RuntimeError: no such thing", "cure 2")
    assert found["works"] == ok("all is well")


def test_doctor_ends_although_a_check_hangs() -> None:
    breaking = """
import time
from weight_update.cli import doctor
from weight_update.cli.checks.base import Check
doctor.checks = lambda peers: [Check("hangs", lambda: time.sleep(1000), "wait no longer", 0.2)]
"""
    done = run_python("-c", DOCTOR.format(breaking=breaking), timeout=30.0)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["findings"][0]["cure"] == "wait no longer"


def test_ctrl_c_ends_doctor_at_once_although_a_check_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orderly end would abort if the check is in C++."""

    def interrupted(checks: object) -> None:
        raise KeyboardInterrupt

    registered: list[Any] = []
    monkeypatch.setattr(doctor, "run", interrupted)
    monkeypatch.setattr(doctor, "still_running", lambda: True)
    monkeypatch.setattr(doctor.atexit, "register", lambda *call: registered.append(call))
    assert call("doctor").exit_code == 1
    assert registered == [(doctor._leave, 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("breaking", "status"),
    [
        ("", {"GPU": "ok", "CUDA IPC": "ok", "NCCL": "ok"}),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'", {"CUDA IPC": "ok"}),
        (
            "os.environ['CUDA_VISIBLE_DEVICES'] = ''",
            {"GPU": "skipped", "CUDA IPC": "skipped", "NCCL": "skipped"},
        ),
    ],
    ids=["works", "expandable segments", "hidden"],
)
def test_doctor_looks_at_the_gpu(breaking: str, status: dict[str, str]) -> None:
    done = run_python("-c", DOCTOR.format(breaking=breaking))
    found = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert {name: found[name]["status"] for name in status} == status, found


def test_a_library_that_is_out_of_date_is_named_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [packages.kernels, packages.ans, packages.dense, packages.transfer, unchanged]
    for module in loops:
        monkeypatch.setattr(module, "library", object())
    assert packages.look_at_kernels().found == "compiled"
    monkeypatch.setattr(unchanged, "library", None)
    found = packages.look_at_kernels()
    assert (found.status, found.found) == (
        "warn",
        "not compiled, so these take longer: comparisons of modules",
    )
