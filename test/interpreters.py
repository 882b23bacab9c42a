"""Programs of tests, each in an interpreter of its own, without the 3 to 5 s of CPU that imports take.

:func:`run_python` stands in for ``subprocess.run([sys.executable, ...])``. A template process imports torch,
tensordict and torchrl once. Each program runs in a fork of it, as ``__main__``, with arguments, environment
and descriptors of its own, imports this library anew, and ends as an interpreter ends. In tests of
collectors, Ray's workers are such programs, too (:data:`RAY_PYTHON`). Tests of what an interpreter imports,
or of one that starts, use subprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
_FILTERS = list(warnings.filters)
_PRELOADED = {
    "without ray": ("torch", "torch.distributed.checkpoint.state_dict", "tensordict"),
    "all": ("torchrl.collectors", "torchrl.envs"),  # they import ray, if it is installed
}
JOB_PYTHON = f"{sys.executable} {__file__} all"  # a command that stands in for a python of a batch system
RAY_PYTHON = f"{sys.executable} {__file__} 'without ray'"
"""A command that stands in for a python of Ray's workers, whose environment ray reads when it is imported."""
_OURS = ("weight_update.testing", "collectors")
_ADDRESS = "WEIGHT_UPDATE_TEST_TEMPLATE"
_LIMIT = 1 << 17
_DESCRIPTORS = 3  # of a forkserver; before Python 3.14 it has two
_START_SECONDS = 300.0
_HUGE = 2 << 20  # bytes of a huge page
_MADV_COLLAPSE = 25  # of Linux 6.1 and newer


def run_python(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 100.0,
    merged: bool = False,
    quick_spawn: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` from the root of the repository, and return what it printed.

    Args:
        arguments: options ``-W error`` first, if they are wanted, then ``-c`` and a program, ``-m`` and a
            module, or a file; then the arguments of the program.
        env: added to the environment of this process; PYTHONPATH is the root of the repository.
        timeout: seconds until it is killed.
        merged: whether stderr goes to stdout.
        quick_spawn: whether processes that it starts by spawn come from a forkserver, itself a fork of the
            template. They get everything pickled, and import ``__main__``, all the same.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    words = [str(argument) for argument in arguments]
    request = {
        "arguments": words,
        "env": {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        "quick_spawn": quick_spawn,
    }
    end, out, error = time.monotonic() + timeout, _Pipe(), _Pipe()
    try:
        code = _Template.get().run(request, [out.number, (out if merged else error).number], timeout)
    finally:
        out.close()
        error.close()
    ended = [pipe.ended(end - time.monotonic()) for pipe in (out, error)]  # others may hold them, too
    if code is None or not all(ended):
        raise subprocess.TimeoutExpired(words, timeout, out.text, error.text)
    return subprocess.CompletedProcess([sys.executable, *words], code, out.text, error.text)


def _stand_in(kind: str, words: Sequence[str]) -> NoReturn:
    """Run ``python *words`` with the environment, output and signals of this process; end as it ends."""
    template = _Template(kind)
    pid = template.start({"arguments": words, "env": dict(os.environ), "quick_spawn": False}, [1, 2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    sys.exit(template.wait(None))


class _Pipe:
    """The output of a program and of the processes that it starts."""

    def __init__(self) -> None:
        reading, self.number = os.pipe()
        self.text = ""
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._thread.start()

    def _read(self, reading: int) -> None:
        with open(reading) as file:
            for line in file:
                self.text += line

    def close(self) -> None:
        """Close the end for writing of this process."""
        os.close(self.number)

    def ended(self, timeout: float) -> bool:
        """Return whether all processes that could write have ended."""
        self._thread.join(max(timeout, 1.0))
        return not self._thread.is_alive()


def use_template_for_forkserver() -> None:
    """Start the forkserver of this process as a fork of the template, unless it runs."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address is None:
        _start_forkserver(_Template.get().run_program)
        server.ensure_running = lambda: None  # it would ask whether a child runs, and this is no child


def prepare_to_fork() -> None:
    """Make the forks of this process cheap, to which all that it has imported belongs.

    They do not look for garbage in it, and it moves to huge pages: an entry in the page table for every 4 KiB
    takes most of the time of a fork.
    """
    gc.freeze()
    madvise = ctypes.CDLL(None).madvise  # it fails where there are no huge pages; then a fork takes longer
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in ends.split("-"))
            for place in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                madvise(ctypes.c_void_p(place), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)


def start_template() -> None:
    """Start a template process for this process and those that it starts, unless there is one.

    It ends with this process.
    """
    if _ADDRESS in os.environ:
        return
    folder = tempfile.mkdtemp()
    alive, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(theirs)
        numbers = [theirs.fileno()]
        for kind in _PRELOADED:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"{folder}/{kind}")
            listener.listen()
            numbers.append(listener.fileno())
        command = [sys.executable, __file__, "template", *map(str, numbers)]
        process = subprocess.Popen(command, pass_fds=numbers, cwd=ROOT)
    os.environ[_ADDRESS] = folder
    atexit.register(_stop_template, os.getpid(), process, alive, folder)


def _stop_template(pid: int, process: subprocess.Popen[bytes], alive: socket.socket, folder: str) -> None:
    if os.getpid() == pid:
        process.kill()
        process.wait(30.0)
        alive.close()  # open until now: without it the template ends
        shutil.rmtree(folder)


class _Template:
    """The template process, as tests see it."""

    _only: _Template | None = None

    def __init__(self, kind: str = "all") -> None:
        start_template()
        self._pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_START_SECONDS)
        self._socket.connect(f"{os.environ[_ADDRESS]}/{kind}")
        assert self._socket.recv(_LIMIT) == b"ready"

    @classmethod
    def get(cls) -> _Template:
        """Return the template of this process; start it if there is none."""
        if cls._only is None or cls._only._pid != os.getpid():
            cls._only = cls()
        return cls._only

    def run_program(self, executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        """Run ``python ... -c program ...`` without waiting for its end; return its pid."""
        words = _after_c(arguments)
        request = {"program": words, "numbers": list(descriptors), "env": dict(os.environ)}
        return self.start(request, descriptors)

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        self._socket.settimeout(30.0)
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return int(self._socket.recv(_LIMIT))

    def wait(self, timeout: float | None) -> int:
        """Return the exit code of the program that was started last."""
        self._socket.settimeout(timeout)
        return int(self._socket.recv(_LIMIT))

    def run(self, request: dict[str, Any], descriptors: list[int], timeout: float) -> int | None:
        """Run a program; return its exit code, or None if it was killed."""
        pid = self.start(request, descriptors)
        try:
            return self.wait(timeout)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self.wait(30.0)
            return None


# -- the template process ------------------------------------------------------------------------------


def _accept(alive: socket.socket, listener: socket.socket) -> socket.socket | None:
    """Fork for each client; return its connection in the fork, and None at the end."""
    while alive not in select.select([listener, alive], [], [])[0]:
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            alive.close()
            return connection
        connection.close()
    return None


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request; return the request in the fork, and None at the end."""
    connection.send(b"ready")
    while True:
        data, descriptors, *_ = socket.recv_fds(connection, _LIMIT, _DESCRIPTORS)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            connection.close()
            return json.loads(data), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())
        if "program" in json.loads(data):
            continue
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process look like a new interpreter, and run the program."""
    if "program" in request:
        _set_environment(request["env"])
        _run_forkserver(request["program"], dict(zip(request["numbers"], descriptors, strict=True)))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, number in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _set_environment(request["env"])
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch and threads.isdigit() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    if "triton" in sys.modules:  # its bindings print which objects are not collected at the end
        gc.unfreeze()
    _run(request["arguments"], request["quick_spawn"])


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _start_forkserver(start: Callable[[str, Sequence[str], Sequence[int]], int]) -> None:
    """Start the forkserver of this process by ``start``, which gets executable, arguments and descriptors."""
    util: Any = multiprocessing.util
    multiprocessing.resource_tracker.ensure_running()
    before, util.spawnv_passfds = util.spawnv_passfds, start
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        util.spawnv_passfds = before


def _fork_forkserver(executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    pid = os.fork()
    if pid == 0:
        _run_forkserver(_after_c(arguments), {number: number for number in descriptors})
    return pid


def _after_c(arguments: Sequence[str]) -> list[str]:
    """Return the program of ``python ... -c program ...``, and its arguments."""
    return list(arguments[arguments.index("-c") + 1 :])


def _run_forkserver(words: Sequence[str], numbers: Mapping[int, int]) -> NoReturn:
    """Run a program with the descriptors ``numbers``, from what it calls them to what they are here.

    ``words`` are the program and its arguments.
    """
    try:
        high = {number: fcntl.fcntl(mine, fcntl.F_DUPFD, 1000) for number, mine in numbers.items()}
        os.closerange(3, 1000)
        for number, mine in high.items():
            os.dup2(mine, number)
            os.close(mine)
        sys.path.insert(0, str(ROOT))
        _preload(_OURS)
        prepare_to_fork()
        sys.argv = ["-c", *words[1:]]
        exec(words[0], {})
    finally:
        os._exit(0)


def _run(words: Sequence[str], quick_spawn: bool) -> None:
    words = list(words)
    warnings.resetwarnings()  # what the imports have changed
    warnings.filters.extend(_FILTERS)  # type: ignore[attr-defined]
    if words[0] == "-u":
        del words[0]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        del words[:2]
    if quick_spawn:
        _start_forkserver(_fork_forkserver)
        contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["spawn"] = contexts["forkserver"]
    sys.path[0] = ""
    sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the latter names it in spawned processes
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-c":
        sys.argv, text, name = ["-c", *words[2:]], words[1], "<string>"
    else:
        sys.argv, text, name = words, Path(words[0]).read_text(), words[0]
        sys.path[0] = str(Path(name).resolve().parent)
        main.__file__ = name
    exec(compile(text, name, "exec"), main.__dict__)


def _preload(names: Sequence[str]) -> None:
    """Import those of the modules that are installed."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            with warnings.catch_warnings(), contextlib.suppress(ImportError):
                warnings.simplefilter("ignore")
                importlib.import_module(name)


def _main() -> None:
    kind, *words = sys.argv[1:]
    if kind != "template":
        _stand_in(kind, words)
    alive, bare, full = (socket.socket(fileno=int(number)) for number in words)
    _preload(_PRELOADED["without ray"])
    mine, other = (full, bare) if os.fork() == 0 else (bare, full)
    other.close()
    if mine is full:
        _preload(_PRELOADED["all"])
    prepare_to_fork()
    connection = _accept(alive, mine)
    found = connection and _serve(connection)
    if not found:
        os._exit(0)  # an ordinary end takes long with so much imported
    sys.modules["template of this program"] = sys.modules["__main__"]
    _become(*found)


if __name__ == "__main__":
    _main()
