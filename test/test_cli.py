"""The command weight-update."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import run_python
from marks import slow
from torch import nn

from weight_update import PatchEncoding, WeightChunk, WeightSchema
from weight_update.encodings.base import Tracker
from weight_update.synchronizer import CheckpointStore
from weight_update.wire.frames import Kind, Step, frame_of

pytest.importorskip("click", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")

from click.testing import CliRunner, Result

from weight_update.cli.checks import memory, network, packages, ray
from weight_update.cli.checks.base import Check, Finding, ok, run
from weight_update.cli.commands import COMMANDS, weight_update
from weight_update.cli.contents.checkpoints import read_directory
from weight_update.cli.contents.frames import read_frames
from weight_update.cli.measuring.advice import network_advice, recommendation
from weight_update.cli.measuring.rounds import Case, Results
from weight_update.report import SyncReport

ROOT = Path(__file__).resolve().parent.parent


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(weight_update, [str(one) for one in arguments])


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


IN_A_FOLDER = """
import os, sys
from weight_update.cli import main
os.chdir({folder!r})
sys.argv = {words!r}
if __name__ == "__main__":
    main()
"""


def in_folder(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in another folder."""
    return run_python("-c", IN_A_FOLDER.format(folder=str(folder), words=words), quick_spawn=True)


# -- all commands --------------------------------------------------------------------------------------


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
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {tmp_path} holds no checkpoints")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["click", "rich"])
def test_the_error_without_the_extra_names_it(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from weight_update.cli import main; main()"
    done = run_python("-c", program)
    assert done.returncode == 1
    assert done.stderr == f'weight-update needs the package {package}: pip install "weight-update[cli]"\n'


# -- doctor --------------------------------------------------------------------------------------------

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
FEW_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))"

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make a namespace")


@pytest.mark.parametrize(
    ("breaking", "check", "status", "words", "cure"),
    [
        (FEW_FILES, "open files", "fail", "100 files may be open", "ulimit -n 4096"),
        (FORBID_MEMFD, "shared memory", "fail", "Operation not permitted", "seccomp"),
        (HIDE_MEMORY, "other processes", "fail", "Permission denied", "the same user"),
        pytest.param(SMALL_SHM, "/dev/shm", "warn", "0.00105 GB are free", "--shm-size", marks=needs_root),
        pytest.param(NO_NETWORK, "sockets", "fail", "loopback", "ip link set lo up", marks=needs_root),
        (
            "os.environ['GLOO_SOCKET_IFNAME'] = 'no-such-interface'",
            "gloo",
            "fail",
            "Unable to find address for: no-such-interface",
            "set GLOO_SOCKET_IFNAME",
        ),
    ],
    ids=["open files", "memfd", "other processes", "shm", "loopback", "gloo"],
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
        "Provides-Extra: some",
    )
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


@pytest.mark.parametrize("peer", ["10.0.0.5", "10.0.0.5:", ":80", "host:99999", "host:http"])
def test_a_peer_without_a_port_is_refused(peer: str) -> None:
    result = call("doctor", "--peer", peer)
    assert result.exit_code == 2
    assert "is not HOST:PORT, such as 10.0.0.5:29650" in result.output


def test_doctor_warns_if_gloo_uses_loopback_in_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.look_at_gloo().status == "ok"
    assert network.look_at_gloo(cluster=True).status == "warn"


def test_doctor_looks_for_the_cluster_of_ray(
    listener: socket.socket, closed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    current = tmp_path / "ray_current_cluster"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray.look_at_ray(str(current)).found.startswith("no cluster runs here")
    current.write_text(f"127.0.0.1:{closed}")
    assert ray.look_at_ray(str(current)).status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed}")
    lost = ray.look_at_ray(str(current))
    assert lost.status == "fail"
    assert "unset RAY_ADDRESS" in lost.cure
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{listener.getsockname()[1]}")
    assert ray.look_at_ray(str(current)).found.endswith("answers")


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
    assert time.monotonic() - began < 3.0
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("breaking", "status"),
    [
        ("", {"GPU": "ok", "CUDA IPC": "ok", "NCCL": "ok"}),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'", {"CUDA IPC": "fail"}),
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


# -- inspect -------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A few kilobytes: tied tensors, several dtypes and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.two = nn.Linear(4, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("steps", torch.tensor(3))

    def get_extra_state(self) -> Any:
        return {"name": "model"}

    def set_extra_state(self, state: Any) -> None:
        del state


@pytest.fixture
def run_7(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run-7")
    for version in (11, 12):
        store.publish(version, Model().state_dict(), step=10 * version)
    return store.directory


def data_file(directory: Path, version: int) -> Path:
    return next(directory.glob(f"{version:012}-*.safetensors"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_inspect_shows_a_directory_and_writes_nothing(run_7: Path) -> None:
    (run_7 / "notes.txt").write_text("not a checkpoint")
    before = sorted(path.name for path in run_7.iterdir())
    result, table = call("inspect", run_7, "--json"), call("inspect", run_7)
    assert (result.exit_code, table.exit_code) == (0, 0), table.output
    assert sorted(path.name for path in run_7.iterdir()) == before
    found = document(result)
    assert found["newest_complete_version"] == 12
    assert [(row["version"], row["step"], row["state"]) for row in found["versions"]] == [
        (12, 120, "ok"),
        (11, 110, "ok"),
    ]
    assert found["versions"][0]["bytes"] == data_file(run_7, 12).stat().st_size
    assert sorted(found["tensors"], key=lambda row: str(row["name"])) == [
        {"name": "one.bias", "dtype": "float32", "shape": [3], "bytes": 12, "tied_to": None},
        {"name": "one.weight", "dtype": "float32", "shape": [3, 4], "bytes": 48, "tied_to": None},
        {"name": "steps", "dtype": "int64", "shape": [], "bytes": 8, "tied_to": None},
        {"name": "two.weight", "dtype": "float32", "shape": [3, 4], "bytes": 48, "tied_to": "one.weight"},
    ]
    assert found["extra_state"] == ["_extra_state"]
    assert "one.weight" in table.stdout
    assert found["versions"][0]["checksum"] in table.stdout


@pytest.mark.parametrize("step", [slow(1), 13])
def test_every_flipped_byte_of_a_version_is_found(run_7: Path, step: int) -> None:
    for path in (data_file(run_7, 12), run_7 / "000000000012.json"):
        raw = path.read_bytes()
        for at in range(0, len(raw), step):
            flip(path, at)
            found = read_directory(run_7)
            assert not found["good"], (path, at)
            assert found["newest_complete_version"] == 11
            path.write_bytes(raw)
    assert read_directory(run_7)["good"]


@pytest.mark.parametrize("given", ["directory", "manifest", "data"])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: flip(path, -1), "the digest of"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, not"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
    ],
    ids=["flipped", "short", "empty"],
)
def test_inspect_fails_if_a_file_is_damaged(
    run_7: Path, given: str, damage: Callable[[Path], object], problem: str
) -> None:
    data = data_file(run_7, 12)
    damage(data)
    path = {"directory": run_7, "manifest": run_7 / "000000000012.json", "data": data}[given]
    result = call("inspect", path, "--json")
    assert result.exit_code == 1
    found = document(result)
    row = found["versions"][0] if given == "directory" else found
    assert row["state"] == "damaged"
    assert problem in row["problem"]


def test_inspect_names_missing_and_left_over_files(run_7: Path) -> None:
    data_file(run_7, 12).unlink()
    (run_7 / f"000000000013-{'0' * 32}.safetensors.part").write_bytes(b"half")
    found = document(call("inspect", run_7, "--json"))
    assert found["versions"][0]["problem"].endswith("is missing")
    assert [row["bytes"] for row in found["other_files"]] == [4]
    assert found["other_files"][0]["meaning"].startswith("incomplete")


def test_inspect_reads_one_version_and_a_file_of_another_program(run_7: Path, tmp_path: Path) -> None:
    one = document(call("inspect", data_file(run_7, 11), "--json"))
    assert (one["good"], one["version"], one["step"]) == (True, 11, 110)
    alone = tmp_path / "model.safetensors"
    alone.write_bytes(data_file(run_7, 11).read_bytes())
    found = document(call("inspect", alone, "--json"))
    assert (found["good"], found["checksum"]) == (True, "none: no manifest names this file")
    assert found["tensors"] == one["tensors"]
    alone.write_bytes(alone.read_bytes()[:-1])
    assert call("inspect", alone).exit_code == 1


def test_inspect_does_not_wait_at_a_file_that_is_not_regular(tmp_path: Path, run_7: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = call("inspect", tmp_path / "pipe")
    assert result.exit_code == 1
    assert "not a regular file" in result.stderr
    data = data_file(run_7, 12)
    size = data.stat().st_size
    data.unlink()
    os.mkfifo(data)
    found = document(call("inspect", run_7, "--json"))
    assert found["versions"][0]["problem"] == f"{data.name} has 0 bytes, not {size}"
    assert found["newest_complete_version"] == 11


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_inspect_refuses_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    result = call("inspect", path)
    assert result.exit_code == 1
    assert "is no file of weights; known: directories of checkpoints" in result.stderr
    assert call("inspect", tmp_path / "nothing").exit_code == 2


TENSORS = {"weight": torch.arange(64, dtype=torch.float32).view(8, 8), "bias": torch.zeros(8)}
SCHEMA = WeightSchema.of(TENSORS)


def welcome() -> WeightChunk:
    header = {"schema": SCHEMA.to_header(), "strategy": "state_dict", "keep": True}
    return WeightChunk(Kind.WELCOME, {**header, "version": 3, "digests": None})


def full(version: int) -> WeightChunk:
    flat = torch.zeros(SCHEMA.nbytes, dtype=torch.uint8)
    torch._foreach_copy_(SCHEMA.views(flat), list(TENSORS.values()))
    return frame_of(Step(version), SCHEMA, "dense/1", 0, 1, flat)


def patches(first: int, *versions: int, base: int | None = None) -> list[WeightChunk]:
    """Return one update that consists of a patch for each version."""
    tracker: Tracker[Any] = PatchEncoding().tracker(SCHEMA, None)
    tracker.begin(list(TENSORS.values()))
    new = [value.clone() for value in TENSORS.values()]
    payloads, before = [], first
    for version in versions:
        new[0][0, version % 8] += 1.0
        difference = tracker.compare(new)
        payload = tracker.encode(
            difference, before, version, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        )
        assert payload is not None
        tracker.advance(difference)
        payloads.append(payload.clone())
        before = version
    step, start = Step(versions[-1]), first if base is None else base
    return [
        frame_of(step, SCHEMA, "patch/1", index, len(payloads), payload, start)
        for index, payload in enumerate(payloads)
    ]


def dump(path: Path, *chunks: WeightChunk) -> Path:
    path.write_bytes(b"".join(chunk.encode() for chunk in chunks))
    return path


def test_inspect_shows_frames_and_the_chain_of_patches(tmp_path: Path) -> None:
    path = dump(tmp_path / "frames", welcome(), full(3), *patches(3, 4), *patches(4, 5, 6))
    result = call("inspect", path, "--json")
    assert result.exit_code == 0, result.output
    found = document(result)
    assert found["chain"] == "3 -> 4 -> 5 -> 6"
    assert [row["kind"] for row in found["frames"]] == ["WELCOME", *["UPDATE"] * 4]
    assert [row["chunk"] for row in found["frames"]] == [None, "1 of 1", "1 of 1", "1 of 2", "2 of 2"]
    assert [(row["base"], row["version"], row["changed_elements"]) for row in found["patches"]] == [
        (3, 4, 1),
        (4, 5, 1),
        (5, 6, 1),
    ]
    assert [row["name"] for row in found["tensors"]] == ["weight", "bias"]
    assert "3 -> 4 -> 5 -> 6" in call("inspect", path).stdout


@pytest.mark.parametrize("step", [slow(1), 7])
def test_every_flipped_byte_of_a_frame_is_found(tmp_path: Path, step: int) -> None:
    path = dump(tmp_path / "frames", full(3), *patches(3, 4))
    raw = path.read_bytes()
    for at in range(0, len(raw), step):
        flip(path, at)
        assert not read_frames(path)["good"], at
        path.write_bytes(raw)
    assert read_frames(path)["good"]


@pytest.mark.parametrize("know_schema", [False, True])
@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([full(3), *patches(4, 5)], "applies to version 4, the update before makes 3"),
        (patches(3, 4, 5)[:1], "the file ends after chunk 1 of 2"),
        (patches(3, 4, 5)[1:], "chunk 2 follows chunk 0"),
        (patches(4, 5, base=3), "a delta applies to version 4, the one before makes 3"),
        (
            [frame_of(Step(7), SCHEMA, "patch/1", 0, 1, patches(3, 4)[0].payload, 3)],
            "the deltas end at version 4",
        ),
    ],
    ids=["gap", "end missing", "start missing", "wrong base", "wrong version"],
)
def test_inspect_finds_a_broken_chain(
    tmp_path: Path, know_schema: bool, chunks: list[WeightChunk], problem: str
) -> None:
    path = dump(tmp_path / "frames", *[welcome()] * know_schema, *chunks)
    result = call("inspect", path, "--json")
    assert result.exit_code == 1
    assert problem in str(document(result)["frames"][-1]["problem"])


def test_inspect_decodes_payloads_if_it_knows_the_schema(tmp_path: Path) -> None:
    short = frame_of(Step(3), SCHEMA, "dense/1", 0, 1, torch.zeros(64, dtype=torch.uint8))
    assert read_frames(dump(tmp_path / "one", short))["good"]
    assert not read_frames(dump(tmp_path / "two", welcome(), short))["good"]


def test_inspect_goes_on_after_a_damaged_payload_and_ends_at_a_cut(tmp_path: Path) -> None:
    path = dump(tmp_path / "frames", full(3), full(4), full(5))
    flip(path, len(full(3).encode()) - 1)
    assert [row["state"] for row in read_frames(path)["frames"]] == ["damaged", "ok", "ok"]
    path.write_bytes(path.read_bytes()[:-1])
    assert [row["state"] for row in read_frames(path)["frames"]] == ["damaged", "ok", "damaged"]


# -- bench ---------------------------------------------------------------------------------------------


def bench(*arguments: str | Path, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Run ``bench`` in a process of its own; return status, document and stderr."""
    done = run_python("-m", "weight_update", "bench", "--json", *arguments, quick_spawn=True, **options)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_bench_measures_all_schemes_in_turns_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    more = ["--png", picture] if importlib.util.find_spec("matplotlib") else []
    status, found, errors = bench("--size", "0.2", "--workers", "1", "--seconds", "50", *more)
    assert status == 0, (found, errors)
    rows = {(row["scheme"], row["encoding"]): row for row in found["updates"]}
    assert list(rows) == [(s, e) for s in ("shared", "process", "distributed") for e in ("dense", "patch")]
    assert len({row["updates"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["problem"] is None
        assert 0 < row["lower_quartile_ms"] <= row["median_ms"] <= row["upper_quartile_ms"]
    assert 0 < rows["shared", "patch"]["sent_bytes"] < found["model_bytes"] / 10
    assert rows["shared", "dense"]["sent_bytes"] >= found["model_bytes"]
    assert (found["recommended_scheme"], found["recommended_encoding"]) in rows
    assert "\n" not in found["reason"]
    assert (
        f"{rows[found['recommended_scheme'], found['recommended_encoding']]['median_ms']:.3g} ms"
        in found["reason"]
    )
    assert found["plain_copy_ms"] > 0
    assert found["network"].startswith("between machines: ")
    assert not more or picture.read_bytes().startswith(b"\x89PNG")


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(300, 200)
        self.register_buffer("flags", torch.zeros(10, dtype=torch.bool))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

net = Net()
number = 3
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Net", "net"])
def test_bench_measures_a_module_given_by_import_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    words = ["weight-update", "bench", "--json", "--model", f"my_model:{name}", "--scheme", "process"]
    done = in_folder(tmp_path, [*words, "--changed", "0.5"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(done.stdout)
    assert found["model_bytes"] == 4 * (300 * 200 + 200) + 10 + 8
    assert [row["scheme"] for row in found["updates"]] == ["process", "process"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:net", "No module named 'no_such_module'"),
        ("json", "give package.module:name"),
        ("json:loads.nothing", "has no attribute 'nothing'"),
        ("torch.nn:Identity", "has no weights to send"),
        ("os:sep", "is a str, neither a torch.nn.Module nor"),
    ],
)
def test_bench_refuses_a_path_that_leads_to_no_module(path: str, words: str) -> None:
    result = call("bench", "--model", path)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_bench_refuses_a_picture_that_it_could_not_write(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = call("bench", "--png", tmp_path / "nowhere" / "bench.png")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_bench_refuses_a_model_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_update.cli.measuring.rounds.available_memory", lambda: 1_000_000)
    result = call("bench", "--size", "1")
    assert result.exit_code == 1
    assert "give a smaller --size, fewer --workers, or one --scheme" in result.stderr


def test_bench_ends_at_its_time_limit() -> None:
    began = time.monotonic()
    status, _, errors = bench("--seconds", "1", "--workers", "1", "--scheme", "shared", "--size", "300")
    assert status == 1
    assert re.search("1 s passed while|did not answer within", errors), errors
    assert time.monotonic() - began < 30.0


@pytest.mark.slow
def test_bench_names_a_worker_that_dies_and_goes_on() -> None:
    program = """
import os, signal, sys
from weight_update.cli.measuring import rounds
send, count = rounds._send, [0]
def kill_then_send(case, counted):
    count[0] += 1
    if count[0] == 5:
        import multiprocessing
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    send(case, counted)
rounds._send = kill_then_send
from weight_update.cli import main
sys.argv = ["weight-update", "bench", "--size", "1", "--scheme", "shared", "--json"]
if __name__ == "__main__":
    main()
"""
    done = run_python("-c", program)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert not found["good"]
    assert all(re.search(r"worker [01]: the other end is gone", row["problem"]) for row in found["updates"])


@pytest.mark.slow
def test_bench_measures_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    status, found, errors = bench("--scheme", "ray", "--encoding", "dense", "--size", "1", "--workers", "1")
    assert status == 0, (found, errors)
    assert found["updates"][0]["updates"] > 0


def test_bench_names_a_missing_package() -> None:
    program = (
        "import sys; sys.modules[{!r}] = None; sys.argv[1:] = {!r}; import weight_update.cli as c; c.main()"
    )
    for package, options, words in [
        ("ray", ["bench", "--scheme", "ray"], 'pip install "weight-update[ray]"'),
        ("matplotlib", ["bench", "--png", "x.png"], 'pip install "matplotlib'),
    ]:
        done = run_python("-c", program.format(package, options))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: ")
        assert words in done.stderr


def results(**milliseconds: list[float]) -> Results:
    """Make up figures, by ``scheme_encoding``; a patch has a hundredth of the bytes."""
    cases = []
    for name, times in milliseconds.items():
        scheme, encoding = name.split("_")
        case = Case(scheme, encoding, None, [time / 1e3 for time in times])  # type: ignore[arg-type]
        sent = 10_000_000 if encoding == "dense" else 100_000
        case.report = SyncReport(1, encoding, dense_bytes=10_000_000, wire_bytes=2 * sent)
        cases.append(case)
    return Results(cases, [0.001], 10_000_000, 3)


def test_the_fastest_is_recommended_unless_a_simpler_one_is_within_the_spread() -> None:
    clear = recommendation(results(shared_dense=[4, 4, 4], shared_patch=[2, 2, 2], process_dense=[3, 3, 3]))
    assert clear["recommended_encoding"] == "patch"
    assert (
        clear["reason"] == "2 ms per update, 2 times a plain copy; the next is process with dense with 3 ms"
    )
    close = recommendation(results(shared_dense=[1, 3, 5], shared_patch=[2.5, 2.5, 2.5]))
    assert close["recommended_encoding"] == "dense"
    assert "simpler than shared with patch (2.5 ms), within the spread" in str(close["reason"])
    assert recommendation(results())["recommended_scheme"] is None


def test_the_link_on_which_patches_pay_off() -> None:
    # 9.9 MB less in 9.9 ms more: equal at 8 Gbit/s
    found = network_advice(results(distributed_dense=[1, 1, 1], distributed_patch=[10.9, 10.9, 10.9]))
    assert found == "between machines: distributed with patch below 8 Gbit/s, with dense on faster links"
    faster = network_advice(results(distributed_dense=[3, 3, 3], distributed_patch=[2, 2, 2]))
    assert "even over loopback" in str(faster)
    assert network_advice(results(shared_dense=[3, 3, 3])) is None


# -- the manual ----------------------------------------------------------------------------------------


def examples() -> list[Any]:
    """Return the commands in the manual, each with the output that is shown; those of bench are slow."""
    text = (ROOT / "docs" / "commands.rst").read_text()
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"\.\. code-block:: console\n\n((?:    .*\n|\n)+)", text):
        for line in block.splitlines():
            if line.strip().startswith("$ "):
                found.append((line.strip().removeprefix("$ "), []))
            elif line.strip():
                found[-1][1].append(" ".join(line.split()))
    return [
        slow(*one) if " bench " in one[0] else one for one in found if one[0].startswith("weight-update ")
    ]


@pytest.mark.parametrize(("command", "shown"), examples())
def test_the_examples_of_the_manual_run(
    command: str, shown: list[str], run_7: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_7.parent)
    dump(run_7.parent / "update.frames", welcome(), full(3), *patches(3, 4), *patches(4, 5, 6))
    command = command.replace("10.0.0.5:29650", f"127.0.0.1:{listener.getsockname()[1]}")
    (run_7.parent / "my_policy.py").write_text(MODEL.replace("Net", "Policy"))
    words = shlex.split(command)
    done = in_folder(run_7.parent, words)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    for line in shown:
        if line != "..." and not re.search(r"\d", line):
            assert line in lines
